"""Files of runs, checkpoints, traces and imports in a state that nobody wrote on purpose: one line that names the file, and no traceback."""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.test_trainer_newcomer import arguments
from train_example import compare, compare_fixed, trace
from train_example.config import TINY
from train_example.hf_checkpoint import _Folder, check_target
from train_example.hf_config import INDEX, config_from_folder, config_to_hf
from train_example.run_config import ConfigError, RunConfig
from train_example.train import build_model, main


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("damaged") / "run"
    assert main(arguments(out)) == 0
    return out


@pytest.fixture
def copy(run, tmp_path) -> Path:
    """Of everything but the text."""
    for file in (file for file in run.rglob("*") if file.is_file() and "text" not in file.parts):
        target = tmp_path / "copy" / file.relative_to(run)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    return tmp_path / "copy"


def one_line(capsys, pattern: str) -> None:
    error = capsys.readouterr().err
    assert re.match(f"error: .*{pattern}", error), error
    assert error.count("\n") == 1, error
    assert not dist.is_initialized()


ROW = b'{"step": 1, "loss": 2.0}\n'


@pytest.mark.parametrize(
    ("file", "content", "pattern"),
    [
        ("config.json", b'{"impl": "ea', "config.json is damaged: Unterminated string"),
        ("config.json", b"[1]", "config.json must hold a table of names and values, got list"),
        ("config.json", b'{"model": [1]}', "config.json: model must hold a table"),
        ("config.json", b"\xff", "config.json is damaged: 'utf-8' codec"),
        ("environment.json", b"3", "environment.json must hold a table"),
        ("environment.json", b"", "environment.json is damaged"),
        ("metrics.jsonl", b'{"step": 1, "lo\n' + ROW, "metrics.jsonl line 1 is damaged"),
        ("metrics.jsonl", b"\0\0\0\n" + ROW, "metrics.jsonl line 1 is damaged"),
        ("metrics.jsonl", b"[1]\n" + ROW, "metrics.jsonl line 1 must hold a table"),
        ("metrics.jsonl", b'{"loss": 2.0}\n' + ROW, "metrics.jsonl line 1 is no row of a run: a whole number `step`"),
        ("metrics.jsonl", b'{"step": 1.5}\n' + ROW, "metrics.jsonl line 1 is no row of a run"),
        ("metrics.jsonl", b'{"step": 1, "loss": "2"}\n' + ROW, "metrics.jsonl line 1 is no row of a run"),
        pytest.param("metrics.jsonl", b'{"step": 1, "loss": 1' + b"0" * 400 + b"}\n" + ROW, "line 1 is no row of a run", id="huge"),
    ],
)
def test_compare(run, copy, capsys, file, content, pattern):
    (copy / file).write_bytes(content)
    assert compare.main([str(run), str(copy)]) == 2
    one_line(capsys, pattern)


def test_compare_takes_what_a_crash_leaves(run, copy):
    """A last line that is cut, a value that there is not, and no record of the text."""
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    lines[0] = json.dumps({**json.loads(lines[0]), "loss": None}).encode() + b"\n"
    (copy / "metrics.jsonl").write_bytes(b"".join(lines) + lines[-1][:30])
    (copy / "environment.json").write_text("{}")
    assert compare.main([str(run), str(copy)]) == 0
    assert [step for step, _ in compare.compare(run, copy)["loss"]] == [2, 3]


@pytest.mark.parametrize(
    ("state", "pattern"),
    [
        ("[]", "must hold a table"),
        ("{}", "train_state.json: progress must hold a table"),
        ('{"progress": {}, "model": [], "data": {}}', "train_state.json: model must hold a table"),
        ('{"progress": {"step": "3"}', "train_state.json is damaged"),
        ({"step": "3"}, "progress.step must be an integer of 0 or more, got '3'"),
        ({"data_tokens": -1}, "progress.data_tokens must be an integer of 0 or more, got -1"),
        ({"loss_ema": "low"}, "progress.loss_ema must be a number"),
    ],
)
def test_state_of_a_checkpoint(copy, tmp_path, capsys, state: str | dict, pattern):
    """state: the file, or what is changed of its progress"""
    (file,) = copy.glob("checkpoints/*/train_state.json")
    whole = json.loads(file.read_text())
    file.write_text(state if isinstance(state, str) else json.dumps({**whole, "progress": {**whole["progress"], **state}}))
    capsys.readouterr()
    assert main(arguments(tmp_path / "on", "--resume", str(copy))) == 2
    one_line(capsys, pattern)


