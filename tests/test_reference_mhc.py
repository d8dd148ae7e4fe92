"""The mHC specification against brute force, finite differences, exact arithmetic, and transformers' DeepSeek-V4 modules."""

from __future__ import annotations

import inspect
import math
from decimal import Decimal, localcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from reference import mhc
from reference.cases.mhc import CONVENTIONS, HIDDEN_SIZES, LOGIT_STDS, OPS, STREAM_COUNTS, MhcShape, leaves, make_cotangents, make_inputs

F64 = torch.float64
WITH_CONVENTION = ("sinkhorn", "hc_gates", "hc_pre", "hc_post_pre")
SMALL = MhcShape(1, 3, 3, 5)


def call(op: str, inputs: dict[str, Tensor], shape: MhcShape, **options: object) -> tuple[Tensor, ...]:
    if op in ("hc_gates", "hc_expand"):
        options["hc_mult"] = shape.N
    out = getattr(mhc, op)(**inputs, **options)
    return (out,) if isinstance(out, Tensor) else out


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


PER_SITE = ("fn", "scale", "base")


def brute(op: str, inputs: dict[str, Tensor], shape: MhcShape, *, iters=20, hc_eps=1e-6, norm_eps=1e-6, convention="v4") -> list[Tensor]:
    tokens = []
    for b in range(shape.B):
        for s in range(shape.S):
            token = {name: (t if name in PER_SITE else t[b, s]).tolist() for name, t in inputs.items()}
            tokens.append(brute_token(op, token, shape.N, iters, hc_eps, norm_eps, convention))
    stacked = [torch.tensor(list(results), dtype=F64) for results in zip(*tokens)]
    return [t.unflatten(0, (shape.B, shape.S)) for t in stacked]


def assert_close(got: Tensor, want: Tensor, rel: float) -> None:
    """Largest error, relative to the largest value."""
    assert got.shape == want.shape
    error = (got.double() - want.double()).abs().max().item()
    assert error <= rel * want.double().abs().max().item(), f"error {error:.3e}, largest value {want.abs().max().item():.3e}"


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


def deviation(comb: Tensor, dim: int) -> float:
    return (comb.sum(dim) - 1).abs().max().item()


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


# ---- the mixing contracts the first index of comb ------------------------------------------------------------------------------------


@pytest.mark.parametrize("N", STREAM_COUNTS)
def test_comb_is_applied_transposed(N: int) -> None:
    shape = MhcShape(1, 3, N, 6)
    a = make_inputs("hc_post", shape, dtype=F64)
    forward, wrong = mhc.hc_post(**a), mhc.hc_post(a["f"], a["x"], a["post"], a["comb"].mT)
    assert (forward - wrong).abs().max() > 0.1
    # comb with a single one at [j, k] carries stream j to stream k
    comb = torch.zeros(N, N, dtype=F64)
    comb[0, N - 1] = 1.0
    out = mhc.res_bmm(comb.expand(1, 3, N, N), a["x"])
    assert torch.equal(out[..., N - 1, :], a["x"][..., 0, :])
    assert (out[..., : N - 1, :] == 0).all()


def test_cases_have_what_they_promise() -> None:
    for N in STREAM_COUNTS:
        comb = make_inputs("res_bmm", MhcShape(1, 8, N, 2))["comb"]
        assert (comb - comb.mT).abs().amax((-1, -2)).min() > 0.05, "asymmetric for every token"
        assert deviation(comb, -2) > 0.1, "not doubly stochastic"
    for logit_std in LOGIT_STDS:
        shape = MhcShape(1, 256, 4, 100)
        a = make_inputs("hc_pre", shape, dtype=F64, logit_std=logit_std)
        mixes, _ = mhc.hc_project(a["x"], a["fn"])
        assert (mixes[..., 8:] * a["scale"][2]).std().item() == pytest.approx(logit_std, rel=0.15)
    for op in OPS:  # the order of the keys is that of the signature; the same values in every dtype; another seed, another case
        a, b = make_inputs(op, SMALL), make_inputs(op, SMALL, dtype=torch.float32)
        parameters = list(inspect.signature(getattr(mhc, op)).parameters)
        assert list(a) == parameters[: len(a)]
        assert all(torch.equal(a[name], b[name].to(a[name].dtype)) for name in a)
        assert not any(torch.equal(a[name], t) for name, t in make_inputs(op, SMALL, seed=1).items() if name != "scale")
    with pytest.raises(ValueError, match="op must be one of"):
        make_inputs("hc_mix", SMALL)
    with pytest.raises(ValueError, match="takes no pre_mix"):
        make_inputs("hc_post", SMALL, with_pre_mix=True)


