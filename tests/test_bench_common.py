"""What benches share and no GPU is needed for: files of rows, several runs as one, the time limit."""

import signal

import pytest

from bench import common, recompute, run
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


@pytest.mark.parametrize(
    "module, args, message",
    [
        (run, "attn --tokens 0", "argument --tokens: must be at least 1, got 0"),
        (run, "indexer --topk -1", "argument --topk: must be at least 1, got -1"),
        (run, "mhc --shape 1,2,3", "want B,S,N,D with N in 2 to 8, for example 1,4096,4,4096, got '1,2,3'"),
        (run, "merge nowhere.jsonl", "No such file or directory: 'nowhere.jsonl'"),
        (run, f"merge {__file__}", "is no JSONL file of a bench"),
        (recompute, "--device cpu --hc-mult 1", "plan: hc_mult has N = 1 streams, wanted 2 to 8"),
        (recompute, "--device npu", "this needs a device of kind npu, which is not here"),
    ],
)
def test_a_wrong_argument_is_one_line(module, args, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench", *args.split()])
    with pytest.raises(SystemExit) as end:
        module.main()
    assert end.value.code == 2 and message in capsys.readouterr().err.splitlines()[-1]


def test_the_time_limit_stops_what_runs():
    with pytest.raises(OverLimit, match=r"over 0\.1 s"), time_limit(0.1):
        while True:
            pass
    with time_limit(60):
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)  # it is over
