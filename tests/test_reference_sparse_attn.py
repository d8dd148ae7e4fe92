"""The sparse attention's specification against a loop over single queries and keys, finite differences and identities."""

import math
from dataclasses import replace

import pytest
import torch
from torch.autograd import gradcheck

from reference.cases.sparse_attn import ATTENTION_CASES, AttentionCase, attention_inputs, cu_seqlens_of, valid_pairs
from reference.sparse_attn import compressed_cu_seqlens, lse_with_sink, lse_without_sink, sparse_attn_shared_kv
from tests.sparse_attn_util import EMPTY, MODES, empty_case

DIFFERENTIABLE = ("q", "ori_kv", "cmp_kv", "sinks")
by_name = pytest.mark.parametrize("case", ATTENTION_CASES, ids=lambda case: case.name)


def _documents(inputs):
    """(queries, keys, entries, indices, offset) of each sequence or document, as plain slices."""
    q, ori, cmp, index = (inputs.get(name) for name in ("q", "ori_kv", "cmp_kv", "cmp_indices"))
    offset = inputs.get("q_offset")
    if "cu_seqlens_q" not in inputs:
        for b in range(q.shape[0]):
            o = ori.shape[1] - q.shape[1] if offset is None else int(offset[b]) if torch.is_tensor(offset) else offset
            yield q[b], ori[b], None if cmp is None else cmp[b], None if index is None else index[b], o
        return
    cu_q = inputs["cu_seqlens_q"].tolist()
    cu_ori = inputs.get("cu_seqlens_ori", inputs["cu_seqlens_q"]).tolist()
    done = 0
    for g in range(len(cu_q) - 1):
        queries, keys = slice(cu_q[g], cu_q[g + 1]), slice(cu_ori[g], cu_ori[g + 1])
        length = cu_ori[g + 1] - cu_ori[g]
        entries = length // inputs["cmp_ratio"] if cmp is not None else 0
        o = length - (cu_q[g + 1] - cu_q[g]) if offset is None else int(offset[g]) if torch.is_tensor(offset) else offset
        yield q[queries], ori[keys], None if cmp is None else cmp[done : done + entries], None if index is None else index[queries], o
        done += entries


def _one_query(q, ori, cmp, index, sinks, t, *, window, ratio, scale):
    """out [N, D], lse [N], cmp_probs [K] of one query, from a list of the rows it sees. Nothing is masked: rows are listed or not."""
    seen = [ori[p] for p in range(len(ori)) if p <= t and (window is None or p > t - window)]
    slots = []
    if cmp is not None:
        for slot, j in enumerate(range(len(cmp)) if index is None else index.tolist()):
            if 0 <= j < len(cmp) and (j + 1) * ratio <= t + 1:  # its last token is not after the query
                slots.append((slot, len(seen)))
                seen.append(cmp[j])
    N = q.shape[0]
    out, lse, probs = torch.zeros_like(q), q.new_full((N,), -math.inf), q.new_zeros(0 if index is None else len(index))
    for n in range(N):
        sink = -math.inf if sinks is None else float(sinks[n].detach())
        if sink == math.inf:
            lse[n] = math.inf
            continue
        logits = torch.stack([scale * (q[n] @ row) for row in seen] + [q.new_tensor(sink)])
        if logits.max() == -math.inf:
            continue
        lse[n] = torch.logsumexp(logits, 0)
        weights = torch.softmax(logits, 0)[:-1]
        for weight, row in zip(weights, seen):
            out[n] += weight * row
        if index is not None:
            for slot, position in slots:
                probs[slot] += weights[position] / N
    return out, lse, probs


def oracle(inputs):
    sinks = inputs.get("sinks")
    scale = inputs.get("softmax_scale") or 1 / math.sqrt(inputs["q"].shape[-1])
    results = []
    for q, ori, cmp, index, offset in _documents(inputs):
        for i in range(len(q)):
            row = None if index is None else index[i]
            results.append(
                _one_query(q[i], ori, cmp, row, sinks, offset + i, window=inputs["window"], ratio=inputs.get("cmp_ratio"), scale=scale)
            )
    out, lse, probs = (torch.stack(x) for x in zip(*results))
    lead = inputs["q"].shape[:-2]
    return out.view(inputs["q"].shape), lse.view(*lead, -1), probs.view(*lead, -1)


