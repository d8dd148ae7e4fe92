"""The mHC specification: how its parts compose, types and layouts, and parity with transformers' DeepSeek-V4 modules."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from reference import mhc
from reference.cases.mhc import CONVENTIONS, LOGIT_STDS, OPS, STREAM_COUNTS, MhcShape, leaves, make_cotangents, make_inputs
from tests.mhc_reference import F64, PER_SITE, SMALL, assert_close, call, deviation

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
