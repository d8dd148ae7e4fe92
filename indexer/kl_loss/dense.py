"""KL loss on all visible blocks: teacher and gradients of a chunk of queries, from rows [batches, n, S3] in place of lists of slots.

The scores are those of `indexer.lightning.fwd.scores_kernel`. Columns of a row count from the query's own document, and those past the
visible ones are neither read nor written. The gradient of k needs no atomics: a program owns a tile of keys and walks over queries, every
SPLITS-th one, so that there are programs enough for a chip; the partial sums are added in a fixed order.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from indexer.core import ASCEND, causal, product, visible
from indexer.kl_loss.slots import GPU_TARGETS, NPU_TARGETS
from kernel_runtime.launch import TRITON_DTYPE, Spec

COLUMNS = 128  # queries x heads of a tile of the teacher
TEACHER_KEYS = 128
BLOCK_HEADS = 64
BLOCK_KEYS = 64
ASCEND_COLUMNS, ASCEND_KEYS = 64, 32
PROGRAMS = 1024  # tiles of keys x splits that the gradient of k aims at
MAX_SPLITS = 64
LOG2E = tl.constexpr(1.4426950408889634)
CHUNK = ("b0", "i0", "n", "S", "S3", "rows", "q_offset")
CHUNK_TYPES = dict.fromkeys((*CHUNK, "tasks"), "i32")


@triton.jit
def logits(q_tile, q_mask, k_tile, k_mask, scale, D: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr):
    """scale * (cmp_kv . q) [BK keys, COLS queries x heads], D in pieces of BD channels."""
    z = tl.zeros([BK, COLS], tl.float32)
    for j in tl.range(0, D, BD, num_stages=STAGES):
        if ASCEND:
            z = product(tl.load(k_tile + j, mask=k_mask, other=0.0), tl.trans(tl.load(q_tile + j, mask=q_mask, other=0.0)), z)
        else:  # the pointers are held within the tensors, which is cheaper than masks
            z = product(tl.load(k_tile + j), tl.trans(tl.load(q_tile + j)), z)
    return z * scale


@triton.jit
def q_pointers(q, token, tile, n, N: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, NQ: tl.constexpr):
    """[NQ * HB, BD] first channels of NQ queries from `token` on, the tile-th of n; the last ones again where there are no more."""
    column = tl.arange(0, NQ * HB)
    mine = tl.minimum(column // HB, n - 1 - tile) * N + tl.minimum(column % HB, N - 1)
    return q + token * N * D + mine[:, None] * D + tl.arange(0, BD)[None, :]


@triton.jit
def k_pointers(cmp_kv, batch, s, S3, D: tl.constexpr, BD: tl.constexpr):
    """[keys, BD] first channels of keys s of a batch entry, whose channels are fewer than 2^31."""
    return cmp_kv + batch.to(tl.int64) * S3 * D + tl.minimum(s, S3 - 1)[:, None] * D + tl.arange(0, BD)[None, :]


@triton.jit
def lse_of_queries(
    task, q, cmp_kv, span, lse, scale, b0, i0, n, S, S3, rows, q_offset,
    N: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, R: tl.constexpr, TABLE: tl.constexpr, NQ: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """lse[row, head] of z over the row's visible blocks, -inf where it sees none."""
    tiles = tl.cdiv(n, NQ)
    batch = b0 + task // tiles
    tile = (tiles - 1 - task % tiles) * NQ  # later queries see more and go first
    column = tl.arange(0, NQ * HB)
    head = column % HB
    local = tile + column // HB
    on = (local < n) & (head < N)
    row = batch.to(tl.int64) * S + i0 + local
    start, count = visible(span, row, i0 + local, local < n, rows, S3, q_offset, R, TABLE)
    low = tl.min(tl.where(count > 0, start, S3), 0)
    high = tl.max(tl.where(count > 0, start + count, 0), 0)
    q_tile = q_pointers(q, batch.to(tl.int64) * S + i0 + tile, tile, n, N, HB, D, BD, NQ)
    keys = tl.arange(0, BK)
    top = tl.full([NQ * HB], float("-inf"), tl.float32)
    mass = tl.zeros([NQ * HB], tl.float32)
    for j in range(low, high, BK):
        s = j + keys
        k_tile = k_pointers(cmp_kv, batch, s, S3, D, BD)
        z = logits(q_tile, on[:, None], k_tile, (s < high)[:, None], scale * LOG2E, D, BD, BK, NQ * HB, STAGES)
        place = s[:, None] - start[None, :]
        z = tl.where((place >= 0) & (place < count[None, :]), z, float("-inf"))
        higher = tl.maximum(top, tl.max(z, 0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        mass = mass * tl.exp2(top - shift) + tl.sum(tl.exp2(z - shift[None, :]), 0)
        top = higher
    found = tl.where(mass > 0.0, (top + tl.log2(tl.where(mass > 0.0, mass, 1.0))) / LOG2E, float("-inf"))
    tl.store(lse + row * N + head, found, mask=on)


@triton.jit(do_not_specialize=["scale", "b0", "i0", "n", "S", "S3", "rows", "q_offset", "tasks"])
def dense_lse_kernel(
    q, cmp_kv, span, lse, scale, b0, i0, n, S, S3, rows, q_offset, tasks,
    N: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, R: tl.constexpr, TABLE: tl.constexpr, NQ: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr,
    LOOP: tl.constexpr,
):  # fmt: skip
    if LOOP:
        for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
            lse_of_queries(
                task, q, cmp_kv, span, lse, scale, b0, i0, n, S, S3, rows, q_offset,
                N, HB, D, BD, R, TABLE, NQ, BK, STAGES,
            )  # fmt: skip
    else:
        lse_of_queries(
            tl.program_id(0), q, cmp_kv, span, lse, scale, b0, i0, n, S, S3, rows, q_offset,
            N, HB, D, BD, R, TABLE, NQ, BK, STAGES,
        )  # fmt: skip


@triton.jit
def teacher_of_tile(
    task, q, cmp_kv, lse, span, teacher, scale, b0, i0, n, S, S3, rows, q_offset,
    N: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, R: tl.constexpr, TABLE: tl.constexpr, NQ: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """teacher[row, column] = mean over heads of exp(z - lse): one tile of keys, NQ queries."""
    key_tiles = tl.cdiv(S3, BK)
    tiles = tl.cdiv(n, NQ)
    entry = task // key_tiles // tiles
    batch = b0 + entry
    tile = (tiles - 1 - task // key_tiles % tiles) * NQ
    local = tile + tl.arange(0, NQ)
    if TABLE:
        start, count = visible(span, batch.to(tl.int64) * S + i0 + local, i0 + local, local < n, rows, S3, q_offset, R, TABLE)
        low = tl.min(tl.where(count > 0, start, S3), 0)
        high = tl.max(tl.where(count > 0, start + count, 0), 0)
    else:
        start = local * 0
        count = tl.where(local < n, causal(i0 + local, S3, q_offset, R), 0)
        low = 0
        high = causal(i0 + tl.minimum(tile + NQ, n) - 1, S3, q_offset, R)
    j = task % key_tiles * BK
    if (j < high) & (j + BK > low):
        column = tl.arange(0, NQ * HB)
        head = column % HB
        on = (tile + column // HB < n) & (head < N)
        s = j + tl.arange(0, BK)
        token = batch.to(tl.int64) * S + i0 + tile
        q_tile = q_pointers(q, token, tile, n, N, HB, D, BD, NQ)
        k_tile = k_pointers(cmp_kv, batch, s, S3, D, BD)
        z = logits(q_tile, on[:, None], k_tile, (s < high)[:, None], scale * LOG2E, D, BD, BK, NQ * HB, STAGES)
        lse2 = tl.load(lse + token * N + column // HB * N + head, mask=on, other=float("-inf")) * LOG2E
        lse2 = tl.where(lse2 > float("-inf"), lse2, float("inf"))  # a head that saw nothing gives 0, as does one with lse = +inf
        total = tl.sum(tl.reshape(tl.exp2(z - lse2[None, :]), [BK, NQ, HB]), 2) / N
        out = teacher + (entry * n + tile).to(tl.int64) * S3
        place = s[:, None] - start[None, :]
        tl.store(out + tl.arange(0, NQ)[None, :] * S3 + place, total, mask=(place >= 0) & (place < count[None, :]))


@triton.jit(do_not_specialize=["scale", "b0", "i0", "n", "S", "S3", "rows", "q_offset", "tasks"])
def dense_teacher_kernel(
    q, cmp_kv, lse, span, teacher, scale, b0, i0, n, S, S3, rows, q_offset, tasks,
    N: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, R: tl.constexpr, TABLE: tl.constexpr, NQ: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr,
    LOOP: tl.constexpr,
):  # fmt: skip
    if LOOP:
        for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
            teacher_of_tile(
                task, q, cmp_kv, lse, span, teacher, scale, b0, i0, n, S, S3, rows, q_offset,
                N, HB, D, BD, R, TABLE, NQ, BK, STAGES,
            )  # fmt: skip
    else:
        teacher_of_tile(
            tl.program_id(0), q, cmp_kv, lse, span, teacher, scale, b0, i0, n, S, S3, rows, q_offset,
            N, HB, D, BD, R, TABLE, NQ, BK, STAGES,
        )  # fmt: skip


@triton.jit
def dq_of_query(
    task, q, k, weights, dscores, span, dq, dweights, b0, i0, n, S, S3, rows, q_offset,
    H: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr, TABLE: tl.constexpr, BS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dq = w (dS'^T k) and dw = rowsum(q (dS'^T k)) of one query and HB heads, dS' = dI 1[S > 0]."""
    local = n - 1 - task % n
    blocks: tl.constexpr = (H + HB - 1) // HB
    entry = task // n // blocks
    batch = (b0 + entry).to(tl.int64)
    row = batch * S + i0 + local
    start, count = visible(span, row, i0 + local, local < n, rows, S3, q_offset, R, TABLE)
    head = task // n % blocks * HB + tl.arange(0, HB)
    d = tl.arange(0, DP)
    q_mask = (head < H)[:, None] & (d < D)[None, :]
    place = row * H * D + head[:, None] * D + d[None, :]
    q_t = tl.trans(tl.load(q + place, mask=q_mask, other=0.0))
    sums = tl.zeros([HB, DP], tl.float32)
    slot = tl.arange(0, BS)
    keys = k + (batch * S3 + start) * D
    grads = dscores + (entry * n + local).to(tl.int64) * S3
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


@triton.jit(do_not_specialize=["b0", "i0", "n", "S", "S3", "rows", "q_offset", "tasks"])
def dense_dq_kernel(
    q, k, weights, dscores, span, dq, dweights, b0, i0, n, S, S3, rows, q_offset, tasks,
    H: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr, TABLE: tl.constexpr, BS: tl.constexpr,
    STAGES: tl.constexpr,
    LOOP: tl.constexpr,
):  # fmt: skip
    if LOOP:
        for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
            dq_of_query(
                task, q, k, weights, dscores, span, dq, dweights, b0, i0, n, S, S3, rows, q_offset,
                H, HB, D, DP, R, TABLE, BS, STAGES,
            )  # fmt: skip
    else:
        dq_of_query(
            tl.program_id(0), q, k, weights, dscores, span, dq, dweights, b0, i0, n, S, S3, rows, q_offset,
            H, HB, D, DP, R, TABLE, BS, STAGES,
        )  # fmt: skip


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


@triton.jit
def dk_of_tile(
    task, q, k, weights, dscores, span, partial, b0, i0, n, S, S3, rows, q_offset, splits,
    H: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr, TABLE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """partial[split, batch, key] += dk of the queries split, split + splits, .. of the chunk."""
    tiles = tl.cdiv(S3, BK)
    tile = task % tiles
    split = task // tiles % splits
    entry = task // tiles // splits
    batch = (b0 + entry).to(tl.int64)
    s = tile * BK + tl.arange(0, BK)
    d = tl.arange(0, DP)
    mask = (s < S3)[:, None] & (d < D)[None, :]
    k_tile = tl.load(k + (batch * S3 + s)[:, None] * D + d[None, :], mask=mask, other=0.0)
    first = 0
    if not TABLE:  # the first query that sees the first key of the tile
        first = tl.minimum(tl.maximum((tile * BK + 1) * R - 1 - q_offset - i0, 0), n)
    total = tl.zeros([BK, DP], tl.float32)
    for x in range(0, (n - first - split + splits - 1) // splits):
        local = first + split + x * splits
        row = batch * S + i0 + local
        start, count = visible(span, row, i0 + local, local < n, rows, S3, q_offset, R, TABLE)
        column = s - start
        on = (column >= 0) & (column < count)
        grads = dscores + (entry * n + local).to(tl.int64) * S3 + tl.where(on, column, 0)
        heads = H
        if TABLE:  # none where the query sees no key of the tile
            heads = tl.max(on.to(tl.int32), 0) * H
        for h in range(0, heads, HB):
            total = add_query(total, k_tile, q, weights, grads, row, h, on, H, HB, D, DP, BK)
    out = partial + ((split.to(tl.int64) * (rows // S) + batch) * S3 + s)[:, None] * D + d[None, :]
    tl.store(out, tl.load(out, mask=mask, other=0.0) + total, mask=mask)


@triton.jit(do_not_specialize=["b0", "i0", "n", "S", "S3", "rows", "q_offset", "splits", "tasks"])
def dense_dk_kernel(
    q, k, weights, dscores, span, partial, b0, i0, n, S, S3, rows, q_offset, splits, tasks,
    H: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr, TABLE: tl.constexpr, BK: tl.constexpr,
    LOOP: tl.constexpr,
):  # fmt: skip
    if LOOP:
        for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
            dk_of_tile(
                task, q, k, weights, dscores, span, partial, b0, i0, n, S, S3, rows, q_offset, splits,
                H, HB, D, DP, R, TABLE, BK,
            )  # fmt: skip
    else:
        dk_of_tile(
            tl.program_id(0), q, k, weights, dscores, span, partial, b0, i0, n, S, S3, rows, q_offset, splits,
            H, HB, D, DP, R, TABLE, BK,
        )  # fmt: skip


@cache
def dense_teacher_spec(
    dtype: torch.dtype, heads: int, dim: int, cmp_ratio: int, table: bool, own_lse: bool, npu: bool = False
) -> Spec:
    """`own_lse`: the kernel that makes lse rather than the teacher."""
    name = TRITON_DTYPE[dtype]
    block = max(16, triton.next_power_of_2(heads))
    # on Ascend a tile of one query does not compile, as it is no sum over heads alone
    columns = max(block * (2 if npu and not own_lse else 1), 32 if dtype == torch.float32 else ASCEND_COLUMNS if npu else COLUMNS)
    # two vectors a column are held through the loop of lse; the teacher's tile of 256 columns is one of Ascend alone
    tile = ASCEND_KEYS if npu else 32 if dtype == torch.float32 else TEACHER_KEYS
    if dtype != torch.float32 and (columns > 128 or (own_lse and (columns > 64 or not npu))):
        tile //= 2
    tensors = ("q", "cmp_kv", "span", "lse") if own_lse else ("q", "cmp_kv", "lse", "span", "teacher")
    kinds = {"q": f"*{name}", "cmp_kv": f"*{name}", "lse": "*fp32", "span": "*i32", "teacher": "*fp32"}
    return Spec(
        dense_lse_kernel if own_lse else dense_teacher_kernel,
        types={x: kinds[x] for x in tensors} | {"scale": "fp32"} | CHUNK_TYPES,
        consts={
            "N": heads, "HB": block, "D": dim, "BD": min(64, dim & -dim), "R": cmp_ratio, "TABLE": table, "NQ": columns // block,
            "BK": tile, "STAGES": 3, "LOOP": npu,
        },
        num_warps=4,
        targets=NPU_TARGETS if npu else GPU_TARGETS,
    )  # fmt: skip


@cache
def dense_gradient_spec(
    dtype: torch.dtype, weights_dtype: torch.dtype, heads: int, dim: int, cmp_ratio: int, table: bool, keys: bool, npu: bool = False
) -> Spec:
    """`keys`: the gradient of k rather than those of q and the weights."""
    name = TRITON_DTYPE[dtype]
    wide = dtype == torch.float32
    types = {"q": f"*{name}", "k": f"*{name}", "weights": f"*{TRITON_DTYPE[weights_dtype]}", "dscores": "*fp32", "span": "*i32"}
    consts = {
        "H": heads, "HB": max(16, min(32 if wide else BLOCK_HEADS, triton.next_power_of_2(heads))), "D": dim,
        "DP": max(16, triton.next_power_of_2(dim)), "R": cmp_ratio, "TABLE": table,
    }  # fmt: skip
    block = ASCEND_KEYS if npu else 32 if wide else BLOCK_KEYS
    targets = NPU_TARGETS if npu else GPU_TARGETS
    if keys:
        types |= {"partial": "*fp32"} | dict.fromkeys((*CHUNK, "splits", "tasks"), "i32")
        return Spec(dense_dk_kernel, types, consts | {"BK": block, "LOOP": npu}, num_warps=4, targets=targets)
    types |= {"dq": f"*{name}", "dweights": "*fp32"} | CHUNK_TYPES
    return Spec(dense_dq_kernel, types, consts | {"BS": block, "STAGES": 3, "LOOP": npu}, num_warps=4, targets=targets)


def key_splits(batch: int, queries: int, keys: int, block: int) -> int:
    """Parts of the queries that a tile of keys is summed in: from the sizes alone, so that results do not depend on the device."""
    return max(1, min(MAX_SPLITS, queries // 8, PROGRAMS // max(1, batch * triton.cdiv(keys, block))))
