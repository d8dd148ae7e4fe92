"""One program of an emulated kernel: its warpgroups, barriers, and what each knows of what the others have done (vector clocks)."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

PARTITIONS_MAX = 6


class EmulationError(Exception):
    """The kernel did what a device would answer with a wrong result, a hang or a fault."""


class _Stopped(Exception):
    """Ends the threads of a program in which another one has failed."""


class Barrier:
    """An mbarrier: `phase` is the parity of the phase that is going on. It carries what its arrivals knew to those who wait."""

    def __init__(self, name: str, count: int, agents: int) -> None:
        self.name, self.count, self.pending, self.phase = name, count, count, 0
        self._coming = np.zeros((2, agents), dtype=np.int64)
        self.known = np.zeros((2, agents), dtype=np.int64)  # row 0: what has happened; row 1: what of it a fence has shown to wgmma

    def arrive(self, count: int, knows: np.ndarray) -> None:
        if count > self.pending:
            raise EmulationError(f"{self.name}: {count} arrivals where {self.pending} of {self.count} are missing")
        np.maximum(self._coming, knows, out=self._coming)
        self.pending -= count
        if not self.pending:
            np.maximum(self.known, self._coming, out=self.known)
            self.phase ^= 1
            self.pending = self.count


@dataclass
class Landing:
    """An arrival that waits for asynchronous copies: `write` puts their data into shared memory."""

    write: Callable[[], None]
    barrier: Barrier
    count: int
    knows: np.ndarray


class Partition:
    """A warpgroup, or whatever number of warps: a thread that runs only while it has the word."""

    def __init__(self, machine: Machine, index: int, warps: int, work: Callable[[], None] | None) -> None:
        self.machine, self.index, self.warps, self.work = machine, index, warps, work
        self.word = threading.Semaphore(0)
        self.waits_for: tuple[Barrier, int] | None = None
        self.done = False
        self.copies: list[Callable[[], None]] = []  # started, and no barrier has been told to hear of them
        self.landings: deque[Landing] = deque()
        self.copy_clock = 0  # asynchronous copies so far
        self.products = 0  # asynchronous products so far
        agents = 3 * PARTITIONS_MAX
        self.knows = np.zeros((2, agents), dtype=np.int64)
        self.knows[0, index] = 1

    # an access is one of three agents': the warps themselves, their asynchronous copies, their asynchronous products
    @property
    def copier(self) -> int:
        return PARTITIONS_MAX + self.index

    @property
    def multiplier(self) -> int:
        return 2 * PARTITIONS_MAX + self.index

    @property
    def now(self) -> int:
        return int(self.knows[0, self.index])

    def step(self) -> None:
        """What others learn of from now on does not include what comes after."""
        self.knows[0, self.index] += 1

    def fence(self) -> None:
        self.knows[1] = self.knows[0]
        self.step()

    def runnable(self) -> bool:
        return not self.done and (self.waits_for is None or self.waits_for[0].phase != self.waits_for[1])


class Machine:
    """Runs a program. The code of the kernel before its warps part runs as partition 0."""

    def __init__(self, seed: int, warps: int, program: int, programs: int, unordered: frozenset[str] = frozenset()) -> None:
        self.random = random.Random(seed * 1_000_003 + program)
        self.unordered = unordered  # functions of the kernel whose shared memory is read while it is written, see memory.Allocation
        self.program, self.programs = program, programs
        self.partitions = [Partition(self, 0, warps, None)]
        self._local = threading.local()
        self._local.partition = self.partitions[0]
        self._back = threading.Semaphore(0)
        self._failure: BaseException | None = None
        self.late = self.random.random() < 0.5  # whether copies land as late as they can in this program

    @property
    def here(self) -> Partition:
        return self._local.partition  # type: ignore[no-any-return]  # threading.local knows no types

    def new_barrier(self, count: int, name: str) -> Barrier:
        return Barrier(name, count, 3 * PARTITIONS_MAX)

    # what a partition calls

    def wait(self, barrier: Barrier, parity: int) -> None:
        me = self.here
        if barrier.phase == parity:
            if len(self.partitions) == 1:
                raise EmulationError(f"{barrier.name}: waits for itself")
            me.waits_for = (barrier, parity)
            self._pause(me)
            me.waits_for = None
        else:
            self.maybe_pause()
        np.maximum(me.knows, barrier.known, out=me.knows)

    def arrive(self, barrier: Barrier, count: int) -> None:
        me = self.here
        barrier.arrive(count, me.knows)
        me.step()
        self.maybe_pause()

    def arrive_after_copies(self, barrier: Barrier) -> None:
        """Every thread of the partition arrives once its copies so far have landed."""
        me = self.here
        copies, me.copies = me.copies, []
        knows = me.knows.copy()
        knows[0, me.copier] = me.copy_clock

        def write() -> None:
            for copy in copies:
                copy()

        me.landings.append(Landing(write, barrier, 32 * me.warps, knows))
        me.step()
        self.maybe_pause()

    def maybe_pause(self) -> None:
        if len(self.partitions) > 1 and self.random.random() < 0.2:
            self._pause(self.here)

    def _pause(self, me: Partition) -> None:
        self._back.release()
        me.word.acquire()
        if self._failure is not None:
            raise _Stopped

    # the parting of warps

    def specialize(self, works: list[Callable[[], None]], warps: list[int]) -> None:
        first = self.partitions[0]
        if len(self.partitions) > 1:
            raise EmulationError("warps part twice")
        if len(works) > PARTITIONS_MAX:
            raise EmulationError(f"{len(works)} partitions")
        first.work = works[0]
        first.step()
        for i, (work, count) in enumerate(zip(works[1:], warps, strict=True), start=1):
            partition = Partition(self, i, count, work)
            np.maximum(partition.knows, first.knows, out=partition.knows)
            self.partitions.append(partition)
        threads = [threading.Thread(target=self._run, args=(p,), daemon=True) for p in self.partitions]
        for thread in threads:
            thread.start()
        try:
            self._schedule()
        finally:
            for p in self.partitions:
                if not p.done:
                    self._failure = self._failure or _Stopped()
                    p.word.release()
            for thread in threads:
                thread.join()
        if self._failure is not None:
            raise self._failure
        self._local.partition = first
        for p in self.partitions[1:]:
            np.maximum(first.knows, p.knows, out=first.knows)
        self.partitions = [first]

    def _run(self, partition: Partition) -> None:
        self._local.partition = partition
        partition.word.acquire()
        try:
            if self._failure is None:
                assert partition.work is not None
                partition.work()
                if partition.copies:
                    raise EmulationError("copies that no barrier hears of")
        except _Stopped:
            pass
        except BaseException as error:
            if isinstance(error, EmulationError):
                error.add_note(f"in partition {partition.index} of program {self.program}")
            self._failure = self._failure or error
        partition.done = True
        self._back.release()

    def _schedule(self) -> None:
        while self._failure is None:
            ready: list[Any] = [p for p in self.partitions if p.runnable()]
            landings = [p for p in self.partitions if p.landings]
            if not ready and not landings:
                if all(p.done for p in self.partitions):
                    return
                raise EmulationError(self._deadlock())
            if landings and (not ready or (not self.late and self.random.random() < 0.4)):
                landing = self.random.choice(landings).landings.popleft()
                landing.write()
                landing.barrier.arrive(landing.count, landing.knows)
                continue
            chosen = self.random.choice(ready)
            chosen.word.release()
            self._back.acquire()

    def _deadlock(self) -> str:
        waits = [
            f"partition {p.index} waits for phase {parity} of {barrier.name}, {barrier.pending} of {barrier.count} arrivals missing"
            for p, (barrier, parity) in ((p, p.waits_for) for p in self.partitions if not p.done and p.waits_for is not None)
        ]
        return f"program {self.program} hangs: " + "; ".join(waits)
