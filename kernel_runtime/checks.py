"""Argument checks with one wording: which argument, what came, what is wanted.

Every check is plain Python on metadata (never on values), so torch.compile evaluates it while tracing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # fp64: eager form alone, for checks
COEFFICIENTS = (torch.float32, torch.float64)


def check_tensor(op: str, name: str, value: object) -> None:
    """TypeError unless `value` is a torch.Tensor."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(value).__name__}")


def check_dtype(op: str, name: str, value: torch.Tensor, wanted: Sequence[torch.dtype]) -> None:
    """TypeError unless `value` is a tensor whose dtype is one of `wanted`."""
    check_tensor(op, name, value)
    if value.dtype not in wanted:
        names = ", ".join(str(d).removeprefix("torch.") for d in wanted)
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


def check_int(op: str, name: str, value: object, *, minimum: int) -> None:
    """TypeError unless `value` is an int (bool is not), ValueError if it is below `minimum`."""
    # bool is an int to Python, but True as a count is a slip; a symbolic int appears while torch.compile traces
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise TypeError(f"{op}: {name} must be an int, got {type(value).__name__}")
    if value < minimum:
        raise ValueError(f"{op}: {name} must be at least {minimum}, got {value}")


def check_choice(op: str, name: str, value: object, choices: Sequence[str]) -> None:
    """ValueError unless `value` is one of the strings `choices`."""
    if value not in choices:
        raise ValueError(f"{op}: {name} must be one of {', '.join(repr(c) for c in choices)}, got {value!r}")