@pytest.mark.parametrize("content", [None, b"", b"\x80\x04N.", b"not pickled"])
def test_index_of_a_checkpoint(copy, tmp_path, capsys, content):
    (file,) = copy.glob("checkpoints/*/.metadata")
    file.unlink() if content is None else file.write_bytes(content)
    capsys.readouterr()
    assert main(arguments(tmp_path / "on", "--resume", str(copy))) == 2
    one_line(capsys, "step_00000003 is damaged, resume from another checkpoint; rank 0: ")


def test_resume_on_damaged_metrics(run, tmp_path, capsys):
    """The only process that reads them is rank 0: the others must not wait for it."""
    assert main(arguments(tmp_path / "own", "--steps", "2")) == 0
    file = tmp_path / "own" / "metrics.jsonl"
    file.write_bytes(b"{\n" + file.read_bytes())
    capsys.readouterr()
    assert main(arguments(tmp_path / "own", "--resume", "latest")) == 2
    one_line(capsys, "metrics.jsonl line 1 is damaged")


def test_settings_of_a_run_for_fixed_weights(copy, capsys):
    (copy / "config.json").write_text("[]")
    assert compare_fixed.main([str(copy), "--device", "cpu"]) == 2
    one_line(capsys, "config.json must hold a table")


def test_sizes_that_no_tensor_has_room_for():
    sizes: dict[str, int] = {"vocab_size": 2**31 - 1, "hidden_size": 2**31 - 1, "num_hash_layers": 0}
    config = RunConfig(model=dataclasses.replace(TINY, **sizes))
    with pytest.raises(ConfigError, match="no tensor has room for these sizes of the model"):
        build_model(config, None)  # type: ignore[arg-type]  # it ends before anything is sharded


@pytest.mark.parametrize(
    ("name", "content", "pattern"),
    [
        ("rank0.json", b"{", "the trace is damaged"),
        ("rank0.json", b"3", "no Chrome trace: it holds no list of events"),
        ("rank0.json", b'{"events": []}', "no Chrome trace"),
        ("rank0.json", b"[1]", "no Chrome trace"),
        ("rank0.json", b"[]", "the trace has no step of the trainer"),
        ("rank0.json", b'[{"cat": "user_annotation", "name": "train step 1"}]', "no trace of torch's profiler: KeyError"),
        ("rank0.json.gz", b"{}", "damaged: Not a gzipped file"),
        ("rank0.json.gz", gzip.compress(b"[]" * 99, mtime=0)[:-9], "damaged: "),
    ],
)
def test_trace(tmp_path, capsys, name, content, pattern):
    (tmp_path / name).write_bytes(content)
    assert trace.main([str(tmp_path / name)]) == 2
    one_line(capsys, f"{name}: .*{pattern}")


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ({"train_example": 5}, "train_example must hold a table"),
        ({"compress_ratios": 4}, "has no len"),
        ({"num_hidden_layers": "4"}, "config.json: "),
        ({"hidden_size": 64.0}, "hidden_size must be an integer below 2.31, got 64.0"),
        ({"hidden_size": "64"}, "hidden_size must be an integer below 2.31, got '64'"),
        ({"hc_eps": None}, "hc_eps must be a finite number, got None"),
        ({"layer_types": 4}, "config.json: "),
        ({"rope_parameters": [1]}, "config.json: "),
        ({"rope_parameters": {"main": {}, "compress": {}}}, "config.json lacks 'rope_type'"),
        ({"compress_rates": None}, "config.json: "),
        ({"model_type": None}, "model_type must be 'deepseek_v4', got None"),
    ],
)
def test_config_of_an_import(tmp_path, change, pattern):
    (tmp_path / "config.json").write_text(json.dumps({**config_to_hf(TINY), **change}))
    with pytest.raises(ValueError, match=f"config.json.*{pattern}|{pattern}"):
        config_from_folder(tmp_path)


@pytest.mark.parametrize("content", ["3", "[]", "{", '{"model_type": "deepseek_v4"}'])
def test_export_over_something_else(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match="is no checkpoint that this trainer wrote"):
        check_target(tmp_path)


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        ({"weight_map": ["model.norm.weight"]}, "weight_map must hold a table"),
        ({"weight_map": {"model.norm.weight": 3}}, "model.norm.weight is to be in 3, which is no name of a file beside it"),
        ({"weight_map": {"model.norm.weight": "../other.safetensors"}}, "model.norm.weight is to be in .*, which is no name of a file beside it"),
        ({}, "weight_map must hold a table"),
    ],
)
def test_damaged_index_of_an_import(tmp_path, content, pattern):
    (tmp_path / INDEX).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"{INDEX} is damaged: {pattern}"):
        _Folder(tmp_path)
