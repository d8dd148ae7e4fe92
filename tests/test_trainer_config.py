"""Settings and bad input: precedence, round trip, and one clear message for each thing that cannot work."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.trainer_util import SMALL
from train_example.metrics import read_metrics
from train_example.parallel import Parallel, check_experts
from train_example.run_config import ConfigError, RunConfig, from_dict, parse
from train_example.train import due, main

ROOT = Path(__file__).resolve().parent.parent


def test_command_line_over_file_over_defaults(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('lr = 1\nsteps = 7\n[model]\npreset = "tiny"\nhidden_size = 32\nindex_topk = 4\n')
    config = parse(["--config", str(file), "--steps", "9", "--model.hidden_size", "48", "--model.compress_ratios=0,4,16,0", "--no-compile"])
    assert (config.lr, config.steps, config.batch) == (1.0, 9, RunConfig().batch)
    assert (config.model.hidden_size, config.model.index_topk, config.model.compress_ratios) == (48, 4, (0, 4, 16, 0))
    assert parse(["--seq_len", "64"]).seq_len == parse(["--seq-len", "64"]).seq_len == 64


def test_echoed_settings_are_a_config_file(tmp_path):
    config = parse(["--model.hidden_size", "48", "--clip", "-1", "--deterministic"])
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config.to_dict()))
    assert parse(["--config", str(file)]) == config


def test_help_names_units_and_minus_one(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()[0]) < 100, "a usage line, not all of the options"
    text = " ".join(shown.split())
    for part in ("-1 = no clipping", "seconds a collective", "tokens of a sequence", "-1 = all of them", "--model.hidden-size", "TFLOP/s"):
        assert part in text, part


def test_help_comes_once_a_host(capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--stepz", "5"], "unrecognized arguments: --stepz 5"),
        (["--model.hidden_sizes", "5"], "unrecognized arguments: --model.hidden-sizes 5"),
        (["--tp", "2"], "tp = 2: not supported .*the indexer sums scores over all heads"),
        (["--pp", "2"], "pp = 2: not supported .*stages would be uneven"),
        (["--recompute", "mhc", "--impl", "eager"], "recompute = mhc replays mHC's ops, which impl = eager bypasses"),
        (["--recompute", "cross-layer", "--impl", "eager"], "recompute = cross-layer replays mHC's ops"),
        (["--recompute", "all"], "argument --recompute: invalid choice"),
        (["--lr", "fast"], "argument --lr: invalid float value: 'fast'"),
        (["--lr=-1"], "lr must be a number above 0, got -1.0"),
        (["--weight-decay", "inf"], "weight_decay must be a finite number, got inf"),
        (["--lr", "nan"], "lr must be a finite number, got nan"),
        (["--peak-tflops", "0"], "peak_tflops must be above 0, or -1 to look the device up, got 0.0"),
        (["--ep", "0"], "ep must be 1 or more, or -1, got 0"),
        (["--impl", "cuda"], "argument --impl: invalid choice"),
        (["--profile", "5"], "profile must be START:END"),
        (["--profile", "8:5"], "profile must be START:END with START < END"),
        (["--model", "huge"], "invalid choice: 'huge'"),
        (["--model.num_heads", "3"], "o_groups must be a divisor of num_heads"),
        (["--model.vocab_size", "200"], "vocab_size must be 257 or more"),
        (["--eval-fraction", "0.9"], "eval_fraction must be 0 to 0.5"),
        (["--resume", "latest"], "name it with --out"),
        (["--config", "there-is-none.json"], "config file there-is-none.json does not exist"),
    ],
)
def test_bad_command_line(argv, message):
    with pytest.raises(ConfigError, match=message):
        parse(argv)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.toml", "stepz = 5", "unknown setting stepz; did you mean steps?"),
        ("a.json", '{"model": {"hidden_sise": 5}}', "unknown setting model.hidden_sise; did you mean model.hidden_size?"),
        ("a.json", '{"steps": "5"}', "steps must be of type int, got '5'"),
        ("a.json", '{"steps": 5.5}', "steps must be of type int, got 5.5"),
        ("a.json", '{"steps": true}', "steps must be of type int, got True"),
        ("a.json", '{"model": {"compress_ratios": [0, "4"]}}', "compress_ratios must be a list of integers"),
        ("a.json", '{"model": "huge"}', "model preset must be one of tiny, flash, pro, got 'huge'"),
        ("a.json", "[1]", "must hold a table of names and values, got list"),
        ("a.json", "{", "a.json: what it holds is damaged: Expecting"),
        ("a.json", '"steps"', "must hold a table of names and values, got str"),
        pytest.param("a.json", "[" * 100_000, "a.json: what it holds is damaged", id="deep"),
        pytest.param("a.json", '{"steps": ' + "9" * 5000 + "}", "a.json: what it holds is damaged: Exceeds the limit", id="digits"),
        ("a.json", b'{"out": "\xff"}', "a.json: what it holds is damaged: 'utf-8' codec"),
        ("a.toml", b"lr = 1\xff", "a.toml: 'utf-8' codec"),
        ("a.json", '{"model": 5}', "a.json: model must hold a table of names and values, got int"),
        ("a.json", '{"model": null}', "model must hold a table of names and values, got NoneType"),
        ("a.json", '{"model": {"preset": ["tiny"]}}', "model preset must be one of tiny, flash, pro, got .'tiny'."),
        ("a.json", '{"seed": 9223372036854775808}', "seed must be below 2.63"),
        pytest.param("a.json", '{"lr": ' + "9" * 400 + "}", "lr must be below 2.63", id="huge"),
        ("a.json", '{"lr": NaN}', "lr must be a finite number, got nan"),
        ("a.json", '{"step_timeout": 1e300}', "step_timeout must be at most 3.1536e.07 s, a year"),
        ("a.json", '{"batch": 1000000000}', "batch must be fewer than 2.31 / seq_len = 16777216 sequences"),
        ("a.json", '{"nudge": 2147483648}', "nudge must be below 2.31"),
        ("a.json", '{"profile": "1:\\u00b2"}', "profile must be START:END"),
        ("a.json", '{"out": "a\\u0000b"}', "out must be without a character 0"),
        ("a.json", '{"model": {"hidden_size": 2147483648}}', "hidden_size must be an integer below 2.31"),
        ("a.json", '{"model": {"norm_eps": Infinity}}', "norm_eps must be a finite number, got inf"),
        ("a.json", '{"model": {"compress_ratios": [0, 4, 16, -4]}}', "compress_ratios must be integers of 0 or more"),
        ("a.yaml", "steps: 5", "must end in .json or .toml"),
    ],
)
def test_bad_config_file(tmp_path, name, content, message):
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=message):
        parse(["--config", str(file)])


SMALL_ARGS = [f"--model.{key}={','.join(map(str, v)) if isinstance(v, tuple) else v}" for key, v in vars(SMALL).items()]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--data", "{folder}/none.txt"], "data .*none.txt does not exist"),
        (["--data", "{folder}/empty.txt"], "data file .*empty.txt is empty"),
        (["--data", "{folder}/nothing"], "data folder .*nothing holds no file with anything in it"),
        (["--data", "{folder}/short.txt"], "too short for one sequence of seq_len 128"),
        (["--data", "{folder}/short.txt", "--ep", "2"], "ep = 2 does not divide the 1 processes"),
        (["--data", "{folder}/short.txt", "--swap-optimizer"], "on a CPU they are there already"),
        (["--data", "{folder}/short.txt", "--impl", "triton"], "impl = triton cannot run on a CPU"),
        (["--resume", "{folder}/nothing"], "no checkpoint to resume from in .*nothing"),
    ],
)
def test_bad_input_ends_with_one_line_and_status_2(tmp_path, capsys, monkeypatch, args, message):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "nothing").mkdir()
    argv = [*SMALL_ARGS, "--out", str(tmp_path / "run"), "--device", "cpu", *(arg.format(folder=tmp_path) for arg in args)]
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert re.search(message, error), error
    assert not dist.is_initialized()


def test_run_alone_then_refuse_to_overwrite(tmp_path, capsys):
    """The whole command in one process, on the default text; a second run into the same folder needs to be told what to do."""
    argv = [*SMALL_ARGS, "--out", str(tmp_path), "--device", "cpu", "--steps", "2", "--batch", "1", "--seq-len", "32"]
    argv += ["--eval-sequences", "2", "--profile", "2:3"]
    # in a process of its own: torch 2.13's profiler can crash a long-lived process such as pytest's when that ends
    subprocess.run([sys.executable, "-m", "train_example.train", *argv], cwd=ROOT, check=True, capture_output=True, timeout=300)
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    assert list((tmp_path / "traces").iterdir())
    argv = argv[:-2]
    assert main(argv) == 2
    assert "holds a run already" in capsys.readouterr().err
    assert main([*argv, "--overwrite", "--steps", "1"]) == 0
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1]


def test_experts_must_divide():
    class Mesh:
        def size(self, dim):
            return 3

    with pytest.raises(ConfigError, match="ep = 3 does not divide the 8 experts"):
        check_experts(8, Parallel(None, 0, 3, None, Mesh()))


def test_due():
    assert [step for step in range(1, 8) if due(3, step, 7)] == [3, 6, 7]
    assert [step for step in range(1, 8) if due(-1, step, 7)] == [7]
    assert [step for step in range(1, 8) if due(0, step, 7)] == []


def test_unknown_source_is_named():
    with pytest.raises(ConfigError, match=r"job\.json: unknown setting lrr"):
        from_dict({"lrr": 1}, "job.json")
