"""Forward for sm_90: the launcher. Short contiguous ranges go to dense_fwd.py, all others to fwd_kernel.py."""

from __future__ import annotations

from functools import cache

import torch
import triton

from kernel_runtime.launch import TRITON_DTYPE, Spec
from sparse_attn.shared_kv.fwd import ALL, SELECTED, mode_of
from sparse_attn.shared_kv.hopper.core import HEADS, laid_out, programs
from sparse_attn.shared_kv.hopper.dense import dense_supports
from sparse_attn.shared_kv.hopper.fwd_kernel import ANEW, MAXIMUM, NOTHING, PROGRAMS_MAX, hopper_fwd_kernel
from sparse_attn.shared_kv.hopper.tasks import BN
from sparse_attn.shared_kv.places import places_of
from sparse_attn.shared_kv.used import used_of


def forms_of(dtype: torch.dtype) -> tuple[int, ...]:
    """The kernels that a forward launches, one after the other: see fwd_kernel.py."""
    return (NOTHING.value, ANEW.value) if dtype == torch.bfloat16 else (MAXIMUM.value,)


@cache
def forward_spec(dtype: torch.dtype, N: int, D: int, compressed: int, sinks: bool, form: int) -> Spec:
    x = f"*{TRITON_DTYPE[dtype]}"
    return Spec(
        hopper_fwd_kernel,
        types={
            "q": x, "ori_kv": x, "cmp_kv": x, "indices": "*i32", "sinks": "*fp32", "places": "*i32", "used": "*i32", "anew": "*i32", "out": x,
            "lse": "*fp32", "rows": "i32", "tasks": "i32", "K": "i32", "zero": "i32", "scale": "fp32",
        },
        consts={"N": N, "D": D, "COMPRESSED": compressed, "SINKS": sinks, "FORM": form, "BN": BN},
        targets=("cuda",),
    )  # fmt: skip


def forward_specs(dtype: torch.dtype, N: int, D: int, compressed: int, sinks: bool) -> list[Spec]:
    return [forward_spec(dtype, N, D, compressed, sinks, form) for form in forms_of(dtype)]


def attention_fwd(
    q: torch.Tensor, ori_kv: torch.Tensor, cmp_kv: torch.Tensor | None, cmp_indices: torch.Tensor | None, sinks: torch.Tensor | None,
    cu_q: torch.Tensor | None, cu_ori: torch.Tensor | None, cu_cmp: torch.Tensor | None, q_offsets: torch.Tensor | None,
    q_offset: int | None, scale: float, cmp_ratio: int, window: int | None, return_cmp_probs: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """out, lse, cmp_probs of the op shared_kv_fwd, for calls that hopper_supports takes."""
    N, D = q.shape[-2:]
    K = cmp_indices.shape[-1] if cmp_indices is not None else 0
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    probs = torch.zeros(cmp_indices.shape if return_cmp_probs and cmp_indices is not None else 0, dtype=torch.float32, device=q.device)
    rows, mode = lse.numel() // N, mode_of(cmp_kv, cmp_indices)
    if not rows:
        return out, lse, probs
    places = places_of(q, ori_kv, cmp_kv, cu_q, cu_ori, cu_cmp, q_offsets, q_offset, cmp_ratio, window)
    entry_kv = cmp_kv if mode == ALL else None  # lists without a slot see no entry, whatever there is of them
    # the dense kernel takes the maximum before the scale
    if mode != SELECTED and scale > 0 and dense_supports(D, window, 0 if entry_kv is None else entry_kv.shape[-2]):
        from sparse_attn.shared_kv.hopper.dense_fwd import dense_forward

        dense_forward(q, ori_kv, entry_kv, sinks, places, out, lse, scale)
        return out, lse, probs
    # a tensor that the mode does not read is stood in for by another of its type
    q, ori_kv = laid_out(q), laid_out(ori_kv)
    cmp_kv = q if cmp_kv is None else laid_out(cmp_kv)
    indices = places if cmp_indices is None else cmp_indices.contiguous()
    used = used_of(indices, places) if mode == SELECTED else places
    specs = forward_specs(q.dtype, N, D, mode, sinks is not None)
    sinks = lse if sinks is None else sinks.contiguous()
    tasks = rows * triton.cdiv(N, HEADS)
    grid = min(programs(tasks, q.device), PROGRAMS_MAX.value)
    anew = torch.empty(grid, dtype=torch.int32, device=q.device) if len(specs) > 1 else places
    for spec in specs:
        spec.launch((grid,), q, ori_kv, cmp_kv, indices, sinks, places, used, anew, out, lse, rows, tasks, K, 0, scale)
    if return_cmp_probs and mode == SELECTED:  # otherwise there is no entry that a slot could hold
        from sparse_attn.shared_kv.hopper.probs import slot_probs

        probs = slot_probs(q, cmp_kv, indices, places, used, lse, scale)
    return out, lse, probs
