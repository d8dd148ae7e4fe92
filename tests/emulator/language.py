"""What a kernel calls: the part of Triton's and Gluon's language that the kernels of this library use, on emulated values."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from triton import language as tl
from triton.experimental.gluon import language as real_gl

from tests.emulator import memory
from tests.emulator.machine import EmulationError, Machine
from tests.emulator.values import LAYOUT, TORCH, Choice, Pointer, T, as_t, beside, promoted

NOW: list[Machine] = []  # the program that runs


def here() -> Machine:
    return NOW[-1]


def called_from() -> tuple[str, str]:
    """Place and function of the kernel that calls."""
    frame = sys._getframe(2)
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}", frame.f_code.co_name


def unlayouted(kwargs: dict[str, Any]) -> None:
    """Layouts, and hints to a compiler, mean nothing here; anything else that is not known is an error."""
    if unknown := set(kwargs) - {"layout", "assert_trivial", "cache_modifier", "eviction_policy", "sem", "scope", "num_stages"}:
        raise EmulationError(f"unknown arguments {sorted(unknown)}")


# making tensors


def arange(start: Any, end: Any, layout: Any = None) -> T:
    return T(torch.arange(int(start), int(end), dtype=torch.int32))


def full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> T:
    return T(torch.full([int(n) for n in shape], 0, dtype=TORCH[dtype]) + as_t(value).value.to(TORCH[dtype]))


def zeros(shape: Any, dtype: Any, layout: Any = None) -> T:
    return T(torch.zeros([int(n) for n in shape], dtype=TORCH[dtype]))


def full_like(x: T, value: Any) -> T:
    return T(torch.full_like(x.value, value))


# element by element


def where(condition: Any, a: Any, b: Any) -> Any:
    c = as_t(condition).value.bool()
    if isinstance(a, Pointer) or isinstance(b, Pointer):
        return Choice(c, a, b)
    a, b = beside(a, b), beside(b, a)
    dtype = promoted(a.value, b.value)
    return T(torch.where(c, a.value.to(dtype), b.value.to(dtype)))


def extreme(compute: Any, keep: Any) -> Any:
    """maximum or minimum: of a number and NaN the number, unless propagate_nan says otherwise."""

    def of(a: Any, b: Any, propagate_nan: Any = None, **kwargs: Any) -> Any:
        unlayouted(kwargs)
        if not isinstance(a, T) and not isinstance(b, T):
            return keep(a, b)
        a, b = beside(a, b), beside(b, a)
        dtype = promoted(a.value, b.value)
        x, y = torch.broadcast_tensors(a.value.to(dtype), b.value.to(dtype))
        if dtype.is_floating_point and propagate_nan != tl.PropagateNan.ALL:
            x, y = torch.where(x.isnan(), y, x), torch.where(y.isnan(), x, y)
        return T(compute(x, y), unsigned=a.unsigned or b.unsigned)

    return of


def unary(compute: Any) -> Any:
    return lambda x: T(compute(x.value))


def fma(a: Any, b: Any, c: Any) -> T:
    x, y, z = (as_t(v).value for v in (a, b, c))
    dtype = torch.promote_types(torch.promote_types(x.dtype, y.dtype), z.dtype)
    return T((x.double() * y.double() + z.double()).to(dtype))


def cdiv(a: Any, b: Any) -> Any:
    return (a + b - 1) // b


def cast(x: Any, dtype: Any) -> T:
    return as_t(x).to(dtype)


def inline_asm_elementwise(asm: str, constraints: str, args: Any, dtype: Any, is_pure: bool, pack: int) -> T:
    if not asm.startswith("cvt.rn.bf16x2.f32"):
        raise EmulationError(f"unknown assembler: {asm}")
    return args[0].to(dtype)


# sums and shapes


def reduction(compute: Any) -> Any:
    def of(x: T, axis: Any = None, keep_dims: Any = False, **kwargs: Any) -> T:
        unlayouted(kwargs)
        value = x.value
        if value.dtype == torch.bool:
            value = value.to(torch.int32)
        found = compute(value.reshape(-1), 0) if axis is None else compute(value, int(axis))
        return T(found.unsqueeze(int(axis)) if keep_dims else found)

    return of


def total(x: torch.Tensor, axis: int) -> torch.Tensor:
    return x.sum(axis, dtype=x.dtype)


def reshape(x: T, shape: Any, **kwargs: Any) -> T:
    unlayouted(kwargs)
    return x.reshape([int(n) for n in shape])


def join(a: T, b: T) -> T:
    return T(torch.stack([a.value, b.value], -1))


def convert_layout(x: T, layout: Any, assert_trivial: bool = False) -> T:
    return T(x.value, unsigned=x.unsigned)


# memory


def load(pointer: Pointer, mask: Any = None, other: Any = None, **kwargs: Any) -> T:
    unlayouted(kwargs)
    return pointer.load(mask, other)


def store(pointer: Pointer, value: Any, mask: Any = None, **kwargs: Any) -> None:
    unlayouted(kwargs)
    pointer.store(value, mask)


def atomic_add(pointer: Pointer, value: Any, mask: Any = None, **kwargs: Any) -> None:
    """Gives nothing back: no kernel here uses what it returns."""
    unlayouted(kwargs)
    pointer.add(value, mask)


def allocate_shared_memory(dtype: Any, shape: Any, layout: Any = None, value: Any = None) -> memory.Shared:
    if value is not None:
        raise EmulationError("shared memory with a first value")
    return memory.allocate(here(), dtype, shape, *called_from())


# programs


def program_id(axis: int) -> T:
    return as_t(here().program if axis == 0 else 0)


def num_programs(axis: int) -> T:
    return as_t(here().programs if axis == 0 else 1)


def run_time_range(*bounds: Any, **kwargs: Any) -> Iterator[T]:
    """The number of a pass is a run-time value, whatever the bounds are."""
    unlayouted(kwargs)
    for i in range(*(int(b) for b in bounds)):
        yield as_t(i)


def static_range(*bounds: Any) -> range:
    return range(*(int(b) for b in bounds))


def warp_specialize(functions: Any, worker_warps: Any, worker_registers: Any) -> None:
    def work(function: Any, arguments: Any) -> Any:
        return lambda: function(*arguments)

    here().specialize([work(*pair) for pair in functions], [int(w) for w in worker_warps])


# barriers and asynchronous work


def init(barrier: memory.Shared, count: Any) -> None:
    barrier.make_barrier(int(count))


def wait(barrier: memory.Shared, phase: Any, pred: Any = True, deps: Any = ()) -> None:
    if bool(as_t(pred)):
        here().wait(barrier.barrier(), int(phase))


def arrive(barrier: memory.Shared, *, count: Any = 1, pred: Any = True) -> None:
    if bool(as_t(pred)):
        here().arrive(barrier.barrier(), int(count))


def async_copy_global_to_shared(target: memory.Shared, pointer: Pointer, mask: Any = None, **kwargs: Any) -> None:
    unlayouted(kwargs)
    target.copy_from(pointer, mask)


def arrive_after_copies(barrier: memory.Shared, increment_count: bool = True) -> None:
    if increment_count:
        raise EmulationError("an arrival that raises its own count")
    here().arrive_after_copies(barrier.barrier())


def warpgroup_mma(a: Any, b: Any, acc: T, **kwargs: Any) -> T:
    return memory.product(here(), a, b, acc, **kwargs)


def warpgroup_mma_wait(num_outstanding: Any, deps: Any) -> Any:
    return memory.wait_for_products(here(), num_outstanding, deps)


def tf32(x: torch.Tensor) -> torch.Tensor:
    """The 10 bits of the mantissa that tensor cores take of an fp32 operand."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def mma_v2(a: T, b: T, acc: T, input_precision: Any = None) -> T:
    x, y = a.value.float(), b.value.float()
    if a.value.dtype == torch.float32 and input_precision == "tf32":
        x, y = tf32(x), tf32(y)
    return T(x @ y + acc.value)


