"""The registry of kernel specialisations: what an op's launcher can pick for a model, for warmup and ahead-of-time compilation.

Every op registers one function `specs(shape: ModelShape) -> iterable of Spec`; it builds the specs with the very functions that its
launchers use, so nothing is written twice.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass

_SPECS: dict[str, str] = {}


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that decide which specialisations its kernels need. dtype is Triton's name of the streams' dtype."""

    hidden: int
    hc_mult: int
    heads: int
    head_dim: int
    window: int
    ratios: tuple[int, ...]  # compression ratios of the layers that compress
    index_heads: int
    index_dim: int
    index_topk: int
    sinkhorn_iters: int = 20
    dtype: str = "bf16"


def register_specs(name: str, path: str) -> None:
    """Registers "module:function", called with a ModelShape, under the op's name. Imported only when asked for (it imports Triton)."""
    _SPECS[name] = path


def registered_specs(shape: ModelShape) -> Iterator[tuple[str, object]]:
    """(op name, Spec) of every specialisation that the registered ops need for a model of this shape."""
    for name, path in sorted(_SPECS.items()):
        module, function = path.split(":")
        for spec in getattr(importlib.import_module(module), function)(shape):
            yield name, spec
