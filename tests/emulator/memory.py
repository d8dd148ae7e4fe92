"""Shared memory of an emulated program: data, and for every element who wrote it last, who has read it since, and when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.emulator.machine import PARTITIONS_MAX, Barrier, EmulationError, Machine, Partition
from tests.emulator.values import LAYOUT, TORCH, TRITON, T, as_t, undefined

AGENTS = 3 * PARTITIONS_MAX


def agent_name(agent: int) -> str:
    kind = ("warps", "copies", "products")[agent // PARTITIONS_MAX]
    return f"the {kind} of partition {agent % PARTITIONS_MAX}"


class Allocation:
    """`unordered`: a kernel reads here while it is written on purpose, and makes nothing of what it reads then. Such a read gives numbers at
    random instead of an error, and writing what is there already is no write."""

    def __init__(self, dtype: torch.dtype, numel: int, name: str, unordered: bool) -> None:
        self.data = undefined((numel,), dtype)
        self.name, self.unordered = name, unordered
        self.coming = self.data.clone() if unordered else self.data  # with what is being copied
        self.writer = torch.zeros(numel, dtype=torch.int64)
        self.written = torch.zeros(numel, dtype=torch.int64)
        self.read: dict[int, torch.Tensor] = {}  # by those agents that have read anything
        self.last_written = np.zeros(AGENTS, dtype=np.int64)  # the latest of all elements, for a quick answer
        self.last_read = np.zeros(AGENTS, dtype=np.int64)
        self.barriers: dict[int, Barrier] = {}


class Shared:
    """A descriptor: `data` is a view of what the allocation holds."""

    type = LAYOUT
    layout = LAYOUT

    def __init__(self, machine: Machine, allocation: Allocation, data: torch.Tensor) -> None:
        self.machine, self.allocation, self.data = machine, allocation, data

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def dtype(self) -> Any:
        return TRITON[self.data.dtype]

    def _view(self, data: torch.Tensor) -> Shared:
        return Shared(self.machine, self.allocation, data)

    def index(self, i: Any) -> Shared:
        i = int(i)
        if not 0 <= i < self.data.shape[0]:
            raise EmulationError(f"{self.allocation.name}: index {i} of {self.data.shape[0]}")
        return self._view(self.data[i])

    def slice(self, start: Any, length: Any, dim: int = 0) -> Shared:
        start, length = int(start), int(length)
        if not 0 <= start <= start + length <= self.data.shape[dim]:
            raise EmulationError(f"{self.allocation.name}: slice {start} + {length} of {self.data.shape[dim]}")
        return self._view(self.data.narrow(dim, start, length))

    def permute(self, order: Any) -> Shared:
        return self._view(self.data.permute(tuple(order)))

    def _reinterpret(self, dtype: Any, shape: Any, layout: Any) -> Shared:
        """Elements in the order of the rows: layouts are not known, so what is written through one view may be read through it alone."""
        if TORCH[dtype] != self.data.dtype:
            raise EmulationError("_reinterpret as another dtype")
        sizes = [int(n) for n in shape]
        count = int(np.prod(sizes))
        if count > self.data.numel():
            raise EmulationError(f"{self.allocation.name}: _reinterpret of {self.shape} as {sizes}")
        return self._view(self.data.view(-1)[:count].view(sizes))

    def _of(self, x: torch.Tensor) -> Any:
        """The same elements of what is known of the allocation."""
        return torch.as_strided(x, self.data.shape, self.data.stride(), self.data.storage_offset())

    # accesses

    def load(self, layout: Any = None) -> T:
        me = self.machine.here
        late = self._late(me, 0, "reads")
        self._has_read(me.index, me.now)
        return T(self._seen(late))

    def store(self, value: Any) -> None:
        me = self.machine.here
        self._check_shape(value.shape)
        if TORCH[value.dtype] != self.data.dtype:
            raise EmulationError(f"{self.allocation.name} holds {self.dtype}, a store of {value.dtype}")
        self._claim(me, me.index, me.now, value.value)
        self.data.copy_(value.value)

    def copy_from(self, pointer: Any, mask: Any) -> None:
        """Starts an asynchronous copy; masked elements become zeros."""
        me = self.machine.here
        got = pointer.load(mask, None if mask is None else 0.0).value
        self._check_shape(got.shape)
        me.copy_clock += 1
        self._claim(me, me.copier, me.copy_clock, got)
        if not self.allocation.unordered:
            self.data.copy_(undefined((), self.data.dtype))
        data = self.data
        me.copies.append(lambda: data.copy_(got))

    def operand(self) -> Callable[[], torch.Tensor]:
        """What an asynchronous product reads, from now until it is waited for."""
        me = self.machine.here
        if self.allocation.unordered and self.machine.random.random() < 0.5:
            return lambda: self._multiplied(me)
        now = self._multiplied(me)
        return lambda: now

    def _multiplied(self, me: Partition) -> torch.Tensor:
        late = self._late(me, 0, "multiplies")
        unfenced = self._late(me, 1, "multiplies without a fence")
        self._has_read(me.multiplier, me.products)
        return self._seen(late if unfenced is None else unfenced if late is None else late | unfenced)

    def _seen(self, late: Any) -> torch.Tensor:
        data = self.data.clone()
        if late is not None:
            late = torch.from_numpy(late) & (self._of(self.allocation.written) > 0)  # fresh memory keeps its NaN
            noise = torch.tensor([self.machine.random.uniform(-8, 8) for _ in range(61)]).to(data.dtype)
            data = torch.where(late, noise[torch.arange(data.numel()) % 61].view(data.shape), data)
        return data

    # checks

    def _check_shape(self, shape: Any) -> None:
        if list(shape) != self.shape:
            raise EmulationError(f"{self.allocation.name}: {list(shape)} into {self.shape}")

    def _has_read(self, agent: int, when: int) -> None:
        read = self.allocation.read
        if agent not in read:
            read[agent] = torch.zeros_like(self.allocation.written)
        self._of(read[agent]).fill_(when)
        self.allocation.last_read[agent] = when

    def _late(self, me: Partition, row: int, does: str) -> Any:
        """Elements whose last write is not ordered before now, None if there are none: an error, unless that is the kernel's own business."""
        allocation, knows = self.allocation, me.knows[row]
        news = allocation.last_written > knows
        if row == 0:
            news[me.index] = False
        if not news.any():
            return None
        writer = self._of(allocation.writer).numpy()
        late = self._of(allocation.written).numpy() > knows.take(writer)
        if row == 0:
            late &= writer != me.index
        if not late.any():
            return None
        if not allocation.unordered:
            raise EmulationError(f"{allocation.name}: partition {me.index} {does} what {agent_name(int(writer[late][0]))} wrote, unordered")
        return late

    def _claim(self, me: Partition, agent: int, when: int, value: torch.Tensor) -> None:
        """A write must be ordered after the last write and all reads since."""
        allocation = self.allocation
        if allocation.unordered:
            before = self._of(allocation.coming)
            changed = before.view(torch.int16) != value.contiguous().view(torch.int16)
            self._of(allocation.writer)[changed], self._of(allocation.written)[changed] = agent, when
            before.copy_(value)
        else:
            self._late(me, 0, "overwrites")
            for reader in np.nonzero(allocation.last_read > me.knows[0])[0]:
                if reader != me.index and bool((self._of(allocation.read[reader]).numpy() > me.knows[0, reader]).any()):
                    raise EmulationError(f"{allocation.name}: partition {me.index} overwrites what {agent_name(reader)} may still be reading")
            self._of(allocation.writer).fill_(agent)
            self._of(allocation.written).fill_(when)
        allocation.last_written[agent] = when

    # barriers

    def barrier(self) -> Barrier:
        at = self.data.storage_offset()
        if at not in self.allocation.barriers:
            raise EmulationError(f"{self.allocation.name}[{at}] is no barrier yet")
        return self.allocation.barriers[at]

    def make_barrier(self, count: int) -> None:
        at = self.data.storage_offset()
        name = self.allocation.name if self.allocation.data.numel() == 1 else f"{self.allocation.name}[{at}]"
        self.allocation.barriers[at] = self.machine.new_barrier(count, name)


