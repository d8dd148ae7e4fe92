"""warmup(): every kernel of a plan is compiled once a node and loaded, before training starts. Also `python -m kernel_runtime.warmup`.

Processes of one node that start together share the work by locks in the cache folder: each takes kernels that nobody else has in hand,
then loads what the others made. No torch.distributed is needed; where it is initialised, a barrier ends the warmup.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from kernel_runtime import cache
from kernel_runtime.filler import Filler, Report, Row, one_line
from kernel_runtime.guard import compiling_allowed
from kernel_runtime.impl import KERNEL_DEVICES, interpreting, triton_installed

LOCK_TIMEOUT = 900.0
MAX_THREADS = 16  # that compile in one process; a seventh of a compilation is Python, so more would only wait for each other


def _load_on_device(filler: Filler, specs: dict[str, Any]) -> None:
    """Puts every kernel into the launch table of this process and onto the current device, as its first launch would."""
    for row in filler.report.rows:
        if row.state == "failed":
            continue
        begun = time.perf_counter()
        spec = specs[row.key]
        try:
            kernel = spec.kernel.warmup(*spec.sample_arguments(), grid=(1,), **spec.keywords)
            kernel._init_handles()
            if kernel.hash != row.key:
                row.state, row.note = "failed", f"a launch picks key {kernel.hash[:12]}, not this one: the spec and the kernel disagree"
            row.registers, row.spills, row.shared = kernel.n_regs, kernel.n_spills, kernel.metadata.shared
        except Exception as error:
            row.state, row.note = "failed", one_line(error)
        row.seconds += time.perf_counter() - begun


def _warm_npu(plan: Any, report: Report, lock_timeout: float) -> None:
    """Triton-Ascend: its own launch path compiles and loads; one process of the node at a time, the others find the result cached."""
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context(cache.locked(Path(report.folder), "ascend", lock_timeout))
            report.say(lock.warning)
        except cache.LockTimeout as error:
            report.say(f"{error}; compiling here as well")
        for op, spec in plan:
            row = Row(op, spec.name, "")
            begun = time.perf_counter()
            try:
                kernel = spec.kernel.warmup(*spec.sample_arguments(), grid=(1,), **spec.keywords)
                kernel._init_handles()
                row.state, row.key = "cached", kernel.hash
            except Exception as error:
                row.state, row.note = "failed", one_line(error)
            row.seconds = time.perf_counter() - begun
            report.rows.append(row)


def warmup(
    plan: Any, device: str | torch.device = "auto", *, dtype: str | None = None, cache_dir: str | os.PathLike[str] | None = None,
    lock_timeout: float = LOCK_TIMEOUT, barrier: bool = True, log: Callable[[str], None] | None = None, threads: int | None = None,
) -> Report:  # fmt: skip
    """Compiles, or finds in the cache, every kernel of `plan` and loads it onto `device`; afterwards a step compiles nothing.

    plan      a kernel_runtime.plan.Plan, or what `plan_for` takes: a ModelShape, a preset's name, a model configuration.
    device    "auto", "cuda", "cuda:1", "npu", "cpu". On a CPU nothing is compiled and the report is empty.
    dtype     Triton's name of the streams' dtype ("bf16", "fp32"), where `plan` is a configuration that does not say.
    cache_dir another folder than Triton's; it stays in force for this process and its children.
    lock_timeout  seconds without progress after which a kernel that another process has in hand is compiled here as well.
    barrier   wait for all ranks at the end, where torch.distributed is initialised.
    log       called with each line worth a log.
    threads   that compile in this process; by default the cores that it may use, shared with the other processes of the node.

    A kernel that does not compile is a failed row of the report, not an exception: an op may never need it. Nothing about a damaged,
    read-only or full cache folder stops training; the report's messages say what was done.
    """
    chosen = _pick_device(device)
    begun = time.perf_counter()
    if chosen.type == "cpu" or interpreting() or not triton_installed():
        why = "the CPU" if chosen.type == "cpu" else ("Triton's interpreter" if interpreting() else f"{chosen} without Triton")
        report = Report(why, "")
    else:
        from kernel_runtime.plan import Plan, plan_for

        whole = plan if isinstance(plan, Plan) else plan_for(plan, dtype)
        with compiling_allowed(), torch.get_device_module(chosen).device(chosen):
            report = _warm_device(whole, cache_dir, lock_timeout, threads)
    if barrier and torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()
    report.seconds = time.perf_counter() - begun
    for line in [*report.messages, *(f"{r.kernel} ({r.op}) does not compile: {r.note}" for r in report.failed), report.summary()]:
        if log is not None:
            log(line)
    return report


def _warm_device(plan: Any, cache_dir: Any, lock_timeout: float, threads: int | None) -> Report:
    """On the current device"""
    import triton

    target = triton.runtime.driver.active.get_current_target()
    folder = Path(cache_dir) if cache_dir else cache.default_folder()
    plan = plan.for_target(target)
    if target.backend == "npu":
        report = Report(str(target.arch), str(folder))
        cache.use_folder(folder)
        _warm_npu(plan, report, lock_timeout)
        return report
    from kernel_runtime.targets import target_name

    report = Report(target_name(target), str(folder))
    filler = Filler(plan, target, report, lock_timeout, measure=False)
    filler.choose_folder()
    rank, world = (int(os.environ.get(name, default)) for name, default in (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")))
    filler.run(rank, world, _threads(world) if threads is None else threads)
    _load_on_device(filler, {row.key: spec for row, spec in filler.entries})
    return report


def _threads(processes: int) -> int:
    """Of the cores that this process may use, its share among the processes of the node."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MAX_THREADS, cores // max(1, processes)))