# ---- composition -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, F64])
def test_boundary_is_post_then_pre(dtype: torch.dtype) -> None:
    a = make_inputs("hc_post_pre", MhcShape(1, 3, 4, 10), dtype=dtype, logit_std=3.0)
    got = mhc.hc_post_pre(**a)
    streams = mhc.hc_post(a["f"], a["x"], a["post"], a["comb"])
    want = (streams, *mhc.hc_pre(streams, a["fn"], a["scale"], a["base"]))
    assert len(got) == 4
    assert all(torch.equal(g, w) for g, w in zip(got, want))


def test_return_pre_defaults_to_whether_pre_mix_is_given() -> None:
    for op, results in (("hc_pre", 3), ("hc_post_pre", 4)):
        plain, single = (make_inputs(op, SMALL, with_pre_mix=w) for w in (False, True))
        for inputs, return_pre, extra in ((plain, None, 0), (plain, True, 1), (single, None, 1), (single, False, 0)):
            assert len(call(op, inputs, SMALL, return_pre=return_pre)) == results + extra


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_single_pass_chain_against_composition_by_hand(convention: str) -> None:
    """Three sublayers: each collapses with the pre of the one before it; value and gradient of the whole chain."""
    shape = MhcShape(1, 2, 3, 4)
    sites = [make_inputs("hc_pre", shape, dtype=F64, logit_std=3.0, seed=seed) for seed in (5, 6, 7)]
    x0 = sites[0].pop("x")
    for site in sites[1:]:
        del site["x"]
    sites = [leaves(site) for site in sites]
    inputs = [x0.requires_grad_(True), *(t for site in sites for t in site.values())]

    def chain() -> Tensor:
        x = x0
        y, post, comb, pre = mhc.hc_pre(x, **sites[0], convention=convention, return_pre=True)
        for site in sites[1:]:
            x, y, post, comb, pre = mhc.hc_post_pre(torch.tanh(y), x, post, comb, **site, convention=convention, pre_mix=pre)
        return mhc.hc_post(torch.tanh(y), x, post, comb)

    def by_hand() -> Tensor:
        x, handed_on = x0, None
        for site in sites:
            mixes = torch.einsum("bsi,mi->bsm", x.reshape(1, 2, 12), site["fn"])
            mixes = mixes / (x.square().mean((-1, -2)) + 1e-6).sqrt()[..., None]
            own, post, comb = mhc.hc_gates(mixes, site["scale"], site["base"], hc_mult=3, convention=convention)
            f = torch.tanh(torch.einsum("bsn,bsnd->bsd", own if handed_on is None else handed_on, x))
            x = torch.einsum("bsk,bsd->bskd", post, f) + torch.einsum("bsjk,bsjd->bskd", comb, x)
            handed_on = own
        return x

    got, want = chain(), by_hand()
    cotangent = make_cotangents(want)
    assert_close(got, want, 1e-13)
    for g, w in zip(torch.autograd.grad(got, inputs, cotangent), torch.autograd.grad(want, inputs, cotangent)):
        assert w.abs().max() > 0
        assert_close(g, w, 1e-11)


