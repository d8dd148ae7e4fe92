"""bench/train.py on the CPU: the rows of one process, and a row that cannot work."""

from __future__ import annotations

import csv
import warnings

import pytest

from bench import train as bench


def test_rows_of_one_process(tmp_path, capsys, monkeypatch):
    sizes = ["--device", "cpu", "--preset", "tiny", "--dtype", "fp32", "--ratios", "0,4,16", "--vocab", "264", "--experts", "4"]
    steps = ["--seq-lens", "32", "--steps", "1", "--warmup", "0", "--out", str(tmp_path)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="DTensor random operators")
        rows = bench.main([*sizes, *steps, "--variants", "ours", "eager", "--recompute", "none", "mhc"])
        assert [(r.variant, r.recompute) for r in rows] == [("ours", "none"), ("eager", "none"), ("ours", "mhc")], "no eager with mhc"
        assert all(r.ms > 0 and r.tokens_per_s > 0 for r in rows)
        assert len({r.loss for r in rows}) == 1 and 5 < rows[0].loss < 7, "the same weights and tokens; recompute changes no bit"

        def full(*_):
            raise RuntimeError("no room")

        monkeypatch.setattr(bench, "train_step", full)
        (row,) = bench.main([*sizes, *steps, "--variants", "ours", "--longest"])[:1]
    assert row.note == "RuntimeError: no room" and row.ms == 0
    assert "no room" in capsys.readouterr().out
    with (tmp_path / "train.csv").open() as file:
        assert [r["note"] for r in csv.DictReader(file)] == ["RuntimeError: no room"] * 2


def test_sizes_that_cannot_work_are_a_usage_error(capsys):
    with pytest.raises(SystemExit, match="2"):
        bench.main(["--device", "cpu", "--preset", "tiny", "--ratios=0,-4"])
    assert "compress_ratios must be integers of 0 or more" in capsys.readouterr().err
