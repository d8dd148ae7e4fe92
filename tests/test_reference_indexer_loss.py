"""The indexer loss's specification against Python loops, gradcheck and the gradients written by hand, and the identities it must keep."""

import math

import pytest
import torch

from reference import indexer as reference_scores
from reference import indexer_loss as reference
from reference.cases import indexer as cases

FP64 = torch.float64
TARGETS = ("joint", "compressed", "marginal")
SPARSE_AND_DENSE = pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])


def make(case, *, dense=False, given=False, ties=True):
    """Keyword arguments of the loss in fp64, and the names of the three differentiable ones."""
    index = cases.make_indexer(case, FP64, ties=ties)
    kwargs = dict(q_index=index["q"], k_index=index["k"], weights=index["weights"] * 4, **cases.layout(case))
    kwargs["indices"] = None if dense else cases.make_indices(case)
    return kwargs | (dict(teacher=cases.make_teacher(case)) if given else cases.make_attention(case, FP64))


def trainable(kwargs):
    return [kwargs[name].requires_grad_() for name in ("q_index", "k_index", "weights")]


def loop_row(q, k, w, blocks, count, *, target, teacher=None, z=None, lse=None):
    """L_t, and dI by slot, of one query. ``blocks``: its index list; z(s) gives the logits of block s for all heads. Floats and loops."""
    valid = [j for j, s in enumerate(blocks) if 0 <= s < count]
    scores = {}
    for j in valid:
        products = [sum(float(a) * float(b) for a, b in zip(head, k[blocks[j]])) for head in q]
        scores[j] = sum(float(w[h]) * max(0.0, x) for h, x in enumerate(products))
    if teacher is not None:
        u = {j: float(teacher[j]) for j in valid}
    else:
        logits = {j: [float(x) for x in z(blocks[j])] for j in valid}
        u = dict.fromkeys(valid, 0.0)
        heads = len(logits[valid[0]]) if valid else 0
        for n in range(heads):
            norm = math.log(sum(math.exp(logits[j][n]) for j in valid)) if target == "compressed" else float(lse[n])
            for j in valid:
                u[j] += (math.exp(logits[j][n] - norm) if norm > -math.inf else 0.0) / heads
    mass = sum(u.values())
    if not valid or mass == 0:
        return 0.0, [0.0] * len(blocks), False
    soft = sum(math.exp(x) for x in scores.values())
    loss, d_scores = 0.0, [0.0] * len(blocks)
    for j in valid:
        p, s = u[j] / mass, math.exp(scores[j]) / soft
        loss += p * (math.log(p) - math.log(s)) if p > 0 else 0.0
        d_scores[j] = s - p
    scale = mass if target == "marginal" else 1.0
    return scale * loss, [scale * x for x in d_scores], True


def loop_loss(case, kwargs, target):
    """Sum of L_t, the number of valid rows and the gradients of q_index, k_index, weights by the hand-written formulas."""
    q_index, k_index, weights = (kwargs[n].detach() for n in ("q_index", "k_index", "weights"))
    indices = kwargs["indices"]
    teacher, q, cmp_kv, lse = (kwargs.get(n) for n in ("teacher", "q", "cmp_kv", "lse"))
    grads = [torch.zeros_like(x) for x in (q_index, k_index, weights)]
    total, counted, offset = 0.0, 0, case.q_offset or 0
    if case.documents is None:
        spots = [((b, i), (b, slice(None)), i, k_index.shape[1]) for b in range(case.batch) for i in range(case.seq)]
    else:
        spots, first_q, first_k = [], 0, 0
        for n in case.documents:
            spots += [((first_q + i,), (slice(first_k, first_k + case.keys_of(n)),), i, case.keys_of(n)) for i in range(n)]
            first_q, first_k = first_q + n, first_k + case.keys_of(n)
    for row, of_keys, i, keys in spots:
        k, count = k_index[of_keys], min(keys, math.floor((i + offset + 1) / case.cmp_ratio))
        blocks = list(range(keys)) if indices is None else indices[row].tolist()
        z = None
        if teacher is None:
            z = lambda s, row=row, of_keys=of_keys: case.attn_dim**-0.5 * (q[row] @ cmp_kv[of_keys][s])  # noqa: E731  (the formula, in one line)
        loss, d_scores, valid = loop_row(
            q_index[row], k, weights[row], blocks, count, target=target, z=z,
            teacher=None if teacher is None else teacher[row], lse=None if lse is None else lse[row],
        )  # fmt: skip
        total, counted = total + loss, counted + valid
        for s, d in zip(blocks, d_scores):
            if d != 0:
                products = q_index[row] @ k[s]
                grads[2][row] += d * products.relu()
                d_products = d * weights[row] * (products > 0)
                grads[0][row] += d_products[:, None] * k[s]
                grads[1][of_keys][s] += d_products @ q_index[row]
    return total, counted, grads


