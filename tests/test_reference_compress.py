"""The compressor's specification against a loop over windows and channels, and finite differences."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.autograd import gradcheck

from reference.cases.sparse_attn import COMPRESS_CASES, CompressCase, compress_inputs
from reference.compress import compress_kv

by_name = pytest.mark.parametrize("case", COMPRESS_CASES, ids=lambda case: case.name)


def _one_sequence(kv, gate, bias, ratio, overlap):
    """[S // ratio, D] by a list of (logit, value) for every entry and channel."""
    S, D = kv.shape[0], kv.shape[1] // (2 if overlap else 1)
    entries = []
    for e in range(S // ratio):
        channels = []
        for d in range(D):
            # (token, column): the columns of a token's own window come last where there are two series.
            slots = [(e * ratio + r, d + (D if overlap else 0)) for r in range(ratio)]
            if overlap and e > 0:
                slots += [((e - 1) * ratio + r, d) for r in range(ratio)]
            logits = torch.stack([gate[s, c] + bias[s % ratio, c] for s, c in slots])
            weights = torch.softmax(logits, 0)
            channels.append(sum(w * kv[s, c] for w, (s, c) in zip(weights, slots)))
        entries.append(torch.stack(channels))
    return torch.stack(entries) if entries else kv.new_zeros(0, D)


def oracle(inputs):
    kv, gate, bias, ratio, overlap = (inputs[name] for name in ("kv", "gate", "position_bias", "ratio", "overlap"))
    if "cu_seqlens" not in inputs:
        return torch.stack([_one_sequence(k, g, bias, ratio, overlap) for k, g in zip(kv, gate)])
    cu = inputs["cu_seqlens"].tolist()
    # Windows count from a document's start, so `s % ratio` inside a document is right.
    parts = [_one_sequence(kv[a:b], gate[a:b], bias, ratio, overlap) for a, b in pairwise(cu)]
    entries = torch.cat(parts)
    return torch.cat([entries, entries.new_zeros(kv.shape[0] // ratio - len(entries), entries.shape[1])])


def _leaves(inputs):
    return [inputs[name].requires_grad_() for name in ("kv", "gate", "position_bias")]


@by_name
def test_equals_loop(case):
    got, want = (compress_inputs(case, seed=1, dtype=torch.float64) for _ in range(2))
    got_leaves, want_leaves = _leaves(got), _leaves(want)
    result, expected = compress_kv(**got), oracle(want)
    assert result.shape == expected.shape and result.dtype == torch.float64
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-14)
    cotangent = torch.randn(result.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    result.backward(cotangent)
    if expected.requires_grad:
        expected.backward(cotangent)
    for a, b in zip(got_leaves, want_leaves):
        torch.testing.assert_close(a.grad, torch.zeros_like(b) if b.grad is None else b.grad, rtol=1e-11, atol=1e-13)


@by_name
def test_gradcheck(case):
    case = replace(case, D=2)
    inputs = compress_inputs(case, seed=3, dtype=torch.float64)

    def run(kv, gate, bias):
        return compress_kv(**{**inputs, "kv": kv, "gate": gate, "position_bias": bias})

    assert gradcheck(run, _leaves(inputs), atol=1e-7, rtol=1e-5)


@by_name
def test_low_precision_stays_close_to_fp64(case):
    want = compress_kv(**compress_inputs(case, seed=4, dtype=torch.float64))
    for dtype, atol in ((torch.float32, 1e-6), (torch.bfloat16, 5e-2)):
        got = compress_kv(**compress_inputs(case, seed=4, dtype=dtype))
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=0, atol=atol)


def test_overlap_takes_the_first_channels_of_the_window_before():
    """A token whose gate dominates: its last channels rule its own window's entry, its first ones the next one's."""
    case = CompressCase("", 4, True, D=3, B=1, S=12)
    inputs = compress_inputs(case, seed=5, dtype=torch.float64)
    inputs["gate"][0, 5] = 1000.0
    result = compress_kv(**inputs)
    torch.testing.assert_close(result[0, 1], inputs["kv"][0, 5, 3:], rtol=1e-12, atol=0)
    torch.testing.assert_close(result[0, 2], inputs["kv"][0, 5, :3], rtol=1e-12, atol=0)
    inputs["gate"][0, 5], inputs["gate"][0, 9] = 0.0, 1000.0  # the last window's first channels have no entry to go to
    assert not torch.isclose(compress_kv(**inputs)[0, 0], inputs["kv"][0, 9, :3]).any()


def test_documents_do_not_mix():
    """NaN and huge gates in one document and in its remainder leave the others as they are, in both directions."""
    case = CompressCase("", 2, True, D=3, docs=(5, 4, 6))
    clean, dirty = (compress_inputs(case, seed=6) for _ in range(2))
    dirty["kv"][4] = torch.nan  # the remainder of the first document
    dirty["gate"][4] = torch.inf
    dirty["kv"][5:9] = torch.nan
    dirty["gate"][5:9] = 3e38
    leaves = _leaves(dirty)
    result = compress_kv(**dirty)
    others = torch.tensor([0, 1, 4, 5, 6])
    torch.testing.assert_close(result[others], compress_kv(**clean)[others], rtol=0, atol=0)
    result[others].sum().backward()
    tokens = torch.tensor([*range(5), *range(9, 15)])
    assert all(leaf.grad[tokens].isfinite().all() for leaf in leaves[:2])
    assert (leaves[0].grad[4] == 0).all() and (leaves[1].grad[4] == 0).all()


def test_what_no_entry_takes_up_may_hold_anything():
    """NaN in remainders, behind the last document, in a first series that no window follows, and in the gradient of rows that are no entries."""
    inputs = compress_inputs(CompressCase("", 4, True, D=3, docs=(9, 6, 7)), seed=6, dtype=torch.float64)
    inputs["cu_seqlens"] = torch.tensor([0, 9, 15], dtype=torch.int32)
    dout = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = []
    for filling in (0.0, torch.nan):
        filled = {name: x.clone() if torch.is_tensor(x) else x for name, x in inputs.items()}
        for x in (filled["kv"], filled["gate"]):
            x[8] = x[13:] = filling
            x[4:8, :3] = x[9:13, :3] = filling
        leaves = _leaves(filled)
        result = compress_kv(**filled)
        cotangent = dout.index_fill(0, torch.tensor([3, 4]), filling)
        found.append((result, *torch.autograd.grad(result, leaves, cotangent)))
    for got, want in zip(found[1], found[0]):
        assert want.any() and torch.equal(got, want)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("empty", ["B", "S", "T"])
def test_empty_inputs(overlap, empty):
    case = CompressCase("", 4, overlap)
    case = replace(case, docs=(0,)) if empty == "T" else replace(case, **{empty: 0})
    inputs = compress_inputs(case, seed=7)
    leaves = _leaves(inputs)
    result = compress_kv(**inputs)
    assert result.shape == (*inputs["kv"].shape[:-2], inputs["kv"].shape[-2] // 4, case.D)
    result.sum().backward()
    assert all((leaf.grad == 0).all() for leaf in leaves)


@pytest.mark.parametrize("name", ["plain", "plain_pack", "overlap", "overlap_pack"])
def test_traces_in_one_graph(name):
    case = next(c for c in COMPRESS_CASES if c.name == name)
    inputs = compress_inputs(case, seed=8)
    leaves = _leaves(inputs)
    want = compress_kv(**inputs)
    got = torch.compile(compress_kv, fullgraph=True, backend="aot_eager")(**inputs)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    cotangent = torch.randn(want.shape, generator=torch.Generator().manual_seed(9))
    for a, b in zip(torch.autograd.grad(got, leaves, cotangent), torch.autograd.grad(want, leaves, cotangent)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
