"""The indexer's kernels against fp64 and against the reference's selection, in the interpreter and on a GPU."""

import pytest
import torch

from indexer import lightning_indexer
from kernel_runtime import interpreting
from reference import indexer as reference
from reference.cases import indexer as cases
from reference.cases import relative_error
from tests.op_checks import poison_empty

# The kernels may be this many times further from fp64 than the reference in fp32.
BUDGET = 8.0


def whole(inputs, dtype=torch.float32):
    """Small whole numbers: every sum is exact in any order, so that ties, and with them the order, must agree with the reference's."""
    q, k, weights = ((inputs[name] * factor).round() for name, factor in (("q", 2), ("k", 2), ("weights", 16)))
    return dict(q=q.to(dtype), k=k.to(dtype), weights=weights)


def check_selection(case, device, inputs, **options):
    layout = cases.layout(case, device) | options.pop("layout", {})
    want_indices, want_scores = reference.lightning_indexer(**inputs, topk=case.topk, **layout)
    indices, scores = lightning_indexer(**inputs, topk=case.topk, **layout, impl="triton", **options)
    assert indices.dtype == torch.int32 and scores.dtype == torch.float32
    if options.get("sorted", True):
        torch.testing.assert_close(indices, want_indices, rtol=0, atol=0)
        torch.testing.assert_close(scores, want_scores, rtol=0, atol=0)
    else:
        order = scores.sort(dim=-1, descending=True, stable=True)
        assert torch.equal(order.values, want_scores)
        assert torch.equal(indices.sort(dim=-1).values, want_indices.sort(dim=-1).values)
        assert torch.equal(scores == -torch.inf, indices < 0) and torch.equal(indices < 0, want_indices < 0)


@pytest.mark.parametrize("case", cases.SMALL, ids=lambda c: c.name)
def test_selection_is_exact(kernel_device, monkeypatch, case):
    poison_empty(monkeypatch)
    check_selection(case, kernel_device, whole(cases.make_indexer(case, device=kernel_device)))


@pytest.mark.parametrize("case", [cases.SMALL[0], cases.SMALL[7]], ids=lambda c: c.name)
@pytest.mark.parametrize("chunk", [1, 5, 20, 1000])
def test_chunks_and_unsorted(kernel_device, monkeypatch, case, chunk):
    poison_empty(monkeypatch)
    inputs = whole(cases.make_indexer(case, device=kernel_device))
    check_selection(case, kernel_device, inputs, query_chunk=chunk, sorted=chunk != 5)


@pytest.mark.parametrize("case", [cases.SMALL[0], cases.SMALL[7]], ids=lambda c: c.name)
def test_calls_that_come_again(kernel_device, case):
    """From the third call on a GPU starts the launches over with new addresses."""
    for seed in range(5 if kernel_device == "cuda" else 1):
        check_selection(case, kernel_device, whole(cases.make_indexer(case, device=kernel_device, seed=seed)))


