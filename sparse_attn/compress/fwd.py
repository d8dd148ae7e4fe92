"""compress_kv forward: kernel, table of tiles, launcher.

Bytes: kv and gate are read once (each half of a token by the one entry that takes it up) and an entry is written once,
    2 * C * D + D / ratio elements a token        [bytes in bf16, D = 512: 4352 at ratio 4 with overlap, 2056 at 128]
and that is all: a window is one tile, so the softmax never leaves the registers. Windows of more than MAX_ROWS tokens go by in tiles of
that many with a running maximum.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from kernel_runtime.launch import ON_ASCEND, TRITON_DTYPE, Spec
from sparse_attn.compress.core import exponentials, load_bias, load_tile
from sparse_attn.compress.slots import slot_of, slots_of

MAX_ROWS = 128  # tokens of a tile
PROGRAMS = 48 if ON_ASCEND else 1024  # of the grid, together


@triton.jit
def _take(top, total, acc, z, v):
    """Softmax-weighted sum over more tokens: running maximum, sum of exponentials and sum of values, [BD] each."""
    higher = tl.maximum(top, tl.max(z, 0))
    scale = tl.exp2(top - higher)
    e = tl.exp2(z - higher[None, :])
    return higher, total * scale + tl.sum(e, 0), acc * scale + tl.sum(e * v, 0)


@triton.jit(do_not_specialize=["count", "n", "S", "E"])
def compress_fwd_kernel(
    kv, gate, bias, out, lse, slots, count, n, S, E,
    R: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, OVERLAP: tl.constexpr, PACKED: tl.constexpr, LSE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = 2 if OVERLAP else 1
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    rows = tl.arange(0, BR)
    if BR >= R:
        b = load_bias(bias, rows, d, C - 1, R, D, C)
        b_last = b
        if OVERLAP:
            b_last = load_bias(bias, rows, d, 0, R, D, C)
    for slot in tl.range(tl.program_id(1), count, tl.num_programs(1), num_stages=STAGES):
        own, tokens, entry, last = slot_of(slots, slot, n, S, E, R, PACKED)
        tokens = tl.where(entry >= 0, tokens, 0)
        tokens_last = tl.where(last & (entry >= 0), R, 0)
        if BR >= R:
            z, v = load_tile(kv, gate, b, own, tokens, rows, d, C - 1, D, C)
            if OVERLAP:
                z_last, v_last = load_tile(kv, gate, b_last, own - R, tokens_last, rows, d, 0, D, C)
                z_last = tl.where(tokens_last > 0, z_last, float("-inf"))
                e, e_last, total = exponentials(z, z_last, OVERLAP)
                pooled = tl.sum(e * v + e_last * v_last, 0) / total
            else:
                e, e_last, total = exponentials(z, z, OVERLAP)
                pooled = tl.sum(e * v, 0) / total
        else:
            top = tl.zeros([BD], tl.float32) - float("inf")
            total = tl.zeros([BD], tl.float32)
            acc = tl.zeros([BD], tl.float32)
            for r0 in range(0, R, BR):
                b = load_bias(bias, r0 + rows, d, C - 1, R, D, C)
                z, v = load_tile(kv, gate, b, own, tokens, r0 + rows, d, C - 1, D, C)
                top, total, acc = _take(top, total, acc, z, v)
            if OVERLAP:
                for r0 in range(0, R, BR):
                    b = load_bias(bias, r0 + rows, d, 0, R, D, C)
                    z, v = load_tile(kv, gate, b, own - R, tokens_last, r0 + rows, d, 0, D, C)
                    z = tl.where(tokens_last > 0, z, float("-inf"))
                    top, total, acc = _take(top, total, acc, z, v)
            pooled = acc / total
            if LSE:
                tl.store(lse + tl.cast(slot, tl.int64) * D + d, top + tl.log2(total), mask=d < D)
        # rows of a pack behind the last entry: nothing was read, so all values and the sum are zero
        tl.store(out + tl.cast(slot, tl.int64) * D + d, pooled.to(out.dtype.element_ty), mask=d < D)


@dataclass(frozen=True)
class Tiles:
    """Tokens and channels of a tile, warps of a program, programs of the grid, windows in flight (1: no loads ahead)."""

    BR: int
    BD: int
    num_warps: int
    programs: int
    stages: int = 1


def block(R: int, D: int, overlap: bool, sums: bool) -> tuple[int, int]:
    """BR, BD. On a GPU 512 elements and a row of 64 to 256 bytes (measured: NOTES_compress.md); on Ascend what its 192 KB hold, the
    bias's sums among it."""
    BR = min(MAX_ROWS, triton.next_power_of_2(R))
    if ON_ASCEND:
        BD = min(max(32 if BR == MAX_ROWS or (overlap and sums and BR > 32) else 64, 1024 // BR), 256)
    else:
        BD = min(max(32, 512 // BR), 128)
    return BR, min(BD, max(16, triton.next_power_of_2(D)))


def stages_of(BR: int, R: int, overlap: bool) -> int:
    """Loads for the next two windows are on their way while one is computed: half of all the speed. Fewer where shared memory of small
    GPUs would not hold them; none for a window in several tiles, whose loop is another."""
    return 1 if ON_ASCEND or BR < R else 2 if overlap and BR >= 64 else 3


def forward_tiles(R: int, D: int, overlap: bool) -> Tiles:
    """The table: at most 64 elements a thread in the one or two tiles of a window."""
    BR, BD = block(R, D, overlap, sums=False)
    return Tiles(BR, BD, max(1, BR * BD // (1024 if overlap else 2048)), PROGRAMS, stages_of(BR, R, overlap))


@cache
def forward_spec(dtype: torch.dtype, bias: torch.dtype, R: int, D: int, overlap: bool, packed: bool, lse: bool = False) -> Spec:
    """lse: as the backward of long windows runs it, with fp32 results and their log-sum-exp."""
    x, tiles = f"*{TRITON_DTYPE[dtype]}", forward_tiles(R, D, overlap)
    return Spec(
        compress_fwd_kernel,
        types={
            "kv": x, "gate": x, "bias": f"*{TRITON_DTYPE[bias]}", "out": "*fp32" if lse else x, "lse": "*fp32", "slots": "*i32",
            **dict.fromkeys(("count", "n", "S", "E"), "i32"),
        },
        consts={"R": R, "D": D, "BR": tiles.BR, "BD": tiles.BD, "OVERLAP": overlap, "PACKED": packed, "LSE": lse, "STAGES": tiles.stages},
        num_warps=tiles.num_warps,
        hot=not packed,  # a pack's slots are read from memory one by one, which counts as a scalar loop
    )  # fmt: skip


def launch_forward(
    kv: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None,
    ratio: int, overlap: bool, cu_seqlens: torch.Tensor | None,
) -> None:  # fmt: skip
    """Fills out, and lse if given (windows of more than MAX_ROWS tokens alone); kv, gate and bias are contiguous."""
    D = out.shape[-1]
    slots, count, n, S, E = slots_of(kv, ratio, cu_seqlens, tails=False)
    if not count:
        return
    spec = forward_spec(kv.dtype, bias.dtype, ratio, D, overlap, slots is not None, lse is not None)
    slices = triton.cdiv(D, spec.consts["BD"])
    groups = min(count, triton.cdiv(forward_tiles(ratio, D, overlap).programs, slices))
    # a tensor that the case does not use is stood in for by another
    any_int = torch.empty(1, dtype=torch.int32, device=kv.device) if slots is None else slots
    any_float = torch.empty(1, dtype=torch.float32, device=kv.device) if lse is None else lse
    spec.launch((slices, groups), kv, gate, bias, out, any_float, any_int, count, n, S, E)


def compress_fwd(
    kv: torch.Tensor, gate: torch.Tensor, position_bias: torch.Tensor, ratio: int, overlap: bool, cu_seqlens: torch.Tensor | None
) -> torch.Tensor:
    """out of the op compress_fwd."""
    *lead, tokens, channels = kv.shape
    out = torch.empty((*lead, tokens // ratio, channels // (2 if overlap else 1)), dtype=kv.dtype, device=kv.device)
    launch_forward(kv.contiguous(), gate.contiguous(), position_bias.contiguous(), out, None, ratio, overlap, cu_seqlens)
    return out
