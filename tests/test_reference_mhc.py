"""The mHC specification against brute force, finite differences and exact arithmetic; test_reference_mhc_parity.py has the rest."""

from __future__ import annotations

import inspect
import math
from decimal import Decimal, localcontext

import pytest
import torch
from torch import Tensor

from reference import mhc
from reference.cases.mhc import CONVENTIONS, HIDDEN_SIZES, LOGIT_STDS, OPS, STREAM_COUNTS, MhcShape, leaves, make_cotangents, make_inputs
from tests.mhc_reference import F64, PER_SITE, SMALL, assert_close, call, deviation

WITH_CONVENTION = ("sinkhorn", "hc_gates", "hc_pre", "hc_post_pre")


# ---- the oracle: one token at a time, python floats (or Decimal) and loops ----------------------------------------------------------


def sigmoid(v: float) -> float:
    return 1.0 / (1.0 + math.exp(-v))


def brute_normalise(m: list[list], axis: str, eps: float) -> list[list]:
    n = range(len(m))
    if axis == "column":
        sums = [sum(m[j][k] for j in n) + eps for k in n]
        return [[m[j][k] / sums[k] for k in n] for j in n]
    sums = [sum(m[j][k] for k in n) + eps for j in n]
    return [[m[j][k] / sums[j] for k in n] for j in n]


def brute_sinkhorn(logits: list[list[float]], iters: int, eps: float, convention: str) -> list[list[float]]:
    steps = ["column"] + ["row", "column"] * (iters - 1) if convention == "v4" else ["column", "row"] * iters
    m = [[math.exp(v) for v in row] for row in logits]
    if convention == "v4":
        m = [[v / sum(row) + eps for v in row] for row in m]
    for axis in steps:
        m = brute_normalise(m, axis, eps if convention == "v4" else 0.0)
    return m


def brute_gates(mixes, scale, base, N, iters, eps, convention):
    z = [mixes[i] * scale[0 if i < N else 1 if i < 2 * N else 2] + base[i] for i in range(len(mixes))]
    pre = [sigmoid(v) + (eps if convention == "v4" else 0.0) for v in z[:N]]
    post = [2.0 * sigmoid(v) for v in z[N : 2 * N]]
    logits = [[z[2 * N + j * N + k] for k in range(N)] for j in range(N)]
    return pre, post, brute_sinkhorn(logits, iters, eps, convention)


def brute_project(x, fn, eps):
    flat = [v for stream in x for v in stream]
    r = 1.0 / math.sqrt(sum(v * v for v in flat) / len(flat) + eps)
    return [sum(w * v for w, v in zip(row, flat)) * r for row in fn], r


def brute_collapse(pre, x):
    return [sum(pre[n] * x[n][d] for n in range(len(x))) for d in range(len(x[0]))]


def brute_post(f, x, post, comb):
    N, D = len(x), len(x[0])
    return [[post[k] * f[d] + sum(comb[j][k] * x[j][d] for j in range(N)) for d in range(D)] for k in range(N)]


def brute_token(op: str, a: dict[str, list], N: int, iters: int, hc_eps: float, norm_eps: float, convention: str) -> tuple:
    """All results of one op for one token, as nested lists."""
    if op == "sinkhorn":
        return (brute_sinkhorn(a["logits"], iters, hc_eps, convention),)
    if op == "hc_gates":
        return brute_gates(a["mixes"], a["scale"], a["base"], N, iters, hc_eps, convention)
    if op == "hc_project":
        return brute_project(a["x"], a["fn"], norm_eps)
    if op == "pre_bmm":
        return (brute_collapse(a["pre"], a["x"]),)
    if op == "post_bmm":
        return ([[p * v for v in a["f"]] for p in a["post"]],)
    if op == "res_bmm":
        return (brute_post([0.0] * len(a["x"][0]), a["x"], [0.0] * N, a["comb"]),)
    if op == "hc_post":
        return (brute_post(a["f"], a["x"], a["post"], a["comb"]),)
    if op == "hc_expand":
        return ([a["h"] for _ in range(N)],)
    if op == "hc_head":
        mixes, _ = brute_project(a["x"], a["fn"], norm_eps)
        return (brute_collapse([sigmoid(m * a["scale"][0] + b) + hc_eps for m, b in zip(mixes, a["base"])], a["x"]),)
    if op == "hc_pre":
        mixes, _ = brute_project(a["x"], a["fn"], norm_eps)
        pre, post, comb = brute_gates(mixes, a["scale"], a["base"], N, iters, hc_eps, convention)
        return brute_collapse(a.get("pre_mix", pre), a["x"]), post, comb, pre
    assert op == "hc_post_pre"
    streams = brute_post(a["f"], a["x"], a["post"], a["comb"])
    return (streams, *brute_token("hc_pre", {**a, "x": streams}, N, iters, hc_eps, norm_eps, convention))