@pytest.mark.parametrize("heads, dim", [(1, 16), (3, 10), (20, 64), (64, 128), (130, 16)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_heads_channels_dtypes(kernel_device, monkeypatch, heads, dim, dtype):
    poison_empty(monkeypatch)
    case = cases.IndexerCase("shape", batch=2, seq=9, q_offset=14, heads=heads, head_dim=dim, topk=3)
    check_selection(case, kernel_device, whole(cases.make_indexer(case, device=kernel_device), dtype))
    inputs = cases.make_indexer(case, dtype, weights_dtype=dtype, device=kernel_device, ties=False)
    want = reference.lightning_indexer(**{n: x.double() for n, x in inputs.items()}, topk=3, **cases.layout(case))
    fp32 = reference.lightning_indexer(**inputs, topk=3, **cases.layout(case))
    got = lightning_indexer(**inputs, topk=3, **cases.layout(case), impl="triton")
    assert torch.equal(got[0], want[0])
    finite = want[0] >= 0
    error, limit = (relative_error(x[1][finite], want[1][finite]) for x in (got, fp32))
    assert error <= BUDGET * max(limit, 1e-7), f"{error:.1e} against {limit:.1e}"


@pytest.mark.parametrize("layout", ["BSND", "TND"])
def test_offset_tensor(kernel_device, monkeypatch, layout):
    poison_empty(monkeypatch)
    case = cases.IndexerCase("b", batch=3, seq=7, keys=6, topk=4) if layout == "BSND" else cases.IndexerCase("t", documents=(5, 9, 0, 4), topk=4)
    offsets = torch.tensor([0, 40, -9, 6][: 3 if layout == "BSND" else 4], dtype=torch.int32, device=kernel_device)
    check_selection(case, kernel_device, whole(cases.make_indexer(case, device=kernel_device)), layout=dict(q_offset=offsets))


def long_case(keys, topk, heads=1):
    return cases.IndexerCase("long", batch=1, seq=6, q_offset=4 * keys - 4, keys=keys, topk=topk, heads=heads, head_dim=16)


@pytest.mark.parametrize("keys", [1024, 1025, 2500, 5000])
@pytest.mark.parametrize("topk", [1, 40])
def test_wide_rows(kernel_device, monkeypatch, keys, topk):
    """One search of 1, 2, 4 and 8 warps; whole numbers, so that many blocks share the last score."""
    poison_empty(monkeypatch)
    case = long_case(keys, topk)
    check_selection(case, kernel_device, whole(cases.make_indexer(case, device=kernel_device)))


@pytest.mark.parametrize("topk", [600, 1100])
def test_many_winners(kernel_device, monkeypatch, topk):
    """More than are sorted together, the last set with fewer; scores that all differ, and whole numbers."""
    poison_empty(monkeypatch)
    case = cases.IndexerCase("winners", batch=1, seq=1, q_offset=5999, keys=1500, topk=topk, heads=2, head_dim=16)
    inputs = cases.make_indexer(case, device=kernel_device)
    check_selection(case, kernel_device, whole(inputs))
    inputs["weights"][:] = torch.tensor([0.0, 1.0], device=kernel_device)
    inputs["q"] = torch.zeros_like(inputs["q"])
    inputs["q"][..., 1, 0] = 1
    order = torch.randperm(1500, generator=torch.Generator().manual_seed(3)).to(kernel_device)
    inputs["k"][0, :, 0] = order.to(torch.float32)
    check_selection(case, kernel_device, inputs)


KINDS = pytest.mark.parametrize("kind", ["ties", "distinct", "rising", "falling", "zero", "negative"])


def scores_of_kind(kind, case, device):
    """Inputs of a case with one batch entry: many equal scores, all different in random, rising or falling order, nothing but 0, none above 0."""
    inputs = whole(cases.make_indexer(case, device=device))
    if kind in ("distinct", "rising", "falling"):
        inputs["weights"] = torch.ones_like(inputs["weights"])
        inputs["q"] = torch.zeros_like(inputs["q"])
        inputs["q"][..., 0] = 1
        order = torch.randperm(case.keys, generator=torch.Generator().manual_seed(3))
        if kind != "distinct":
            order = order.sort(descending=kind == "falling").values
        inputs["k"][0, :, 0] = order.to(device, torch.float32)
    elif kind == "zero":
        inputs["weights"] = torch.zeros_like(inputs["weights"])
    elif kind == "negative":
        inputs["weights"] = -inputs["weights"].abs() - 1
    return inputs


@KINDS
def test_candidates(kernel_device, monkeypatch, kind):
    """Rows longer than a search: in tiles, to no more candidates than there is room for, and searched among those."""
    import indexer.lightning.topk as topk

    monkeypatch.setattr(topk, "WIDE", 1024)
    poison_empty(monkeypatch)
    case = long_case(2078, 50)  # the last tile holds fewer blocks than are wanted
    check_selection(case, kernel_device, scores_of_kind(kind, case, kernel_device))


@KINDS
def test_sets_of_winners(kernel_device, monkeypatch, kind):
    """Winners are selected and sorted in sets, here of 16: rows with fewer and more blocks than are wanted, or longer than a search."""
    import indexer.lightning.topk as topk

    def forget():
        topk.select_spec.cache_clear()
        topk.order_spec.cache_clear()

    monkeypatch.setattr(topk, "GROUP", 16)
    monkeypatch.setattr(topk, "WIDE", 1024)
    forget()
    try:
        poison_empty(monkeypatch)
        case = cases.IndexerCase("long", batch=1, seq=2, q_offset=4 * 1100 - 4, keys=1100, topk=50, heads=1, head_dim=16)
        check_selection(case, kernel_device, scores_of_kind(kind, case, kernel_device))
        case = cases.IndexerCase("short", documents=(3, 7), cmp_ratio=2, q_offset=76, topk=40, heads=1, head_dim=16)
        check_selection(case, kernel_device, whole(cases.make_indexer(case, device=kernel_device)), sorted=kind != "zero")
    finally:
        forget()


@pytest.mark.parametrize("keys, topk", [(140, 120), (2300, 50)])
def test_infinite_and_signed_zero_scores(kernel_device, monkeypatch, keys, topk):
    """Visible blocks of score -inf come before the empty tail; -0.0 and 0.0 are a tie."""
    import indexer.lightning.topk as topk_module

    monkeypatch.setattr(topk_module, "WIDE", 1024)
    case = long_case(keys, topk)
    inputs = whole(cases.make_indexer(case, device=kernel_device))
    inputs["q"][:] = 1
    inputs["k"][:] = 1
    inputs["k"][:, ::3] = 0
    inputs["k"][:, 1::7] = torch.inf
    if keys > 1024:
        inputs["k"][:, 40:] = torch.inf  # so that -inf is the last score
    inputs["weights"][:] = -1
    check_selection(case, kernel_device, inputs)


def test_more_nan_scores_than_there_is_room_for(kernel_device, monkeypatch):
    """They count as infinite, so that the first ones are selected."""
    import indexer.lightning.topk as topk

    monkeypatch.setattr(topk, "WIDE", 1024)
    poison_empty(monkeypatch)
    case = long_case(2300, 50)
    inputs = whole(cases.make_indexer(case, device=kernel_device))
    inputs["q"] = inputs["q"].abs() + 1
    inputs["weights"][:] = 1
    inputs["k"][:, ::2] = torch.nan
    indices, scores = lightning_indexer(**inputs, topk=50, **cases.layout(case, kernel_device), impl="triton")
    assert scores.isnan().all() and torch.equal(indices.sort(-1).values, torch.arange(0, 100, 2, device=kernel_device).int().expand(1, 6, 50))


def test_nan_scores_are_selected_and_stay_nan(kernel_device, monkeypatch):
    """A NaN is not hidden by the relu: its block comes before all others, so that the error shows."""
    poison_empty(monkeypatch)
    case = long_case(140, 50)
    inputs = whole(cases.make_indexer(case, device=kernel_device))
    inputs["q"] = inputs["q"].abs() + 1
    inputs["weights"][:] = 1
    inputs["k"][:, ::5] = torch.nan
    indices, scores = lightning_indexer(**inputs, topk=50, **cases.layout(case, kernel_device), impl="triton")
    for row, values in zip(indices[0], scores[0]):
        assert row.unique().numel() == 50 and row.min() >= 0 and row.max() < 140
        assert {*row[values.isnan()].tolist()} == {*range(0, 140, 5)} and not values[28:].isnan().any()


def gradients(case, device, inputs, deterministic, impl):
    """Gradients of q, k, weights for one random cotangent of the scores, a third of it zero."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    options = dict(impl=impl, deterministic=deterministic)
    indices, scores = lightning_indexer(**leaves, topk=case.topk, **cases.layout(case, device), **options)
    cotangent = torch.randn(scores.shape, generator=torch.Generator().manual_seed(9)).to(device, scores.dtype)
    cotangent[..., ::3] = 0
    cotangent = torch.where(indices < 0, torch.nan, cotangent)  # what comes back for an empty slot is not looked at
    return torch.autograd.grad(scores, list(leaves.values()), cotangent)


# 16 bit: dS' and the results are rounded; the interpreter truncates bf16 stores, which doubles their error
GRADIENT_LIMIT = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2 if interpreting() else 6e-3}


@pytest.mark.parametrize("case", cases.SMALL, ids=lambda c: c.name)
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients(kernel_device, monkeypatch, case, deterministic):
    poison_empty(monkeypatch)
    check_gradients(case, kernel_device, torch.float32, deterministic)


@pytest.mark.parametrize("heads, dim", [(1, 10), (64, 128), (70, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_heads_channels_dtypes(kernel_device, monkeypatch, heads, dim, dtype, deterministic):
    poison_empty(monkeypatch)
    case = cases.IndexerCase("shape", batch=2, seq=5, q_offset=20, heads=heads, head_dim=dim, topk=5)
    check_gradients(case, kernel_device, dtype, deterministic)


def check_gradients(case, device, dtype, deterministic):
    inputs = cases.make_indexer(case, dtype, device=device, ties=False)
    inputs["k"][..., 2::5, :] = 0  # products of exactly 0: relu'(0) = 0
    want = gradients(case, device, {name: x.double() for name, x in inputs.items()}, None, "eager")
    got = gradients(case, device, inputs, deterministic, "triton")
    for name, g, w in zip(inputs, got, want):
        assert g.dtype == inputs[name].dtype
        assert relative_error(g, w) <= GRADIENT_LIMIT[dtype], f"d{name}: {relative_error(g, w):.1e}"


def test_small_gradients_in_fp16(kernel_device):
    """A cotangent far below the smallest fp16 number still gives gradients where the result can hold them."""
    case = cases.IndexerCase("small", batch=1, seq=5, q_offset=20, topk=5)
    inputs = cases.make_indexer(case, torch.float16, device=kernel_device, ties=False)
    inputs["weights"] *= 100
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    _, scores = lightning_indexer(**leaves, topk=5, **cases.layout(case), impl="triton")
    big, small = (torch.autograd.grad(scores.sum() * x, leaves["weights"], retain_graph=True)[0] for x in (1.0, 1e-9))
    assert relative_error(small * 1e9, big) < 1e-5 and big.abs().max() > 0


@pytest.mark.gpu
def test_many_rows_on_a_gpu():
    """More rows and keys than the interpreter can take, with the sizes of DeepSeek-V4."""
    for case in (
        cases.IndexerCase("flash", batch=1, seq=3000, heads=64, head_dim=128, topk=512),
        cases.IndexerCase("packed", documents=(2500, 700, 1, 9000), heads=8, head_dim=64, topk=512),
        cases.IndexerCase("segments", batch=2, seq=40, q_offset=160000, heads=4, head_dim=64, topk=1024),
        cases.IndexerCase("wide", batch=1, seq=200, q_offset=20000, heads=4, head_dim=64, topk=2048),
    ):
        check_selection(case, "cuda", whole(cases.make_indexer(case, device="cuda"), torch.bfloat16))
