"""What `--compile` compiles: the parts of a layer between FSDP's hooks, the experts' exchange and the library's kernels.

Dynamo does not trace FSDP's hooks, and each of a layer's fp32 islands has two of them: a whole layer falls into about ten graphs, each compiled
anew for another sequence length. So every part here is compiled by itself, inside the hooks, as one graph (a break is an error), and for any
number of tokens: what may change is marked.

    always                              the routers' scores, choice and weights; the loss of the logits
    where the trainer's own kernels     RMS norms, RoPE with the products around it, SwiGLU with the shared expert's products, the weighted sum of
    (fused.py) do not run               the experts' rows
    with impl = eager                   mHC and the compressors' pooling: the other impls make each of them one op, with nothing to fuse

A kernel is called faster outside of a graph than from one (its arguments are checked once and its launch is replayed), and there is nothing left
to fuse around it. Attention and indexer in eager loop over chunks in Python, which a graph would unroll: they stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kernel_runtime import interpreting
from kernel_runtime.impl import KERNEL_DEVICES
from train_example.attention import Attention, Compressor, GatedPool, Indexer, RMSNorm
from train_example.model import DeepSeekV4, Layer, ModelHyperConnection, ModelHyperHead
from train_example.moe import Experts, MoE, Router, SharedExpert

GRAPHS_OF_A_PART = 64
ALWAYS: dict[type[nn.Module], tuple[str, ...]] = {Router: ("forward",), DeepSeekV4: ("loss_sum",)}
WITHOUT_FUSED: dict[type[nn.Module], tuple[str, ...]] = {
    RMSNorm: ("forward",),
    Attention: ("queries", "rotated", "projected"),
    Compressor: ("rotated",),
    Indexer: ("queries",),
    SharedExpert: ("hidden",),
    Experts: ("activate",),
    MoE: ("combine",),
}
EAGER: dict[type[nn.Module], tuple[str, ...]] = {
    ModelHyperConnection: ("forward",),
    ModelHyperHead: ("forward",),
    Layer: ("leave",),
    GatedPool: ("forward",),
}


def compile_parts(model: nn.Module, impl: str, device: torch.device) -> None:
    """Replace the methods that `parts` lists, in place; before the model is sharded. They are compiled at their first call."""
    limits = torch._dynamo.config  # a graph counts for the code, which modules share: one a size of a part, with gradients and without
    limits.recompile_limit = max(limits.recompile_limit, GRAPHS_OF_A_PART)
    for module, name in list(parts(model, impl, device)):
        setattr(module, name, one_graph(getattr(module, name)))


def parts(model: nn.Module, impl: str, device: torch.device) -> Iterator[tuple[nn.Module, str]]:
    """The methods that are compiled for an `impl` on a device, with their modules."""
    kernels = impl != "eager" and (device.type in KERNEL_DEVICES or interpreting())
    wanted = dict(ALWAYS)
    if not kernels or device.type == "npu":  # fused.py has none for it
        wanted |= WITHOUT_FUSED
    if impl == "eager":
        wanted |= EAGER
    for module in model.modules():
        for kind, names in wanted.items():
            if isinstance(module, kind):
                yield from ((module, name) for name in names)


def one_graph(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, compiled as a whole, for any S: dim 1 of tensors of three or more dims (the first is B, the same in all of a run), else dim 0."""
    compiled = torch.compile(function, fullgraph=True)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        _mark(args)
        return compiled(*args)

    return call


def _mark(args: tuple[Any, ...]) -> None:
    for arg in args:
        if isinstance(arg, Tensor):
            torch._dynamo.maybe_mark_dynamic(arg, int(arg.dim() > 2))
        elif isinstance(arg, tuple):
            _mark(arg)
