"""indexer_kl_loss: the public function."""

import torch
from torch import Tensor

from indexer.kl_loss.op import IndexerKLLoss
from indexer.library import MAX_ATTENTION_DIM, MAX_ATTENTION_HEADS, MAX_DIM, MAX_TOPK, check_indexer, resolve_deterministic
from kernel_runtime import apply_function, check_choice, check_dtype, check_same, check_shape, run_eager, select_impl
from kernel_runtime.checks import COEFFICIENTS, FLOATS, check_number
from reference import indexer_loss as reference

OP = "indexer_kl_loss"
TARGETS = ("joint", "compressed", "marginal")
REDUCTIONS = ("sum", "mean")


def no_kernel(q_index: Tensor, indices: Tensor | None, q: Tensor | None) -> str | None:
    """Why the kernels do not cover a case, None if they do; q is None with a given teacher."""
    if q_index.shape[-1] > MAX_DIM:
        return f"Di = {q_index.shape[-1]}; kernels take at most {MAX_DIM} channels"
    if indices is not None and indices.shape[-1] > MAX_TOPK:
        return f"{indices.shape[-1]} slots a query; kernels take at most {MAX_TOPK}"
    if q is None:
        return None
    heads, dim = q.shape[-2:]
    if heads > MAX_ATTENTION_HEADS:
        return f"q has N = {heads} heads; kernels take at most {MAX_ATTENTION_HEADS}"
    if dim % 16 or dim > MAX_ATTENTION_DIM:
        return f"q has D = {dim} channels; kernels take multiples of 16 up to {MAX_ATTENTION_DIM}"
    return "q is fp64; kernels take bf16, fp16 and fp32" if q.dtype == torch.float64 else None


def indexer_kl_loss(
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    indices: Tensor | None,
    *,
    teacher: Tensor | None = None,
    q: Tensor | None = None,
    cmp_kv: Tensor | None = None,
    lse: Tensor | None = None,
    scores: Tensor | None = None,
    softmax_scale: float | None = None,
    target: str = "joint",
    cmp_ratio: int = 4,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    q_offset: int | Tensor | None = None,
    reduction: str = "sum",
    denominator: int | float | Tensor | None = None,
    coefficient: float = 1.0,
    deterministic: bool | None = None,
    impl: str = "auto",
) -> Tensor:
    """``coefficient * sum_t KL(p_t || softmax(I_t)) / denominator``: trains the indexer's scores I towards the main attention's weights p.

    Layouts as in lightning_indexer. K slots a query, N heads and D channels of the main attention.

    q_index       [B, S, H, Di] or [T, H, Di], bf16, fp16 or fp32 (fp64: eager form alone).
    k_index       [B, S3, Di] or [T3, Di], dtype of q_index.
    weights       [B, S, H] or [T, H], fp32 or the dtype of q_index.
    indices       int32 [B, S, K] or [T, K]: the selected blocks; -1, out of range and not yet visible do not count, a repeated index
                  counts as often as it occurs. None: all visible blocks (dense warm-up).
    teacher       fp32 [B, S, K] or [T, K]: the attention's probabilities on the slots, a mean over heads (`return_cmp_probs`). Then q,
                  cmp_kv and lse are not used. Not with indices=None, not with target="compressed".
    q, cmp_kv     [B, S, N, D] and [B, S3, D], or [T, N, D] and [T3, D], of one dtype: the main attention's, to compute the teacher here.
    lse           fp32 [B, S, N] or [T, N], natural log, of window, compressed blocks and sink; not used by "compressed".
    scores        fp32 [B, S, K] or [T, K]: what lightning_indexer returned with these indices, sorted or not, for the same q_index, k_index,
                  weights, cmp_ratio, documents and offset, so that the kernels need not compute them again. Values alone: no gradient
                  flows into them, they may come from under no_grad, and slots that do not count are not read. That they match is up
                  to the caller. The eager forms compute their own. Not with indices=None.
    softmax_scale scale of q . cmp_kv; None is D ** -0.5.
    target        "joint": exp(z - lse), mean over heads, normalised over the slots. "compressed": a softmax over the slots for each head,
                  then their mean. "marginal": as "joint", each token weighted by its mass Z on the slots.
    cmp_ratio, cu_seqlens_q, cu_seqlens_k, q_offset   as in lightning_indexer.
    reduction     "sum" or "mean"; decides the default of denominator alone: 1, or the number of valid rows (at least 1).
    denominator   a positive number or a scalar tensor on the device of q_index (the global number of tokens, say).
    coefficient   a number, factor of the loss. Compiled code is compiled again for another one: multiply the loss where it changes often.
    deterministic sums the gradient of k_index to the same bits in every run; None follows torch.are_deterministic_algorithms_enabled().
                  impl="eager" is plain autograd and follows PyTorch's own switch alone.
    impl          "auto", "triton" or "eager", see kernel_runtime.impl.

    Returns a scalar, fp32 (fp64 for fp64 inputs), differentiable in q_index, k_index and weights only; the main attention's tensors are
    constants. A row without a valid slot or with teacher mass 0 has loss 0 and zero gradients and is not counted. The gradients are
    computed with the value; `indexer.save_kl_policy` keeps them under activation checkpointing. Formulas: reference/indexer_loss.py.
    Double backward is refused.
    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape, device or option.
    """
    layout = check_indexer(OP, ("q_index", "k_index"), q_index, k_index, weights, cmp_ratio, cu_seqlens_q, cu_seqlens_k, q_offset)
    check_choice(OP, "target", target, TARGETS)
    check_choice(OP, "reduction", reduction, REDUCTIONS)
    _check_indices(indices, q_index)
    _check_scores(scores, indices, q_index)
    if teacher is not None:
        _check_given_teacher(teacher, indices, target, q_index)
        q = cmp_kv = lse = None
    else:
        if target == "compressed":
            lse = None
        _check_attention(q, cmp_kv, lse, target, q_index, k_index)
    scale = _number("softmax_scale", softmax_scale) if softmax_scale is not None else (1.0 if q is None else q.shape[-1] ** -0.5)
    coefficient = _number("coefficient", coefficient)
    denominator = _check_denominator(denominator, q_index)
    deterministic = resolve_deterministic(OP, deterministic)
    how = select_impl(OP, impl, q_index, no_kernel=no_kernel(q_index, indices, q))
    if impl == "eager":
        return run_eager(
            reference.indexer_kl_loss, q_index, k_index, weights, indices, teacher=teacher, q=q, cmp_kv=cmp_kv, lse=lse,
            softmax_scale=scale, target=target, cmp_ratio=cmp_ratio, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            q_offset=q_offset, reduction=reduction, denominator=denominator, coefficient=coefficient,
        )  # fmt: skip
    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (q_index, k_index, weights))
    constants = tuple(None if x is None else x.detach() for x in (indices, teacher, q, cmp_kv, lse, scores, *layout.tensors))
    options = (reduction == "mean", denominator, coefficient)
    rest = (scale, target, *layout.numbers, gradients, deterministic, how)
    return apply_function(IndexerKLLoss, q_index, k_index, weights, *options, *constants, *rest)


