"""Filling a cache folder with the kernels of a plan, one process among many that do the same. Used by kernel_runtime.warmup."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernel_runtime import cache


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
        from kernel_runtime.targets import EXTENSION

        self.target, self.report, self.lock_timeout, self.measure = target, report, lock_timeout, measure
        self.extension = EXTENSION[target.backend]
        self.entries: list[tuple[Row, Any]] = []
        for op, spec in plan:
            try:
                self.entries.append((Row(op, spec.name, spec.cache_hash(target)), spec))
            except Exception as error:  # a broken table must not stop training: the row says so
                self.report.rows.append(Row(op, spec.name, "", "failed", note=one_line(error)))

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

    def run(self, rank: int, world: int) -> None:
        """Every entry; entries that another process has in hand come again later.

        This process begins with every `world`-th: those that compile for long are neighbours in a plan (the forms of one kernel), and
        are so spread over the processes.
        """
        self.report.rows.extend(row for row, _ in self.entries)
        world = max(world, 1)
        waiting = deque(entry for i in range(world) for entry in self.entries[(rank + i) % world :: world])
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
            holder = f"process {lock.holder()} has held its lock for {self.lock_timeout:.0f} s"
            self.report.say(f"{row.kernel}: {holder}; compiling it here as well")
        self.report.say(lock.warning)
        try:
            self._make(row, spec)
        except OSError as error:
            if error.errno not in cache.STORAGE_ERRORS or not self._move(f"{self.folder}: {error.strerror}"):
                row.state, row.note = "failed", one_line(error)
                return True
            return False  # again, in the other folder
        except Exception as error:  # whatever the compiler raises: training can still start, and the report names the kernel
            row.state, row.note = "failed", one_line(error)
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

        # the launcher first: other processes take a kernel that is there for complete, and load it
        self.report.say(build_launcher(spec.source(), self.target, self._lock))
        kernel = spec.compile(self.target)
        if kernel.hash != row.key:
            keys = f"stored key {kernel.hash[:12]} where {row.key[:12]} was expected"
            raise RuntimeError(f"Triton {keys}; this Triton version is not supported")
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


def one_line(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else text[:297] + "..."