def test_expand_is_a_copy() -> None:
    h = make_inputs("hc_expand", SMALL)["h"]
    x = mhc.hc_expand(h)
    assert x.shape == (1, 3, 4, 5) and x.is_contiguous()
    x.zero_()
    assert h.abs().min() > 0


# ---- types, layouts, modes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_coefficients_are_fp32_and_streams_are_rounded_once(dtype: torch.dtype) -> None:
    shape = MhcShape(2, 5, 4, 100)
    for op in OPS:
        inputs = make_inputs(op, shape, dtype=dtype, logit_std=3.0)
        outputs = call(op, inputs, shape)
        exact = call(op, {name: t.double() for name, t in inputs.items()}, shape)
        for i, (got, want) in enumerate(zip(outputs, exact)):
            is_stream = got.ndim >= 3 and got.shape[-1] == shape.D
            assert got.dtype == (dtype if is_stream else torch.float32)
            eps, largest = torch.finfo(dtype).eps, want.abs().max()
            if op == "hc_post_pre" and i > 0:  # the second half reads streams that were rounded when stored
                bound = (8 * eps + 1e-5) * largest
            elif is_stream:  # half a unit in the last place of the stored type, plus fp32 arithmetic
                bound = 0.5 * eps * want.abs() + 2e-6 * largest
            else:
                bound = 1e-5 * largest
            assert ((got.double() - want).abs() <= bound).all(), (op, i)


def test_sinkhorn_of_bf16_logits_computes_in_fp32() -> None:
    logits = make_inputs("sinkhorn", SMALL)["logits"].bfloat16()
    comb = mhc.sinkhorn(logits)
    assert comb.dtype == torch.float32
    assert torch.equal(comb, mhc.sinkhorn(logits.float()))


@pytest.mark.parametrize("op", OPS)
def test_layouts_leading_dims_and_empty_inputs(op: str) -> None:
    shape = MhcShape(2, 3, 4, 6)
    inputs = make_inputs(op, shape, dtype=F64, logit_std=3.0)
    want = call(op, inputs, shape)
    per_token = [name for name in inputs if name not in PER_SITE]

    permuted = {n: (t.transpose(0, 1).contiguous().transpose(0, 1) if n in per_token else t) for n, t in inputs.items()}
    flat = {n: (t.flatten(0, 1) if n in per_token else t) for n, t in inputs.items()}
    single = {n: (t[0, 1] if n in per_token else t) for n, t in inputs.items()}
    empty = {n: (t[:, :0] if n in per_token else t) for n, t in inputs.items()}
    for w, p, f, s, e in zip(want, *(call(op, a, shape) for a in (permuted, flat, single, empty))):
        assert_close(p, w, 1e-14)
        assert_close(f.unflatten(0, (2, 3)), w, 1e-14)
        assert_close(s, w[0, 1], 1e-13)
        assert e.shape == (2, 0, *w.shape[2:])


@pytest.mark.parametrize("op", OPS)
def test_autocast_changes_nothing(op: str) -> None:
    inputs = make_inputs(op, SMALL, logit_std=3.0)
    want = call(op, inputs, SMALL)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = call(op, inputs, SMALL)
    assert all(g.dtype == w.dtype and torch.equal(g, w) for g, w in zip(got, want))


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_traces_as_one_graph(convention: str) -> None:
    inputs = leaves(make_inputs("hc_post_pre", SMALL, dtype=F64, with_pre_mix=True))
    want = mhc.hc_post_pre(**inputs, convention=convention)
    got = torch.compile(mhc.hc_post_pre, backend="aot_eager", fullgraph=True)(**inputs, convention=convention)
    cotangents = make_cotangents(want)
    for g, w in zip(got, want):
        assert_close(g, w, 1e-13)
    values = list(inputs.values())
    for g, w in zip(torch.autograd.grad(got, values, cotangents), torch.autograd.grad(want, values, cotangents)):
        assert_close(g, w, 1e-12)


