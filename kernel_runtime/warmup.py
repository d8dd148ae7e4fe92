"""warmup(): every kernel of a plan is compiled once a node and loaded, before training starts. Also `python -m kernel_runtime.warmup`.

Processes of one node that start together share the work by locks in the cache folder: each takes kernels that nobody else has in hand,
then loads what the others made. No torch.distributed is needed; where it is initialised, a barrier ends the warmup.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from kernel_runtime import cache
from kernel_runtime.guard import compiling_allowed
from kernel_runtime.impl import interpreting, triton_installed

LOCK_TIMEOUT = 900.0
_STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


@dataclass
class Row:
    """One specialisation. state: cached, compiled, repaired, adopted (folder had moved), missing (dry run or check), failed."""

    op: str
    kernel: str
    key: str
    state: str = "missing"
    seconds: float = 0.0
    bytes: int = 0
    registers: int | None = None
    spills: int | None = None
    shared: int | None = None
    note: str = ""


@dataclass
class Report:
    """What a warmup did. seconds is the whole of it; messages are for the log."""

    target: str
    folder: str
    rows: list[Row] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if row.state == "failed"]

    def count(self, *states: str) -> int:
        return sum(row.state in states for row in self.rows)

    def summary(self) -> str:
        states = sorted({row.state for row in self.rows})
        counts = ", ".join(f"{self.count(s)} {s}" for s in states) or "nothing to compile"
        return f"warmup for {self.target}: {counts}, {self.seconds:.1f} s, cache {self.folder}"

    def table(self) -> str:
        head = ["kernel", "op", "key", "state", "s", "bytes", "registers", "spills", "shared", "note"]
        body = [[r.kernel, r.op, r.key[:12], r.state, f"{r.seconds:.2f}", *(("-" if v is None else str(v)) for v in
                (r.bytes, r.registers, r.spills, r.shared)), r.note] for r in self.rows]  # fmt: skip
        widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths)).rstrip() for line in [head, *body])

    def say(self, message: str) -> None:
        if message and message not in self.messages:
            self.messages.append(message)


class _Filler:
    """Brings every entry of a plan into the cache folder for one target, together with other processes that do the same."""

    def __init__(self, plan: Any, target: Any, report: Report, lock_timeout: float, measure: bool) -> None:
        from kernel_runtime.targets import EXTENSION

        self.target, self.report, self.lock_timeout, self.measure = target, report, lock_timeout, measure
        self.extension = EXTENSION[target.backend]
        self.entries: list[tuple[Row, Any]] = []
        for op, spec in plan:
            try:
                self.entries.append((Row(op, spec.name, spec.cache_hash(target)), spec))
            except Exception as error:  # a broken table must not stop training: the row says so
                self.report.rows.append(Row(op, spec.name, "", "failed", note=_one_line(error)))

    @property
    def folder(self) -> Path:
        return Path(self.report.folder)

    def inspect(self, row: Row) -> cache.EntryState:
        return cache.inspect(self.folder, row.key, row.kernel, self.extension)

    def choose_folder(self) -> None:
        """Keeps the folder if it can be written or needs no writing, else moves to a private one of this node, with what is there."""
        reason = cache.why_not_writable(self.folder)
        if reason and any(self.inspect(row).state != "ok" for row, _ in self.entries):
            self._move(reason)
        cache.use_folder(self.folder)

    def _move(self, reason: str) -> bool:
        path, why = cache.fallback_folder(self.folder)
        if path is None or path == self.folder:
            self.report.say(f"{reason}, and there is no other place ({why or 'this is the other place'}); kernels compile at their first launch")
            return False
        self.report.say(f"{reason}; this node uses {path} instead")
        source = self.folder
        for row, _ in self.entries:
            if self.inspect(row).state in ("ok", "moved"):
                with contextlib.suppress(OSError):
                    cache.copy_entry(source, path, cache.entry_folder(source, row.key).name)
        for entry in source.iterdir() if source.exists() else ():  # launchers: entries with a shared object and no group
            if entry.is_dir() and any(entry.glob("*.so")) and not any(entry.glob("__grp__*")):
                with contextlib.suppress(OSError):
                    cache.copy_entry(source, path, entry.name)
        self.report.folder = str(path)
        cache.use_folder(path)
        return True

    def run(self, first: int) -> None:
        """Every entry, from the `first` one on; entries that another process has in hand come again later."""
        self.report.rows.extend(row for row, _ in self.entries)
        start = first % len(self.entries) if self.entries else 0
        waiting = deque(self.entries[start:] + self.entries[:start])
        since, idle = time.monotonic(), 0
        while waiting:
            row, spec = waiting.popleft()
            begun = time.perf_counter()
            done = self._one(row, spec, wait_is_over=time.monotonic() - since > self.lock_timeout)
            if done:
                row.seconds += time.perf_counter() - begun
                since, idle = time.monotonic(), 0
                continue
            waiting.append((row, spec))
            idle += 1
            if idle >= len(waiting):
                time.sleep(0.02)
                idle = 0

    def _one(self, row: Row, spec: Any, wait_is_over: bool) -> bool:
        state = self.inspect(row)
        if state.state == "ok":
            row.state, row.bytes = "cached", state.bytes
            return True
        lock = cache.Lock(self.folder, row.key)
        if not lock.try_acquire():
            if not wait_is_over:
                return False
            self.report.say(f"{row.kernel}: process {lock.holder()} has held its lock for {self.lock_timeout:.0f} s; compiling it here as well")
        self.report.say(lock.warning)
        try:
            self._make(row, spec)
        except OSError as error:
            if error.errno not in _STORAGE_ERRORS or not self._move(f"{self.folder}: {error.strerror}"):
                row.state, row.note = "failed", _one_line(error)
                return True
            return False  # again, in the other folder
        except Exception as error:  # whatever the compiler raises: training can still start, and the report names the kernel
            row.state, row.note = "failed", _one_line(error)
        finally:
            lock.release()
        return True

    def _make(self, row: Row, spec: Any) -> None:
        state = self.inspect(row)  # another process may have been here between the look and the lock
        if state.state == "ok":
            row.state, row.bytes = "cached", state.bytes
            return
        if state.state == "moved":
            cache.adopt(self.folder, row.key, row.kernel)
            row.state, row.bytes = "adopted", state.bytes
            return
        if state.state == "corrupt":
            self.report.say(f"{row.kernel}: damaged cache entry replaced ({state.reason})")
            cache.discard(self.folder, row.key)
        cache.sweep(self.folder, row.key)
        from kernel_runtime.targets import build_launcher

        kernel = spec.compile(self.target)
        if kernel.hash != row.key:
            raise RuntimeError(f"Triton stored key {kernel.hash[:12]} where {row.key[:12]} was expected; this Triton version is not supported")
        with cache.locked(self.folder, "launchers", self.lock_timeout):
            self.report.say(build_launcher(kernel))
        cache.seal(self.folder, row.key)
        row.state = "repaired" if state.state == "corrupt" else "compiled"
        row.bytes = len(kernel.kernel)
        if self.measure:
            self._measure(row, kernel)

    def _measure(self, row: Row, kernel: Any) -> None:
        from kernel_runtime.targets import resources, shared_limit

        used = resources(kernel)
        row.registers, row.spills, row.shared = used.registers, used.spills, used.shared
        limit = shared_limit(self.target)
        if limit is not None and used.shared > limit:
            row.state, row.note = "failed", f"{used.shared} bytes of shared memory, the target has {limit}"


def _one_line(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else text[:297] + "..."


def _load_on_device(filler: _Filler, specs: dict[str, Any]) -> None:
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
            row.state, row.note = "failed", _one_line(error)
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
                row.state, row.note = "failed", _one_line(error)
            row.seconds = time.perf_counter() - begun
            report.rows.append(row)


def warmup(
    plan: Any, device: str | torch.device = "auto", *, dtype: str | None = None, cache_dir: str | os.PathLike[str] | None = None,
    lock_timeout: float = LOCK_TIMEOUT, barrier: bool = True, log: Callable[[str], None] | None = None,
) -> Report:  # fmt: skip
    """Compiles, or finds in the cache, every kernel of `plan` and loads it onto `device`; afterwards a step compiles nothing.

    plan      a kernel_runtime.plan.Plan, or what `plan_for` takes: a ModelShape, a preset's name, a model configuration.
    device    "auto", "cuda", "cuda:1", "npu", "cpu". On a CPU nothing is compiled and the report is empty.
    dtype     Triton's name of the streams' dtype ("bf16", "fp32"), where `plan` is a configuration that does not say.
    cache_dir another folder than Triton's; it stays in force for this process and its children.
    lock_timeout  seconds without progress after which a kernel that another process has in hand is compiled here as well.
    barrier   wait for all ranks at the end, where torch.distributed is initialised.
    log       called with each line worth a log.

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
            report = _warm_device(whole, chosen, cache_dir, lock_timeout)
    if barrier and torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()
    report.seconds = time.perf_counter() - begun
    for line in [*report.messages, *(f"{r.kernel} ({r.op}) does not compile: {r.note}" for r in report.failed), report.summary()]:
        if log is not None:
            log(line)
    return report


