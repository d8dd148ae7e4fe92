"""Calls of a launcher that come again: its launches are started over with new addresses, and nothing else of it is run.

A launcher that is meant for this (`eager_call(op, replay=True)`) is a function of the types, shapes, strides, dtypes and devices of
its tensors and of its options: from these alone it works out what it allocates and what it launches. So the second call with the same of
everything is watched, and from the third on what it did is repeated: the allocations in C, the launches as compiled kernels with
addresses in place. Of 50 us of host time a boundary of mHC keeps about half, which decides at small shapes.

What is compared before a replay, in one call of C: TensorGuards, which torch.compile's guards are made of, knows the tensors' metadata and
what this thread does with torch (functorch, autocast, inference mode, the minus sign of a conjugate's view). Dispatch modes, profilers and
Triton's settings are asked for besides. Whatever differs is an ordinary call, and so is what cannot be repeated: an operation of torch other
than an allocation or torch.zeros, a copy made by .contiguous(), a kernel that was not launched directly. `kernel_runtime.ops.replay_report`
says which calls of a process are replayed, and why others are not.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import reduce
from operator import itemgetter, or_
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernel_runtime.impl import triton_installed

MAX_REPLAYS = 256  # of one op; more are not recorded, so that memory and the time of recording have a limit
MAX_GUARDS = 8  # of one shape: leaves and results, tensors with and without gradients
ATTEMPTS = 2 * MAX_GUARDS  # calls of a shape, one after the other, that are watched while none can be repeated; then one of ever more
# A replay allocates at once what its launcher may have used one after the other, and so does the call that is recorded. Neither is worth memory:
# on so large tensors the device takes longer than the host
MAX_BYTES = 1 << 30  # of the tensors of a call that is recorded
MAX_SCRATCH = 256 << 20  # bytes, where it is more than one piece
ALLOCATIONS = frozenset(
    getattr(torch.ops.aten, name) for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)

_GUARDS: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
# Inductor's allocation, past the dispatcher; it leaves out the fill of torch.utils.deterministic
ALLOCATE: Any = {"cuda": getattr(_GUARDS, "_empty_strided_cuda", None), "cpu": getattr(_GUARDS, "_empty_strided_cpu", None)}
# torch notes in a variable of the whole process that some mode is on, and puts back what it found when the mode ends: two threads that record
# at once would leave it set for good, whereupon torch.compile compiles nothing any more (torch 2.11) and says so to nobody
_RECORDING = threading.RLock()


class Allocations(TorchDispatchMode):
    """Keeps the tensors that were allocated, and which of them as zeros; `other` names the first of anything else that is done with torch."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []
        self.zeros: set[int] = set()  # ids of tensors
        self.other = ""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would import torch._dynamo at the first call, which takes seconds and leaves cycles that hold tensors; nothing is compiled here"""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in ALLOCATIONS or func.overloadpacket is torch.ops.aten.zeros:
            self.tensors.append(out)
            if func.overloadpacket is torch.ops.aten.zeros:
                self.zeros.add(id(out))
        elif func.overloadpacket is not torch.ops.aten.detach:  # as which torch.empty comes back from under a mode
            self.other = self.other or str(func)
        return out


class Start(NamedTuple):
    """One launch. pick: its pointers from the list of addresses; tail: its numbers, and what the launcher wants for constants"""

    start: Callable[..., Any]
    grid: tuple[int, int, int]
    options: tuple[Any, ...]
    pick: Callable[[list[int]], tuple[int, ...]]
    tail: tuple[Any, ...]


class Replay:
    """What one call of a launcher did: the tensors that it made, its launches, and which of the tensors it returned."""

    def __init__(self, device: torch.device, made: list[Any], offsets: list[tuple[int, int]], starts: list[Start], results: list[Any]) -> None:
        self.device, self.index = device, device.index or 0  # a CPU has none: tests
        self.made = made  # (size, stride, dtype)
        self.zeros: list[int] = []  # indices into `made`: what nothing has been launched for before
        self.offsets = offsets  # of further addresses: number of an address before, bytes after it
        self.starts, self.results = starts, results  # results: indices into `made`, None for an output that does not exist
        self.kernels: list[tuple[Any, Any]] = []  # with Triton's table of what it has compiled
        self.settings: Any = None  # as launch.settings gave them
        self.launch: Any = None  # the module kernel_runtime.launch, which imports Triton
        self.single = False  # whether the result is a tensor, no tuple

    def current(self) -> bool:
        """Whether Triton would start the same kernels now, on the device that is current"""
        device = _device()
        if device != self.index or self.launch.LAUNCH_OBSERVERS:
            return False
        for kernel, table in self.kernels:
            if kernel.device_caches.get(device) is not table or self.launch.settings(kernel) != self.settings:
                return False
        return True

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The launcher's result; None, with nothing done, where a tensor is not aligned to 16 bytes."""
        addresses = [t.data_ptr() for t in tensors]
        if reduce(or_, addresses) & 15:
            return None
        if torch._C._get_deterministic_algorithms():  # new memory may have to be filled
            made = [torch.empty_strided(size, stride, dtype=dtype, device=self.device) for size, stride, dtype in self.made]
        else:
            allocate = ALLOCATE[self.device.type]
            made = [allocate(size, stride, dtype) for size, stride, dtype in self.made]
        for i in self.zeros:
            made[i].zero_()
        addresses += [t.data_ptr() for t in made]
        for base, offset in self.offsets:
            addresses.append(addresses[base] + offset)
        stream = _stream(self.index)
        for start, grid, options, pick, tail in self.starts:
            start(*grid, stream, *options, *pick(addresses), *tail)
        if self.single:
            return made[self.results[0]]
        return tuple([None if i is None else made[i] for i in self.results])