def _leaves(inputs):
    names = [name for name in DIFFERENTIABLE if name in inputs]
    for name in names:
        inputs[name].requires_grad_()
    return names


@by_name
def test_equals_loop_over_queries_and_keys(case):
    inputs = attention_inputs(case, seed=1, dtype=torch.float64)
    out, lse = sparse_attn_shared_kv(**inputs, return_lse=True)
    want_out, want_lse, want_probs = oracle(inputs)
    assert out.dtype == lse.dtype == torch.float64 and out.shape == want_out.shape and lse.shape == want_lse.shape
    torch.testing.assert_close(out, want_out, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(lse, want_lse, rtol=1e-12, atol=1e-13)
    if case.mode == "scfa":
        probs = sparse_attn_shared_kv(**inputs, return_cmp_probs=True)[1]
        assert probs.shape == inputs["cmp_indices"].shape
        torch.testing.assert_close(probs, want_probs, rtol=1e-12, atol=1e-14)


@by_name
def test_low_precision_stays_close_to_fp64(case):
    wide = attention_inputs(case, seed=2, dtype=torch.float64)
    for dtype, atol in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        narrow = attention_inputs(case, seed=2, dtype=dtype)
        out, lse = sparse_attn_shared_kv(**narrow, return_lse=True)
        assert out.dtype == dtype and lse.dtype == torch.float32
        want = sparse_attn_shared_kv(**wide)
        torch.testing.assert_close(out.double(), want, rtol=0, atol=atol)


@by_name
def test_gradcheck(case):
    # Fewer queries than the other tests take, since every input element costs two forwards.
    case = replace(case, D=4, N=min(case.N, 3), B=min(case.B, 2))
    inputs = attention_inputs(case, seed=3, dtype=torch.float64)
    names = [name for name in DIFFERENTIABLE if name in inputs]
    finite = torch.isfinite(inputs["sinks"]) if "sinks" in inputs else None

    def run(*tensors):
        args = dict(zip(names, tensors))
        if finite is not None:  # finite differences have no step at an infinite sink
            args["sinks"] = torch.where(finite, args["sinks"], inputs["sinks"])
        return sparse_attn_shared_kv(**{**inputs, **args})

    leaves = [torch.where(torch.isfinite(inputs[n]), inputs[n], 0.0).requires_grad_() for n in names]
    assert gradcheck(run, leaves, fast_mode=True, atol=1e-7, rtol=1e-5)


@by_name
def test_gradients_equal_those_of_the_loop(case):
    got, want = (attention_inputs(case, seed=4, dtype=torch.float64) for _ in range(2))
    names = _leaves(got)
    _leaves(want)
    cotangent = torch.randn(got["q"].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    sparse_attn_shared_kv(**got).backward(cotangent)
    out = oracle(want)[0]
    if out.requires_grad:
        out.backward(cotangent)
    for name in names:
        if name == "sinks":  # the loop turns sinks into floats; see test_dsink
            continue
        expected = torch.zeros_like(want[name]) if want[name].grad is None else want[name].grad
        torch.testing.assert_close(got[name].grad, expected, rtol=1e-10, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("name", ["swa", "cfa_pack", "scfa", "scfa_extreme_sinks", "scfa_pack"])
def test_dsink_against_central_differences_and_formula(name):
    case = next(c for c in ATTENTION_CASES if c.name == name)
    inputs = attention_inputs(case, seed=6, dtype=torch.float64)
    cotangent = torch.randn(inputs["q"].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    sinks = inputs["sinks"].requires_grad_()
    out, lse = sparse_attn_shared_kv(**inputs, return_lse=True)
    (dsink,) = torch.autograd.grad(out, sinks, cotangent)
    sinks, out = sinks.detach(), out.detach()
    for n in range(case.N):
        if not torch.isfinite(sinks[n]):
            assert dsink[n] == 0
            continue
        step = torch.zeros_like(sinks).index_fill_(0, torch.tensor([n]), 1e-5)
        up, down = (sparse_attn_shared_kv(**{**inputs, "sinks": sinks + sign * step}) for sign in (1, -1))
        torch.testing.assert_close(dsink[n], ((up - down) * cotangent).sum() / 2e-5, rtol=1e-7, atol=1e-9)
        delta = (cotangent * out).sum(-1)[..., n]
        torch.testing.assert_close(dsink[n], -((sinks[n] - lse[..., n]).exp() * delta).sum(), rtol=1e-10, atol=1e-12)


@by_name
def test_never_nan_and_zero_gradients_without_mass(case):
    for dtype in (torch.float32, torch.float64):
        inputs = attention_inputs(case, seed=8, dtype=dtype)
        names = _leaves(inputs)
        results = sparse_attn_shared_kv(**inputs, return_lse=True, return_cmp_probs=case.mode == "scfa")
        results[0].backward(torch.randn(results[0].shape, dtype=dtype, generator=torch.Generator().manual_seed(9)))
        for x in (*results, *(inputs[name].grad for name in names)):
            assert not x.isnan().any()
        blind = torch.isinf(results[1].detach())  # +inf sink, or nothing seen and no sink
        assert (results[0][blind] == 0).all() and (inputs["q"].grad[blind] == 0).all()
        assert not any(x.requires_grad for x in results[1:])


def test_row_that_sees_nothing():
    inputs = attention_inputs(AttentionCase("", "scfa", S=4, S2=8, q_offset=-4), seed=10)  # every position is negative
    out, lse, probs = sparse_attn_shared_kv(**inputs, return_lse=True, return_cmp_probs=True)
    assert (out == 0).all() and (probs == 0).all()
    torch.testing.assert_close(lse, inputs["sinks"].expand_as(lse), rtol=1e-6, atol=1e-7)
    inputs.pop("sinks")
    out, lse = sparse_attn_shared_kv(**inputs, return_lse=True)
    assert (out == 0).all() and (lse == -math.inf).all()


def test_infinite_sinks():
    inputs = attention_inputs(AttentionCase("", "scfa", N=4), seed=11, dtype=torch.float64)
    none, lse_none = sparse_attn_shared_kv(**{**inputs, "sinks": None}, return_lse=True)
    minus, lse_minus = sparse_attn_shared_kv(**{**inputs, "sinks": torch.full((4,), -math.inf)}, return_lse=True)
    torch.testing.assert_close(minus, none, rtol=0, atol=0)
    torch.testing.assert_close(lse_minus, lse_none, rtol=0, atol=0)
    names = _leaves(inputs)
    plus, lse_plus = sparse_attn_shared_kv(**{**inputs, "sinks": torch.full((4,), math.inf)}, return_lse=True)
    plus.sum().backward()
    assert (plus == 0).all() and (lse_plus == math.inf).all()
    assert all((inputs[name].grad == 0).all() for name in names if name != "sinks")


def test_invisible_rows_do_not_reach_the_result():
    """NaN in every compressed row that no query may see, and at the rows a clamped -1 would read."""
    case = AttentionCase("", "scfa", S=16, cmp_ratio=4, B=1)
    inputs = attention_inputs(case, seed=12, dtype=torch.float64)
    inputs["cmp_indices"] = torch.full_like(inputs["cmp_indices"], -1)
    inputs["cmp_indices"][..., 1] = 3  # seen by the last query alone
    inputs["cmp_kv"][:, :3] = torch.nan
    names = _leaves(inputs)
    out = sparse_attn_shared_kv(**inputs)
    out.sum().backward()
    assert not out.isnan().any() and not any(inputs[name].grad.isnan().any() for name in names)
    assert (inputs["cmp_kv"].grad[:, :3] == 0).all() and (inputs["cmp_kv"].grad[:, 3] != 0).any()


def test_duplicate_index_counts_as_often_as_it_occurs():
    inputs = attention_inputs(AttentionCase("", "scfa", B=1, S=8, cmp_ratio=2, K=3, sinks="none"), seed=13, dtype=torch.float64)
    inputs["cmp_indices"] = torch.tensor([1, 1, 0], dtype=torch.int32).expand(1, 8, 3)
    got = sparse_attn_shared_kv(**inputs)
    rows = torch.tensor([1, 1, 0])
    inputs["cmp_kv"] = inputs["cmp_kv"][:, rows]
    inputs["cmp_indices"] = torch.tensor([0, 1, 2], dtype=torch.int32).expand(1, 8, 3)
    want = sparse_attn_shared_kv(**inputs)
    # From position 5 on all three copies are visible, whichever number they go by.
    torch.testing.assert_close(got[:, 5:], want[:, 5:], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("mode", ["swa", "cfa", "scfa"])
def test_pack_equals_its_documents(mode):
    lengths = (9, 0, 14, 1, 6)
    inputs = attention_inputs(AttentionCase("", mode, docs_q=lengths), seed=14, dtype=torch.float64)
    out, lse = sparse_attn_shared_kv(**inputs, return_lse=True)
    cu, done = inputs["cu_seqlens_q"].tolist(), 0
    for g, length in enumerate(lengths):
        tokens, entries = slice(cu[g], cu[g + 1]), slice(done, done + length // 4)
        done += length // 4
        own = {name: inputs[name] for name in ("sinks", "window")}
        own |= {"q": inputs["q"][None, tokens], "ori_kv": inputs["ori_kv"][None, tokens]}
        if mode != "swa":
            own |= {"cmp_kv": inputs["cmp_kv"][None, entries], "cmp_ratio": 4}
        if mode == "scfa":
            own["cmp_indices"] = inputs["cmp_indices"][None, tokens]
        want, want_lse = sparse_attn_shared_kv(**own, return_lse=True)
        torch.testing.assert_close(out[tokens], want[0], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(lse[tokens], want_lse[0], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("layout", [{"S": 9, "S2": 4}, {"docs_q": (7, 9), "docs_ori": (3, 4)}], ids=["BSND", "TND"])
def test_keys_leave_a_window_that_is_longer_than_all_of_them(layout):
    """Queries further on than the window is long: the last keys go one by one, without a gather of window rows."""
    inputs = attention_inputs(AttentionCase("", "swa", window=7, q_offset=2, **layout), seed=18, dtype=torch.float64)
    out, lse = sparse_attn_shared_kv(**inputs, return_lse=True)
    want_out, want_lse, _ = oracle(inputs)
    torch.testing.assert_close(out, want_out, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(lse, want_lse, rtol=1e-12, atol=1e-13)


def test_rows_after_the_last_document_see_nothing():
    inputs = attention_inputs(AttentionCase("", "cfa", docs_q=(5, 7)), seed=15)
    inputs["cu_seqlens_q"] = cu_seqlens_of((5, 4))
    out, lse = sparse_attn_shared_kv(**inputs, return_lse=True)
    assert (out[9:] == 0).all() and (out[:9] != 0).any(-1).all()
    torch.testing.assert_close(lse[9:], inputs["sinks"].expand(3, -1), rtol=1e-6, atol=1e-7)


def test_rows_after_the_last_document_may_hold_anything():
    inputs = attention_inputs(AttentionCase("", "cfa", docs_q=(5, 7)), seed=15)
    inputs["cu_seqlens_q"] = cu_seqlens_of((5, 4))
    dout = torch.randn(inputs["q"].shape, generator=torch.Generator().manual_seed(1)).index_fill(0, torch.arange(9, 12), torch.nan)
    found = []
    for filling in (0.0, torch.nan):
        leaves = {name: inputs[name].clone() for name in ("q", "ori_kv", "cmp_kv", "sinks")}
        leaves["q"][9:] = filling
        out = sparse_attn_shared_kv(**{**inputs, **{name: x.requires_grad_() for name, x in leaves.items()}})
        found.append((out, *torch.autograd.grad(out, list(leaves.values()), dout.nan_to_num(filling))))
    for got, want in zip(found[1], found[0]):
        assert want.isfinite().all() and torch.equal(got, want)


@pytest.mark.parametrize("name", ["swa", "swa_pack", "cfa", "scfa", "scfa_pack_offset"])
def test_chunks_do_not_change_the_result(name, monkeypatch):
    case = next(c for c in ATTENTION_CASES if c.name == name)
    inputs = attention_inputs(case, seed=16, dtype=torch.float64)
    whole = sparse_attn_shared_kv(**inputs, return_lse=True)
    monkeypatch.setattr("reference.sparse_attn._CHUNK_ELEMENTS", 1100)
    for got, want in zip(sparse_attn_shared_kv(**inputs, return_lse=True), whole):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


@MODES
@EMPTY
def test_empty_inputs(mode, empty):
    case = empty_case(mode, empty)
    inputs = attention_inputs(case, seed=17)
    names = _leaves(inputs)
    out, lse = sparse_attn_shared_kv(**inputs, return_lse=True)
    assert out.shape == inputs["q"].shape and lse.shape == out.shape[:-1]
    out.sum().backward()
    assert all(inputs[name].grad is not None and not inputs[name].grad.isnan().any() for name in names)


def test_lse_identities():
    inputs = attention_inputs(AttentionCase("", "scfa", N=3, S=11, q_offset=-2), seed=18, dtype=torch.float64)
    sinks = inputs["sinks"]
    with_sink = sparse_attn_shared_kv(**inputs, return_lse=True)[1]
    without = sparse_attn_shared_kv(**{**inputs, "sinks": None}, return_lse=True)[1]
    assert (without == -math.inf).any()
    torch.testing.assert_close(lse_with_sink(without, sinks), with_sink, rtol=1e-12, atol=1e-13)
    got = lse_without_sink(with_sink, sinks)
    torch.testing.assert_close(got[got != -math.inf], without[got != -math.inf], rtol=1e-10, atol=1e-11)
    lse = torch.tensor([[1.0, -math.inf, 0.5, math.inf, -math.inf, 2.0]])
    sinks = torch.tensor([-math.inf, -math.inf, 0.5, math.inf, 1.0, 2.5])
    assert lse_without_sink(lse, sinks).tolist() == [[1.0, *[-math.inf] * 5]]
    assert lse_without_sink(torch.tensor([[math.nan, 1.0]]), torch.tensor([1.0, math.nan])).isnan().all()
    lse = torch.tensor([[1.0, -math.inf, -math.inf, math.inf, 1.0]])
    sinks = torch.tensor([-math.inf, -math.inf, 0.5, 1.0, math.inf])
    assert lse_with_sink(lse, sinks).tolist() == [[1.0, -math.inf, 0.5, math.inf, math.inf]]


def test_compressed_cu_seqlens():
    got = compressed_cu_seqlens(cu_seqlens_of((9, 0, 3, 8, 4)), 4)
    assert got.dtype == torch.int32 and got.tolist() == [0, 2, 2, 2, 4, 5]
    assert compressed_cu_seqlens(torch.tensor([0], dtype=torch.int32), 4).tolist() == [0]


def test_pairs_are_counted_as_the_loop_lists_them():
    for case in ATTENTION_CASES:
        inputs = attention_inputs(replace(case, sinks="none"), seed=19, dtype=torch.float64)
        inputs["q"].zero_()  # every seen key weighs the same: LSE = log(number of keys)
        lse = sparse_attn_shared_kv(**inputs, return_lse=True)[1]
        assert valid_pairs(case, inputs.get("cmp_indices")) == round(float(lse[..., 0].exp().sum())), case.name


@pytest.mark.parametrize("name", ["swa", "swa_pack", "cfa", "cfa_pack_longer_keys", "scfa", "scfa_pack_offset"])
def test_traces_in_one_graph(name):
    case = next(c for c in ATTENTION_CASES if c.name == name)
    inputs = attention_inputs(case, seed=20)
    names = _leaves(inputs)
    compiled = torch.compile(sparse_attn_shared_kv, fullgraph=True, backend="aot_eager")
    cotangent = torch.randn(inputs["q"].shape, generator=torch.Generator().manual_seed(21))
    want = torch.autograd.grad(sparse_attn_shared_kv(**inputs), [inputs[n] for n in names], cotangent)
    got = torch.autograd.grad(compiled(**inputs), [inputs[n] for n in names], cotangent)
    for g, w in zip(got, want):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-6)
