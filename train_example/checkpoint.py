"""Checkpoints with torch.distributed.checkpoint: model, optimizer, schedule, RNG and the place in the data.

    OUT/checkpoints/step_00000100/    the shards of all ranks, and train_state.json

A checkpoint is written under a temporary name and renamed when all ranks are done, so a folder named step_* is always whole. Tensors are
saved by their global shape: a run may go on with another number of processes or another `ep`, and with or without SwapAdamW.
"""

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from train_example.files import read_table, table
from train_example.parallel import barrier, together
from train_example.run_config import ConfigError
from train_example.swap_optimizer import SwapAdamW

STATE_FILE = "train_state.json"


def init_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Make AdamW's moments before the first step, so that every checkpoint has the same tensors and a load has somewhere to go."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            step_device = param.device if group.get("fused") else "cpu"
            optimizer.state[param] = {
                "step": torch.zeros((), dtype=torch.float32, device=step_device),
                "exp_avg": torch.zeros_like(param),
                "exp_avg_sq": torch.zeros_like(param),
            }


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """References to every tensor of the training state, by name; loading fills them in place."""
    if isinstance(optimizer, SwapAdamW):
        optimizer.synchronize()
    weights = named_tensors(model)  # first: it shards what an evaluation may have left gathered
    moments = {name: dict(optimizer.state[param]) for name, param in model.named_parameters()}
    return {"model": weights, "optimizer": moments}


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What makes the model: sharded parameters, persistent buffers, and the hash routers' tables, which an imported model brings along."""
    tables = {name: buffer for name, buffer in model.named_buffers() if name.endswith(".tid2eid")}
    return {**{name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}, **tables}


def _rng_state(device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state[device.type] = getattr(torch, device.type).get_rng_state(device)
    return state


def save(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: dict[str, Any],
    model_config: dict[str, Any],
    keep: int,
    data: dict[str, Any] | None = None,
) -> Path:
    """Write a checkpoint of all ranks; returns its folder once it is whole on disk. Collective.

    Args:
        folder: of all checkpoints of the run.
        progress: plain numbers to go on from; must hold `step`, the optimizer steps done.
        model_config: sizes of the model, kept to recognise a checkpoint of another model.
        keep: older checkpoints are deleted so that this many are left; -1 = all are kept.
        data: what the place in the data refers to, see check_data.
    """
    rank, device = dist.get_rank(), next(model.parameters()).device
    final = folder / f"step_{progress['step']:08d}"
    temporary = folder / f".{final.name}.tmp"
    if rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
    barrier()
    state = {**_tensors(model, optimizer), "rng": {str(rank): _rng_state(device)}}
    dcp.save(state, checkpoint_id=temporary)
    if rank == 0:
        record = {"progress": progress, "model": model_config, "data": data or {}, "processes": dist.get_world_size()}
        (temporary / STATE_FILE).write_text(json.dumps(record, indent=1))
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        for old in list_checkpoints(folder)[: -keep if keep != -1 else 0]:
            shutil.rmtree(old)
    barrier()
    return final


def list_checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints in a folder, oldest first."""
    return sorted(path.parent for path in folder.glob(f"step_*/{STATE_FILE}"))


def find(resume: str, folder: Path) -> Path:
    """The checkpoint that `resume` names: "latest" of this run's `folder`, a checkpoint, or a folder of them (the newest)."""
    path = folder if resume == "latest" else Path(resume)
    if (path / STATE_FILE).is_file():
        return path
    found = list_checkpoints(path) or list_checkpoints(path / "checkpoints")
    if not found:
        raise ConfigError(f"no checkpoint to resume from in {path}")
    return found[-1]


def _record(path: Path) -> dict[str, Any]:
    try:
        record = read_table(path / STATE_FILE)
        for name in ("progress", "model", "data"):
            table(record.get(name), f"{path / STATE_FILE}: {name}")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return record


def _changes(saved: dict[str, Any], wanted: dict[str, Any]) -> str:
    wanted = json.loads(json.dumps(wanted))  # tuples become lists, as they did in the file
    differing = [name for name in sorted(saved.keys() | wanted.keys()) if saved.get(name) != wanted.get(name)]
    return ", ".join(f"{name} {saved.get(name)!r} there and {wanted.get(name)!r} here" for name in differing)


def read_progress(path: Path, model_config: dict[str, Any]) -> dict[str, Any]:
    """The progress saved with a checkpoint; ConfigError if it is one of another model."""
    record = _record(path)
    if changes := _changes(record["model"], model_config):
        raise ConfigError(f"{path} is a checkpoint of another model: {changes}")
    progress = record["progress"]
    for name in ("step", "tokens", "data_tokens"):
        if type(value := progress.get(name)) is not int or value < 0:
            raise ConfigError(f"{path / STATE_FILE}: progress.{name} must be an integer of 0 or more, got {value!r}")
    if type(ema := progress.get("loss_ema")) not in (int, float, type(None)):
        raise ConfigError(f"{path / STATE_FILE}: progress.loss_ema must be a number, got {ema!r}")
    return progress


def check_data(path: Path, data: dict[str, Any], allowed: bool) -> bool:
    """Whether a checkpoint comes from the same text, cut into the same sequences in the same order; ConfigError if not, unless `allowed`.

    Another text, seed, seq_len or eval_fraction makes the saved place in the data mean nothing, repeats some of it, and may hold out what
    was trained on already: an evaluation after that looks better than the model is.
    """
    changes = _changes(_record(path)["data"], data)
    if changes and not allowed:
        raise ConfigError(f"{path} was trained on other data: {changes}; --new-data goes on with it, from its beginning")
    return not changes


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Fill model, optimizer state and this rank's RNG state from a checkpoint, whatever meshes it was written on. Collective.

    ConfigError on every rank if one of them cannot read its part of it.
    """
    try:
        dcp.load(_tensors(model, optimizer), checkpoint_id=path)
    except CheckpointException as error:  # of all ranks, whichever failed
        raise _damaged(path, error) from error
    together(lambda: _load_rng(path, next(model.parameters()).device))


def _damaged(path: Path, error: CheckpointException) -> ConfigError:
    failed, (reason, _) = min(error.failures.items(), key=lambda item: item[0])
    return ConfigError(f"{path} is damaged, resume from another checkpoint; rank {failed}: {(str(reason) or repr(reason)).splitlines()[0]}")


def _load_rng(path: Path, device: torch.device) -> None:
    rank = str(dist.get_rank())
    rng = {"rng": {rank: _rng_state(device)}}
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    if all(f"rng.{rank}.{kind}" in saved for kind in rng["rng"][rank]):  # else the saving run had no such rank, or no such device
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # each rank loads its own, alone
            try:
                dcp.load(rng, checkpoint_id=path, no_dist=True)
            except CheckpointException as error:
                raise _damaged(path, error) from error
        torch.set_rng_state(rng["rng"][rank]["cpu"])
        if device.type != "cpu":
            getattr(torch, device.type).set_rng_state(rng["rng"][rank][device.type], device)
