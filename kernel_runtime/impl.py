"""Which implementation a public function runs: the one documented rule.

impl="eager"    the reference itself under plain autograd, on any device: the specification and the honest baseline.
impl="triton"   the Triton kernel, or a ValueError that says why it cannot run; it never falls back.
impl="auto"     the registered op: the Triton kernel where one exists for the case and can run (a GPU or NPU tensor, or a CPU tensor
                under TRITON_INTERPRET=1), the reference inside the op everywhere else.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from kernel_runtime.checks import check_choice

IMPLS = ("auto", "triton", "eager")
KERNEL_DEVICES = ("cuda", "npu")

P = ParamSpec("P")
R = TypeVar("R")


# Read once, at import, as Triton itself does. Constants: torch.compile warns of a cached function that it meets.
_INTERPRETING = os.environ.get("TRITON_INTERPRET", "0") == "1"
_TRITON_INSTALLED = importlib.util.find_spec("triton") is not None


def interpreting() -> bool:
    """True if Triton kernels run in its CPU interpreter."""
    return _INTERPRETING


def triton_installed() -> bool:
    return _TRITON_INSTALLED


def no_kernel_reason(tensor: torch.Tensor, no_kernel: str | None = None) -> str | None:
    """Why no Triton kernel can run on `tensor`, None if one can; `no_kernel` is the op's own reason, None if a kernel covers the case."""
    if no_kernel is not None:
        return no_kernel
    if tensor.dtype == torch.float64:
        return "kernels take bf16, fp16 and fp32; fp64 is for checks with the eager form"
    if tensor.device.type not in KERNEL_DEVICES and not (tensor.device.type == "cpu" and interpreting()):
        return f"the tensors are on {tensor.device}; kernels run on {' and '.join(KERNEL_DEVICES)}, or on CPU under TRITON_INTERPRET=1"
    if not triton_installed():
        return "triton is not installed; install the extra 'cuda' or 'ascend'"
    return None


def cannot_run(op: str, impl: str, reason: str) -> ValueError:
    """What an implementation that was asked for by name and cannot run raises."""
    return ValueError(f"{op}: impl={impl!r} cannot run here: {reason}")


def select_impl(op: str, impl: str, tensor: torch.Tensor, *, no_kernel: str | None = None) -> str:
    """The implementation that the registered op runs: "triton" or "eager". See the module's docstring for the rule.

    `no_kernel` says why no kernel covers this case ("no kernel exists yet", "D = 100 is no multiple of 16"), None if one does.
    ValueError if `impl` is unknown, or is "triton" and the kernel cannot run.
    """
    check_choice(op, "impl", impl, IMPLS)
    reason = no_kernel_reason(tensor, no_kernel)
    if reason is None:
        return "triton" if impl != "eager" else "eager"
    if impl == "triton":
        raise cannot_run(op, impl, reason)
    return "eager"


def run_eager(fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls a reference function with autocast off: the reference chooses its own precision, as the kernels do."""
    device = next((a.device.type for a in args if isinstance(a, torch.Tensor)), "cpu")
    if device == "meta" or not torch.is_autocast_enabled(device):  # meta tensors have no autocast to ask for
        return fn(*args, **kwargs)
    with torch.autocast(device, enabled=False):
        return fn(*args, **kwargs)