def _pick_device(device: str | torch.device) -> torch.device:
    """ValueError for a device that is not here, or that no kernel runs on."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    here = accelerator.type if accelerator is not None and accelerator.type in KERNEL_DEVICES else "cpu"
    if str(device) == "auto":
        return torch.device(here)
    if str(device).partition(":")[0] not in ("cpu", here):
        raise ValueError(f"device {str(device)!r} is not here, wanted auto{', ' + here if here != 'cpu' else ''} or cpu")
    return torch.device(device)


def compile_ahead(
    plan: Any, target: str, cache_dir: str | os.PathLike[str] | None = None, jobs: int = 1, lock_timeout: float = LOCK_TIMEOUT
) -> Report:
    """Fills a cache folder for `target` ("sm_90", "gfx942") with no device; a process with such a device then compiles nothing.

    The same Triton version and the same source files are needed on both sides (see `origin.explain_key`); the folder may be moved or mounted
    elsewhere, warmup adopts it. `jobs` processes share the work; more than one are spawned, so a script that calls this needs the usual
    `if __name__ == "__main__"`. ValueError for an unknown target or one of Ascend.
    """
    from kernel_runtime.targets import parse_target

    parsed = parse_target(target)
    if parsed.backend == "npu":
        raise ValueError("the object for Ascend needs CANN's compiler; without an NPU there is only the check: make ascend-check")
    folder = str(Path(cache_dir) if cache_dir else cache.default_folder())
    begun = time.perf_counter()
    if jobs <= 1:
        report = _compile_part(plan.to_json(), target, folder, 0, 1, lock_timeout)
    else:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            shares = [pool.submit(_compile_part, plan.to_json(), target, folder, i, jobs, lock_timeout) for i in range(jobs)]
            report = _merge([share.result() for share in shares])
    report.seconds = time.perf_counter() - begun
    return report


def _compile_part(plan_json: str, target: str, folder: str, rank: int, world: int, lock_timeout: float) -> Report:
    from kernel_runtime.plan import Plan
    from kernel_runtime.targets import parse_target

    parsed, report = parse_target(target), Report(target, folder)
    filler = Filler(Plan.from_json(plan_json).for_target(parsed), parsed, report, lock_timeout, measure=True)
    filler.choose_folder()
    filler.run(rank, world)
    return report


def _merge(reports: list[Report]) -> Report:
    """One row a kernel, of which every process has its own in the same order: of the process that made it, else of the first."""
    merged = reports[0]
    for message in (message for report in reports[1:] for message in report.messages):
        merged.say(message)
    rows = zip(*(report.rows for report in reports), strict=True)
    merged.rows = [next((row for row in same if row.state != "cached"), same[0]) for same in rows]
    return merged


def look(plan: Any, target: Any, folder: Path) -> Report:
    """State of every entry of the plan in a cache folder; compiles nothing and changes nothing. The messages say what the folder holds in
    place of what is missing, and what to do."""
    from kernel_runtime.origin import why_missing
    from kernel_runtime.targets import target_name

    report = Report(target_name(target), str(folder))
    filler = Filler(plan.for_target(target), target, report, 0.0, measure=False)
    absent = []
    for row, spec in filler.entries:
        state = filler.inspect(row)
        row.bytes, row.note = state.bytes, state.reason
        row.state = {"ok": "cached", "moved": "moved", "corrupt": "corrupt", "missing": "missing"}[state.state]
        if state.state == "missing":
            absent.append(spec)
        elif state.state == "ok" and (lacks := filler.lacks(spec)):
            row.state, row.note = "missing", lacks
        report.rows.append(row)
    for line in why_missing(absent, target, folder):
        report.say(line)
    if not folder.is_dir():
        report.say(f"there is no folder {folder}")
    if report.count("missing", "corrupt"):
        report.say("to fill the folder: the same command without --check and --dry-run; what others have compiled there stays theirs")
    if count := report.count("moved"):
        report.say(f"{count} kernels were compiled under another path: warmup() and the command without --check and --dry-run adopt them")
    return report


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernel_runtime.warmup", description="Compile the kernels of a model before training.")
    parser.add_argument("--config", required=True, help="tiny, flash, pro, a trainer configuration (JSON, TOML) or a JSON plan")
    parser.add_argument("--dtype", help="dtype of the streams where the configuration does not say: bf16, fp16 or fp32")
    parser.add_argument("--device", default="auto", help="auto, cuda or npu: compile for it and load; ignored with --target")
    parser.add_argument("--target", help="compile ahead of time with no device: sm_90, gfx942 (Ascend910B3: a check alone)")
    parser.add_argument("--cache-dir", type=Path, help="folder to fill; default: Triton's")
    parser.add_argument("--jobs", type=int, help="processes that compile, with --target (1 if not given); else threads (the cores)")
    parser.add_argument("--by-name", action="store_true", help="also kernels that run only for an impl asked for by name, as impl='portable'")
    parser.add_argument("--dry-run", action="store_true", help="list the kernels and their state, compile nothing")
    parser.add_argument("--check", action="store_true", help="as --dry-run, and exit with 1 if anything would have to compile")
    parser.add_argument("--save-plan", type=Path, help="write the plan as JSON")
    parser.add_argument("--report", choices=("table", "json"), default="table", help="form of the output")
    args = parser.parse_args(argv)
    if args.jobs is not None and args.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {args.jobs}")
    if args.target and args.target.startswith("Ascend"):
        return _check_ascend(args)
    if not triton_installed():
        print("error: triton is not installed; install the extra 'cuda'", file=sys.stderr)
        return 2
    try:
        report = _run(args)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.report == "json":
        print(json.dumps(asdict(report), indent=1))
    else:
        print(report.table(), *report.messages, report.summary(), sep="\n")
    unready = args.check and report.count("missing", "moved", "corrupt")
    return 1 if report.failed or unready else 0


def _run(args: argparse.Namespace) -> Report:
    import triton

    from kernel_runtime.plan import load_plan
    from kernel_runtime.targets import parse_target

    plan = load_plan(args.config, args.dtype)
    if args.by_name:
        plan = plan.by_name()
    if args.save_plan:
        args.save_plan.write_text(plan.to_json())
    if not args.target and _pick_device(args.device).type == "cpu":
        raise ValueError("no device was found; name a --target, for example sm_90, to compile without one")
    if args.dry_run or args.check:
        target = parse_target(args.target) if args.target else triton.runtime.driver.active.get_current_target()
        return look(plan, target, args.cache_dir or cache.default_folder())
    if args.target:
        return compile_ahead(plan, args.target, args.cache_dir, args.jobs or 1)
    return warmup(plan, args.device, cache_dir=args.cache_dir, threads=args.jobs)


def _check_ascend(args: argparse.Namespace) -> int:
    import importlib.util

    if importlib.util.find_spec("ascendnpuir") is None:
        print("error: the check for Ascend has an environment of its own: make ascend-check", file=sys.stderr)
        return 2
    given = {"--dtype": args.dtype, "--cache-dir": args.cache_dir, "--check": args.check, "--save-plan": args.save_plan}
    if ignored := ", ".join(flag for flag, value in given.items() if value):
        print(f"error: {ignored} has no meaning for {args.target}: all kernels are compiled as a check, and nothing is kept", file=sys.stderr)
        return 2
    from kernel_runtime.ascend.__main__ import main as check

    listed = ["--dry-run"] if args.dry_run else []
    return check(["--model", args.config, "--target", args.target, "--jobs", str(args.jobs or 2), "--report", args.report, *listed])


if __name__ == "__main__":
    sys.exit(main())