def brute(op: str, inputs: dict[str, Tensor], shape: MhcShape, *, iters=20, hc_eps=1e-6, norm_eps=1e-6, convention="v4") -> list[Tensor]:
    tokens = []
    for b in range(shape.B):
        for s in range(shape.S):
            token = {name: (t if name in PER_SITE else t[b, s]).tolist() for name, t in inputs.items()}
            tokens.append(brute_token(op, token, shape.N, iters, hc_eps, norm_eps, convention))
    stacked = [torch.tensor(list(results), dtype=F64) for results in zip(*tokens)]
    return [t.unflatten(0, (shape.B, shape.S)) for t in stacked]


# ---- every function against the oracle -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("logit_std", LOGIT_STDS)
@pytest.mark.parametrize("N", STREAM_COUNTS)
def test_every_op_equals_brute_force(N: int, logit_std: float, convention: str) -> None:
    shape = MhcShape(2, 2, N, 7)
    for op in OPS:
        options = {"convention": convention} if op in WITH_CONVENTION else {}
        if op in ("hc_pre", "hc_post_pre"):
            options["return_pre"] = True
        inputs = make_inputs(op, shape, dtype=F64, logit_std=logit_std, seed=N)
        got = call(op, inputs, shape, **options)
        want = brute(op, inputs, shape, convention=convention)
        assert len(got) == len(want)
        for g, w in zip(got, want):
            assert g.dtype == F64
            assert_close(g, w, 1e-12)


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("iters", [1, 2, 7])
def test_iters_and_eps_reach_the_result(iters: int, convention: str) -> None:
    shape = MhcShape(1, 2, 3, 4)
    eps = {"hc_eps": 3e-2, "norm_eps": 0.5}  # large, so that each has to be where the formulas put it
    for op in ("hc_pre", "hc_post_pre"):
        inputs = make_inputs(op, shape, dtype=F64, logit_std=3.0)
        got = call(op, inputs, shape, iters=iters, convention=convention, return_pre=True, **eps)
        for g, w in zip(got, brute(op, inputs, shape, iters=iters, convention=convention, **eps)):
            assert_close(g, w, 1e-13)
    inputs = make_inputs("hc_head", shape, dtype=F64)
    assert_close(mhc.hc_head(**inputs, **eps), brute("hc_head", inputs, shape, **eps)[0], 1e-13)
    logits = make_inputs("sinkhorn", shape, dtype=F64, logit_std=3.0)
    got = mhc.sinkhorn(**logits, iters=iters, eps=3e-2, convention=convention)
    assert_close(got, brute("sinkhorn", logits, shape, iters=iters, hc_eps=3e-2, convention=convention)[0], 1e-13)


@pytest.mark.parametrize("D", HIDDEN_SIZES)
def test_real_hidden_sizes_equal_brute_force(D: int) -> None:
    shape = MhcShape(1, 1, 4, D)
    inputs = make_inputs("hc_post_pre", shape, dtype=F64, logit_std=3.0)
    for g, w in zip(call("hc_post_pre", inputs, shape, return_pre=True), brute("hc_post_pre", inputs, shape)):
        assert_close(g, w, 1e-12)


# ---- Sinkhorn: order, end, number of iterations, extreme logits ---------------------------------------------------------------------


@pytest.mark.parametrize("logit_std", LOGIT_STDS)
@pytest.mark.parametrize("N", STREAM_COUNTS)
def test_the_end_of_the_iteration(N: int, logit_std: float) -> None:
    logits = make_inputs("sinkhorn", MhcShape(1, 64, N, 1), dtype=F64, logit_std=logit_std)["logits"]
    for iters in (1, 3):  # far from convergence: only the norm that came last is exact
        v4 = mhc.sinkhorn(logits, iters=iters, eps=0.0, convention="v4")
        paper = mhc.sinkhorn(logits, iters=iters, convention="paper")
        assert deviation(v4, -2) < 1e-13 and deviation(v4, -1) > 1e-3
        assert deviation(paper, -1) < 1e-13 and deviation(paper, -2) > 1e-3 / iters**2


