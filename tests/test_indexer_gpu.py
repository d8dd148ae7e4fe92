"""The indexer and its loss on a GPU at the sizes they are for: 128K tokens, 64 heads, 512 slots. Slices are compared with fp64."""

import pytest
import torch

from indexer import indexer_kl_loss, lightning_indexer
from reference import indexer as reference
from reference.cases import relative_error

pytestmark = pytest.mark.gpu
HEADS, DIM, RATIO, TOPK = 64, 128, 4, 512
LONG = 131072


def make(batch, tokens, seed=0, keys=None):
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, device="cuda", dtype=dtype).normal_(generator=generator)

    weights = normal(batch, tokens, HEADS, dtype=torch.float32) * (HEADS * DIM) ** -0.5
    return normal(batch, tokens, HEADS, DIM), normal(batch, keys or tokens // RATIO, DIM), weights


def check_row(q, k, weights, t, indices, scores):
    """One query against fp64. Blocks may differ, and their order, only where two scores are closer than the error of the fp32 sums, which is
    itself held to what 64 such additions may do. Returns how many blocks differ."""
    visible = min(k.shape[0], (t + 1) // RATIO)
    exact = reference.index_scores(q[None, None].double(), k[None, :visible].double(), weights[None, None].double())[0, 0]
    size = torch.einsum("hd,kd->hk", q.double(), k[:visible].double()).relu()
    size = (size * weights.double().abs()[:, None]).sum(0)  # of the terms of each sum
    kept = min(TOPK, visible)
    assert (indices[kept:] == -1).all() and (scores[kept:] == -torch.inf).all()
    index, score = indices[:kept].long(), scores[:kept]
    assert kept == 0 or (index.min() >= 0 and index.max() < visible and index.unique().numel() == kept)
    if kept == 0:
        return 0
    error = (score.double() - exact[index]).abs().max().item()
    assert error <= HEADS * 2.0**-24 * size.max().item()
    out = torch.ones(visible, dtype=torch.bool, device=q.device)
    out[index] = False
    if out.any():
        assert exact[index].min() >= exact[out].max() - 2 * error
    assert (exact[index].diff() <= 2 * error).all()
    falls = score.diff() < 0
    assert (falls | ((score.diff() == 0) & (index.diff() > 0))).all()
    best = exact.sort(descending=True, stable=True).indices[:kept]
    return kept - torch.isin(index, best).sum().item()


ROWS = (0, 3, 4, 2047, 2048, 4099, 16384, 65535, 65540, 70001, 100003, LONG - 2, LONG - 1)


def test_128k_tokens_against_fp64():
    """More than 2^31 elements in q, more keys than one search holds, and no more memory than the results and the stated buffers."""
    q, k, weights = make(2, LONG)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    indices, scores = lightning_indexer(q, k, weights, TOPK, impl="triton")
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before - indices.nbytes - scores.nbytes
    assert extra <= 2**28 + 2**25 + 2**22, f"{extra / 2**20:.0f} MiB beyond the results; 256 of scores and 32 of winners are stated"
    differ = sum(check_row(q[b, t], k[b], weights[b, t], t, indices[b, t], scores[b, t]) for b in (0, 1) for t in ROWS)
    assert differ <= 4  # blocks of 10,000; as many as scores are closer than fp32 tells


def test_gradients_of_128k_tokens():
    """Rows of dq and dw against fp64; dk by atomics and in a fixed order, which share no code for the sum; bit-equal when repeated."""
    leaves = [x.requires_grad_() for x in make(1, LONG, seed=1)]
    indices, scores = lightning_indexer(*leaves, TOPK, impl="triton")
    cotangent = torch.randn_like(scores).mul_(1e-3).masked_fill_(indices < 0, 0)
    fast = torch.autograd.grad(scores, leaves, cotangent, retain_graph=True)
    results = []
    for _ in range(2):
        indices, scores = lightning_indexer(*leaves, TOPK, deterministic=True, impl="triton")
        results.append(torch.autograd.grad(scores, leaves, cotangent))
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert relative_error(fast[1], results[0][1]) < 6e-3
    q, k, weights = (x.detach() for x in leaves)
    for t in ROWS[3:]:
        row = [q[:, t : t + 1].double().requires_grad_(), k.double(), weights[:, t : t + 1].double().requires_grad_()]
        want = reference.selected_scores(*row, indices[:, t : t + 1])
        valid = want > -torch.inf
        dq, dw = torch.autograd.grad(want[valid], [row[0], row[2]], cotangent[:, t : t + 1][valid].double())
        for grads in (fast, results[0]):
            assert relative_error(grads[0][:, t : t + 1], dq) < 6e-3 and relative_error(grads[2][:, t : t + 1], dw) < 6e-3


def test_planted_ties_at_full_size():
    """Every second key repeats the one before it, a third are zero: the K best are the first K of the whole order, and ties rise."""
    q, k, weights = make(1, 2048, seed=2)
    k[:, 1::2] = k[:, ::2]
    k[:, ::3] = 0
    weights[:, ::5] = 0
    whole_index, whole = lightning_indexer(q, k, weights, 512, impl="triton")
    step, rise = whole.diff(dim=-1).nan_to_num(nan=0.0), whole_index.diff(dim=-1)
    shown = whole_index[..., 1:] >= 0
    assert ((step < 0) | ((step == 0) & (rise > 0)) | ~shown).all() and (step[shown] == 0).float().mean() > 0.3
    for topk in (1, 37, 100, 500):
        for ordered in (True, False):
            indices, scores = lightning_indexer(q, k, weights, topk, sorted=ordered, impl="triton")
            if not ordered:
                scores, _ = scores.sort(dim=-1, descending=True, stable=True)
                assert torch.equal(scores, whole[..., :topk])
                assert torch.equal(indices.sort(-1).values, whole_index[..., :topk].sort(-1).values)
            else:
                assert torch.equal(indices, whole_index[..., :topk]) and torch.equal(scores, whole[..., :topk])


@pytest.mark.parametrize("target", ["joint", "marginal", "compressed"])
@pytest.mark.parametrize("dense", [False, True])
def test_finite_differences_of_the_loss(target, dense):
    """The slope of the kernels' own loss along a random direction against their gradients, in fp32."""
    generator = torch.Generator("cuda").manual_seed(3)

    def normal(*shape):
        return torch.empty(shape, device="cuda").normal_(generator=generator)

    S, S3, H, D = 320, 80, 8, 32
    leaves = [normal(1, S, H, D), normal(1, S3, D), normal(1, S, H) * (H * D) ** -0.5]
    indices = None if dense else lightning_indexer(*leaves, 24, impl="triton")[0]
    teacher = dict(q=normal(1, S, 4, 64) * 0.5, cmp_kv=normal(1, S3, 64), lse=normal(1, S, 4) + 4)

    def loss(leaves):
        return indexer_kl_loss(*leaves, indices, **teacher, target=target, deterministic=True, impl="triton")

    grads = torch.autograd.grad(loss([x.requires_grad_() for x in leaves]), leaves)
    for i, name in enumerate(("q_index", "k_index", "weights")):
        # partly along the gradient, so that the difference stands out of the loss's own rounding, 1e-6 of its value
        direction = normal(*leaves[i].shape)
        direction = grads[i] / grads[i].norm() + direction / direction.norm()
        slope = (grads[i].double() * direction.double()).sum().item()
        step = 1e-3 * leaves[i].detach().norm().item()
        ends = [loss([x + s * step * direction if i == j else x for j, x in enumerate(leaves)]).double().item() for s in (1, -1)]
        noise = 2e-6 * abs(ends[0]) / step
        assert abs((ends[0] - ends[1]) / (2 * step) - slope) <= 1e-2 * abs(slope) + noise and noise < 1e-2 * abs(slope), name


def test_loss_of_128k_tokens():
    """Rows of the gradients against fp64, and the memory: what inputs and gradients take and 4 bytes a slot, with the selection's scores."""
    leaves = [x.requires_grad_() for x in make(1, LONG, seed=4)]
    with torch.no_grad():
        indices, scores = lightning_indexer(*leaves, TOPK, impl="triton")
    teacher = torch.rand(indices.shape, device="cuda") / TOPK
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = indexer_kl_loss(*leaves, indices, teacher=teacher, scores=scores, impl="triton")
    torch.cuda.synchronize()
    held = leaves[0].nbytes + 2 * leaves[1].nbytes + leaves[2].nbytes + 4 * indices.numel()
    assert torch.cuda.max_memory_allocated() - before <= held + 2**23
    grads = torch.autograd.grad(loss, leaves)
    q, k, weights = (x.detach() for x in leaves)
    for t in ROWS[3:]:
        row = [q[:, t : t + 1].double().requires_grad_(), k.double(), weights[:, t : t + 1].double().requires_grad_()]
        options = dict(teacher=teacher[:, t : t + 1].double(), q_offset=t, impl="eager")
        dq, dw = torch.autograd.grad(indexer_kl_loss(*row, indices[:, t : t + 1], **options), [row[0], row[2]])
        assert relative_error(grads[0][:, t : t + 1], dq) < 6e-3 and relative_error(grads[2][:, t : t + 1], dw) < 6e-3
