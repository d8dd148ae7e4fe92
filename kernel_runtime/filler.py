"""Filling a cache folder with the kernels of a plan, one process among many that do the same. Used by kernel_runtime.warmup."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernel_runtime import cache
from kernel_runtime.guard import compiling_allowed

MADE = ("compiled", "repaired")  # by this process


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


class Filler:
    """Brings every entry of a plan into the cache folder for one target, together with other processes that do the same."""

    def __init__(self, plan: Any, target: Any, report: Report, lock_timeout: float, measure: bool) -> None:
        from kernel_runtime import origin, targets  # which import Triton

        self._origin, self._targets = origin, targets
        self.target, self.report, self.lock_timeout, self.measure = target, report, lock_timeout, measure
        self.extension = targets.EXTENSION[target.backend]
        self.entries: list[tuple[Row, Any]] = []
        self._parts: dict[str, str] = {}
        self._moving = threading.Lock()
        self._progress = time.monotonic()
        for op, spec in plan:
            try:
                self.entries.append((Row(op, spec.name, spec.cache_hash(target)), spec))
            except Exception as error:  # a broken table must not stop training: the row says so
                self.report.rows.append(Row(op, spec.name, "", "failed", note=one_line(error)))

    @property
    def folder(self) -> Path:
        return Path(self.report.folder)

    def inspect(self, row: Row, folder: Path | None = None) -> cache.EntryState:
        return cache.inspect(folder or self.folder, row.key, row.kernel, self.extension)

    def lacks(self, spec: Any, folder: Path | None = None) -> str:
        """What is missing beside the kernel itself: a C module that would be compiled when the kernel is loaded; empty if nothing"""
        return self._targets.host_module_missing(spec.source(), self.target, folder or self.folder)

    def choose_folder(self) -> None:
        """Keeps the folder if it can be written or needs no writing, else moves to a private one of this node, with what is there."""
        reason = cache.why_not_writable(self.folder)
        if reason and any(self.inspect(row).state != "ok" or self.lacks(spec) for row, spec in self.entries):
            self._move(reason)
        cache.use_folder(self.folder)

    def _leave(self, folder: Path, reason: str) -> bool:
        """Moves on from `folder`, where another thread has not done so; what was done there stays done."""
        with self._moving:
            if self.folder != folder:
                return True
            if not self._move(reason):
                return False
            for row, _ in self.entries:
                if self.inspect(row).state == "moved":
                    with contextlib.suppress(OSError):
                        cache.adopt(self.folder, row.key, row.kernel)
            return True

    def _move(self, reason: str) -> bool:
        path, why = cache.fallback_folder(self.folder)
        if path is None or path == self.folder:
            nowhere = why or "this is the other place"
            self.report.say(f"{reason}, and there is no other place ({nowhere}); kernels compile at their first launch")
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

    @contextlib.contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        """Waits for a lock, but not for ever on a process that is stuck."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(cache.locked(self.folder, name, self.lock_timeout))
            except cache.LockTimeout as error:
                self.report.say(f"{error}; going on without it")
            yield

    def run(self, rank: int, world: int, threads: int = 1) -> None:
        """Every entry, by so many threads; entries that another process has in hand come again later.

        Gluon kernels first, as one of them compiles for as long as ten others, and they should not be what is left at the end. Of these and
        of the rest this process begins with every `world`-th: the forms of one kernel are neighbours in a plan and take alike, so they are
        spread over the processes.
        """
        self.report.rows.extend(row for row, _ in self.entries)
        world = max(world, 1)
        long, rest = ([entry for entry in self.entries if entry[1].gluon == wanted] for wanted in (True, False))
        waiting = deque(entry for part in (long, rest) for i in range(world) for entry in part[(rank + i) % world :: world])
        self._progress = time.monotonic()
        if threads <= 1:
            self._work(waiting)
            return
        with ThreadPoolExecutor(threads, "warmup") as pool:
            for worker in [pool.submit(self._work, waiting) for _ in range(threads)]:
                worker.result()

    def _work(self, waiting: deque[tuple[Row, Any]]) -> None:
        """One thread: it ends when no entry is waiting; those in the hands of other threads are theirs."""
        idle = 0
        with compiling_allowed():
            while True:
                try:
                    row, spec = waiting.popleft()
                except IndexError:
                    return
                begun = time.perf_counter()
                if self._one(row, spec, wait_is_over=time.monotonic() - self._progress > self.lock_timeout):
                    row.seconds += time.perf_counter() - begun
                    self._progress, idle = time.monotonic(), 0
                    continue
                waiting.append((row, spec))
                idle += 1
                if idle >= len(waiting):
                    time.sleep(0.02)
                    idle = 0

    def _one(self, row: Row, spec: Any, wait_is_over: bool) -> bool:
        folder = self.folder
        state = self.inspect(row, folder)
        if state.state == "ok" and row.state not in MADE and not self.lacks(spec, folder):
            row.state, row.bytes = "cached", state.bytes
            return True
        lock = cache.Lock(folder, row.key)
        if not lock.try_acquire():
            if not wait_is_over:
                return False
            holder = f"process {lock.holder()} has held its lock for {self.lock_timeout:.0f} s"
            self.report.say(f"{row.kernel}: {holder}; compiling it here as well")
        self.report.say(lock.warning)
        try:
            self._make(row, spec, folder)
        except OSError as error:
            if self._left(folder):
                return False
            if error.errno not in cache.STORAGE_ERRORS or not self._leave(folder, f"{folder}: {error.strerror}"):
                row.state, row.note = "failed", one_line(error)
                return True
            return False  # again, in the other folder
        except Exception as error:  # whatever the compiler raises: training can still start, and the report names the kernel
            row.state, row.note = "failed", one_line(error)
        finally:
            lock.release()
        return not self._left(folder)

    def _left(self, folder: Path) -> bool:
        """Whether another thread has found `folder` full: what was made meanwhile may be in either, or in parts in both."""
        with self._moving:
            return self.folder != folder

    def _make(self, row: Row, spec: Any, folder: Path) -> None:
        state = self.inspect(row, folder)  # another process may have been here between the look and the lock
        if state.state in ("ok", "moved"):
            if reason := self.lacks(spec, folder):
                self.report.say(f"there are kernels without what belongs to them, which is built ({reason})")
                self.report.say(self._targets.build_launcher(spec.source(), self.target, self._lock))
            if state.state == "moved":
                cache.adopt(folder, row.key, row.kernel)
            if row.state in MADE:  # for the folder that was left meanwhile: Triton may have put it here already
                self._finish(row, spec, folder)
            else:
                row.state, row.bytes = "adopted" if state.state == "moved" else "cached", state.bytes
            return
        if state.state == "corrupt":
            self.report.say(f"{row.kernel}: damaged cache entry replaced ({state.reason})")
            cache.discard(folder, row.key)
        cache.sweep(folder, row.key)
        # the launcher first: other processes take a kernel that is there for complete, and load it
        self.report.say(self._targets.build_launcher(spec.source(), self.target, self._lock))
        kernel = spec.compile(self.target)
        if kernel.hash != row.key:
            keys = f"stored key {kernel.hash[:12]} where {row.key[:12]} was expected"
            raise RuntimeError(f"Triton {keys}; this Triton version is not supported")
        if row.state not in MADE:
            row.state = "repaired" if state.state == "corrupt" else "compiled"
        row.bytes, row.note = len(kernel.kernel), ""
        self._finish(row, spec, folder)
        if self.measure:
            self._measure(row, kernel)

    def _finish(self, row: Row, spec: Any, folder: Path) -> None:
        self._parts = self._parts or self._origin.explain_key(self.target)
        self._origin.write(cache.entry_folder(folder, row.key), spec, self._parts)
        cache.seal(folder, row.key)

    def _measure(self, row: Row, kernel: Any) -> None:
        used = self._targets.resources(kernel)
        row.registers, row.spills, row.shared = used.registers, used.spills, used.shared
        if excess := used.excess(self.target):
            row.state, row.note = "failed", excess


def one_line(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else text[:297] + "..."
