"""Spec: one specialisation of a kernel, the single source for its launch and for its compilation ahead of time. Imports Triton."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

TRITON_DTYPE = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}
CUDA_SMEM_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}


@dataclass(frozen=True)
class Spec:
    """A kernel with its constants and the Triton types of its run-time arguments.

    types   run-time arguments in the kernel's order: name -> "*bf16", "*fp32", "i32", "fp32". Run-time integers are token or row counts
            and belong into the kernel's do_not_specialize, so that no length ever recompiles; sizes of the model are constants.
    hot     may contain no scalar loop when compiled for Ascend.
    targets backends this kernel is for; a kernel with no Ascend form has a twin that has one.
    """

    kernel: Any
    types: Mapping[str, str]
    consts: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    hot: bool = False
    targets: tuple[str, ...] = ("cuda", "ascend")
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.kernel.__name__

    def launch(self, grid: Sequence[int], *args: Any) -> Any:
        """Starts the kernel on the current device and stream; `args` are the run-time arguments in order."""
        return self.kernel[tuple(grid)](*args, **self.consts, num_warps=self.num_warps, num_stages=self.num_stages, **self.options)

    def source(self) -> triton.compiler.ASTSource:
        """What Triton's compiler takes, with the specialisation that the launch above would pick for 16-byte aligned tensors."""
        names = self.kernel.arg_names
        runtime = [n for n in names if n not in self.consts]
        if runtime != list(self.types):
            raise ValueError(f"{self.name}: run-time arguments are {runtime} but the spec types {list(self.types)}")
        signature = {n: "constexpr" if n in self.consts else self.types[n] for n in names}
        attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if str(signature[n]).startswith("*")}
        return triton.compiler.ASTSource(fn=self.kernel, signature=signature, constexprs=dict(self.consts), attrs=attrs)

    def compile(self, target: Any) -> Any:
        """Compiles for a triton GPUTarget without a device; returns the compiled kernel, whose metadata has shared memory and so on."""
        options = dict(num_warps=self.num_warps, num_stages=self.num_stages, **self.options)
        return triton.compile(self.source(), target=target, options=options)
