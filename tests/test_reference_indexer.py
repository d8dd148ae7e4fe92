"""The indexer's specification against Python loops, fp64 gradcheck, the order rule on ties, TND == BSND per document."""

import math

import pytest
import torch

from reference import indexer as reference
from reference.cases import indexer as cases

FP64 = torch.float64


def loop_scores(q, k, weights, position, cmp_ratio):
    """Scores of the visible blocks of one query, written as the sentence in the specification says it: floats and loops only."""
    scores = []
    for s in range(k.shape[0]):
        if s >= math.floor((position + 1) / cmp_ratio):
            break
        total = 0.0
        for h in range(q.shape[0]):
            total += float(weights[h]) * max(0.0, sum(float(a) * float(b) for a, b in zip(q[h], k[s])))
        scores.append(total)
    return scores


def loop_topk(scores, topk):
    best = sorted(range(len(scores)), key=lambda s: (-scores[s], s))[:topk]
    missing = topk - len(best)
    return best + [-1] * missing, [scores[s] for s in best] + [-math.inf] * missing


def loop_indexer(case, inputs):
    q, k, weights = inputs["q"], inputs["k"], inputs["weights"]
    offset = case.q_offset or 0
    rows = []
    if case.documents is None:
        for b in range(case.batch):
            for i in range(case.seq):
                rows.append(loop_topk(loop_scores(q[b, i], k[b], weights[b, i], i + offset, case.cmp_ratio), case.topk))
    else:
        first_q = first_k = 0
        for n in case.documents:
            keys = k[first_k : first_k + case.keys_of(n)]
            for i in range(n):
                rows.append(loop_topk(loop_scores(q[first_q + i], keys, weights[first_q + i], i + offset, case.cmp_ratio), case.topk))
            first_q, first_k = first_q + n, first_k + keys.shape[0]
        rows += [loop_topk([], case.topk)] * case.padding
    return torch.tensor([r[0] for r in rows]), torch.tensor([r[1] for r in rows], dtype=FP64)


@pytest.mark.parametrize("case", cases.SMALL, ids=lambda c: c.name)
@pytest.mark.parametrize("ties", [True, False])
def test_against_python_loops(case, ties):
    inputs = cases.make_indexer(case, FP64, ties=ties)
    # whole numbers: sums are exact in any order, so equal scores are equal in the loop too and the index comparison is meaningful
    inputs["q"], inputs["k"] = (inputs["q"] * 2).round(), (inputs["k"] * 2).round()
    inputs["weights"] = (inputs["weights"] * 16).round()
    indices, scores = reference.lightning_indexer(**inputs, topk=case.topk, **cases.layout(case))
    want_indices, want_scores = loop_indexer(case, inputs)
    assert indices.dtype == torch.int32 and scores.dtype == FP64
    torch.testing.assert_close(indices.reshape(-1, case.topk).long(), want_indices, rtol=0, atol=0)
    torch.testing.assert_close(scores.reshape(-1, case.topk), want_scores, rtol=0, atol=0)


def test_cases_hold_ties_and_both_signs():
    """The planted difficulties are there: exact-zero ties across different blocks, repeated scores elsewhere, rows of negative scores."""
    case = cases.SMALL[0]
    _, scores = reference.lightning_indexer(**cases.make_indexer(case, FP64), topk=case.topk, **cases.layout(case))
    tied = (scores[..., 1:] == scores[..., :-1]) & (scores[..., 1:] > -math.inf)
    assert (tied & (scores[..., 1:] == 0)).any() and (tied & (scores[..., 1:] != 0)).any()
    finite = scores > -math.inf
    assert ((scores < 0) & finite).any() and (scores > 0).any() and (~finite).any()


def test_order_rule_on_ties():
    scores = torch.tensor([[[0.0, 2.0, -0.0, 2.0, -1.0, 0.0, 9.0]]], dtype=FP64)
    count = torch.tensor([[6]])
    indices, values = reference.select_topk(scores, count, 9)
    assert indices[0, 0].tolist() == [1, 3, 0, 2, 5, 4, -1, -1, -1]
    assert values[0, 0].tolist() == [2, 2, 0, 0, 0, -1, -math.inf, -math.inf, -math.inf]
    assert reference.select_topk(scores, count, 4)[0][0, 0].tolist() == [1, 3, 0, 2]
    # a visible block whose score overflowed to -inf still comes before the blocks that are not visible
    assert reference.select_topk(torch.full((1, 1, 5), -math.inf), torch.tensor([[2]]), 3)[0][0, 0].tolist() == [0, 1, -1]


@pytest.mark.parametrize("case", [cases.SMALL[0], cases.SMALL[2], cases.SMALL[7]], ids=lambda c: c.name)
def test_gradcheck(case):
    inputs = {name: x.requires_grad_() for name, x in cases.make_indexer(case, FP64, ties=False).items()}

    def scores(q, k, weights):
        values = reference.lightning_indexer(q, k, weights, case.topk, **cases.layout(case))[1]
        return torch.where(values > -math.inf, values, 0)

    assert torch.autograd.gradcheck(scores, tuple(inputs.values()), fast_mode=True)


