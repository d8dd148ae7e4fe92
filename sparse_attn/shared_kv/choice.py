"""Which kernels run the attention: the one place where the portable ones and those for sm_90 part. Imports no Triton until it is asked.

impl="auto", "triton"  hopper/ where `hopper_supports` says so (sm_90, bf16 or fp16, D of 128, 256 or 512, the Triton it was written for),
                       the portable kernels in every other case that has kernels; elsewhere "auto" takes the reference, "triton" raises.
impl="portable"        the portable kernels, on sm_90 too, or a ValueError that says why they cannot run.
impl="hopper"          the kernels for sm_90, or such a ValueError.

The device is asked for when the op runs, so torch.compile never meets the question. A backward takes what its forward took: it asks the
same of the same tensor.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from kernel_runtime import IMPLS, check_choice, select_impl
from kernel_runtime.gluon import has_gluon
from kernel_runtime.impl import cannot_run, no_kernel_reason
from kernel_runtime.registry import ModelShape
from sparse_attn.shared_kv.hopper import hopper_supports

if TYPE_CHECKING:
    from kernel_runtime.launch import Spec

ATTENTION_IMPLS = (*IMPLS, "portable", "hopper")
OP = "sparse_attn_shared_kv"
MAX_KERNEL_D = 512
PORTABLE, HOPPER = "sparse_attn.shared_kv", "sparse_attn.shared_kv.hopper"


def no_kernel(q: torch.Tensor) -> str | None:
    """Why no portable kernel covers this call, None if one does."""
    D = q.shape[-1]
    if D % 16 or D > MAX_KERNEL_D:
        return f"q has D = {D} channels; kernels take multiples of 16 up to {MAX_KERNEL_D}"
    return None


def select(op: str, impl: str, q: torch.Tensor) -> str:
    """What the registered op is told: "eager", "portable", "hopper", or "triton" where kernels run and the device decides which.

    ValueError if `impl` is unknown, or is "triton" or "portable" and no such kernel can run. "hopper" raises when the op runs.
    """
    check_choice(op, "impl", impl, ATTENTION_IMPLS)
    if impl == "portable" and (reason := no_kernel_reason(q, no_kernel(q))) is not None:
        raise cannot_run(op, impl, reason)
    return impl if impl in ("portable", "hopper") else select_impl(op, impl, q, no_kernel=no_kernel(q))


def _launcher(package: str, module: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(f"{package}.{module}"), f"attention_{module}")


def _hopper(module: str, q: torch.Tensor) -> Callable[..., Any]:
    if (reason := hopper_supports(q)) is not None:
        raise cannot_run(OP, "hopper", reason)
    return _launcher(HOPPER, module)


def _chosen(module: str, q: torch.Tensor) -> Callable[..., Any]:
    return _launcher(HOPPER if hopper_supports(q) is None else PORTABLE, module)


def chosen_fwd(q: torch.Tensor, *args: Any) -> Any:
    return _chosen("fwd", q)(q, *args)


def chosen_bwd(dout: torch.Tensor, q: torch.Tensor, *args: Any) -> Any:
    return _chosen("bwd", q)(dout, q, *args)


def hopper_fwd(q: torch.Tensor, *args: Any) -> Any:
    return _hopper("fwd", q)(q, *args)


def hopper_bwd(dout: torch.Tensor, q: torch.Tensor, *args: Any) -> Any:
    return _hopper("bwd", q)(dout, q, *args)


def specs(shape: ModelShape) -> Iterator[Spec]:
    """Of both; those for sm_90 where Triton has the dialect that they are written in (Triton-Ascend has not). Where there are
    some, the portable ones are marked: on sm_90 they run for impl="portable" alone, except for those that both use."""
    from sparse_attn.shared_kv.bwd import specs as portable_specs

    hopper: list[Spec] = []
    if has_gluon():
        from sparse_attn.shared_kv.hopper.bwd import specs as hopper_specs

        hopper = [replace(spec, arch=90) if spec.gluon else spec for spec in hopper_specs(shape)]
    for spec in portable_specs(shape):
        yield replace(spec, yields_on=(90,)) if hopper else spec
    yield from hopper
