"""compress_kv: the public function."""

from __future__ import annotations

import torch
from torch import Tensor

from kernel_runtime import apply_function, check_dtype, check_int, check_same, check_shape, run_eager, select_impl
from kernel_runtime.checks import FLOATS
from reference import compress as reference
from sparse_attn.compress.op import Compress
from sparse_attn.library import check_cu_seqlens, check_flag

OP = "compress_kv"


def compress_kv(
    kv: Tensor,
    gate: Tensor,
    position_bias: Tensor,
    ratio: int,
    *,
    overlap: bool = False,
    cu_seqlens: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Every `ratio` tokens become one entry: a softmax over the tokens, channel by channel, of gate + position_bias weighs their kv.

    kv, gate        [B, S, C * D], C = 2 with overlap, else 1; packed, with cu_seqlens: [T, C * D]. bf16, fp16 or fp32 (fp64: eager form
                    alone), one dtype, any strides.
    position_bias   [ratio, C * D] fp32, or in the dtype of kv.
    ratio           tokens of a window, at least 1; tokens of an incomplete last window are dropped.
    overlap         the first D channels of a token belong to the entry of the next window, the last D to that of its own; the window
                    before a sequence's (document's) first does not exist.
    cu_seqlens      [documents + 1] int32; every document is compressed on its own. Values are trusted. Tokens past the last document see
                    no gradient; what they hold, and the gradient of rows that are no entries, may be anything, NaN too.
    impl            "auto", "triton" or "eager", see kernel_runtime.impl.

    Returns [B, S // ratio, D] in the dtype of kv, before norm and rotary embedding; packed: [T // ratio, D], of which the first
    compressed_cu_seqlens(cu_seqlens, ratio)[-1] rows are entries and the rest zero. The softmax is in fp32.
    Differentiable in kv, gate and position_bias; double backward is refused. Formulas: reference/compress.py.
    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape, device or value.
    """
    check_int(OP, "ratio", ratio, minimum=1)
    check_flag(OP, "overlap", overlap)
    check_dtype(OP, "kv", kv, FLOATS)
    check_shape(OP, "kv", kv, ("B", "S", "C * D") if cu_seqlens is None else ("T", "C * D"))
    if kv.shape[-1] < 1 or (overlap and kv.shape[-1] % 2):
        raise ValueError(f"{OP}: kv has {kv.shape[-1]} channels, wanted {'an even number, D of each series' if overlap else 'at least 1'}")
    check_same(OP, "gate", gate, "kv", kv)
    check_shape(OP, "gate", gate, kv.shape)
    check_dtype(OP, "position_bias", position_bias, (torch.float32, kv.dtype) if kv.dtype != torch.float64 else (torch.float64,))
    check_same(OP, "position_bias", position_bias, "kv", kv, dtype=False)
    check_shape(OP, "position_bias", position_bias, (ratio, kv.shape[-1]))
    if cu_seqlens is not None:
        check_cu_seqlens(OP, "cu_seqlens", cu_seqlens, "kv", kv)
    how = select_impl(OP, impl, kv)
    if impl == "eager":
        return run_eager(reference.compress_kv, kv, gate, position_bias, ratio, overlap=overlap, cu_seqlens=cu_seqlens)
    return apply_function(Compress, kv, gate, position_bias, ratio, overlap, cu_seqlens, how)
