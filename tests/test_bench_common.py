"""What benches share and no GPU is needed for: files of rows, several runs as one, the time limit."""

import time

import pytest

from bench import common, run
from bench.common import OverLimit, Row, read, time_limit, write


def test_rows_of_several_runs_become_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(common, "environment", lambda: {"device": "none", "torch": "1"})
    monkeypatch.setattr(common, "plot", lambda rows, file: [])
    rows = [Row("mhc", shape, "bfloat16", "full", "both", "ours", True, ms, 10**6, 4000.0, 6, 1.5) for shape, ms in (("a", 0.5), ("b", 2.0))]
    files = [write([row], tmp_path / row.shape)[1] for row in rows]
    assert read(files) == ({"device": "none", "torch": "1"}, rows)
    monkeypatch.setattr("sys.argv", ["run", "merge", *map(str, files), "--out", str(tmp_path / "all")])
    run.main()
    assert capsys.readouterr().out.count("full             both      ours") == 2
    assert read([tmp_path / "all" / "mhc.jsonl"])[1] == rows
    assert (tmp_path / "all" / "mhc.csv").read_text().count("\n") == 3
    monkeypatch.setattr(common, "environment", lambda: {"device": "another"})
    with pytest.raises(ValueError, match="one environment"):
        read([files[0], write(rows, tmp_path / "c")[1]])


def test_the_time_limit_stops_what_runs():
    with pytest.raises(OverLimit, match=r"over 0\.1 s"), time_limit(0.1):
        while True:
            pass
    with time_limit(0.1):
        pass
    with time_limit(0):
        time.sleep(0.15)  # and the one before is over
