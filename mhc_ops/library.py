"""The registered ops of this package (torch.ops.mhc_ops.*) and the checks that its public functions share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from kernel_runtime import OpLibrary, check_choice, check_dtype, check_int, check_same, check_shape
from kernel_runtime.checks import FLOATS, check_number
from kernel_runtime.ops import EagerCall

OPS = OpLibrary("mhc_ops")
CONVENTIONS = ("v4", "paper")
MIN_STREAMS, MAX_STREAMS = 2, 8
MAX_SIGNATURES = 4096
REPLAYED = ("auto", "triton")  # values of impl that may be answered by a replay
# what looking for a replay raises: for something that is no tensor, None in every place, a tensor without a shape
NO_TENSORS = (AttributeError, TypeError, IndexError, RuntimeError)


def coefficient_dtype(like: torch.Tensor) -> torch.dtype:
    """Dtype of parameters and coefficients beside a tensor `like`: fp32, and fp64 beside fp64."""
    return torch.float64 if like.dtype == torch.float64 else torch.float32


def mix_columns(n: int) -> int:
    """M, the columns of a site's mix: pre (N) | post (N) | comb (N*N)."""
    return n * n + 2 * n


def check_streams(op: str, name: str, n: int | torch.SymInt) -> None:
    """ValueError unless the number of streams is one that the library is built for."""
    if not MIN_STREAMS <= n <= MAX_STREAMS:
        raise ValueError(f"{op}: {name} has N = {n} streams, wanted {MIN_STREAMS} to {MAX_STREAMS}")


def check_convention(op: str, convention: str) -> None:
    check_choice(op, "convention", convention, CONVENTIONS)


def check_stream_tensor(op: str, name: str, x: torch.Tensor) -> None:
    """Streams [..., N, D] of a floating dtype, N in 2..8, D at least 1."""
    check_dtype(op, name, x, FLOATS)
    if x.dim() < 2 or x.shape[-1] < 1:
        raise ValueError(f"{op}: {name} has shape {list(x.shape)}, wanted [..., N, D] with D at least 1")
    check_streams(op, name, x.shape[-2])


def check_coefficient(op: str, name: str, value: torch.Tensor, shape: Sequence[int | str | None], like_name: str, like: torch.Tensor) -> None:
    """A parameter or coefficient beside `like`: fp32 (fp64 exactly where `like` is fp64), of this shape, on its device."""
    check_dtype(op, name, value, (coefficient_dtype(like),))
    check_shape(op, name, value, shape)
    check_same(op, name, value, like_name, like, dtype=False)


def check_eps(op: str, name: str, value: object) -> None:
    """TypeError unless `value` is a number, ValueError if it is negative or not finite."""
    check_number(op, name, value)
    if value < 0:  # type: ignore[operator]  # a number: check_number has seen to it
        raise ValueError(f"{op}: {name} must be at least 0, got {value}")


def check_iteration(op: str, iters: object, eps: object, convention: str, *, eps_name: str = "hc_eps") -> None:
    check_int(op, "iters", iters, minimum=1)
    check_eps(op, eps_name, eps)
    check_convention(op, convention)


def once_a_signature(check: Callable[..., None]) -> Callable[..., None]:
    """`check(op, *tensors)` reads nothing but types, shapes, dtypes, devices and layouts: what has passed once passes again, and is not
    checked a second time (which takes as much host time as three launches)."""
    passed: set[tuple[object, ...]] = set()

    def wrapper(op: str, *tensors: torch.Tensor | None) -> None:
        key = None
        if not torch.compiler.is_compiling():
            try:
                key = tuple([None if t is None else (type(t), t.shape, t.dtype, t.device, t.layout) for t in tensors])
                if key in passed:
                    return
            except (AttributeError, TypeError, RuntimeError):  # no tensor, symbolic sizes, or a tensor without a shape
                key = None
        check(op, *tensors)
        if key is not None:
            if len(passed) >= MAX_SIGNATURES:
                passed.clear()
            passed.add(key)

    return wrapper


def _check_expansion(op: str, f: torch.Tensor, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> None:
    check_stream_tensor(op, "x", x)
    check_same(op, "f", f, "x", x)
    *lead, n, d = x.shape
    check_shape(op, "f", f, [*lead, d])
    check_coefficient(op, "post", post, [*lead, n], "x", x)
    check_coefficient(op, "comb", comb, [*lead, n, n], "x", x)


def _check_site(op: str, x: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, pre_mix: torch.Tensor | None) -> None:
    check_stream_tensor(op, "x", x)
    *lead, n, d = x.shape
    check_coefficient(op, "fn", fn, [mix_columns(n), n * d], "x", x)
    check_coefficient(op, "scale", scale, [3], "x", x)
    check_coefficient(op, "base", base, [mix_columns(n)], "x", x)
    if pre_mix is not None:
        check_coefficient(op, "pre_mix", pre_mix, [*lead, n], "x", x)


def _check_boundary(
    op: str, f: torch.Tensor, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, *site: Any
) -> None:
    _check_expansion(op, f, x, post, comb)
    _check_site(op, x, *site)


# What hc_post takes: f [..., D] of the dtype of x [..., N, D], post [..., N], comb [..., N, N].
check_expansion = once_a_signature(_check_expansion)
# What hc_pre takes: x [..., N, D], fn [M, N*D], scale [3], base [M], pre_mix [..., N] or None.
check_site = once_a_signature(_check_site)
# What hc_post_pre takes: both, x once.
check_boundary = once_a_signature(_check_boundary)


def check_site_options(op: str, iters: object, hc_eps: object, norm_eps: object, convention: str, return_pre: object) -> None:
    if return_pre is not None and not isinstance(return_pre, bool):
        raise TypeError(f"{op}: return_pre must be True, False or None, got {type(return_pre).__name__}")
    check_eps(op, "norm_eps", norm_eps)
    check_iteration(op, iters, hc_eps, convention)


@lru_cache(256, typed=True)
def _site_options(op: str, iters: int, hc_eps: float, norm_eps: float, convention: str, return_pre: bool | None) -> tuple[Any, ...]:
    check_site_options(op, iters, hc_eps, norm_eps, convention, return_pre)
    return iters, float(hc_eps), float(norm_eps), convention, "triton"


def known_call(call: EagerCall, tensors: tuple[Any, ...], impl: str) -> tuple[Any, ...] | None:
    """What follows the tensors in a call of an op without options, its replay last, where such a call has passed all checks before; else
    None"""
    if impl not in REPLAYED or torch.compiler.is_compiling():
        return None
    try:
        replay = call.known(tensors, ("triton",))
    except NO_TENSORS:  # the checks say what
        return None
    return None if replay is None else ("triton", replay)


def known_site(
    call: EagerCall, op: str, tensors: tuple[Any, ...], iters: Any, hc_eps: Any, norm_eps: Any, convention: Any, return_pre: Any, impl: Any
) -> tuple[Any, ...] | None:
    """known_call of hc_pre and hc_post_pre, with their options as they were given"""
    if impl not in REPLAYED or torch.compiler.is_compiling():
        return None
    try:
        options = _site_options(op, iters, hc_eps, norm_eps, convention, return_pre)
        replay = call.known(tensors, options)
    except NO_TENSORS:  # or what cannot be hashed
        return None
    return None if replay is None else (*options, replay)
