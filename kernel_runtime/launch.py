"""Spec: one specialisation of a kernel, the single source for its launch and for its compilation ahead of time. Imports Triton."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import triton
from triton.runtime.errors import OutOfResources

from kernel_runtime.direct import DirectLaunch, direct_launch, settings
from kernel_runtime.keys import settle

__all__ = ["CUDA_SMEM_LIMIT", "GPU_HINTS", "LAUNCH_OBSERVERS", "ON_ASCEND", "TRITON_DTYPE", "WATCHING", "Spec", "settings"]

TRITON_DTYPE = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}
# Bytes of shared memory that one program may use, by NVIDIA architecture (CUDA programming guide, compute capabilities)
CUDA_SMEM_LIMIT = {
    **dict.fromkeys((80, 87), 163 * 1024), **dict.fromkeys((86, 89, 120, 121), 99 * 1024), **dict.fromkeys((90, 100, 103, 110), 227 * 1024),
}  # fmt: skip
# hints of GPU compilers; Triton-Ascend has no such option and refuses a launch that passes one
GPU_HINTS = frozenset({"maxnreg", "num_ctas", "waves_per_eu", "matrix_instr_nonkdim", "launch_pdl"})
ON_ASCEND = "ascend" in triton.backends.backends

# called with (spec, arguments) before every launch; kernel_runtime.guard.record fills it for a while
LAUNCH_OBSERVERS: list[Callable[[Spec, tuple[Any, ...]], None]] = []
# this thread's launches while it records a replay (kernel_runtime.replay): `launches` is a list of (spec, grid, arguments)
WATCHING = threading.local()


def shared_memory(arch: int) -> int:
    """Bytes of shared memory that kernels for an NVIDIA architecture are tiled for: one that is not in the table is taken to have the least."""
    return CUDA_SMEM_LIMIT.get(arch, min(CUDA_SMEM_LIMIT.values()))


@dataclass(frozen=True)
class Spec:
    """A kernel with its constants and the Triton types of its run-time arguments.

    types   run-time arguments in the kernel's order: name -> "*bf16", "*fp32", "i32", "fp32". Run-time integers are token or row counts
            and belong into the kernel's do_not_specialize, so that no length ever recompiles; sizes of the model are constants.
    hot     may contain no scalar loop when compiled for Ascend.
    targets backends this kernel is for ("cuda", "hip", "ascend"); a kernel with no Ascend form has a twin that has one. "cuda" kernels
            that use nothing of NVIDIA's alone are compiled for AMD as well, see `portable`.
    tokens  tokens that one pass of the loops without constant trip count handles (a part of one where a pass is a tile of a token: BD / D);
            0 = not stated. Where loops differ, argument -> tokens of a pass of the loop that touches it, see kernel_runtime.ascend.hivm.
            For the traffic estimate.
    minimal_bytes  bytes a token that the kernel must move between global memory and the chip, weights apart; 0 = not stated.
    arch    the NVIDIA architecture (90 is sm_90) that the kernel is for, or the first and the last one; None if it is for all.
    shared  bytes of shared memory on the NVIDIA architectures that the kernel is tiled for, from the first to below the last; None if it is
            for all.
    yields_on  NVIDIA architectures on which impl="auto" takes another kernel: there it runs only where it is asked for by name.
    """

    kernel: Any
    types: Mapping[str, str]
    consts: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    hot: bool = False
    targets: tuple[str, ...] = ("cuda", "ascend")
    options: Mapping[str, Any] = field(default_factory=dict)
    tokens: float | Mapping[str, float] = 0
    minimal_bytes: float = 0.0
    arch: int | tuple[int, int] | None = None
    shared: tuple[int, int] | None = None
    yields_on: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        settle(self.kernel)

    @property
    def name(self) -> str:
        return self.kernel.__name__

    @cached_property
    def identity(self) -> tuple[Any, ...]:
        """What tells two specialisations apart; equal for equal kernels, constants, types and options."""
        consts = tuple((n, repr(v)) for n, v in self.consts.items())
        options = tuple(sorted((n, repr(v)) for n, v in self.options.items()))
        return (self.kernel.__module__, self.name, tuple(self.types.items()), consts, self.num_warps, self.num_stages, options)

    @cached_property
    def keywords(self) -> dict[str, Any]:
        """Keyword arguments of a launch. Triton-Ascend ignores warps and stages, and warns about them."""
        if ON_ASCEND:
            return {**self.consts, **self.ascend_options}
        return {**self.consts, "num_warps": self.num_warps, "num_stages": self.num_stages, **self.options}

    @property
    def ascend_options(self) -> dict[str, Any]:
        """The options without those that are hints to GPU compilers."""
        return {name: value for name, value in self.options.items() if name not in GPU_HINTS}

    @cached_property
    def direct(self) -> DirectLaunch | None:
        """How `launch` starts the kernel without Triton's binding of arguments, None where it cannot."""
        return direct_launch(self.kernel, self.types, tuple(self.consts), self.keywords)

    def launch(self, grid: Sequence[int], *args: Any) -> Any:
        """Starts the kernel on the current device and stream; `args` are the run-time arguments in order. ValueError where its tiles need
        more than the device has."""
        for observer in LAUNCH_OBSERVERS:
            observer(self, args)
        grid = tuple(grid)
        if (launches := getattr(WATCHING, "launches", None)) is not None:
            launches.append((self, grid, args))
        try:
            return self.kernel[grid](*args, **self.keywords) if self.direct is None else self.direct(grid, args)
        except OutOfResources as error:
            raise ValueError(self._too_large(error)) from error

    def _too_large(self, error: OutOfResources) -> str:
        pointers = ", ".join(f"{name} {kind[1:]}" for name, kind in self.types.items() if kind.startswith("*"))
        sizes = ", ".join(f"{name} = {value}" for name, value in self.consts.items())
        needs = f"needs {error.required} of {error.name}, of which this device has {error.limit}"
        return f"{self.name} {needs} ({sizes}; {pointers}); impl='eager' runs the case without kernels"

    @property
    def portable(self) -> bool:
        """Whether the kernel is plain Triton, so that it compiles for every GPU; one for a single backend is taken not to be."""
        return "cuda" in self.targets and len(self.targets) > 1 and not self.gluon

    def runs_on(self, target: Any) -> bool:
        """Whether a Triton GPUTarget is of the architectures that the kernel is for; its backend is not asked for here."""
        if target.backend != "cuda":
            return True
        first, last = self.arch if isinstance(self.arch, tuple) else (self.arch or 0, self.arch or target.arch)
        least, below = self.shared or (0, shared_memory(target.arch) + 1)
        return bool(first <= target.arch <= last and least <= shared_memory(target.arch) < below)

    @property
    def gluon(self) -> bool:
        return bool(getattr(self.kernel, "is_gluon", bool)())

    def source(self) -> Any:
        """What Triton's compiler takes, with the specialisation that the launch above would pick for 16-byte aligned tensors."""
        names = self.kernel.arg_names
        runtime = [n for n in names if n not in self.consts]
        if runtime != list(self.types):
            raise ValueError(f"{self.name}: run-time arguments are {runtime} but the spec types {list(self.types)}")
        signature = {n: "constexpr" if n in self.consts else self.types[n] for n in names}
        attrs = {}
        for i, name in enumerate(names):
            constant = self.consts.get(name)
            if signature[name].startswith("*"):
                attrs[(i,)] = [["tt.divisibility", 16]]
            elif isinstance(constant, str):  # Triton's launch path takes a string constant for alignment marks, where "D" means 16 bytes
                attrs[(i,)] = [["tt.divisibility", 16]] if "D" in constant else []
        make = triton.compiler.ASTSource
        if self.gluon:
            make = importlib.import_module("triton.experimental.gluon._runtime").GluonASTSource
        return make(fn=self.kernel, signature=signature, constexprs=dict(self.consts), attrs=attrs)

    def compile(self, target: Any) -> Any:
        """Compiles for a triton GPUTarget without a device; returns the compiled kernel, whose metadata has shared memory and so on."""
        options = dict(num_warps=self.num_warps, num_stages=self.num_stages, **self.options)
        return triton.compile(self.source(), target=target, options=options)

    def cache_hash(self, target: Any) -> str:
        """The key (hex) under which Triton's cache holds this specialisation for `target`, without compiling it."""
        import hashlib

        from triton._C.libtriton import get_cache_invalidating_env_vars
        from triton.compiler.compiler import make_backend
        from triton.runtime.cache import get_cache_key

        backend = make_backend(target)
        options = backend.parse_options(dict(num_warps=self.num_warps, num_stages=self.num_stages, **self.options))
        key = get_cache_key(self.source(), backend, options, env_vars=get_cache_invalidating_env_vars())
        return hashlib.sha256(key.encode("utf-8")).hexdigest()

    def sample_arguments(self) -> list[Any]:
        """Arguments with which Triton's own `warmup` picks this specialisation: dtypes for pointers, numbers for the rest."""
        return [_SAMPLE_TENSOR[kind] if kind.startswith("*") else (0.5 if "fp" in kind else 16) for kind in self.types.values()]


_SAMPLE_TENSOR = {f"*{name}": dtype for dtype, name in TRITON_DTYPE.items()}
_SAMPLE_TENSOR |= {"*fp64": torch.float64, "*i8": torch.int8, "*u8": torch.uint8, "*i16": torch.int16, "*i1": torch.bool}
