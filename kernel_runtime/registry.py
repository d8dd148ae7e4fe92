"""The registry of kernel specialisations: what an op's launcher can pick for a model, for warmup and ahead-of-time compilation.

Every op registers one function `specs(shape: ModelShape) -> iterable of Spec`; it builds the specs with the very functions that its
launchers use, so nothing is written twice.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

OP_PACKAGES = ("mhc_ops", "sparse_attn", "indexer")  # importing one fills the registry; named here, never imported by this package itself
TRAINER_OPS = ("train_example.fused",)
DTYPES = ("bf16", "fp16", "fp32")  # of the streams, in Triton's names

_SPECS: dict[str, str] = {}

# field of ModelShape -> the trainer's name of it
_TRAINER_NAMES = {
    "hidden": "hidden_size", "hc_mult": "hc_mult", "heads": "num_heads", "head_dim": "head_dim", "window": "window",
    "index_heads": "index_heads", "index_dim": "index_head_dim", "index_topk": "index_topk", "sinkhorn_iters": "hc_iters",
    "csa_ratio": "csa_ratio",
}  # fmt: skip


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
    csa_ratio: int = 4  # the ratio whose layers have an overlapping compressor and an indexer, where `ratios` holds it
    dtype: str = "bf16"
    source: Any = field(default=None, compare=False, repr=False)  # what it was made of, for kernels whose sizes are not here

    def __post_init__(self) -> None:
        """The sizes often come from a file: a wrong one is to be named here and not by a kernel's table."""
        for item in fields(self):
            value = getattr(self, item.name)
            numbers = value if item.name == "ratios" else (value,)
            if item.name not in ("dtype", "source") and not all(type(n) is int and n >= 0 for n in numbers):
                raise ValueError(f"{_TRAINER_NAMES.get(item.name, 'compress_ratios')} must be of whole numbers, got {value!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")


PRESETS = {
    "tiny": ModelShape(64, 4, 4, 32, 16, (4, 16), 4, 32, 8, dtype="fp32"),
    "flash": ModelShape(4096, 4, 64, 512, 128, (4, 128), 64, 128, 512),
    "pro": ModelShape(7168, 4, 128, 512, 128, (4, 128), 64, 128, 1024),
}


def compressed_ratios(ratios: Iterable[int]) -> tuple[int, ...]:
    """The ratios of layers that compress, each once; 0 and 1 stand for a window-only layer."""
    return tuple(sorted({r for r in ratios if r > 1}))


def shape_of(config: Any, dtype: str | None = None) -> ModelShape:
    """ModelShape of a preset's name, of a trainer's model configuration (object or mapping), or of a whole trainer configuration.

    A mapping may name a preset and override single sizes, as the trainer's config files do; `dtype` is Triton's name ("bf16", "fp32").
    ValueError for a name that is no preset, for another dtype, or where a size is missing or no whole number.
    """
    if isinstance(config, ModelShape):
        return config if dtype is None else replace(config, dtype=dtype)
    if isinstance(config, str):
        if config not in PRESETS:
            raise ValueError(f"unknown model {config!r}, wanted one of {', '.join(PRESETS)} or a file")
        return shape_of(PRESETS[config], dtype)
    get = config.get if isinstance(config, Mapping) else lambda name, default=None: getattr(config, name, default)
    model = get("model")
    if model is not None:
        if isinstance(model, Mapping) and "preset" not in model and get("preset"):
            model = {"preset": get("preset"), **model}
        return shape_of(model, dtype or get("dtype"))
    base = shape_of(get("preset"), None) if get("preset") else None
    found: dict[str, Any] = {own: get(name) for own, name in _TRAINER_NAMES.items() if get(name) is not None}
    ratios = get("compress_ratios")
    if ratios is not None:
        mtp = get("mtp_compress_ratio") if get("mtp_layers") else None
        if not all(type(r) is int for r in ratios):
            raise ValueError(f"compress_ratios must be of whole numbers, got {ratios!r}")
        found["ratios"] = compressed_ratios([*ratios, mtp or 0])
    missing = [f.name for f in fields(ModelShape) if f.name not in found and f.name not in ("sinkhorn_iters", "csa_ratio", "dtype", "source")]
    if base is None and missing:
        raise ValueError(f"the model configuration lacks {', '.join(_TRAINER_NAMES.get(m, 'compress_ratios') for m in missing)}")
    found["source"] = config
    shape = replace(base, **found) if base is not None else ModelShape(**found)
    return shape if dtype is None else replace(shape, dtype=dtype)


def import_ops(trainer: bool = False) -> None:
    """Imports the op packages that are installed, which fills the registry; with `trainer` also the example's, where there is a checkout."""
    for package in (*OP_PACKAGES, *(TRAINER_OPS if trainer else ())):
        parent = package.partition(".")[0]
        if importlib.util.find_spec(parent) is not None and importlib.util.find_spec(package) is not None:
            importlib.import_module(package)


def register_specs(name: str, path: str) -> None:
    """Registers "module:function", called with a ModelShape, under the op's name. Imported only when asked for (it imports Triton)."""
    _SPECS[name] = path


def registered_specs(shape: ModelShape) -> Iterator[tuple[str, Any]]:
    """(op name, Spec) of every specialisation that the registered ops need for a model of this shape."""
    for name, path in sorted(_SPECS.items()):
        module, function = path.split(":")
        for spec in getattr(importlib.import_module(module), function)(shape):
            yield name, spec
