"""Checkpoints on gloo processes: bit-equal resume, other meshes, every rank's experts, the newest k; of another model or text refused."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.dist_util import run_distributed
from tests.trainer_util import gathered, parameters, run_config, sharded, tokens
from train_example import checkpoint
from train_example.metrics import read_metrics
from train_example.optim import make_optimizer
from train_example.parallel import shutdown
from train_example.run_config import ConfigError
from train_example.step import train_step
from train_example.train import train

TIME_FIELDS = ("ms", "tokens_per_s", "memory_gib", "mfu")


def rows(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in TIME_FIELDS} for row in read_metrics(run / "metrics.jsonl")]


def _runs(rank: int, world: int, folder: str, text: str) -> dict[str, Any]:
    out = Path(folder)
    settings = {"data": text, "ep": 2, "seq_len": 16, "eval_every": 2, "eval_sequences": 4}
    train(run_config(out=str(out / "straight"), save_every=2, keep=2, **settings))
    train(run_config(out=str(out / "again"), save_every=0, **settings))
    # a run that is cut off right behind the checkpoint of step 3; its schedule is that of 6 steps, so it is stopped by force
    config = run_config(out=str(out / "halves"), save_every=3, **settings)
    kept, stop = checkpoint.save, RuntimeError("cut off")

    def save_then_stop(*args, **kwargs):
        kept(*args, **kwargs)
        raise stop

    checkpoint.save = save_then_stop
    try:
        train(config)
    except RuntimeError as error:
        assert error is stop
    finally:
        checkpoint.save = kept
    if rank == 0:  # what a step behind the checkpoint would have left
        with (out / "halves" / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 4, "loss": 99.0}) + "\n")
    train(run_config(out=str(out / "halves"), save_every=3, resume="latest", **settings))
    # the checkpoint of EP 2 goes on with the experts sharded by FSDP alone
    newest = checkpoint.find("latest", out / "straight" / "checkpoints")
    fsdp = run_config(ep=1, **{k: v for k, v in settings.items() if k != "ep"})
    states = []
    for config in (run_config(**settings), fsdp):
        model, _ = sharded(config)
        optimizer = make_optimizer(model, config)
        checkpoint.load(newest, model, optimizer)
        moments = {name: optimizer.state[param]["exp_avg"].full_tensor() for name, param in model.named_parameters()}
        states.append((parameters(model), moments))
    equal = [all(torch.equal(a[name], b[name]) for name in a) for a, b in zip(*states)]
    earlier = str(out / "straight" / "checkpoints" / "step_00000004")
    row = train(run_config(out=str(out / "fsdp"), **{**settings, "ep": 1}, resume=earlier))
    # a run of one process, with all sequences of a step in its batch, goes on in two
    train(run_config(**{**settings, "out": str(out / "two"), "resume": str(out / "one" / "checkpoints" / "step_00000003")}))
    # another model, other data
    other_text = str(Path(text).with_name("other.txt"))
    refused = {}
    for name, changes in {
        "model": {"model": {"expert_dim": 24}},
        "text": {"data": other_text},
        "sequences": {"seed": 1, "seq_len": 8, "eval_fraction": 0.2},
    }.items():
        try:
            train(run_config(**{**settings, **changes, "out": str(out / "other"), "resume": earlier}))
        except ConfigError as error:
            refused[name] = str(error)
    untouched = not (out / "other").exists()
    new = {**settings, "data": other_text, "seq_len": 8, "new_data": True, "out": str(out / "new"), "save_every": 1}
    train(run_config(**new, resume=earlier, steps=5))
    train(run_config(**new, resume="latest"))  # the data is not new any more: on from where it was
    dist.barrier()
    experts = {name: tensor for name, tensor in states[0][0].items() if ".experts." in name}
    return {"fsdp_equal": equal, "fsdp_row": row, "refused": refused, "untouched": untouched, "experts": experts}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("runs")
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog; " * 60)
    (folder / "other.txt").write_text("the quick brown cat jumps over the lazy dog; " * 60)
    alone = {"data": str(text), "seq_len": 16, "batch": 4, "save_every": 3, "keep": -1}
    try:
        train(run_config(out=str(folder / "one"), **alone))
    finally:
        shutdown()
    return folder, run_distributed(_runs, 2, str(folder), str(text))


def test_same_seed_same_bits(runs):
    folder, _ = runs
    straight = rows(folder / "straight")
    assert [row["step"] for row in straight] == [1, 2, 3, 4, 5, 6]
    assert straight == rows(folder / "again")
    assert straight[0]["loss"] > straight[-1]["loss"]


def test_six_steps_equal_three_and_three_resumed(runs):
    folder, _ = runs
    assert rows(folder / "halves") == rows(folder / "straight")


def test_last_state_after_resume_is_bit_equal(runs):
    folder, _ = runs
    straight, halves = (_full(folder / run / "checkpoints" / "step_00000006") for run in ("straight", "halves"))
    assert straight.keys() == halves.keys()
    assert any("exp_avg_sq" in name for name in straight)
    for name in straight:
        assert torch.equal(straight[name], halves[name]), name


def _full(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint in one piece, read without a process group."""
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    state = {name: torch.empty(item.size, dtype=item.properties.dtype) for name, item in metadata.items() if hasattr(item, "size")}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # a single process is the intent
        dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def test_experts_of_every_rank_are_saved(runs):
    folder, found = runs
    saved = _full(folder / "straight" / "checkpoints" / "step_00000006")
    assert found[0]["experts"]
    for name, tensor in found[0]["experts"].items():
        assert torch.equal(saved[f"model.{name}"], tensor), name
        assert not torch.equal(tensor[:2], tensor[2:]), "the two ranks hold different experts"


