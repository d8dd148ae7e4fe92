"""Launching a compiled kernel without Triton's binding of arguments, which costs more host time than the launch itself.

Triton's own launch path (`JITFunction.run`) decides at every call which specialisation the arguments want: dtypes, 16-byte alignment,
integers that are 1, divisible by 16 or wider than 32 bits. A Spec declares its specialisation, so here the arguments are only compared
with it. Whatever differs, and whatever this module does not know (another Triton, an NPU, a hook), takes Triton's path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, reduce
from operator import or_
from typing import Any

import torch
import triton

# the signature of a compiled kernel's `run` is no public interface: versions that were tried on a GPU
KNOWN_TRITON = ("3.6.",)
DTYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64, "i64": torch.int64, "i32": torch.int32,
    "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "i1": torch.bool,
}  # fmt: skip
SCALARS = {"i32": int, "fp32": float}

_RUNTIME: Any = getattr(getattr(triton, "knobs", None), "runtime", None)
_COMPILATION: Any = getattr(getattr(triton, "knobs", None), "compilation", None)
_ONES = ((1, 1, 1), (1, 1), (1,), ())  # what a grid of 0 to 3 dimensions lacks
_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


@cache
def unsupported() -> str:
    """Why compiled kernels are started by Triton alone in this process; empty if they can be started directly: with a version of Triton that
    was tried, for NVIDIA, outside of the interpreter."""
    if "ascend" in triton.backends.backends:
        return "Triton-Ascend starts its kernels itself"
    if not triton.__version__.startswith(KNOWN_TRITON):
        return f"triton {triton.__version__} was not tried, only {', '.join(f'{version}x' for version in KNOWN_TRITON)}"
    if torch.version.cuda is None:
        return "this torch has no CUDA"
    return "Triton's interpreter runs the kernels" if triton.knobs.runtime.interpret else ""


def supported() -> bool:
    """Whether compiled kernels can be started directly here"""
    return not unsupported()


def settings(kernel: Any) -> tuple[Any, ...] | None:
    """Triton's settings that are part of a kernel's key at every launch: asserts of the device, instrumentation. None where somebody
    watches launches (a profiler of Triton's, a hook of this kernel), which takes Triton's own path."""
    try:
        if _RUNTIME.launch_enter_hook.calls or _RUNTIME.launch_exit_hook.calls or kernel.pre_run_hooks:
            return None
        return bool(kernel.debug or _RUNTIME.debug), _COMPILATION.instrumentation_mode
    except AttributeError:  # a bare function was put in place of Triton's list of hooks
        return None


def start_of(compiled: Any) -> tuple[Any, tuple[Any, ...]]:
    """What starts a compiled kernel, and its arguments between the stream and those of the kernel: function, metadata, no hooks"""
    launcher, none = compiled.run, (None, None, None)
    if launcher.global_scratch_size or launcher.profile_scratch_size:  # to be allocated at every launch
        return launcher, (compiled.function, compiled.packed_metadata, *none)
    flags = launcher.launch_cooperative_grid, launcher.launch_pdl
    return launcher.launch, (compiled.function, *flags, None, None, compiled.packed_metadata, *none)


class DirectLaunch:
    """The launches of one specialisation: its kernel, the Triton types of its run-time arguments, pointers first, the number of its
    constants, and the keyword arguments of Triton's own launch path."""

    def __init__(self, kernel: Any, types: Sequence[str], constants: int, keywords: Mapping[str, Any]) -> None:
        self.kernel, self.keywords = kernel, keywords
        self.dtypes = [DTYPES[kind[1:]] for kind in types if kind.startswith("*")]
        self.scalars = tuple(SCALARS[kind] for kind in types if not kind.startswith("*"))
        self.pointers = len(self.dtypes)
        self.constants = (None,) * constants  # the launcher takes them as arguments too, and does not look at them
        self.known: dict[int, tuple[Any, ...]] = {}  # by device

    def __call__(self, grid: tuple[int, ...], args: tuple[Any, ...]) -> Any:
        """Starts the kernel on the current device, as Triton does, through Triton's path where it must; returns the compiled kernel, or
        None where a hook of Triton's kept it from being compiled."""
        tensors, scalars = args[: self.pointers], args[self.pointers :]
        addresses = [t.data_ptr() for t in tensors]
        if reduce(or_, addresses) % 16 or [t.dtype for t in tensors] != self.dtypes:
            return self.kernel[grid](*args, **self.keywords)
        device, now = _device(), settings(self.kernel)
        known = self.known.get(device)
        # Triton's own table: who empties it means this one as well
        if known is None or known[0] is not self.kernel.device_caches.get(device) or known[1] != now:
            compiled = self.kernel[grid](*args, **self.keywords)
            self._learn(device, now, compiled, scalars)
            return compiled
        _, _, compiled, start, options = known
        try:
            start(*grid, *_ONES[len(grid)], _stream(device), *options, *addresses, *scalars, *self.constants)
        except OverflowError:  # an integer beyond 32 bits, which has a kernel of its own; nothing has been started
            return self.kernel[grid](*args, **self.keywords)
        return compiled

    def bound(self, device: int, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """(start, its options, constants, Triton's table) of a launch that has been made on this device and took the short way: to be
        started as `start(*grid of 3, stream, *options, *addresses, *numbers, *constants)`. None if it takes Triton's path."""
        tensors, scalars = args[: self.pointers], args[self.pointers :]
        known = self.known.get(device)
        if known is None or [t.dtype for t in tensors] != self.dtypes or any(t.data_ptr() % 16 for t in tensors):
            return None
        if not self._declared(scalars):
            return None
        table, _, _, start, options = known
        return start, options, self.constants, table

    def _declared(self, scalars: tuple[Any, ...]) -> bool:
        return tuple(map(type, scalars)) == self.scalars and all(-0x80000000 <= value < 0x80000000 for value in scalars)

    def _learn(self, device: int, now: tuple[Any, ...] | None, compiled: Any, scalars: tuple[Any, ...]) -> None:
        """Keeps what Triton's path picked, where that is the specialisation that was declared."""
        table = self.kernel.device_caches.get(device)  # None: emptied meanwhile, by another thread
        if now is None or compiled is None or table is None:
            return
        if self._declared(scalars):
            self.known[device] = table, now, compiled, *start_of(compiled)


def direct_launch(kernel: Any, types: Mapping[str, str], constants: Sequence[str], keywords: Mapping[str, Any]) -> DirectLaunch | None:
    """A DirectLaunch where the kernel has one specialisation for all lengths: pointers, then integers in do_not_specialize and floats,
    then constants; None otherwise. types: run-time argument -> Triton's type."""
    kinds = list(types.values())
    pointers = [kind.startswith("*") for kind in kinds]
    if not supported() or not pointers or not pointers[0] or pointers != sorted(pointers, reverse=True):
        return None
    if kernel.arg_names != [*types, *constants]:
        return None
    for kind, parameter in zip(kinds, kernel.params):
        if kind.startswith("*"):
            if kind[1:] not in DTYPES:
                return None
        elif kind not in SCALARS or (kind == "i32" and not parameter.do_not_specialize):
            return None
    return DirectLaunch(kernel, kinds, len(constants), keywords)