def allocate(machine: Machine, dtype: Any, shape: Any, name: str, function: str) -> Shared:
    sizes = [int(n) for n in shape]
    allocation = Allocation(TORCH[dtype], int(np.prod(sizes)), name, function in machine.unordered)
    return Shared(machine, allocation, allocation.data.view(sizes))


@dataclass
class Flight:
    """Products in flight into one accumulator: they are made when they are waited for."""

    owner: Partition
    number: int  # the last one's
    terms: list[Callable[[], torch.Tensor]]

    def land(self) -> torch.Tensor:
        total = self.terms[0]()
        for term in self.terms[1:]:
            total = total + term()
        return total


def product(machine: Machine, a: Any, b: Any, acc: Any, use_acc: Any = True, is_async: bool = False, **other: Any) -> T:
    """warpgroup_mma: a [M, K] in registers or shared memory, b [K, N] in shared memory, fp32 acc [M, N]."""
    if other:
        raise EmulationError(f"warpgroup_mma with {other}")
    me = machine.here
    if acc.flight is not None and acc.flight.owner is not me:
        raise EmulationError("an accumulator of another partition")
    if a.shape[-1] != b.shape[0] or [a.shape[0], b.shape[1]] != acc.shape:
        raise EmulationError(f"a product of {a.shape} and {b.shape} into {acc.shape}")
    me.products += 1
    if isinstance(a, Shared):
        left = a.operand()
    else:
        registers = a.value
        left = lambda: registers  # noqa: E731
    right = b.operand()
    terms: list[Callable[[], torch.Tensor]] = [lambda: left().float() @ right().float()]
    if bool(as_t(use_acc)):
        start = acc.raw
        terms = (acc.flight.terms if acc.flight is not None else [lambda: start]) + terms
    result = T(acc.raw, Flight(me, me.products, terms))
    return result if is_async else wait_for_products(machine, 0, [result])


def wait_for_products(machine: Machine, num_outstanding: int, deps: Any) -> Any:
    machine.maybe_pause()
    me = machine.here
    through = me.products - int(num_outstanding)
    done = tuple(T(x.flight.land()) if x.flight is not None and x.flight.number <= through else x for x in deps)
    me.knows[0, me.multiplier] = max(me.knows[0, me.multiplier], through)
    return done[0] if len(done) == 1 else done
