"""sparse_attn_shared_kv and the helpers around its log-sum-exp: the public functions."""

from __future__ import annotations

import torch
from torch import Tensor

from kernel_runtime import apply_function, check_dtype, check_int, check_same, check_shape, run_eager
from kernel_runtime.checks import COEFFICIENTS, FLOATS, check_number, check_offset
from reference import sparse_attn as reference
from sparse_attn.library import MAX_HEADS, check_coefficients, check_cu_seqlens, check_flag
from sparse_attn.shared_kv.choice import OP, select
from sparse_attn.shared_kv.op import SharedKV


def sparse_attn_shared_kv(
    q: Tensor,
    ori_kv: Tensor,
    cmp_kv: Tensor | None = None,
    cmp_indices: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    cmp_ratio: int | None = None,
    window: int | None = 128,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_ori: Tensor | None = None,
    cu_seqlens_cmp: Tensor | None = None,
    q_offset: int | Tensor | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    return_cmp_probs: bool = False,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """Attention of N query heads over one shared head that is both key and value; a query sees the last `window` original keys and,
    with cmp_kv, the compressed entries before it: all of them, or those in cmp_indices.

    Letters: B batch, S queries, N heads (1 to 128), D channels of a head, S2 original keys, S3 = S2 // cmp_ratio compressed entries,
    K selected entries. Packed documents (TND) when cu_seqlens_q is given: T, T2 and T3 rows in place of [B, S], [B, S2] and [B, S3].

    q               [B, S, N, D] or [T, N, D], bf16, fp16 or fp32 (fp64: eager form alone), any strides.
    ori_kv          [B, S2, D] or [T2, D], dtype of q.
    cmp_kv          [B, S3, D] or [T3, D], dtype of q; needs cmp_ratio.
    cmp_indices     [B, S, K] or [T, K] int32, into cmp_kv of the same batch or document, each counted from 0. An entry that is negative,
                    out of range or not yet visible is skipped; one that occurs twice counts twice.
    sinks           [N] fp32, logits that are already scaled; -inf is no sink, +inf takes all the mass.
    softmax_scale   D ** -0.5 by default.
    cmp_ratio       tokens a compressed entry stands for; entry j is visible to position t if j < (t + 1) // cmp_ratio.
    window          number of keys up to and including the query's own position; None is plain causal attention.
    cu_seqlens_*    [documents + 1] int32 offsets. ori defaults to q's, cmp to compressed_cu_seqlens(ori, cmp_ratio). Values are trusted.
                    Rows past the last document see nothing (out = 0, no gradient); they and their gradient of out may hold anything, NaN too.
    q_offset        position of a sequence's (document's) first query: an int, or int32 [B] ([documents]), whose values are trusted to lie
                    within 2^30 of 0; None aligns queries to the end of the original keys.
    deterministic   bit-equal gradients from run to run, without float atomics. None follows torch.are_deterministic_algorithms_enabled();
                    the eager form always follows that.
    impl            "auto", "triton" or "eager", see kernel_runtime.impl; the device chooses between portable kernels (D in multiples of 16 up
                    to 512) and those for sm_90 (bf16 and fp16, D of 128, 256 or 512). "portable" and "hopper" take one of them by name, or
                    raise a ValueError: sparse_attn/shared_kv/choice.py.

    Returns out, shaped and typed as q; with return_lse then lse [B, S, N] or [T, N], the log-sum-exp of all logits and the sink; with
    return_cmp_probs (cmp_indices needed) then cmp_probs [B, S, K] or [T, K], the mean over heads of the probability in each slot. Both are
    fp32 (fp64 for fp64) and carry no gradient. A query that sees nothing has out = 0 and lse = sink, or -inf without sinks.
    Differentiable in q, ori_kv, cmp_kv and sinks; double backward is refused. Formulas: reference/sparse_attn.py.
    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape, device, value or combination.
    """
    packed = cu_seqlens_q is not None
    _check_tensors(q, ori_kv, cmp_kv, cmp_indices, sinks, packed)
    _check_lengths(q, ori_kv, cmp_kv, cu_seqlens_q, cu_seqlens_ori, cu_seqlens_cmp)
    _check_ratio(ori_kv, cmp_kv, cmp_ratio, packed)
    _check_offset(q, q_offset, cu_seqlens_q)
    if window is not None:
        check_int(OP, "window", window, minimum=1)
    if softmax_scale is not None:
        check_number(OP, "softmax_scale", softmax_scale)
    if deterministic is not None:
        check_flag(OP, "deterministic", deterministic)
    check_flag(OP, "return_lse", return_lse)
    check_flag(OP, "return_cmp_probs", return_cmp_probs)
    if return_cmp_probs and cmp_indices is None:
        raise ValueError(f"{OP}: return_cmp_probs=True needs cmp_indices; there are no slots to report without them")
    how = select(OP, impl, q)
    if impl == "eager":
        return run_eager(
            reference.sparse_attn_shared_kv, q, ori_kv, cmp_kv, cmp_indices, sinks,
            softmax_scale=softmax_scale, cmp_ratio=cmp_ratio, window=window, cu_seqlens_q=cu_seqlens_q, cu_seqlens_ori=cu_seqlens_ori,
            cu_seqlens_cmp=cu_seqlens_cmp, q_offset=q_offset, return_lse=return_lse, return_cmp_probs=return_cmp_probs,
        )  # fmt: skip
    if cu_seqlens_q is not None and cmp_kv is not None and cu_seqlens_cmp is None and cmp_ratio is not None:
        cu_seqlens_cmp = reference.compressed_cu_seqlens(cu_seqlens_q if cu_seqlens_ori is None else cu_seqlens_ori, cmp_ratio)
    offsets, offset = (q_offset, None) if isinstance(q_offset, Tensor) else (None, q_offset)
    deterministic = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    out, lse, probs = apply_function(
        SharedKV, q, ori_kv, cmp_kv, cmp_indices, sinks, cu_seqlens_q, cu_seqlens_ori, cu_seqlens_cmp, offsets,
        offset, scale, cmp_ratio or 0, window, return_cmp_probs, deterministic, how,
    )  # fmt: skip
    results = (out, *((lse,) if return_lse else ()), *((probs,) if return_cmp_probs else ()))
    return out if len(results) == 1 else results


def compressed_cu_seqlens(cu_seqlens: Tensor, ratio: int) -> Tensor:
    """Offsets of the compressed entries of packed documents: a document of n tokens has n // ratio of them.

    cu_seqlens [documents + 1] int32; returns the same shape, dtype and device. TypeError and ValueError as the checks say.
    """
    check_cu_seqlens("compressed_cu_seqlens", "cu_seqlens", cu_seqlens, "cu_seqlens", cu_seqlens)
    check_int("compressed_cu_seqlens", "ratio", ratio, minimum=1)
    return reference.compressed_cu_seqlens(cu_seqlens, ratio)


def lse_without_sink(lse: Tensor, sinks: Tensor) -> Tensor:
    """The log-sum-exp over the keys alone, as other libraries return it: lse + log1p(-exp(sink - lse)).

    lse [..., N] as sparse_attn_shared_kv returns it, sinks [N], both fp32. Returns [..., N] without gradient; -inf where the sink is all
    there is. Where the sink holds nearly all the mass the difference of two close numbers limits the precision.
    """
    _check_lse("lse_without_sink", lse, sinks)
    with torch.no_grad():
        return reference.lse_without_sink(lse, sinks)


def lse_with_sink(lse: Tensor, sinks: Tensor) -> Tensor:
    """The inverse of lse_without_sink: log(exp(lse) + exp(sink)). lse [..., N], sinks [N], both fp32; no gradient."""
    _check_lse("lse_with_sink", lse, sinks)
    with torch.no_grad():
        return reference.lse_with_sink(lse, sinks)


def _check_tensors(
    q: Tensor, ori_kv: Tensor, cmp_kv: Tensor | None, cmp_indices: Tensor | None, sinks: Tensor | None, packed: bool
) -> None:
    check_dtype(OP, "q", q, FLOATS)
    check_shape(OP, "q", q, ("T", "N", "D") if packed else ("B", "S", "N", "D"))
    lead = () if packed else (q.shape[0],)
    N, D = q.shape[-2:]
    if not 1 <= N <= MAX_HEADS:
        raise ValueError(f"{OP}: q has N = {N} heads, wanted 1 to {MAX_HEADS}")
    if D < 1:
        raise ValueError(f"{OP}: q has D = {D} channels, wanted at least 1")
    check_same(OP, "ori_kv", ori_kv, "q", q)
    check_shape(OP, "ori_kv", ori_kv, (*lead, "T2" if packed else "S2", D))
    if cmp_kv is not None:
        check_same(OP, "cmp_kv", cmp_kv, "q", q)
        check_shape(OP, "cmp_kv", cmp_kv, (*lead, "T3" if packed else "S3", D))
    if cmp_indices is not None:
        if cmp_kv is None:
            raise ValueError(f"{OP}: cmp_indices without cmp_kv: there is nothing to select from")
        check_dtype(OP, "cmp_indices", cmp_indices, (torch.int32,))
        check_same(OP, "cmp_indices", cmp_indices, "q", q, dtype=False)
        check_shape(OP, "cmp_indices", cmp_indices, (*q.shape[:-2], "K"))
    if sinks is not None:
        check_coefficients(OP, "sinks", sinks, "q", q)
        check_shape(OP, "sinks", sinks, (N,))


def _check_lengths(
    q: Tensor,
    ori_kv: Tensor,
    cmp_kv: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_ori: Tensor | None,
    cu_seqlens_cmp: Tensor | None,
) -> None:
    if cu_seqlens_q is None:
        for name, value in (("cu_seqlens_ori", cu_seqlens_ori), ("cu_seqlens_cmp", cu_seqlens_cmp)):
            if value is not None:
                raise ValueError(f"{OP}: {name} without cu_seqlens_q, which is what makes the layout packed")
        return
    check_cu_seqlens(OP, "cu_seqlens_q", cu_seqlens_q, "q", q)
    if cu_seqlens_ori is None and ori_kv.shape[0] != q.shape[0]:
        raise ValueError(
            f"{OP}: ori_kv has {ori_kv.shape[0]} rows but q has {q.shape[0]}; without cu_seqlens_ori both are cut by cu_seqlens_q"
        )
    if cu_seqlens_cmp is not None and cmp_kv is None:
        raise ValueError(f"{OP}: cu_seqlens_cmp without cmp_kv")
    for name, value in (("cu_seqlens_ori", cu_seqlens_ori), ("cu_seqlens_cmp", cu_seqlens_cmp)):
        if value is not None:
            check_cu_seqlens(OP, name, value, "q", q)
            if value.shape != cu_seqlens_q.shape:
                raise ValueError(
                    f"{OP}: {name} has {value.shape[0]} elements but cu_seqlens_q has {cu_seqlens_q.shape[0]}; they are the same documents"
                )


def _check_ratio(ori_kv: Tensor, cmp_kv: Tensor | None, cmp_ratio: int | None, packed: bool) -> None:
    if cmp_kv is None:
        if cmp_ratio is not None:
            check_int(OP, "cmp_ratio", cmp_ratio, minimum=0)
        return
    if cmp_ratio is None:
        raise ValueError(f"{OP}: cmp_kv needs cmp_ratio; without it a query could see entries made from later tokens")
    check_int(OP, "cmp_ratio", cmp_ratio, minimum=1)
    if not packed and cmp_kv.shape[1] != ori_kv.shape[1] // cmp_ratio:
        raise ValueError(
            f"{OP}: cmp_kv has S3 = {cmp_kv.shape[1]} entries, wanted S2 // cmp_ratio = {ori_kv.shape[1]} // {cmp_ratio}"
            f" = {ori_kv.shape[1] // cmp_ratio}"
        )


def _check_offset(q: Tensor, q_offset: int | Tensor | None, cu_seqlens_q: Tensor | None) -> None:
    if isinstance(q_offset, Tensor):
        check_dtype(OP, "q_offset", q_offset, (torch.int32,))
        check_same(OP, "q_offset", q_offset, "q", q, dtype=False)
        check_shape(OP, "q_offset", q_offset, (q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1,))
    elif q_offset is not None:
        check_offset(OP, "q_offset", q_offset, q.shape[-3])


def _check_lse(op: str, lse: Tensor, sinks: Tensor) -> None:
    check_dtype(op, "lse", lse, COEFFICIENTS)
    check_same(op, "sinks", sinks, "lse", lse)
    if lse.dim() < 1:
        raise ValueError(f"{op}: lse is a scalar, wanted [..., N]")
    check_shape(op, "sinks", sinks, (lse.shape[-1],))
