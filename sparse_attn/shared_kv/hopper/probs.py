"""cmp_probs for sm_90 in Gluon: the mean over heads of exp(z - LSE) in every slot that counts.

A second pass over q . k, half of the forward's products, since the LSE is known only after the first. One program a query and 64 of its
heads; two warpgroups take the even and the odd key tiles, the third is the forward's producer.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernel_runtime.launch import TRITON_DTYPE, Spec
from sparse_attn.shared_kv.hopper.core import HEADS, load_ranges, programs, tile_keys
from sparse_attn.shared_kv.hopper.tasks import BN, begins_alone, even_tile, free, gather_tasks, new_copy_barriers, scores


@gluon.jit
def slots_of(task, rows, places, used, N: gl.constexpr, BN: gl.constexpr):
    """As task_of in the forward, without the window."""
    GROUPS: gl.constexpr = (N + 63) // 64
    row = rows - 1 - task // GROUPS
    _, _, cmp_begin, cmp_count, slots = load_ranges(places, used, row, 2)
    return row, task % GROUPS, gl.maximum(gl.cdiv(slots, 2 * BN), 1), (0, 0, 0, cmp_begin, cmp_count, slots)


@gluon.jit
def consumer(
    X: gl.constexpr, lse, probs, indices, places, used, rows, tasks, K, zero, scale2, q_s, k_s, q_full, q_empty, k_full, k_empty,
    N: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """Warpgroup X: the even (0) or odd (1) tiles."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    n = gl.arange(0, BN, layout=gl.SliceLayout(0, s_layout))
    s_zero = gl.zeros([64, BN], gl.float32, layout=s_layout)
    phase = 0
    q_phase = 0
    for task in range(gl.program_id(0), tasks, gl.num_programs(0)):
        row, group, num_pairs, ranges = slots_of(task, rows, places, used, N, BN)
        first_slot = row.to(gl.int64) * K
        target = probs + (group.to(gl.int64) * rows + row) * K
        h = group * 64 + gl.arange(0, 64, layout=s_rows)
        # an LSE of +inf makes a padded head, and one whose sink takes all, weigh nothing
        lse2 = gl.load(lse + row.to(gl.int64) * N + h, mask=h < N, other=float("inf")) * 1.4426950408889634
        for part in gl.static_range(4):
            mbarrier.wait(q_full[part], q_phase)
        alone = begins_alone(ranges, BN)
        for i in range(alone * X, num_pairs):
            z = i * zero
            tile = even_tile(i, alone) + X
            _, valid = tile_keys(indices, first_slot, tile, n, ranges, True, BN)
            s = scores(X, z, q_s, k_s, k_full, phase, s_zero)
            for part in gl.static_range(4):
                free(k_empty[4 * X + part])
            if i + 1 == num_pairs:
                free(q_empty)
            p = gl.where(valid[None, :], gl.exp2(s * scale2 - lse2[:, None]), 0.0)
            slot = tile * BN + n
            gl.store(target + slot, gl.sum(p, 0) * (1.0 / N), mask=slot < ranges[5])
            phase = phase ^ 1
        q_phase = q_phase ^ 1


@gluon.jit(do_not_specialize=["rows", "tasks", "K", "zero", "scale"])
def hopper_probs_kernel(
    q, cmp_kv, indices, places, used, lse, probs, rows, tasks, K, zero, scale, N: gl.constexpr, D: gl.constexpr, BN: gl.constexpr
):  # fmt: skip
    """probs [groups of heads, rows, K]: a group's share of the mean. Slots from `used` on are left as they are."""
    DP: gl.constexpr = D // 4
    dtype: gl.constexpr = q.dtype.element_ty
    scale2 = scale * 1.4426950408889634
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, DP], dtype)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, DP], dtype)
    q_s = gl.allocate_shared_memory(dtype, [4, 64, DP], q_layout)
    k_s = gl.allocate_shared_memory(dtype, [8, BN, DP], k_layout)
    q_full, q_empty, k_full, k_empty = new_copy_barriers()
    gl.warp_specialize(
        [
            (consumer, (
                0, lse, probs, indices, places, used, rows, tasks, K, zero, scale2, q_s, k_s, q_full, q_empty, k_full, k_empty, N, BN,
            )),
            (consumer, (
                1, lse, probs, indices, places, used, rows, tasks, K, zero, scale2, q_s, k_s, q_full, q_empty, k_full, k_empty, N, BN,
            )),
            (gather_tasks, (
                q, cmp_kv, cmp_kv, indices, places, used, rows, tasks, K, zero, q_s, k_s, q_full, q_empty, k_full, k_empty,
                N, D, 2, False, BN,
            )),
        ],
        [4, 4],
        [168, 120],
    )  # fmt: skip


@cache
def probs_spec(dtype: torch.dtype, N: int, D: int) -> Spec:
    x = f"*{TRITON_DTYPE[dtype]}"
    types = {"q": x, "cmp_kv": x, "indices": "*i32", "places": "*i32", "used": "*i32", "lse": "*fp32", "probs": "*fp32"}
    numbers = {**dict.fromkeys(("rows", "tasks", "K", "zero"), "i32"), "scale": "fp32"}
    return Spec(hopper_probs_kernel, types={**types, **numbers}, consts={"N": N, "D": D, "BN": BN}, targets=("cuda",))


def slot_probs(
    q: torch.Tensor, cmp_kv: torch.Tensor, indices: torch.Tensor, places: torch.Tensor, used: torch.Tensor, lse: torch.Tensor, scale: float
) -> torch.Tensor:
    """[..., K] fp32, shaped as indices; zero in slots that do not count."""
    N, D = q.shape[-2:]
    K, rows, groups = indices.shape[-1], places.shape[0], triton.cdiv(N, HEADS)
    probs = torch.zeros((groups, *indices.shape), dtype=torch.float32, device=q.device)
    tasks = rows * groups
    probs_spec(q.dtype, N, D).launch((programs(tasks, q.device),), q, cmp_kv, indices, places, used, lse, probs, rows, tasks, K, 0, scale)
    return probs[0] if groups == 1 else probs.sum(0)