# ---- transformers' DeepSeek-V4 ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deepseek_v4():
    return pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4", reason="parity needs transformers with DeepSeek-V4")


class Attention(nn.Linear):
    """A stand-in with the return value of the layer's attention; what the sublayer computes does not matter here."""

    def forward(self, hidden: Tensor, **_: object) -> tuple[Tensor, None]:
        return torch.tanh(super().forward(hidden)), None


class MLP(nn.Linear):
    def forward(self, hidden: Tensor, **_: object) -> Tensor:
        return torch.tanh(super().forward(hidden))


@pytest.mark.parametrize("logit_std", LOGIT_STDS)
def test_parity_with_transformers_entry_layer_and_head(deepseek_v4, logit_std: float) -> None:
    """DeepseekV4DecoderLayer.forward itself, its sublayers replaced by small maps, and the head: values and all gradients.

    The modules compute their coefficients in fp32, which sets the tolerance; comb comes out in fp32 on both sides.
    """
    shape = MhcShape(2, 3, 4, 20)
    config = SimpleNamespace(hc_mult=shape.N, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-6, hidden_size=shape.D)
    sites = [make_inputs("hc_pre", shape, dtype=torch.float32, logit_std=logit_std, seed=seed) for seed in (0, 1)]
    head = make_inputs("hc_head", shape, dtype=torch.float32, seed=2)
    x = sites[0].pop("x")
    del sites[1]["x"], head["x"]
    sites, head = [leaves(site) for site in sites], leaves(head)

    layer = deepseek_v4.DeepseekV4DecoderLayer.__new__(deepseek_v4.DeepseekV4DecoderLayer)
    nn.Module.__init__(layer)
    torch.manual_seed(0)
    layer.self_attn, layer.mlp = Attention(shape.D, shape.D), MLP(shape.D, shape.D)
    layer.input_layernorm = layer.post_attention_layernorm = nn.Identity()
    layer.attn_hc, layer.ffn_hc = (deepseek_v4.DeepseekV4HyperConnection(config) for _ in range(2))
    hyper_head = deepseek_v4.DeepseekV4HyperHead(config)
    with torch.no_grad():
        for module, site in ((layer.attn_hc, sites[0]), (layer.ffn_hc, sites[1])):
            for name, value in site.items():
                getattr(module, name).copy_(value)
        for name, value in head.items():
            getattr(hyper_head, f"hc_{name}").copy_(value)

    theirs_x, ours_x = x.clone().requires_grad_(True), x.clone().requires_grad_(True)
    theirs = hyper_head(layer.forward(theirs_x))

    y, post, comb = mhc.hc_pre(ours_x, **sites[0])
    f = layer.self_attn(y)[0]
    streams, y, post, comb = mhc.hc_post_pre(f, ours_x, post, comb, **sites[1])
    ours = mhc.hc_head(mhc.hc_post(layer.mlp(y), streams, post, comb), **head)

    their_post, their_comb, their_y = layer.attn_hc(theirs_x)
    our_y, our_post, our_comb = mhc.hc_pre(ours_x, **sites[0])
    for got, want in ((our_y, their_y), (our_post, their_post), (our_comb, their_comb), (ours, theirs)):
        assert_close(got.detach(), want.detach(), 1e-5)

    their_leaves = [theirs_x]
    for module in (layer.attn_hc, layer.ffn_hc):
        their_leaves += [module.fn, module.scale, module.base]
    their_leaves += [hyper_head.hc_fn, hyper_head.hc_scale, hyper_head.hc_base]
    our_leaves = [ours_x, *sites[0].values(), *sites[1].values(), *head.values()]
    cotangent = make_cotangents(theirs)
    for got, want in zip(torch.autograd.grad(ours, our_leaves, cotangent), torch.autograd.grad(theirs, their_leaves, cotangent)):
        assert want.abs().max() > 1e-4
        assert_close(got, want, 1e-4)