def dot(a: T, b: T, acc: Any = None, input_precision: Any = "tf32", out_dtype: Any = None) -> T:
    return mma_v2(a, b, T(torch.zeros(a.shape[0], b.shape[1])) if acc is None else acc, input_precision)


def nothing(*args: Any, **kwargs: Any) -> None:
    """Orders within a warpgroup, and between kernels that overlap, are not looked at."""


DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "uint32", "int1")
LAYOUTS = (
    "SliceLayout", "BlockedLayout", "DistributedLinearLayout", "DotOperandLayout", "NVMMADistributedLayout", "NVMMASharedLayout",
    "SwizzledSharedLayout", "AutoLayout",
)  # fmt: skip
UNARY = ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "abs", "sigmoid")
LANGUAGE = SimpleNamespace(
    **{name: getattr(tl, name) for name in DTYPES}, **dict.fromkeys(LAYOUTS, LAYOUT), **{name: unary(getattr(torch, name)) for name in UNARY},
    # making, element by element
    constexpr=lambda x: x, arange=arange, full=full, zeros=zeros, full_like=full_like, zeros_like=lambda x: full_like(x, 0), where=where,
    maximum=extreme(torch.maximum, max), minimum=extreme(torch.minimum, min), PropagateNan=tl.PropagateNan, fma=fma, cdiv=cdiv, cast=cast,
    inline_asm_elementwise=inline_asm_elementwise,
    # sums, products, shapes
    sum=reduction(total), max=reduction(torch.amax), min=reduction(torch.amin), dot=dot, reshape=reshape, trans=lambda x: x.permute(1, 0),
    permute=lambda x, order: x.permute(tuple(order)), expand_dims=lambda x, axis: T(x.value.unsqueeze(int(axis))), split=lambda x: x.split(),
    join=join, convert_layout=convert_layout, multiple_of=lambda x, n: x, max_contiguous=lambda x, n: x,
    # memory, programs
    load=load, store=store, atomic_add=atomic_add, allocate_shared_memory=allocate_shared_memory, program_id=program_id,
    num_programs=num_programs, num_warps=lambda: here().here.warps, static_range=static_range, range=run_time_range,
    warp_specialize=warp_specialize, thread_barrier=nothing, static_assert=nothing,
)  # fmt: skip
MBARRIER = SimpleNamespace(init=init, wait=wait, arrive=arrive, MBarrierLayout=LAYOUT)
ASYNC_COPY = SimpleNamespace(async_copy_global_to_shared=async_copy_global_to_shared, mbarrier_arrive=arrive_after_copies)
MODULES = {real_gl.__name__: LANGUAGE, tl.__name__: LANGUAGE}