def test_first_step_is_a_softmax_of_rows_then_columns_for_v4_and_columns_then_rows_for_paper() -> None:
    logits = make_inputs("sinkhorn", SMALL, dtype=F64, logit_std=3.0)["logits"]
    rows_then_columns = torch.softmax(logits, -1) / torch.softmax(logits, -1).sum(-2, keepdim=True)
    columns_then_rows = torch.softmax(logits, -2) / torch.softmax(logits, -2).sum(-1, keepdim=True)
    assert_close(mhc.sinkhorn(logits, iters=1, eps=0.0, convention="v4"), rows_then_columns, 1e-14)
    assert_close(mhc.sinkhorn(logits, iters=1, convention="paper"), columns_then_rows, 1e-14)
    assert (rows_then_columns - columns_then_rows).abs().max() > 0.05


# At 20 iterations the norm that did not come last still deviates. Bands of the largest deviation over 4096 matrices.
@pytest.mark.parametrize(("logit_std", "low", "high"), [(1.0, 1e-5, 5e-3), (3.0, 1e-2, 2e-1)])
def test_twenty_iterations_are_not_convergence(logit_std: float, low: float, high: float) -> None:
    logits = make_inputs("sinkhorn", MhcShape(1, 4096, 4, 1), dtype=F64, logit_std=logit_std)["logits"]
    v4 = mhc.sinkhorn(logits)
    assert low < deviation(v4, -1) < high
    assert 0 < deviation(v4, -2) < 3e-6  # the eps in the divisor leaves the columns 1e-6 short
    paper = mhc.sinkhorn(logits, convention="paper")
    assert low < deviation(paper, -2) < high
    assert deviation(paper, -1) < 1e-12
    assert (mhc.sinkhorn(logits, iters=21) - v4).abs().max() > 1e-3 * low


def test_the_gradient_is_of_the_iterations_not_of_their_limit() -> None:
    logits = make_inputs("sinkhorn", MhcShape(1, 256, 4, 1), dtype=F64, logit_std=6.0)["logits"]
    grads = []
    for iters in (20, 2000):
        leaf = logits.clone().requires_grad_(True)
        comb = mhc.sinkhorn(leaf, iters=iters, convention="paper")
        grads.append(torch.autograd.grad(comb, leaf, make_cotangents(comb))[0])
    relative = (grads[0] - grads[1]).norm(dim=(-1, -2)) / grads[1].norm(dim=(-1, -2))
    assert relative.median() > 0.02


def decimal_sinkhorn(logits: list[list[Decimal]], iters: int) -> list[list[Decimal]]:
    """The paper's iteration as the paper writes it, from exp(logits); Decimal's exponents hold exp(+-1e4) and far beyond."""
    m = [[v.exp() for v in row] for row in logits]
    for _ in range(iters):
        m = brute_normalise(brute_normalise(m, "column", Decimal(0)), "row", Decimal(0))
    return m


def test_paper_at_logits_of_1e4_in_value_and_gradient() -> None:
    n, iters = 3, 20
    signs = torch.tensor([[1.0, -1.0, 1.0], [1.0, 1.0, -1.0], [-1.0, -1.0, 1.0]], dtype=F64)
    logits = 1e4 * signs + make_inputs("sinkhorn", MhcShape(1, 1, n, 1), dtype=F64)["logits"][0, 0]
    leaf = logits.clone().requires_grad_(True)
    comb = mhc.sinkhorn(leaf, iters=iters, convention="paper")
    (cotangent,) = make_cotangents(comb)
    (grad,) = torch.autograd.grad(comb, leaf, cotangent)

    with localcontext() as context:
        context.prec = 80
        exact = [[Decimal(v) for v in row] for row in logits.tolist()]
        weight = [[Decimal(v) for v in row] for row in cotangent.tolist()]
        value = decimal_sinkhorn(exact, iters)

        def loss(row: int, column: int, step: Decimal) -> Decimal:
            moved = [list(r) for r in exact]
            moved[row][column] += step
            out = decimal_sinkhorn(moved, iters)
            return sum(weight[j][k] * out[j][k] for j in range(n) for k in range(n))

        step = Decimal(10) ** -25
        slope = [[float((loss(j, k, step) - loss(j, k, -step)) / (2 * step)) for k in range(n)] for j in range(n)]
        want = torch.tensor([[float(v) for v in r] for r in value], dtype=F64)

    assert_close(comb.detach(), want, 1e-9)
    assert torch.tensor(slope).abs().max() > 1e-3, "a vanishing gradient would make the comparison idle"
    assert_close(grad, torch.tensor(slope, dtype=F64), 1e-9)


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_extreme_logits_stay_finite(dtype: torch.dtype, convention: str) -> None:
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(-1, 2, (512, 4, 4), generator=generator)
    leaf = (1e4 * signs).to(dtype).requires_grad_(True)
    comb = mhc.sinkhorn(leaf, convention=convention)
    (grad,) = torch.autograd.grad(comb, leaf, make_cotangents(comb))
    assert comb.isfinite().all() and grad.isfinite().all()
    assert (comb.sum(-1 if convention == "paper" else -2) <= 1 + 1e-5).all()