def _check_indices(indices: Tensor | None, q_index: Tensor) -> None:
    if indices is not None:
        check_dtype(OP, "indices", indices, (torch.int32,))
        check_shape(OP, "indices", indices, [*q_index.shape[:-2], "K"])
        check_same(OP, "indices", indices, "q_index", q_index, dtype=False)


def _check_scores(scores: Tensor | None, indices: Tensor | None, q_index: Tensor) -> None:
    if scores is None:
        return
    if indices is None:
        raise ValueError(f"{OP}: scores with indices=None; scores belong to selected slots, the dense form computes its own")
    check_dtype(OP, "scores", scores, _wide(q_index))
    check_shape(OP, "scores", scores, indices.shape)
    check_same(OP, "scores", scores, "q_index", q_index, dtype=False)


def _check_given_teacher(teacher: Tensor, indices: Tensor | None, target: str, q_index: Tensor) -> None:
    if indices is None:
        raise ValueError(f"{OP}: teacher with indices=None; a given teacher belongs to selected slots, the dense form computes its own")
    if target == "compressed":
        raise ValueError(f"{OP}: target='compressed' cannot be made from a given teacher (a mean over heads); pass q and cmp_kv instead")
    check_dtype(OP, "teacher", teacher, _wide(q_index))
    check_shape(OP, "teacher", teacher, indices.shape)
    check_same(OP, "teacher", teacher, "q_index", q_index, dtype=False)


def _check_attention(q: Tensor | None, cmp_kv: Tensor | None, lse: Tensor | None, target: str, q_index: Tensor, k_index: Tensor) -> None:
    wanted = {"q": q, "cmp_kv": cmp_kv} | ({} if target == "compressed" else {"lse": lse})
    missing = [name for name, x in wanted.items() if x is None]
    if q is None or cmp_kv is None or missing:
        raise ValueError(f"{OP}: {', '.join(missing)} missing; without a teacher, target={target!r} needs {', '.join(wanted)}")
    check_dtype(OP, "q", q, FLOATS)
    check_shape(OP, "q", q, [*q_index.shape[:-2], "N", "D"])
    if q.shape[-2] < 1 or q.shape[-1] < 1:
        raise ValueError(f"{OP}: q has shape {list(q.shape)}, wanted at least one head and one channel")
    check_same(OP, "q", q, "q_index", q_index, dtype=False)
    check_shape(OP, "cmp_kv", cmp_kv, [*k_index.shape[:-1], q.shape[-1]])
    check_same(OP, "cmp_kv", cmp_kv, "q", q)
    if lse is not None:
        check_dtype(OP, "lse", lse, _wide(q))
        check_shape(OP, "lse", lse, q.shape[:-1])
        check_same(OP, "lse", lse, "q", q, dtype=False)


def _wide(like: Tensor) -> tuple[torch.dtype, ...]:
    """Dtypes of what the attention gives in fp32: fp64 as well beside fp64, nothing is rounded silently."""
    return COEFFICIENTS if like.dtype == torch.float64 else (torch.float32,)


def _number(name: str, value: float) -> float:
    check_number(OP, name, value)
    return float(value)


def _check_denominator(denominator: int | float | Tensor | None, q_index: Tensor) -> float | Tensor | None:
    if denominator is None:
        return None
    if isinstance(denominator, Tensor):
        check_shape(OP, "denominator", denominator, [])
        check_same(OP, "denominator", denominator, "q_index", q_index, dtype=False)
        if denominator.dtype == torch.bool or denominator.is_complex():
            raise TypeError(f"{OP}: denominator has dtype {str(denominator.dtype).removeprefix('torch.')}, wanted a real number")
        return denominator.detach()
    value = _number("denominator", denominator)
    if not value > 0:
        raise ValueError(f"{OP}: denominator must be positive, got {denominator}")
    return value