def _warm_device(plan: Any, device: torch.device, cache_dir: Any, lock_timeout: float) -> Report:
    import triton

    target = triton.runtime.driver.active.get_current_target()
    folder = Path(cache_dir) if cache_dir else cache.default_folder()
    plan = plan.for_backend(target.backend)
    if target.backend == "npu":
        report = Report(str(target.arch), str(folder))
        cache.use_folder(folder)
        _warm_npu(plan, report, lock_timeout)
        return report
    from kernel_runtime.targets import target_name

    report = Report(target_name(target), str(folder))
    filler = _Filler(plan, target, report, lock_timeout, measure=False)
    filler.choose_folder()
    rank, world = (int(os.environ.get(name, default)) for name, default in (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")))
    filler.run(first=rank * len(filler.entries) // max(world, 1))
    _load_on_device(filler, {row.key: spec for row, spec in filler.entries})
    return report


def _pick_device(device: str | torch.device) -> torch.device:
    if str(device) != "auto":
        return torch.device(device)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu" if accelerator is None else accelerator.type)


def compile_ahead(
    plan: Any, target: str, cache_dir: str | os.PathLike[str] | None = None, jobs: int = 1, lock_timeout: float = LOCK_TIMEOUT
) -> Report:
    """Fills a cache folder for `target` ("sm_90", "gfx942") with no device; a process with such a device then compiles nothing.

    The same Triton version and the same source files are needed on both sides (see `explain_key`); the folder may be moved or mounted
    elsewhere, warmup adopts it. `jobs` processes share the work. ValueError for an unknown target or one of Ascend.
    """
    from kernel_runtime.targets import parse_target

    parsed = parse_target(target)
    if parsed.backend == "npu":
        raise ValueError("the object for Ascend needs CANN's compiler; without an NPU there is only the check: make ascend-check")
    folder = str(Path(cache_dir) if cache_dir else cache.default_folder())
    begun = time.perf_counter()
    if jobs <= 1:
        report = _compile_part(plan.to_json(), target, folder, 0, lock_timeout)
    else:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            shares = [pool.submit(_compile_part, plan.to_json(), target, folder, i * len(plan) // jobs, lock_timeout) for i in range(jobs)]
            report = _merge([share.result() for share in shares])
    report.seconds = time.perf_counter() - begun
    return report


def _compile_part(plan_json: str, target: str, folder: str, first: int, lock_timeout: float) -> Report:
    from kernel_runtime.plan import Plan
    from kernel_runtime.targets import parse_target

    parsed, report = parse_target(target), Report(target, folder)
    filler = _Filler(Plan.from_json(plan_json).for_backend(parsed.backend), parsed, report, lock_timeout, measure=True)
    filler.choose_folder()
    with compiling_allowed():
        filler.run(first)
    return report


def _merge(reports: list[Report]) -> Report:
    """One row a kernel: of the process that made it, else of the first."""
    merged = reports[0]
    best = {(r.key, r.op, r.kernel): r for r in merged.rows}
    for report in reports[1:]:
        for row in report.rows:
            if row.state != "cached":
                best[row.key, row.op, row.kernel] = row
        for message in report.messages:
            merged.say(message)
    merged.rows = list(best.values())
    return merged


def look(plan: Any, target: Any, folder: Path) -> Report:
    """State of every entry of the plan in a cache folder; compiles nothing and changes nothing."""
    from kernel_runtime.targets import target_name

    report = Report(target_name(target), str(folder))
    filler = _Filler(plan.for_backend(target.backend), target, report, 0.0, measure=False)
    for row, _ in filler.entries:
        state = filler.inspect(row)
        row.bytes = state.bytes
        row.state = {"ok": "cached", "moved": "moved", "corrupt": "corrupt", "missing": "missing"}[state.state]
        row.note = state.reason
        report.rows.append(row)
    return report


def explain_key(target: Any) -> dict[str, str]:
    """What Triton's cache key depends on besides a kernel's own source, constants and types; equal parts mean equal keys."""
    import hashlib

    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import triton_key

    backend = make_backend(target)
    return {
        "triton": triton_key().split("-", 1)[0],
        "triton files": hashlib.sha256(triton_key().encode()).hexdigest()[:16],
        "backend (assembler and architecture)": " ".join(str(backend.hash()).split()),
        "default options": str(backend.parse_options({}).hash())[:16],
        "environment": str(sorted(get_cache_invalidating_env_vars().items())),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernel_runtime.warmup", description="Compile the kernels of a model before training.")
    parser.add_argument("--config", required=True, help="tiny, flash, pro, a trainer configuration (JSON, TOML) or a JSON plan")
    parser.add_argument("--dtype", help="dtype of the streams where the configuration does not say: bf16, fp16 or fp32")
    parser.add_argument("--device", default="auto", help="auto, cuda or npu: compile for it and load; ignored with --target")
    parser.add_argument("--target", help="compile ahead of time with no device: sm_90, gfx942 (Ascend910B3: a check alone)")
    parser.add_argument("--cache-dir", type=Path, help="folder to fill; default: Triton's")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile (with --target)")
    parser.add_argument("--dry-run", action="store_true", help="list the kernels and their state, compile nothing")
    parser.add_argument("--check", action="store_true", help="as --dry-run, and exit with 1 if anything would have to compile")
    parser.add_argument("--save-plan", type=Path, help="write the plan as JSON")
    parser.add_argument("--report", choices=("table", "json"), default="table", help="form of the output")
    args = parser.parse_args(argv)
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
    if args.save_plan:
        args.save_plan.write_text(plan.to_json())
    if not args.target and _pick_device(args.device).type == "cpu":
        raise ValueError("no device was found; name a --target, for example sm_90, to compile without one")
    if args.dry_run or args.check:
        target = parse_target(args.target) if args.target else triton.runtime.driver.active.get_current_target()
        return look(plan, target, args.cache_dir or cache.default_folder())
    if args.target:
        return compile_ahead(plan, args.target, args.cache_dir, args.jobs)
    return warmup(plan, args.device, cache_dir=args.cache_dir)


def _check_ascend(args: argparse.Namespace) -> int:
    import importlib.util

    if importlib.util.find_spec("ascendnpuir") is None:
        print("error: the check for Ascend has an environment of its own: make ascend-check", file=sys.stderr)
        return 2
    from kernel_runtime.ascend.__main__ import main as check

    return check(["--model", args.config, "--target", args.target, "--jobs", str(args.jobs), "--report", args.report])


if __name__ == "__main__":
    sys.exit(main())
