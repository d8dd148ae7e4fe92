"""KL loss on all visible blocks: teacher and gradients of a chunk of queries, from rows [batches, n, S3] in place of lists of slots.

The scores are those of `indexer.lightning.fwd.scores_kernel`. Columns of a row count from the query's own document, and those past the
visible ones are neither read nor written. The gradient of k needs no atomics: a program owns a tile of keys and walks over queries, every
SPLITS-th one, so that there are programs enough for a chip; the partial sums are added in a fixed order.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from indexer.core import product, visible
from kernel_runtime.launch import ON_ASCEND, TRITON_DTYPE, Spec

COLUMNS = 64 if ON_ASCEND else 128  # queries x heads of a tile of the teacher
TEACHER_KEYS = 32 if ON_ASCEND else 128
BLOCK_HEADS = 64
BLOCK_KEYS = 32 if ON_ASCEND else 64
PROGRAMS = 512  # tiles of keys x splits that the gradient of k aims at
MAX_SPLITS = 64
LOG2E = tl.constexpr(1.4426950408889634)
CHUNK = ("b0", "i0", "n", "S", "S3", "rows", "q_offset")
CHUNK_TYPES = dict.fromkeys(CHUNK, "i32")


@triton.jit
def logits(q_tile, q_mask, k_tile, k_mask, scale, D: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr):
    """scale * (cmp_kv . q) [BK keys, COLS queries x heads], D in pieces of BD channels."""
    z = tl.zeros([BK, COLS], tl.float32)
    for j in tl.range(0, D, BD, num_stages=STAGES):
        z = product(tl.load(k_tile + j, mask=k_mask, other=0.0), tl.trans(tl.load(q_tile + j, mask=q_mask, other=0.0)), z)
    return z * scale


@triton.jit(do_not_specialize=["scale", "b0", "i0", "n", "S", "S3", "rows", "q_offset"])
def dense_lse_kernel(
    q, cmp_kv, span, lse, scale, b0, i0, n, S, S3, rows, q_offset,
    N: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, R: tl.constexpr, TABLE: tl.constexpr, NQ: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """lse[row, head] of z over the row's visible blocks, -inf where it sees none."""
    batch = b0 + tl.program_id(1)
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) * NQ
    column = tl.arange(0, NQ * HB)
    head = column % HB
    local = tile + column // HB
    on = (local < n) & (head < N)
    row = batch.to(tl.int64) * S + i0 + local
    start, count = visible(span, row, i0 + local, local < n, rows, S3, q_offset, R, TABLE)
    low = tl.min(tl.where(count > 0, start, S3), 0)
    high = tl.max(tl.where(count > 0, start + count, 0), 0)
    d = tl.arange(0, BD)
    token = batch.to(tl.int64) * S + i0 + tile
    q_tile = q + token * N * D + (column // HB * N + head)[:, None] * D + d[None, :]
    keys = tl.arange(0, BK)
    top = tl.full([NQ * HB], float("-inf"), tl.float32)
    mass = tl.zeros([NQ * HB], tl.float32)
    for j in range(low, high, BK):
        s = j + keys
        k_tile = cmp_kv + (batch.to(tl.int64) * S3 + j) * D + keys[:, None] * D + d[None, :]
        z = logits(q_tile, on[:, None], k_tile, (s < high)[:, None], scale * LOG2E, D, BD, BK, NQ * HB, STAGES)
        place = s[:, None] - start[None, :]
        z = tl.where((place >= 0) & (place < count[None, :]), z, float("-inf"))
        higher = tl.maximum(top, tl.max(z, 0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        mass = mass * tl.exp2(top - shift) + tl.sum(tl.exp2(z - shift[None, :]), 0)
        top = higher
    found = tl.where(mass > 0.0, (top + tl.log2(tl.where(mass > 0.0, mass, 1.0))) / LOG2E, float("-inf"))
    tl.store(lse + row * N + head, found, mask=on)


@triton.jit(do_not_specialize=["scale", "b0", "i0", "n", "S", "S3", "rows", "q_offset"])
def dense_teacher_kernel(
    q, cmp_kv, lse, span, teacher, scale, b0, i0, n, S, S3, rows, q_offset,
    N: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, R: tl.constexpr, TABLE: tl.constexpr, NQ: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """teacher[row, column] = mean over heads of exp(z - lse): one tile of keys, NQ queries."""
    tiles = tl.cdiv(S3, BK)
    batch = b0 + tl.program_id(1)
    tile = (tl.num_programs(0) // tiles - 1 - tl.program_id(0) // tiles) * NQ
    local = tile + tl.arange(0, NQ)
    start, count = visible(span, batch.to(tl.int64) * S + i0 + local, i0 + local, local < n, rows, S3, q_offset, R, TABLE)
    low = tl.min(tl.where(count > 0, start, S3), 0)
    high = tl.max(tl.where(count > 0, start + count, 0), 0)
    j = tl.program_id(0) % tiles * BK
    if (j < high) & (j + BK > low):
        column = tl.arange(0, NQ * HB)
        head = column % HB
        on = (tile + column // HB < n) & (head < N)
        d = tl.arange(0, BD)
        keys = tl.arange(0, BK)
        s = j + keys
        token = batch.to(tl.int64) * S + i0 + tile
        q_tile = q + token * N * D + (column // HB * N + head)[:, None] * D + d[None, :]
        k_tile = cmp_kv + (batch.to(tl.int64) * S3 + j) * D + keys[:, None] * D + d[None, :]
        z = logits(q_tile, on[:, None], k_tile, (s < high)[:, None], scale * LOG2E, D, BD, BK, NQ * HB, STAGES)
        lse2 = tl.load(lse + token * N + column // HB * N + head, mask=on, other=float("-inf")) * LOG2E
        lse2 = tl.where(lse2 > float("-inf"), lse2, float("inf"))  # a head that saw nothing gives 0, as does one with lse = +inf
        total = tl.sum(tl.reshape(tl.exp2(z - lse2[None, :]), [BK, NQ, HB]), 2) / N
        out = teacher + (tl.program_id(1) * n + tile).to(tl.int64) * S3
        place = s[:, None] - start[None, :]
        tl.store(out + tl.arange(0, NQ)[None, :] * S3 + place, total, mask=(place >= 0) & (place < count[None, :]))


@triton.jit(do_not_specialize=["b0", "i0", "n", "S", "S3", "rows", "q_offset"])
def dense_dq_kernel(
    q, k, weights, dscores, span, dq, dweights, b0, i0, n, S, S3, rows, q_offset,
    H: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr, TABLE: tl.constexpr, BS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dq = w (dS'^T k) and dw = rowsum(q (dS'^T k)) of one query and HB heads, dS' = dI 1[S > 0]."""
    local = tl.num_programs(0) - 1 - tl.program_id(0)
    batch = (b0 + tl.program_id(1)).to(tl.int64)
    row = batch * S + i0 + local
    start, count = visible(span, row, i0 + local, local < n, rows, S3, q_offset, R, TABLE)
    head = tl.program_id(2) * HB + tl.arange(0, HB)
    d = tl.arange(0, DP)
    q_mask = (head < H)[:, None] & (d < D)[None, :]
    place = row * H * D + head[:, None] * D + d[None, :]
    q_t = tl.trans(tl.load(q + place, mask=q_mask, other=0.0))
    sums = tl.zeros([HB, DP], tl.float32)
    slot = tl.arange(0, BS)
    keys = k + (batch * S3 + start) * D
    grads = dscores + (tl.program_id(1) * n + local).to(tl.int64) * S3
    for j in tl.range(0, count, BS, num_stages=STAGES):
        on = j + slot < count
        grad = tl.load(grads + j + slot, mask=on, other=0.0)
        block = tl.load(keys + (j + slot)[:, None].to(tl.int64) * D + d[None, :], mask=on[:, None] & (d < D)[None, :], other=0.0)
        positive = product(block, q_t, tl.zeros([BS, HB], tl.float32)) > 0.0
        if q.dtype.element_ty == tl.float16:  # held between -1 and 1, so that small gradients are not lost
            peak = tl.max(tl.abs(grad), 0)
            ds = tl.where(positive, (grad / tl.where(peak > 0.0, peak, 1.0))[:, None], 0.0).to(tl.float16)
            sums += product(tl.trans(ds), block, tl.zeros([HB, DP], tl.float32)) * peak
        else:
            ds = tl.where(positive, grad[:, None], 0.0).to(q.dtype.element_ty)
            sums = product(tl.trans(ds), block, sums)
    w = tl.load(weights + row * H + head, mask=head < H, other=0.0).to(tl.float32)
    again = tl.load(q + place, mask=q_mask, other=0.0).to(tl.float32)
    tl.store(dweights + row * H + head, tl.sum(again * sums, 1), mask=head < H)
    tl.store(dq + place, (sums * w[:, None]).to(dq.dtype.element_ty), mask=q_mask)


@triton.jit
def add_query(
    total, k_tile, q, weights, grads, row, h, on, H: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """total + (dI w 1[S > 0]) q over HB heads of one query; grads points at dI of each key."""
    head = h + tl.arange(0, HB)
    d = tl.arange(0, DP)
    grad = tl.load(grads, mask=on, other=0.0)
    w = tl.load(weights + row * H + head, mask=head < H, other=0.0).to(tl.float32)
    q_tile = tl.load(q + row * H * D + head[:, None] * D + d[None, :], mask=(head < H)[:, None] & (d < D)[None, :], other=0.0)
    positive = product(k_tile, tl.trans(q_tile), tl.zeros([BK, HB], tl.float32)) > 0.0
    if q.dtype.element_ty == tl.float16:
        one = tl.max(tl.abs(grad), 0)
        two = tl.max(tl.abs(w), 0)
        grad = grad / tl.where(one > 0.0, one, 1.0)
        w = w / tl.where(two > 0.0, two, 1.0)
        ds = tl.where(positive, grad[:, None] * w[None, :], 0.0).to(tl.float16)
        total += product(ds, q_tile, tl.zeros([BK, DP], tl.float32)) * (one * two)
    else:
        ds = tl.where(positive, grad[:, None] * w[None, :], 0.0).to(q.dtype.element_ty)
        total = product(ds, q_tile, total)
    return total


@triton.jit(do_not_specialize=["b0", "i0", "n", "S", "S3", "rows", "q_offset"])
def dense_dk_kernel(
    q, k, weights, dscores, span, partial, b0, i0, n, S, S3, rows, q_offset,
    H: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr, TABLE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """partial[split, batch, key] += dk of the queries split, split + SPLITS, .. of the chunk; SPLITS is the size of the grid's last axis."""
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    batch = (b0 + tl.program_id(1)).to(tl.int64)
    s = tl.program_id(0) * BK + tl.arange(0, BK)
    d = tl.arange(0, DP)
    mask = (s < S3)[:, None] & (d < D)[None, :]
    k_tile = tl.load(k + (batch * S3 + s)[:, None] * D + d[None, :], mask=mask, other=0.0)
    first = 0
    if not TABLE:  # the first query that sees the first key of the tile
        first = tl.minimum(tl.maximum((tl.program_id(0) * BK + 1) * R - 1 - q_offset - i0, 0), n)
    total = tl.zeros([BK, DP], tl.float32)
    for x in range(0, (n - first - split + splits - 1) // splits):
        local = first + split + x * splits
        row = batch * S + i0 + local
        start, count = visible(span, row, i0 + local, local < n, rows, S3, q_offset, R, TABLE)
        column = s - start
        on = (column >= 0) & (column < count)
        grads = dscores + (tl.program_id(1) * n + local).to(tl.int64) * S3 + tl.where(on, column, 0)
        heads = H
        if TABLE:  # none where the query sees no key of the tile
            heads = tl.max(on.to(tl.int32), 0) * H
        for h in range(0, heads, HB):
            total = add_query(total, k_tile, q, weights, grads, row, h, on, H, HB, D, DP, BK)
    out = partial + ((split.to(tl.int64) * (rows // S) + batch) * S3 + s)[:, None] * D + d[None, :]
    tl.store(out, tl.load(out, mask=mask, other=0.0) + total, mask=mask)


@cache
def dense_teacher_spec(dtype: torch.dtype, heads: int, dim: int, cmp_ratio: int, table: bool, own_lse: bool) -> Spec:
    """`own_lse`: the kernel that makes lse rather than the teacher."""
    name = TRITON_DTYPE[dtype]
    block = max(16, triton.next_power_of_2(heads))
    # on Ascend a tile of one query does not compile, as it is no sum over heads alone
    columns = max(block * (2 if ON_ASCEND and not own_lse else 1), 32 if dtype == torch.float32 else COLUMNS)
    # two vectors a column are held through the loop of lse; the teacher's tile of 256 columns is one of Ascend alone
    tile = 32 if dtype == torch.float32 else TEACHER_KEYS // (2 if columns > 128 or (own_lse and not ON_ASCEND) else 1)
    tensors = ("q", "cmp_kv", "span", "lse") if own_lse else ("q", "cmp_kv", "lse", "span", "teacher")
    kinds = {"q": f"*{name}", "cmp_kv": f"*{name}", "lse": "*fp32", "span": "*i32", "teacher": "*fp32"}
    return Spec(
        dense_lse_kernel if own_lse else dense_teacher_kernel,
        types={x: kinds[x] for x in tensors} | {"scale": "fp32"} | CHUNK_TYPES,
        consts={
            "N": heads, "HB": block, "D": dim, "BD": min(64, dim & -dim), "R": cmp_ratio, "TABLE": table, "NQ": columns // block,
            "BK": tile, "STAGES": 3,
        },
        num_warps=4,
    )  # fmt: skip


@cache
def dense_gradient_spec(dtype: torch.dtype, weights_dtype: torch.dtype, heads: int, dim: int, cmp_ratio: int, table: bool, keys: bool) -> Spec:
    """`keys`: the gradient of k rather than those of q and the weights."""
    name = TRITON_DTYPE[dtype]
    wide = dtype == torch.float32
    types = {"q": f"*{name}", "k": f"*{name}", "weights": f"*{TRITON_DTYPE[weights_dtype]}", "dscores": "*fp32", "span": "*i32"}
    consts = {
        "H": heads, "HB": max(16, min(32 if wide else BLOCK_HEADS, triton.next_power_of_2(heads))), "D": dim,
        "DP": max(16, triton.next_power_of_2(dim)), "R": cmp_ratio, "TABLE": table,
    }  # fmt: skip
    block = 32 if wide else BLOCK_KEYS
    if keys:
        return Spec(dense_dk_kernel, types | {"partial": "*fp32"} | CHUNK_TYPES, consts | {"BK": block}, num_warps=4)
    return Spec(dense_dq_kernel, types | {"dq": f"*{name}", "dweights": "*fp32"} | CHUNK_TYPES, consts | {"BS": block, "STAGES": 2}, num_warps=4)


def key_splits(batch: int, queries: int, keys: int, block: int) -> int:
    """Parts of the queries that a tile of keys is summed in: from the sizes alone, so that results do not depend on the device."""
    return max(1, min(MAX_SPLITS, queries // 8, PROGRAMS // max(1, batch * triton.cdiv(keys, block))))
