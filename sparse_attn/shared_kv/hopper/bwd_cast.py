"""From the fp32 sums of the keys' gradients to their dtype, and from the order of the fused kernel's lanes to that of the channels."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernel_runtime.launch import TRITON_DTYPE, Spec


@triton.jit(do_not_specialize=["ori_rows", "rows"])
def cast_sums_kernel(sums, dori, dcmp, ori_rows, rows, D: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr):
    """sums [rows, D]: those of dori, then those of dcmp. Channel (r, j, lane, e) lies at (r, lane, j, e), see bwd_kernel.lanes_in_order."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    at = d // (4 * GROUP) * (4 * GROUP) + d % 8 // 2 * GROUP + d % (4 * GROUP) // 8 * 2 + d % 2
    x = tl.load(sums + row.to(tl.int64)[:, None] * D + at[None, :], mask=(row < rows)[:, None], other=0.0)
    own = row.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(dori + own, x.to(dori.dtype.element_ty), mask=(row < ori_rows)[:, None])
    own = (row - ori_rows).to(tl.int64)[:, None] * D + d[None, :]
    tl.store(dcmp + own, x.to(dcmp.dtype.element_ty), mask=((row >= ori_rows) & (row < rows))[:, None])


@cache
def cast_spec(dtype: torch.dtype, D: int, group: int) -> Spec:
    x = f"*{TRITON_DTYPE[dtype]}"
    types = {"sums": "*fp32", "dori": x, "dcmp": x, "ori_rows": "i32", "rows": "i32"}
    return Spec(cast_sums_kernel, types=types, consts={"D": D, "GROUP": group, "BM": 8}, targets=("cuda",))


def cast_sums(sums: torch.Tensor, dori: torch.Tensor, dcmp: torch.Tensor, group: int) -> None:
    """Writes dori and dcmp [..., D] from sums, flat fp32: what belongs to dori, then what belongs to dcmp. group: values of 16 bytes."""
    D = dori.shape[-1]
    ori_rows, rows = dori.numel() // D, sums.numel() // D
    if rows:
        spec = cast_spec(dori.dtype, D, group)
        spec.launch((triton.cdiv(rows, spec.consts["BM"]),), sums, dori, dcmp if dcmp.numel() else dori, ori_rows, rows)