@pytest.mark.parametrize("case", cases.SMALL, ids=lambda c: c.name)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("form", ["sparse", "dense", "given"])
def test_against_python_loops(case, target, form):
    if form == "given" and target == "compressed":
        target = "joint"  # a given teacher has no "compressed" form; joint again, with another reduction
    kwargs = make(case, dense=form == "dense", given=form == "given")
    leaves = trainable(kwargs)
    want, counted, want_grads = loop_loss(case, kwargs, target)
    loss = reference.indexer_kl_loss(**kwargs, target=target, reduction="mean", coefficient=0.75)
    assert loss.dtype == FP64 and loss.shape == ()
    torch.testing.assert_close(loss.item(), 0.75 * want / max(counted, 1), rtol=1e-11, atol=1e-13)
    for got, grad in zip(torch.autograd.grad(loss, leaves), want_grads):
        torch.testing.assert_close(got, 0.75 * grad / max(counted, 1), rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("case", [cases.SMALL[0], cases.SMALL[6]], ids=lambda c: c.name)
@pytest.mark.parametrize("target", TARGETS)
@SPARSE_AND_DENSE
def test_gradcheck(case, target, dense):
    """Finite differences of the loss itself; no planted zero products, where the ReLU has no derivative."""
    kwargs = make(case, dense=dense, ties=False)
    leaves = trainable(kwargs)

    def loss(q_index, k_index, weights):
        moved = kwargs | dict(q_index=q_index, k_index=k_index, weights=weights)
        return reference.indexer_kl_loss(**moved, target=target, denominator=3)

    assert torch.autograd.gradcheck(loss, tuple(leaves), fast_mode=True)


@pytest.mark.parametrize("target", ["joint", "marginal"])
def test_d_scores(target):
    """dI = softmax(I) - p, and Z softmax(I) - u for "marginal", by finite differences of the row loss in I."""
    generator = torch.Generator().manual_seed(4)
    scores = torch.randn(1, 3, 6, generator=generator, dtype=FP64)
    u = torch.rand(1, 3, 6, generator=generator, dtype=FP64) * 0.1
    valid = torch.tensor([[[1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 0]]], dtype=torch.bool)
    u = torch.where(valid, u, 0)
    u[0, 0, 2] = 0
    z = u.sum(-1, keepdim=True)
    soft = torch.where(valid, scores, -torch.inf).softmax(-1).nan_to_num(0)
    want = torch.where(valid, z * soft - u if target == "marginal" else soft - u / torch.where(z > 0, z, 1), 0)
    got = torch.zeros_like(scores)
    for index in torch.cartesian_prod(torch.arange(3), torch.arange(6)).tolist():
        step = torch.zeros_like(scores)
        step[0, index[0], index[1]] = 1e-5
        up, down = (reference.kl_of_rows(scores + sign * step, u, valid, target)[0].sum() for sign in (1, -1))
        got[0, index[0], index[1]] = (up - down) / 2e-5
    torch.testing.assert_close(got, want, rtol=0, atol=1e-9)


@SPARSE_AND_DENSE
def test_marginal_is_joint_weighted_by_mass(dense):
    case = cases.SMALL[0]
    kwargs = make(case, dense=dense)
    rows = {}
    for target in ("joint", "marginal"):
        leaves = trainable(kwargs)
        rows[target], valid = reference.indexer_kl_rows(**kwargs, target=target)
        rows[target, "grad"] = torch.autograd.grad(rows[target][0, 30], leaves[0])[0]
    z = torch.einsum("bsnd,bkd->bsnk", kwargs["q"], kwargs["cmp_kv"]) * case.attn_dim**-0.5
    u = (z - kwargs["lse"][..., None]).exp().mean(2)
    blocks = torch.arange(kwargs["k_index"].shape[1]).expand(u.shape).int() if dense else kwargs["indices"]
    count = ((torch.arange(case.seq) + 1) // case.cmp_ratio)[None, :, None]
    inside = (blocks >= 0) & (blocks < count)
    mass = torch.where(inside, u.gather(-1, torch.where(inside, blocks, 0).long()), 0).sum(-1)
    assert mass[valid].std() > 0.01
    torch.testing.assert_close(rows["marginal"], mass * rows["joint"], rtol=1e-11, atol=1e-14)
    torch.testing.assert_close(rows["marginal", "grad"], mass[0, 30] * rows["joint", "grad"], rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("target", ["joint", "marginal"])
def test_given_teacher_is_the_computed_one(target):
    """The attention's probabilities handed over give the loss that q, cmp_kv and lse give; "joint" does not see the teacher's scale."""
    case = cases.SMALL[0]
    kwargs = make(case)
    want, _ = reference.indexer_kl_rows(**kwargs, target=target)
    q, cmp_kv, lse = (kwargs.pop(n) for n in ("q", "cmp_kv", "lse"))
    indices = kwargs["indices"]
    z = torch.einsum("bsnd,bkd->bsnk", q, cmp_kv) * case.attn_dim**-0.5
    u = (z - lse[..., None]).exp().mean(2).gather(-1, indices.clamp(0, z.shape[-1] - 1).long())
    u = torch.where(indices < 0, torch.nan, u)  # what stands at a slot that is not valid is never looked at
    torch.testing.assert_close(reference.indexer_kl_rows(**kwargs, teacher=u, target=target)[0], want, rtol=1e-12, atol=1e-14)
    if target == "joint":
        torch.testing.assert_close(reference.indexer_kl_rows(**kwargs, teacher=7 * u)[0], want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("target", TARGETS)
def test_dense_is_sparse_over_all_blocks(target):
    case = cases.SMALL[7]
    kwargs = make(case, dense=True)
    everything = torch.arange(kwargs["k_index"].shape[0], dtype=torch.int32).expand(case.rows, -1)
    dense, valid = reference.indexer_kl_rows(**kwargs, target=target)
    sparse, same = reference.indexer_kl_rows(**kwargs | {"indices": everything}, target=target)
    assert torch.equal(valid, same) and 0 < valid.sum() < case.rows
    torch.testing.assert_close(dense, sparse, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("target", TARGETS)
@SPARSE_AND_DENSE
def test_packed_equals_each_document_alone(target, dense):
    case = cases.IndexerCase("packed", documents=(13, 0, 3, 22, 1), topk=5)
    kwargs = make(case, dense=dense)
    offsets = torch.tensor([0, 4, 9, 1, 40], dtype=torch.int32)
    cu_q, cu_k = (kwargs.pop(n).tolist() for n in ("cu_seqlens_q", "cu_seqlens_k"))
    rows, valid = reference.indexer_kl_rows(**kwargs | {"q_offset": offsets} | cu(cu_q, cu_k), target=target)
    for d in range(len(case.documents)):
        tokens, blocks = slice(cu_q[d], cu_q[d + 1]), slice(cu_k[d], cu_k[d + 1])
        alone = {n: kwargs[n][tokens][None] for n in ("q_index", "weights", "q", "lse")}
        alone |= {n: kwargs[n][blocks][None] for n in ("k_index", "cmp_kv")}
        alone["indices"] = None if dense else kwargs["indices"][tokens][None]
        one, one_valid = reference.indexer_kl_rows(**alone, target=target, q_offset=int(offsets[d]))
        assert torch.equal(one_valid[0], valid[tokens])
        torch.testing.assert_close(one[0], rows[tokens], rtol=1e-11, atol=1e-14)


def cu(cu_q, cu_k):
    return dict(cu_seqlens_q=torch.tensor(cu_q, dtype=torch.int32), cu_seqlens_k=torch.tensor(cu_k, dtype=torch.int32))


def test_reduction_denominator_coefficient():
    kwargs = make(cases.SMALL[0])
    rows, valid = reference.indexer_kl_rows(**kwargs)
    total, count = rows.sum(), valid.sum()
    assert 1 < count < valid.numel()
    for options, want in (
        (dict(), total),
        (dict(reduction="mean"), total / count),
        (dict(reduction="mean", denominator=5), total / 5),
        (dict(denominator=torch.tensor(7.0)), total / 7),
        (dict(coefficient=-2.5), -2.5 * total),
        (dict(coefficient=0.0), 0 * total),
    ):
        torch.testing.assert_close(reference.indexer_kl_loss(**kwargs, **options), want, rtol=1e-14, atol=0)


def test_mean_without_valid_row_is_zero():
    kwargs = make(cases.SMALL[8])
    leaves = trainable(kwargs)
    loss = reference.indexer_kl_loss(**kwargs, reduction="mean")
    assert loss == 0 and all((g == 0).all() for g in torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("target", TARGETS)
def test_teacher_side_is_constant(target):
    kwargs = make(cases.SMALL[0])
    leaves = trainable(kwargs)
    constants = [kwargs[n].requires_grad_() for n in ("q", "cmp_kv", "lse")]
    denominator = torch.tensor(2.0, dtype=FP64, requires_grad=True)
    loss = reference.indexer_kl_loss(**kwargs, target=target, denominator=denominator)
    grads = torch.autograd.grad(loss, [*leaves, *constants, denominator], allow_unused=True)
    assert all(g.abs().sum() > 0 for g in grads[:3]) and all(g is None for g in grads[3:])


@pytest.mark.parametrize("given", [False, True])
def test_rows_that_do_not_count(given):
    """All -1, or a teacher of mass 0: loss 0, zero gradients, not valid - also where lse is -inf or the teacher underflows to 0."""
    case = cases.SMALL[0]
    kwargs = make(case, given=given)
    if not given:
        kwargs["lse"][:, 13] = -torch.inf  # a row whose heads saw nothing at all
        kwargs["lse"][:, 15] = 1e5  # exp(z - lse) is 0 exactly
    leaves = trainable(kwargs)
    rows, valid = reference.indexer_kl_rows(**kwargs)
    empty = (kwargs["indices"] < 0).all(-1)
    dead = [7, 15] if given else [13, 15]
    assert empty[:, 8].all() and not valid[:, [0, 1, 2, 8, 17, *dead]].any()
    assert (rows[~valid] == 0).all() and torch.isfinite(rows).all()
    grads = torch.autograd.grad(rows.sum(), leaves)
    assert all(torch.isfinite(g).all() for g in grads)
    assert (grads[0][~valid] == 0).all() and (grads[2][~valid] == 0).all()
    assert (rows[valid] > 0).any() and (rows > -1e-12).all()


@pytest.mark.parametrize("case", [cases.SMALL[0], cases.SMALL[7]], ids=lambda c: c.name)
@SPARSE_AND_DENSE
def test_chunks_change_nothing(case, dense, monkeypatch):
    results = []
    for elements in (1 << 26, 2000):
        monkeypatch.setattr(reference_scores, "CHUNK_ELEMENTS", elements)
        kwargs = make(case, dense=dense)
        leaves = trainable(kwargs)
        rows, _ = reference.indexer_kl_rows(**kwargs, target="compressed")
        results.append((rows.detach(), *torch.autograd.grad(rows.square().sum(), leaves)))
    for whole, pieces in zip(*results):
        torch.testing.assert_close(whole, pieces, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize(
    "shape", [dict(batch=0, seq=5), dict(seq=0), dict(seq=5, keys=0), dict(documents=()), dict(seq=9, topk=0)], ids=str
)
@SPARSE_AND_DENSE
def test_empty(shape, dense):
    case = cases.IndexerCase("empty", **{"topk": 3} | shape)
    if dense and "topk" in shape:
        case = cases.IndexerCase("one", seq=1)
    kwargs = make(case, dense=dense)
    leaves = trainable(kwargs)
    loss = reference.indexer_kl_loss(**kwargs, reduction="mean")
    assert loss == 0 and all((g == 0).all() for g in torch.autograd.grad(loss, leaves))
