"""What a person meets who uses the trainer from the command line: odd numbers of processes, a rank with bad input of its own, folders that
cannot be used, resumes that would mix runs, Ctrl-C; and the order in which kernels are warmed."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist_util import run_distributed
from tests.test_trainer_config import SMALL_ARGS
from tests.test_trainer_resume import rows
from tests.trainer_util import gradients, parameters, plain_model, ratio, run_config, sharded, tokens, worst
from train_example import checkpoint
from train_example import train as trainer
from train_example.compare import main as compare
from train_example.data import Dataset, Text
from train_example.optim import make_optimizer
from train_example.parallel import together
from train_example.run_config import ConfigError
from train_example.train import main, train


def _three(rank: int, world: int, folder: str) -> dict[str, Any]:
    """4 experts whose dim 1 (32) three processes do not divide: gradients, and a checkpoint read back on the same mesh."""
    ids, labels = tokens(3, 24)
    model, _ = sharded(run_config(ep=1))
    valid = int((labels != -100).sum())
    model(ids[rank : rank + 1], labels[rank : rank + 1], num_valid_tokens=valid).loss.backward()
    found = gradients(model)
    optimizer = make_optimizer(model, run_config())
    optimizer.step()
    before = parameters(model)
    saved = checkpoint.save(Path(folder), model, optimizer, {"step": 1}, {}, keep=1)
    again, _ = sharded(run_config(ep=1, seed=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a resume that works says nothing that worries
        checkpoint.load(saved, again, make_optimizer(again, run_config()))
    after = parameters(again)
    equal = all(torch.equal(before[name], after[name]) for name in before)
    return {"gradients": found, "equal": equal}


def test_three_processes_that_divide_nothing(tmp_path):
    config = run_config()
    model = plain_model(config)
    ids, labels = tokens(3, 24)
    model(ids, labels, num_valid_tokens=int((labels != -100).sum())).loss.backward()
    want = {name: param.grad for name, param in model.named_parameters()}
    for report in run_distributed(_three, 3, str(tmp_path)):
        assert worst(report["gradients"], want)[0] < 1e-4, worst(report["gradients"], want)
        experts = [name for name in want if ".experts." in name]
        assert ratio(report["gradients"], want, experts) == pytest.approx(1, rel=1e-4)
        assert report["equal"]


def _alone(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Rank 1 alone cannot: the others must end as well, with its reason. Then both cannot. Then texts of different lengths."""
    said = {}

    def attempt(name: str, action: Any) -> None:
        try:
            action()
            said[name] = ""
        except ConfigError as error:
            said[name] = str(error)

    def open_nothing() -> None:
        if rank == 1:
            open(os.path.join(folder, "none"))  # noqa: SIM115  (raises)

    attempt("file", lambda: together(open_nothing))
    attempt("data", lambda: train(run_config(out=f"{folder}/a", data=f"{folder}/{'none' if rank else 'text'}.txt")))
    attempt("both", lambda: train(run_config(out=f"{folder}/b", data=f"{folder}/none.txt")))
    attempt("lengths", lambda: train(run_config(out=f"{folder}/c", data=f"{folder}/{'longer' if rank else 'text'}.txt")))
    said["value"] = together(lambda: rank * 10)
    return said


def test_a_rank_that_cannot_go_on_alone_takes_the_others_along(tmp_path):
    (tmp_path / "text.txt").write_text("a text " * 100)
    (tmp_path / "longer.txt").write_text("a text " * 101)
    for rank, said in enumerate(run_distributed(_alone, 2, str(tmp_path))):
        assert re.match(r"rank 1: .*No such file", said["file"])
        assert re.match(r"rank 1: data .*none.txt does not exist", said["data"])
        assert re.match(r"data .*none.txt does not exist", said["both"])
        assert re.search(r"different texts .*\[701, 708\] tokens", said["lengths"])
        assert said["value"] == rank * 10


def arguments(folder: Path, *more: str) -> list[str]:
    settings = ["--device", "cpu", "--steps", "3", "--batch", "1", "--seq-len", "16", "--eval-every", "0"]
    return [*SMALL_ARGS, "--out", str(folder), *settings, *more]


@pytest.mark.parametrize(
    ("out", "more", "message"),
    [
        ("file/run", (), "Not a directory|File exists"),
        ("run", ("--profile", "4:6"), "profile must be START:END with START up to the last step, 3, got '4:6'"),
        ("run", ("--overwrite", "--resume", "latest"), "overwrite would delete the run that resume = latest is to go on with"),
        ("run", ("--data", "{folder}/file", "--eval-fraction", "0.001"), "the held-out part of the text has 1 tokens"),
        ("run", ("--data", "{folder}/file", "--eval-fraction", "0.005"), "the held-out part of the text has 2 tokens"),
        ("run", ("--resume", "{folder}/damaged"), "train_state.json is damaged"),
    ],
)
def test_cannot_work(tmp_path, capsys, out, more, message):
    (tmp_path / "file").write_text("x" * 300)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / checkpoint.STATE_FILE).write_text('{"progress": {"st')
    assert main(arguments(tmp_path / out, *(part.format(folder=tmp_path) for part in more))) == 2
    error = capsys.readouterr().err
    assert re.match(f"error: .*({message})", error), error
    assert error.count("\n") == 1
    assert not dist.is_initialized()


