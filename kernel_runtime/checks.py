"""Argument checks with one wording: which argument, what came, what is wanted.

Every check is plain Python on metadata (never on values), so torch.compile evaluates it while tracing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # fp64: eager form alone, for checks
COEFFICIENTS = (torch.float32, torch.float64)
LARGEST_INT, LARGEST_FLOAT = 2**63 - 1, sys.float_info.max  # of an op's arguments


def check_tensor(op: str, name: str, value: object) -> None:
    """TypeError unless `value` is a torch.Tensor with strides: not sparse, not nested."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(value).__name__}")
    if value.layout is not torch.strided or value.is_nested:
        layout = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        raise TypeError(f"{op}: {name} must be a strided tensor, got layout {layout}")


def check_dtype(op: str, name: str, value: torch.Tensor, wanted: Sequence[torch.dtype]) -> None:
    """TypeError unless `value` is a tensor whose dtype is one of `wanted`."""
    check_tensor(op, name, value)
    if value.dtype not in wanted:
        names = ", ".join(dict.fromkeys(str(d).removeprefix("torch.") for d in wanted))
        raise TypeError(f"{op}: {name} has dtype {str(value.dtype).removeprefix('torch.')}, wanted {names}")


def check_shape(op: str, name: str, value: torch.Tensor, wanted: Sequence[int | str | None]) -> None:
    """ValueError unless `value` has the shape `wanted`; a string or None stands for any size (the string is its letter in the message)."""
    check_tensor(op, name, value)
    ok = value.dim() == len(wanted) and all(not isinstance(w, int) or s == w for s, w in zip(value.shape, wanted))
    if not ok:
        text = ", ".join("any" if w is None else str(w) for w in wanted)
        raise ValueError(f"{op}: {name} has shape {list(value.shape)}, wanted [{text}]")


def check_same(op: str, name: str, value: torch.Tensor, like_name: str, like: torch.Tensor, *, dtype: bool = True) -> None:
    """`value` must live on the device of `like` (ValueError) and, by default, have its dtype (TypeError)."""
    check_tensor(op, name, value)
    if dtype and value.dtype != like.dtype:
        a, b = (str(t.dtype).removeprefix("torch.") for t in (value, like))
        raise TypeError(f"{op}: {name} has dtype {a} but {like_name} has {b}; they must be equal, nothing is cast silently")
    if value.device != like.device:
        raise ValueError(f"{op}: {name} is on {value.device} but {like_name} is on {like.device}; they must be on one device")


def _shown(value: object) -> str:
    """A number in a message; Python refuses to write an int of thousands of digits"""
    return f"an int of {value.bit_length()} bits" if isinstance(value, int) and abs(value) > LARGEST_INT else str(value)


def check_int(op: str, name: str, value: object, *, minimum: int, maximum: int | None = None) -> None:
    """TypeError unless `value` is an int (bool is not), ValueError if it is below `minimum` or above `maximum` (by default the largest
    int64)."""
    # bool is an int to Python, but True as a count is a slip; a symbolic int appears while torch.compile traces
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise TypeError(f"{op}: {name} must be an int, got {type(value).__name__}")
    if value < minimum:
        raise ValueError(f"{op}: {name} must be at least {minimum}, got {_shown(value)}")
    if maximum is None and isinstance(value, int):  # a symbolic int needs no guard for it
        maximum = LARGEST_INT
    if maximum is not None and value > maximum:
        raise ValueError(f"{op}: {name} must be at most {maximum}, got {_shown(value)}")


def check_offset(op: str, name: str, value: object, queries: int) -> None:
    """TypeError unless the first position `value` is an int, ValueError if those of the `queries` do not fit the kernels' int32."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise TypeError(f"{op}: {name} must be an int, an int32 tensor or None, got {type(value).__name__}")
    check_int(op, name, value, minimum=-(2**31), maximum=2**31 - 1 - queries)


def check_number(op: str, name: str, value: object) -> None:
    """TypeError unless `value` is a float or an int (bool is not), ValueError if it is infinite, no number or no float holds it."""
    if isinstance(value, bool) or not isinstance(value, int | float | torch.SymInt | torch.SymFloat):
        raise TypeError(f"{op}: {name} must be a number, got {type(value).__name__}")
    if not -LARGEST_FLOAT <= value <= LARGEST_FLOAT:
        raise ValueError(f"{op}: {name} must be finite, got {_shown(value)}")


def check_choice(op: str, name: str, value: object, choices: Sequence[str]) -> None:
    """ValueError unless `value` is one of the strings `choices`."""
    if value not in choices:
        raise ValueError(f"{op}: {name} must be one of {', '.join(repr(c) for c in choices)}, got {value!r}")