def test_gradient_at_zero_product_is_zero():
    """relu'(0) = 0, and a -inf slot passes nothing on."""
    case = cases.SMALL[0]
    inputs = {name: x.requires_grad_() for name, x in cases.make_indexer(case, FP64).items()}
    indices, scores = reference.lightning_indexer(**inputs, topk=case.topk, **cases.layout(case))
    scores.backward(torch.randn(scores.shape, generator=torch.Generator().manual_seed(5), dtype=FP64))
    assert all(torch.isfinite(x.grad).all() for x in inputs.values())
    assert (inputs["k"].grad[:, 2::5] == 0).all() and (indices[..., 0] == -1).any()
    assert (inputs["q"].grad[indices[..., 0] < 0] == 0).all()


def test_packed_equals_each_document_alone():
    case = cases.IndexerCase("packed", documents=(13, 0, 3, 22, 1), topk=5)
    inputs = {name: x.requires_grad_() for name, x in cases.make_indexer(case, FP64).items()}
    offsets = torch.tensor([0, 4, 9, 1, 40], dtype=torch.int32)
    layout = cases.layout(case)
    indices, scores = reference.lightning_indexer(**inputs, topk=case.topk, **layout | {"q_offset": offsets})
    scores.masked_fill(scores == -math.inf, 0).square().sum().backward()
    cu_q, cu_k = layout["cu_seqlens_q"].tolist(), layout["cu_seqlens_k"].tolist()
    for d in range(len(case.documents)):
        tokens, blocks = slice(cu_q[d], cu_q[d + 1]), slice(cu_k[d], cu_k[d + 1])
        alone = [inputs[n].detach()[part][None].requires_grad_() for n, part in (("q", tokens), ("k", blocks), ("weights", tokens))]
        one_indices, one_scores = reference.lightning_indexer(*alone, case.topk, q_offset=int(offsets[d]))
        assert torch.equal(one_indices[0], indices[tokens])
        torch.testing.assert_close(one_scores[0], scores[tokens], rtol=1e-14, atol=1e-15)
        one_scores.masked_fill(one_scores == -math.inf, 0).square().sum().backward()
        for x, name, part in zip(alone, ("q", "k", "weights"), (tokens, blocks, tokens)):
            torch.testing.assert_close(x.grad[0], inputs[name].grad[part], rtol=1e-12, atol=1e-14)


def test_offset_tensor_per_batch_entry():
    case = cases.IndexerCase("batch", batch=3, seq=6, keys=5, topk=4)
    inputs = cases.make_indexer(case, FP64)
    offsets = torch.tensor([0, 7, -3], dtype=torch.int32)
    indices, scores = reference.lightning_indexer(**inputs, topk=4, q_offset=offsets)
    for b, offset in enumerate(offsets.tolist()):
        one = reference.lightning_indexer(*(x[b : b + 1] for x in inputs.values()), 4, q_offset=offset)
        assert torch.equal(one[0][0], indices[b]) and torch.equal(one[1][0], scores[b])


@pytest.mark.parametrize("case", [cases.SMALL[0], cases.SMALL[7]], ids=lambda c: c.name)
def test_chunks_change_nothing(case, monkeypatch):
    results = []
    for elements in (1 << 26, 500):
        monkeypatch.setattr(reference, "CHUNK_ELEMENTS", elements)
        inputs = {name: x.requires_grad_() for name, x in cases.make_indexer(case, FP64).items()}
        indices, scores = reference.lightning_indexer(**inputs, topk=case.topk, **cases.layout(case))
        scores.masked_fill(scores == -math.inf, 0).square().sum().backward()
        results.append((indices, scores.detach(), *(x.grad for x in inputs.values())))
    assert reference.chunk_length(case.batch * case.heads * inputs["k"].shape[-2]) < inputs["q"].shape[-3]
    for whole, pieces in zip(*results):
        torch.testing.assert_close(whole, pieces, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("case", cases.SMALL, ids=lambda c: c.name)
def test_selected_scores_are_the_scores(case):
    """From the indices alone: same scores and gradients as the form that selects (the backward pass of the op rests on it)."""
    inputs = {name: x.requires_grad_() for name, x in cases.make_indexer(case, FP64).items()}
    indices, scores = reference.lightning_indexer(**inputs, topk=case.topk, **cases.layout(case))
    packs = {name: x for name, x in cases.layout(case).items() if name.startswith("cu_")}
    again = reference.selected_scores(**inputs, indices=indices, **packs)
    torch.testing.assert_close(again, scores, rtol=1e-13, atol=1e-15)
    cotangent = torch.randn(scores.shape, generator=torch.Generator().manual_seed(6), dtype=FP64)
    for one, two in zip(*(torch.autograd.grad(x, list(inputs.values()), cotangent) for x in (scores, again))):
        torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("shape", [dict(batch=0, seq=5), dict(seq=0), dict(seq=5, keys=0), dict(documents=())], ids=str)
def test_empty(shape):
    case = cases.IndexerCase("empty", **shape, topk=3)
    inputs = {name: x.requires_grad_() for name, x in cases.make_indexer(case, FP64).items()}
    indices, scores = reference.lightning_indexer(**inputs, topk=3, **cases.layout(case))
    assert indices.shape == scores.shape == (*inputs["weights"].shape[:-1], 3)
    assert (indices == -1).all() and (scores == -math.inf).all()
    scores.sum().backward()
    assert all((x.grad == 0).all() for x in inputs.values())