def record(launcher: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Any, Replay | str]:
    """Calls `launcher(*arguments)`; its result, and the Replay of it, or why it cannot be repeated."""
    from kernel_runtime.launch import WATCHING

    launches: list[Any] = []
    allocations = Allocations()
    WATCHING.launches = launches
    try:
        with _RECORDING, allocations:
            result = launcher(*arguments)
        inputs = [a for a in arguments if isinstance(a, torch.Tensor)]
        made = [t for t in allocations.tensors if t.numel()]
        if allocations.other:
            return result, f"it calls {allocations.other}"
        replay = _replay(inputs, made, launches, result)
        replay.zeros = [i for i, t in enumerate(made) if id(t) in allocations.zeros]
        return result, replay
    except _NotRepeatable as reason:
        return result, str(reason)
    finally:
        WATCHING.launches = None
        # a mode is part of a cycle, and a traceback may hold this frame: neither is to keep memory of the device
        allocations.tensors.clear()
        launches.clear()


class _NotRepeatable(Exception):
    """Its text is for `replay_report`"""


class _Addresses:
    """Numbers for the addresses that a launcher used: its inputs, what it allocated, then places within what it allocated."""

    def __init__(self, inputs: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        self.inputs = {t.data_ptr(): i for i, t in enumerate(inputs)}
        if len(self.inputs) < len(inputs):
            raise _NotRepeatable("two of its tensors have one address")
        self.made = [(t.data_ptr(), t.untyped_storage().nbytes()) for t in made]
        self.offsets: list[tuple[int, int]] = []

    def number(self, address: int) -> int:
        if address in self.inputs:
            return self.inputs[address]
        for i, (first, size) in enumerate(self.made):
            if first <= address < first + size:
                place = (len(self.inputs) + i, address - first)
                if not place[1]:
                    return place[0]
                if place not in self.offsets:
                    self.offsets.append(place)
                return len(self.inputs) + len(self.made) + self.offsets.index(place)
        raise _NotRepeatable("a tensor came from elsewhere, or is a part of an argument")


def _replay(inputs: list[torch.Tensor], made: list[torch.Tensor], launches: list[Any], result: Any) -> Replay:
    from kernel_runtime import launch

    device = inputs[0].device
    if not launches:
        raise _NotRepeatable("it launches nothing")
    if not all(t.numel() and t.device == device for t in (*inputs, *made)):
        raise _NotRepeatable("a tensor is empty, or not on the device of the first")
    addresses = _Addresses(inputs, made)
    results: list[int | None] = []
    for out in [result] if isinstance(result, torch.Tensor) else result:
        if out is None:
            results.append(None)
            continue
        found = addresses.number(out.data_ptr()) - len(inputs)
        if not 0 <= found < len(made) or (out.shape, out.stride(), out.dtype) != (made[found].shape, made[found].stride(), made[found].dtype):
            raise _NotRepeatable("a result is an argument, or a part of what was allocated")
        results.append(found)
    scratch = [t.untyped_storage().nbytes() for i, t in enumerate(made) if i not in results]
    if len(scratch) > 1 and sum(scratch) > MAX_SCRATCH:
        raise _NotRepeatable(f"it has {len(scratch)} pieces of scratch of more than {MAX_SCRATCH >> 20} MiB together")
    now, *others = {launch.settings(spec.kernel) for spec, _, _ in launches}
    starts: list[Start] = []
    kernels: dict[int, tuple[Any, Any]] = {}
    for spec, grid, args in launches:
        bound = None if spec.direct is None else spec.direct.bound(device.index or 0, args)
        if bound is None or now is None or others:
            raise _NotRepeatable(f"{spec.name} was started by Triton: a hook, or arguments that are not aligned or not as declared")
        start, options, constants, table = bound
        numbers = [addresses.number(pointer.data_ptr()) for pointer in args[: spec.direct.pointers]]
        if len(numbers) < 2:
            raise _NotRepeatable(f"{spec.name} has a single pointer")  # itemgetter would return it without a tuple
        pick = itemgetter(*numbers)
        starts.append(Start(start, (*grid, 1, 1)[:3], options, pick, (*args[spec.direct.pointers :], *constants)))
        kernels[id(spec.kernel)] = spec.kernel, table
    replay = Replay(device, [(tuple(t.shape), t.stride(), t.dtype) for t in made], addresses.offsets, starts, results)
    replay.launch, replay.kernels, replay.settings = launch, list(kernels.values()), now
    replay.single = isinstance(result, torch.Tensor)
    return replay


def _key(given: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Any, list[torch.Tensor]]:
    """What replays are kept by, options, one shape and which arguments are None; and the tensors"""
    tensors = [a for a in given if a is not None]
    missing = None if len(tensors) == len(given) else tuple([a is None for a in given])
    return (options, tensors[0].shape, missing), tensors


class Replays:
    """The replays of one op whose first `tensors` arguments are tensors or None, and the rest options."""

    def __init__(self, tensors: int) -> None:
        self.tensors = tensors
        self.count = 0
        self.found: dict[Any, list[tuple[Callable[..., bool], Replay]]] = {}
        self.seen: dict[Any, int] = {}
        self.refused: dict[Any, str] = {}  # why the last attempt failed
        self.lock = threading.Lock()

    def find(self, given: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Replay, list[torch.Tensor]] | None:
        """The replay of a call with `given`, tensors or None, and `options`; and the tensors"""
        key, tensors = _key(given, options)
        try:
            recorded = self.found.get(key)
        except TypeError:  # symbolic sizes, of somebody who traces
            return None
        for check, replay in recorded or ():
            if check(*tensors) and replay.current():
                return None if torch._C._len_torch_dispatch_stack() or torch.autograd._profiler_enabled() else (replay, tensors)
        return None

    def call(self, launcher: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """`launcher(*arguments)`, recorded where these arguments have been seen; the last one is the choice of this launcher"""
        key, tensors = _key(arguments[: self.tensors], arguments[self.tensors :])
        if not self._wanted(key):
            return launcher(*arguments[:-1])
        if sum([t.nbytes for t in tensors]) > MAX_BYTES:
            self.refused[key] = f"its tensors take more than {MAX_BYTES >> 20} MiB"
            return launcher(*arguments[:-1])
        result, replay = record(launcher, arguments[:-1])
        with self.lock:
            if isinstance(replay, str):
                self.refused[key] = replay
            else:
                self.refused.pop(key, None)
                self.found.setdefault(key, []).append((guard(tensors), replay))
                self.count += 1
        return result

    def summary(self) -> str:
        """One line for a log; empty before the first call that could be recorded"""
        with self.lock:
            shapes, reasons = len(self.found), Counter(self.refused.values())
            full = sum(len(replays) >= MAX_GUARDS for replays in self.found.values())
        if not self.seen:
            return ""
        parts = [f"{self.count} replays of {shapes} shapes"]
        parts += [f"{count} shapes not replayed: {reason}" for reason, count in reasons.most_common()]
        parts += [f"the limit of {MAX_REPLAYS} replays is reached, further shapes are launched anew"] if self.count >= MAX_REPLAYS else []
        parts += [f"{full} shapes have all the {MAX_GUARDS} forms (leaves, results, strides) that are kept"] if full else []
        return "; ".join(parts)

    def _wanted(self, key: Any) -> bool:
        if not available() or self.count >= MAX_REPLAYS or len(self.found.get(key, ())) >= MAX_GUARDS:
            return False
        with self.lock:
            times = self.seen.get(key, 0)
            if not times and len(self.seen) >= 4 * MAX_REPLAYS:
                self.seen.clear()
                self.refused.clear()
            self.seen[key] = times + 1
        # What cannot be replayed is tried at the second call and at some later ones, under other guards. The reason may also pass, as
        # a profiler of Triton's does: so it is tried again for as long as it comes, after twice as many calls each time
        return times >= 1 and (times < ATTEMPTS or not times & (times - 1))


def guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """check(*others): whether others differ from `tensors` in their values alone, and this thread does with torch what it does now"""
    sizes: list[list[int | None]] = [list(t.shape) for t in tensors]
    strides: list[list[int | None]] = [list(t.stride()) for t in tensors]
    guards = _GUARDS.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    return guards.check  # type: ignore[no-any-return]  # a module of torch without types


def unavailable() -> str:
    """Why nothing is replayed in this process, empty if calls can be: this torch has what replays are made of, and launches can be direct."""
    if not triton_installed():
        return "triton is not installed"
    from kernel_runtime import direct

    if not (hasattr(_GUARDS, "TensorGuards") and all(ALLOCATE.values())):
        return f"torch {torch.__version__} lacks TensorGuards or Inductor's allocation"
    return "" if direct.supported() else direct.unsupported()


def available() -> bool:
    """Whether a call may be recorded now: replays are possible, and nobody watches launches."""
    from kernel_runtime import launch

    return not unavailable() and not launch.LAUNCH_OBSERVERS