def test_paper_ignores_eps_and_head_knows_no_convention() -> None:
    shape = MhcShape(1, 2, 4, 6)
    inputs = make_inputs("hc_gates", shape, dtype=F64)
    with_eps = mhc.hc_gates(**inputs, convention="paper", hc_eps=0.5)
    without = mhc.hc_gates(**inputs, convention="paper", hc_eps=0.0)
    assert all(torch.equal(a, b) for a, b in zip(with_eps, without))
    v4_pre, v4_post, _ = mhc.hc_gates(**inputs, hc_eps=0.25)
    assert_close(v4_pre - without[0], torch.full_like(v4_pre, 0.25), 1e-14)
    assert torch.equal(v4_post, without[1])
    assert "convention" not in inspect.signature(mhc.hc_head).parameters


@pytest.mark.parametrize("op", WITH_CONVENTION)
def test_an_unknown_convention_is_an_error(op: str) -> None:
    with pytest.raises(ValueError, match="convention must be"):
        call(op, make_inputs(op, SMALL, dtype=F64), SMALL, convention="V4")


# ---- gradients ------------------------------------------------------------------------------------------------------------------------


def gradcheck(op: str, shape: MhcShape, inputs: dict[str, Tensor], **options: object) -> None:
    names, values = list(inputs), [t.requires_grad_(True) for t in inputs.values()]

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = call(op, dict(zip(names, tensors)), shape, **options)
        return tuple(o for o in outputs if o.requires_grad)

    assert torch.autograd.gradcheck(function, values, eps=1e-6, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("op", [op for op in OPS if op not in WITH_CONVENTION])
def test_gradcheck(op: str) -> None:
    gradcheck(op, SMALL, make_inputs(op, SMALL, dtype=F64))


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("logit_std", LOGIT_STDS)
@pytest.mark.parametrize("N", STREAM_COUNTS)
def test_gradcheck_sinkhorn(N: int, logit_std: float, convention: str) -> None:
    shape = MhcShape(1, 2, N, 1)
    gradcheck("sinkhorn", shape, make_inputs("sinkhorn", shape, dtype=F64, logit_std=logit_std), convention=convention)


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_gradcheck_gates(convention: str) -> None:
    gradcheck("hc_gates", SMALL, make_inputs("hc_gates", SMALL, dtype=F64, logit_std=3.0), convention=convention)


@pytest.mark.parametrize("with_pre_mix", [False, True])
@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("op", ["hc_pre", "hc_post_pre"])
def test_gradcheck_of_a_site(op: str, convention: str, with_pre_mix: bool) -> None:
    shape = MhcShape(1, 2, 2, 3)
    inputs = make_inputs(op, shape, dtype=F64, logit_std=3.0, with_pre_mix=with_pre_mix)
    gradcheck(op, shape, inputs, convention=convention, return_pre=True)


def test_rstd_carries_no_gradient_but_mixes_see_it() -> None:
    inputs = leaves(make_inputs("hc_project", SMALL, dtype=F64))
    mixes, rstd = mhc.hc_project(**inputs, norm_eps=0.0)
    assert mixes.requires_grad and not rstd.requires_grad
    # With norm_eps = 0 mixes do not depend on the length of x, so their gradient is orthogonal to x.
    (grad,) = torch.autograd.grad(mixes, inputs["x"], make_cotangents(mixes))
    along = (grad * inputs["x"]).sum((-1, -2))
    assert grad.abs().max() > 1e-3 and along.abs().max() < 1e-13
    assert torch.equal(mhc.hc_project(2 * inputs["x"], inputs["fn"], norm_eps=0.0)[1], rstd / 2)