def test_checkpoint_of_ep2_resumes_with_fsdp_only(runs):
    folder, found = runs
    assert found[0]["fsdp_equal"] == [True, True], "parameters and moments are those of the checkpoint"
    want = rows(folder / "straight")[-1]
    assert found[0]["fsdp_row"]["step"] == 6
    assert found[0]["fsdp_row"]["loss"] == pytest.approx(want["loss"], rel=1e-4)
    assert found[0]["fsdp_row"]["tokens"] == want["tokens"]


def test_run_of_one_process_goes_on_in_two(runs):
    folder, _ = runs
    alone, two = rows(folder / "one"), rows(folder / "two")
    assert [row["step"] for row in two] == [4, 5, 6]
    for got, want in zip(two, alone[3:], strict=True):
        assert got["tokens"] == want["tokens"]
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-4)
        assert got["lr"] == want["lr"]
    assert abs(alone[2]["loss"] / alone[3]["loss"] - 1) > 1e-3, "other sequences would show"


def test_only_whole_and_newest_checkpoints_are_kept(runs):
    folder, _ = runs
    names = sorted(path.name for path in (folder / "straight" / "checkpoints").iterdir())
    assert names == ["step_00000004", "step_00000006"]


def test_checkpoint_of_another_model_is_refused(runs):
    for report in runs[1]:
        assert "checkpoint of another model: expert_dim 16 there and 24 here" in report["refused"]["model"]
        assert report["untouched"]


def test_resume_on_other_data_is_refused(runs):
    for report in runs[1]:
        assert re.search(r"was trained on other data: text_sha256 '\w{64}' there and '\w{64}' here; --new-data", report["refused"]["text"])
        changes = "eval_fraction 0.1 there and 0.2 here, seed 0 there and 1 here, seq_len 16 there and 8 here"
        assert f"was trained on other data: {changes}; --new-data" in report["refused"]["sequences"]


def test_new_data_begins_at_its_beginning_once(runs):
    folder, _ = runs
    five, six = rows(folder / "new")
    assert (five["step"], six["step"]) == (5, 6)
    assert five["tokens"] == 4 * 64 + 32, "16 then 8 tokens, of two sequences on each of two processes"
    assert (five["data_tokens"], six["data_tokens"]) == (32, 64)
    log = (folder / "new" / "train.log").read_text()
    assert log.count("on other data than the checkpoint's, from its beginning") == 1


def _meshes(rank: int, world: int, folder: str) -> dict[str, Any]:
    """A checkpoint of 4 processes (experts over ep 2, and FSDP over the pairs), read back on other meshes of 4, 2 and 1 of them."""
    config = run_config(ep=2)
    ids, labels = tokens(4, 24)
    model, _ = sharded(config)
    optimizer = make_optimizer(model, config)
    train_step(model, optimizer, config, [(ids[rank : rank + 1], labels[rank : rank + 1])], 1)
    path = checkpoint.save(Path(folder), model, optimizer, {"step": 1}, {}, keep=1)

    def state(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
        moments = {f"{name} {kind}": optimizer.state[param][kind] for name, param in model.named_parameters() for kind in ("exp_avg", "exp_avg_sq")}
        return {**gathered(dict(model.state_dict())), **gathered(moments)}

    want = state(model, optimizer)
    found: dict[str, Any] = {"experts": str(dict(model.named_parameters())["layers.0.moe.experts.w_down"].placements)}
    for processes, ep in ((4, 1), (2, 2), (1, 1)):
        if processes < dist.get_world_size():
            dist.destroy_process_group()
            if rank < processes:
                store = dist.FileStore(f"{folder}/store{processes}", processes)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
        if rank >= processes:
            break
        settings = run_config(ep=ep, seed=5)
        other, _ = sharded(settings)
        fresh = make_optimizer(other, settings)
        differs = not torch.equal(gathered({"w": other.head.weight})["w"], want["head.weight"])
        checkpoint.load(path, other, fresh)
        got = state(other, fresh)
        steps = {float(fresh.state[param]["step"]) for param in other.parameters()}
        equal = got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
        found[f"{processes} processes, ep {ep}"] = differs and equal and steps == {1.0}
    return found


def test_every_mesh_reads_a_checkpoint_of_fsdp_and_ep(tmp_path):
    reports = run_distributed(_meshes, 4, str(tmp_path))
    assert "Shard(dim=1), Shard(dim=0)" in reports[0]["experts"]
    for rank, report in enumerate(reports):
        meshes = {name: result for name, result in report.items() if "processes" in name}
        assert len(meshes) == (3, 2, 1, 1)[rank]
        assert all(meshes.values()), meshes


def test_run_folder_holds_log_metrics_curves_and_settings(runs):
    folder, _ = runs
    run = folder / "straight"
    assert {"config.json", "environment.json", "train.log", "metrics.jsonl", "curves.png"} <= {path.name for path in run.iterdir()}
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    log = (run / "train.log").read_text()
    line = next(line for line in log.splitlines() if line.startswith("step 6/6 | loss"))
    for part in ("(lm ", " kl ", " mtp ", "grad norm", "lr ", " ms", "tokens/s a device", "MFU n/a", "GiB", "expert load", "ETA"):
        assert part in line, (part, line)
    assert "held-out bits per byte" in log
    row = read_metrics(run / "metrics.jsonl")[-1]
    wanted = {"step", "loss", "lm_loss", "kl_loss", "mtp_loss", "grad_norm", "lr", "ms", "tokens_per_s", "eval_bpb", "expert_load", "mfu"}
    assert wanted <= row.keys()
