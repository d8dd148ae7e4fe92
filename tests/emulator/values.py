"""Tensors and pointers of an emulated kernel: torch tensors with Triton's rules of types, integer division and masks."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from triton import language as tl

from tests.emulator.machine import EmulationError

TORCH = {
    tl.float32: torch.float32, tl.float16: torch.float16, tl.bfloat16: torch.bfloat16, tl.float64: torch.float64, tl.int64: torch.int64,
    tl.int32: torch.int32, tl.int16: torch.int16, tl.int8: torch.int8, tl.uint8: torch.uint8, tl.int1: torch.bool,
}  # fmt: skip
TRITON = {v: k for k, v in TORCH.items()}
UINT32 = 0xFFFFFFFF
UNSIGNED = ("add", "sub", "mul", "and", "or", "xor", "lt", "le", "gt", "ge", "eq", "ne")  # what is right for uint32 held as int64
UNEXPECTED = 0x5A5A5A5A  # an integer where nothing was loaded


class Anything:
    """Stands for every layout: calling it or asking it for anything gives itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> Anything:
        return self

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


LAYOUT = Anything()


class Type:
    """`type` of a tensor: a kernel asks it for its layout."""

    layout = LAYOUT


def undefined(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """What memory holds that nobody has written."""
    if dtype.is_floating_point:
        return torch.full(tuple(shape), float("nan"), dtype=dtype)
    if dtype == torch.bool:
        return torch.ones(tuple(shape), dtype=dtype)
    return torch.full(tuple(shape), UNEXPECTED & (2 ** (8 * dtype.itemsize - 1) - 1), dtype=dtype)


def promoted(a: torch.Tensor, b: torch.Tensor) -> torch.dtype:
    """Triton's type of an operation on two tensors: a 0-dimensional one counts like any other."""
    return torch.promote_types(a.dtype, b.dtype)


class T:
    """A tensor or a run-time scalar. `flight` is set while an asynchronous product owns it. `unsigned`: 32 bits of it, held as int64, as torch
    has next to nothing for uint32."""

    __slots__ = ("_value", "flight", "unsigned")
    type = Type()

    def __init__(self, value: torch.Tensor, flight: Any = None, unsigned: bool = False) -> None:
        self._value, self.flight, self.unsigned = value & UINT32 if unsigned else value, flight, unsigned

    @property
    def value(self) -> torch.Tensor:
        if self.flight is not None:
            raise EmulationError("the result of an asynchronous product is used before it was waited for")
        return self._value

    @property
    def raw(self) -> torch.Tensor:
        """For the next product in line and the wait."""
        return self._value

    @property
    def shape(self) -> list[int]:
        return list(self._value.shape)

    @property
    def dtype(self) -> Any:
        return TRITON[self._value.dtype]

    def to(self, dtype: Any, **kwargs: Any) -> T:
        if kwargs:
            raise EmulationError(f"to() with {kwargs}")
        if dtype == tl.uint32:
            return T(self.value.to(torch.int64), unsigned=True)
        return T(self.value.to(TORCH[dtype]))

    def reshape(self, *shape: Any) -> T:
        return T(self.value.reshape(*shape))

    def permute(self, *order: Any) -> T:
        return T(self.value.permute(*order))

    def split(self) -> tuple[T, T]:
        if self.shape[-1] != 2:
            raise EmulationError(f"split of {self.shape}")
        return T(self.value[..., 0]), T(self.value[..., 1])

    def __getitem__(self, key: Any) -> T:
        return T(self.value[key], unsigned=self.unsigned)

    def __bool__(self) -> bool:
        if self._value.numel() != 1:
            raise EmulationError(f"a condition of shape {self.shape}")
        return bool(self.value)

    def __index__(self) -> int:
        return int(self.value)

    def __repr__(self) -> str:
        return f"T({self._value})"

    def _with(self, other: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        if isinstance(other, T):
            a, b = self.value, other.value
        elif isinstance(other, (bool, int, float)):
            a, b = self.value, _constant(other, self.value.dtype)
        else:
            return None
        dtype = promoted(a, b)
        return a.to(dtype), b.to(dtype)

    def __neg__(self) -> T:
        return T(-self.value)

    def __invert__(self) -> T:
        return T(~self.value)


@lru_cache(4096, typed=True)
def _constant(x: bool | int | float, like: torch.dtype) -> torch.Tensor:
    """A literal takes the type of the other side, but a fraction makes an integer a float and a number makes a truth value one."""
    if isinstance(x, bool):
        return torch.tensor(x)
    if isinstance(x, int):
        wide = torch.int64 if not -(2**31) <= x < 2**31 else torch.int32
        return torch.tensor(x, dtype=like if like.is_floating_point or like not in (torch.bool, torch.int32) else wide)
    return torch.tensor(x, dtype=like if like.is_floating_point else torch.float32)


def _arithmetic(a: torch.Tensor) -> torch.Tensor:
    return a.to(torch.int32) if a.dtype == torch.bool else a


def _true_division(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a / b if a.dtype.is_floating_point else a.float() / b.float()


def _whole(a: torch.Tensor, b: torch.Tensor) -> None:
    if a.dtype.is_floating_point:
        raise EmulationError("// and % of floats")
    if (b == 0).any():
        raise EmulationError("division by zero")


def _quotient(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    _whole(a, b)
    return torch.div(a, b, rounding_mode="trunc")  # towards zero, unlike Python's


def _remainder(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    _whole(a, b)
    return torch.fmod(a, b)


_OPERATIONS = {
    "add": lambda a, b: _arithmetic(a) + _arithmetic(b), "sub": lambda a, b: _arithmetic(a) - _arithmetic(b),
    "mul": lambda a, b: _arithmetic(a) * _arithmetic(b), "truediv": _true_division, "floordiv": _quotient, "mod": _remainder,
    "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor, "lshift": torch.bitwise_left_shift,
    "rshift": torch.bitwise_right_shift,
}  # fmt: skip
_COMPARISONS = {"lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "eq": torch.eq, "ne": torch.ne}


def _install() -> None:
    def both(name: str, compute: Any, arithmetic: bool) -> None:
        def method(self: T, other: Any, turned: bool = False) -> Any:
            pair = self._with(other)
            if pair is None:
                return NotImplemented
            unsigned = self.unsigned or (isinstance(other, T) and other.unsigned)
            if unsigned and name not in UNSIGNED:
                raise EmulationError(f"{name} of uint32")
            return T(compute(*(reversed(pair) if turned else pair)), unsigned=unsigned and arithmetic)

        setattr(T, f"__{name}__", method)
        if arithmetic:
            setattr(T, f"__r{name}__", lambda self, other: method(self, other, True))

    for name, compute in _OPERATIONS.items():
        both(name, compute, True)
    for name, compute in _COMPARISONS.items():
        both(name, compute, False)
    T.__hash__ = None  # type: ignore[assignment]  # as for every class whose == gives a tensor


_install()


def as_t(x: Any, dtype: torch.dtype | None = None) -> T:
    """A literal as a tensor: int32 (int64 where it must be), fp32, or `dtype`."""
    if isinstance(x, T):
        return x
    return T(_constant(x, torch.int32) if dtype is None else torch.tensor(x, dtype=dtype))


def beside(x: Any, other: Any) -> T:
    """A literal takes its type from a tensor that it meets."""
    return T(_constant(x, other.value.dtype)) if isinstance(other, T) and not isinstance(x, T) else as_t(x)


class Element:
    """`dtype` of a pointer."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.element_ty = TRITON[dtype]


class Pointer:
    """Addresses in the storage of a torch tensor, in elements."""

    __slots__ = ("at", "memory")

    def __init__(self, memory: torch.Tensor, at: torch.Tensor) -> None:
        self.memory, self.at = memory, at

    @staticmethod
    def of(x: torch.Tensor) -> Pointer:
        whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
        return Pointer(whole, torch.tensor(x.storage_offset(), dtype=torch.int64))

    @property
    def dtype(self) -> Element:
        return Element(self.memory.dtype)

    @property
    def shape(self) -> list[int]:
        return list(self.at.shape)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.at + as_t(other).value.to(torch.int64))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.at - as_t(other).value.to(torch.int64))

    def __getitem__(self, key: Any) -> Pointer:
        return Pointer(self.memory, self.at[key])

    def _addresses(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        on = torch.tensor(True) if mask is None else as_t(mask).value.bool()
        at, on = torch.broadcast_tensors(self.at, on)
        outside = on & ((at < 0) | (at >= self.memory.numel()))
        if outside.any():
            worst = at[outside][0].item()
            raise EmulationError(f"element {worst} of a tensor of {self.memory.numel()} ({self.memory.dtype})")
        return at, on

    def load(self, mask: Any = None, other: Any = None) -> T:
        at, on = self._addresses(mask)
        if not self.memory.numel():
            got = undefined(at.shape, self.memory.dtype)
        else:
            got = self.memory[torch.where(on, at, 0)]
        if mask is None:
            return T(got)
        if other is None:
            rest = undefined((), self.memory.dtype)
        else:
            rest = as_t(other).value.to(self.memory.dtype)
        return T(torch.where(on, got, rest))

    def store(self, value: Any, mask: Any = None) -> None:
        at, on = self._addresses(mask)
        got = as_t(value).value.to(self.memory.dtype)
        if got.dim() > at.dim() or torch.broadcast_shapes(got.shape, at.shape) != at.shape:
            raise EmulationError(f"a store of {list(got.shape)} to addresses {list(at.shape)}")
        got = got.expand(at.shape)
        self.memory[at[on]] = got[on]

    def add(self, value: Any, mask: Any = None) -> None:
        at, on = self._addresses(mask)
        got = as_t(value).value.to(self.memory.dtype).expand(at.shape)
        self.memory.index_put_((at[on],), got[on], accumulate=True)


class Choice:
    """Addresses in one of two tensors, element by element."""

    def __init__(self, first: torch.Tensor, a: Pointer, b: Pointer) -> None:
        self.first, self.a, self.b = first, a, b

    @property
    def dtype(self) -> Element:
        return self.a.dtype

    def __add__(self, other: Any) -> Choice:
        return Choice(self.first, self.a + other, self.b + other)

    __radd__ = __add__

    def __getitem__(self, key: Any) -> Choice:
        shape = torch.broadcast_shapes(self.first.shape, tuple(self.a.shape), tuple(self.b.shape))
        first = self.first.expand(shape)[key]
        return Choice(first, *(Pointer(p.memory, p.at.expand(shape)[key]) for p in (self.a, self.b)))

    def _masks(self, mask: Any) -> tuple[T, T]:
        on = torch.tensor(True) if mask is None else as_t(mask).value.bool()
        return T(on & self.first), T(on & ~self.first)

    def load(self, mask: Any = None, other: Any = None) -> T:
        a, b = self._masks(mask)
        return T(torch.where(self.first, self.a.load(a, other).value, self.b.load(b, other).value))

    def store(self, value: Any, mask: Any = None) -> None:
        a, b = self._masks(mask)
        self.a.store(value, a)
        self.b.store(value, b)

    def add(self, value: Any, mask: Any = None) -> None:
        a, b = self._masks(mask)
        self.a.add(value, a)
        self.b.add(value, b)
