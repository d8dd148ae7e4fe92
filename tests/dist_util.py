"""Run a test's worker function in several gloo processes and bring the results (or the first traceback) back."""

import datetime
import faulthandler
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Seconds that only a hang exceeds, on a slow machine with other work too; and less than pytest's own limit (pyproject.toml), which names no rank.
COLLECTIVE_LIMIT = 180.0
STACKS_AFTER = 480.0
WHOLE_LIMIT = 500.0


def _entry(rank: int, world: int, store: str, fn: Callable[..., Any], args: tuple, out_dir: str) -> None:
    torch.set_num_threads(1)
    stacks = open(os.path.join(out_dir, f"{rank}.stack"), "w")  # noqa: SIM115  (open as long as the process lives)
    faulthandler.dump_traceback_later(STACKS_AFTER, file=stacks)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    try:
        limit = datetime.timedelta(seconds=COLLECTIVE_LIMIT)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=limit)
        result: Any = fn(rank, world, *args)
        torch.save({"ok": True, "result": result}, os.path.join(out_dir, f"{rank}.pt"))
    except BaseException as error:
        torch.save({"ok": False, "traceback": traceback.format_exc(), "message": str(error)}, os.path.join(out_dir, f"{rank}.pt"))
        raise SystemExit(1) from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_distributed(fn: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    """Call fn(rank, world, *args) in `world` spawned gloo processes; returns the results by rank.

    A rank that waits longer than COLLECTIVE_LIMIT in a collective fails (so a hang is a failing test, not a stuck one).
    `fn` must be importable (defined at module level); results and args must be picklable.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        store = os.path.join(folder, "store")
        procs = [context.Process(target=_entry, args=(rank, world, store, fn, args, folder)) for rank in range(world)]
        end = time.monotonic() + WHOLE_LIMIT
        for proc in procs:
            proc.start()
        for proc in procs:
            proc.join(max(0.0, end - time.monotonic()))
        stuck = [rank for rank, proc in enumerate(procs) if proc.is_alive()]
        for rank in stuck:
            procs[rank].kill()
            procs[rank].join()
        results, errors = [], []
        for rank in stuck:
            stack = Path(folder, f"{rank}.stack").read_text()
            errors.append(f"rank {rank}: still running after {WHOLE_LIMIT} s; its stack at {STACKS_AFTER} s:\n{stack}")
        for rank in range(world):
            path = os.path.join(folder, f"{rank}.pt")
            if not os.path.exists(path):
                errors.append(f"rank {rank}: ended without a result (exit code {procs[rank].exitcode})")
                continue
            report = torch.load(path, weights_only=False)
            if report["ok"]:
                results.append(report["result"])
            else:
                errors.append(f"rank {rank}: {report['traceback']}")
        if errors:
            raise AssertionError("\n".join(errors))
        return results