def test_three_held_out_tokens_are_enough(tmp_path):
    (tmp_path / "file").write_text("x" * 300)
    dataset = Dataset(Text([tmp_path / "file"]), 16, 3 / 301, seed=0)
    (_, labels), *rest = dataset.held_out(0, 1, 1, -1)
    assert not rest
    assert labels[labels != -100].tolist() == [ord("x"), 256]


@pytest.mark.filterwarnings("error:No artists")
def test_resume_mixes_no_runs(tmp_path, capsys):
    """From an older checkpoint only into another folder; into a folder of another run not at all; after the last step it says so."""
    run, other, checkpoints = tmp_path / "run", tmp_path / "other", tmp_path / "run" / "checkpoints"
    assert main(arguments(run, "--save-every", "1", "--keep", "-1")) == 0
    older = str(checkpoints / "step_00000002")
    assert main(arguments(run, "--resume", older)) == 2
    assert "has checkpoints behind" in capsys.readouterr().err
    assert main(arguments(other, "--resume", older)) == 0
    assert rows(other) == rows(run)[2:]
    assert compare([str(run), str(other), "--tolerance", "0"]) == 0
    assert "at step 3 (1 compared)  ok 0" in capsys.readouterr().out
    assert compare([str(run), str(other), "--keys", "loss", "eval_bpb"]) == 1, "a judged quantity that no step has is no success"
    assert "eval_bpb   in no step of both runs  MISSING" in capsys.readouterr().out
    assert main(arguments(other, "--resume", str(run))) == 2
    assert "holds a run already" in capsys.readouterr().err
    assert main(arguments(run, "--resume", str(run), "--overwrite")) == 2
    assert "overwrite would delete" in capsys.readouterr().err
    assert main(arguments(other, "--resume", str(run), "--overwrite")) == 0
    assert "nothing left to do: 3 steps are done and --steps is 3" in capsys.readouterr().out
    assert len(list(checkpoints.iterdir())) == 3, "no attempt took a checkpoint away"


@pytest.mark.parametrize("harm", ["missing", "cut"])
def test_damaged_checkpoint_is_named(tmp_path, capsys, harm):
    run = tmp_path / "run"
    assert main(arguments(run)) == 0
    (shard,) = (run / "checkpoints").glob("*/*.distcp")
    shard.unlink() if harm == "missing" else shard.write_bytes(shard.read_bytes()[:1000])
    capsys.readouterr()
    assert main(arguments(tmp_path / "other", "--resume", str(run))) == 2
    error = capsys.readouterr().err
    assert re.match(r"error: .*step_00000003 is damaged, resume from another checkpoint; rank 0: ", error), error
    assert error.count("\n") == 1
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted; --resume latest goes on"),
        (FloatingPointError("step 3: loss of rank 1 is nan"), 1, "error: step 3: loss of rank 1 is nan"),
    ],
)
def test_ends_with_one_line(monkeypatch, capsys, error, status, message):
    def stop(config):
        raise error

    monkeypatch.setattr(trainer, "train", stop)
    for local_rank, want in (("0", message), ("1", "")):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        assert main([]) == status
        said = capsys.readouterr().err
        assert said.startswith(want)
        assert said.count("\n") == (1 if want else 0)


@pytest.fixture
def events(monkeypatch) -> list[Any]:
    """What is called, in order: warmup (with its arguments), init_parallel (which ends the run), each step, forbid_compile."""
    seen: list[Any] = []

    def stop(*args):
        seen.append("init_parallel")
        raise ConfigError("far enough")

    monkeypatch.setattr(trainer, "warmup", lambda *args, **kwargs: seen.append(("warmup", args, kwargs)))
    monkeypatch.setattr(trainer, "forbid_compile", lambda mode: seen.append(("forbid_compile", mode)))
    monkeypatch.setattr(trainer, "init_parallel", stop)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return seen


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_kernels_are_warmed_before_the_process_group(events, monkeypatch, kind):
    device = torch.device("cuda", 1) if kind == "cuda" else torch.device("privateuseone", 1)
    monkeypatch.setattr(trainer, "pick_device", lambda name: device)
    config = run_config(dtype="bf16")
    with pytest.raises(ConfigError, match="far enough"):
        train(config)
    assert events == [("warmup", (config.model, device), {"dtype": "bf16", "barrier": False, "log": print}), "init_parallel"]
    events.clear()
    with pytest.raises(ConfigError, match="far enough"):
        train(run_config(impl="eager"))
    assert events == ["init_parallel"]


def test_nothing_is_warmed_on_a_cpu(events):
    with pytest.raises(ConfigError, match="far enough"):
        train(run_config())
    assert events == ["init_parallel"]


def test_only_one_process_a_host_prints_the_warmup(events, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert trainer.warm_kernels(run_config(), torch.device("cuda", 1))
    assert events[0][2]["log"] is None


@pytest.mark.parametrize("warmed", [True, False])
def test_compiling_is_named_after_the_first_step(tmp_path, monkeypatch, warmed):
    seen: list[Any] = []
    step = trainer.train_step
    monkeypatch.setattr(trainer, "warm_kernels", lambda config, device: warmed)
    monkeypatch.setattr(trainer, "forbid_compile", seen.append)
    monkeypatch.setattr(trainer, "train_step", lambda *args: (seen.append("step"), step(*args))[1])
    assert main(arguments(tmp_path)) == 0
    assert seen == (["step", "warn", "step", "step"] if warmed else ["step"] * 3)
