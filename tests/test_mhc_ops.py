"""The contract of every public function of mhc_ops, on the CPU. Kernels: test_mhc_*_kernels.py; errors and modules: test_mhc_api.py."""

import pytest
import torch

import mhc_ops
from mhc_ops.library import OPS as LIBRARY
from reference import mhc as reference
from reference.cases import relative_error
from reference.cases.mhc import OPS, MhcShape, make_cotangents, make_inputs
from tests.op_checks import assert_close, check_checkpoint, check_fullgraph, check_opcheck, gradients, strided_variants

SHAPE = MhcShape(2, 3, 3, 10)
PER_SITE = ("fn", "scale", "base")
# On the CPU an op runs the reference itself: no further from fp64 than plain autograd of the reference in the same dtype, up to noise.
BUDGET = 1.5

CASES = {op: (op, {}, False) for op in OPS}
CASES |= {
    "hc_gates_paper": ("hc_gates", {"convention": "paper", "iters": 3}, False),
    "hc_pre_return": ("hc_pre", {"return_pre": True, "convention": "paper"}, False),
    "hc_pre_single": ("hc_pre", {"iters": 3, "hc_eps": 0.03, "norm_eps": 0.5}, True),
    "hc_post_pre_return": ("hc_post_pre", {"return_pre": True, "iters": 3, "hc_eps": 0.03, "norm_eps": 0.5}, False),
    "hc_post_pre_single": ("hc_post_pre", {"convention": "paper"}, True),
    "hc_head_eps": ("hc_head", {"hc_eps": 0.03, "norm_eps": 0.5}, False),
}
DTYPES = [torch.bfloat16, torch.float32]


def case(name, *, dtype=torch.float32, shape=SHAPE, module=mhc_ops, **more):
    """The function of positional tensors, and its tensors."""
    op, options, with_pre_mix = CASES[name]
    inputs = make_inputs(op, shape, dtype=dtype, logit_std=2.0, with_pre_mix=with_pre_mix)
    options = {**options, **more}
    if op in ("hc_gates", "hc_expand"):
        options["hc_mult"] = shape.N
    return (lambda *tensors: getattr(module, op)(**dict(zip(inputs, tensors)), **options)), list(inputs.values())


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_equals_reference(name, dtype):
    fn, inputs = case(name, dtype=dtype)
    spec, _ = case(name, module=reference)
    got, want, plain = gradients(fn, inputs), gradients(spec, [t.double() for t in inputs]), gradients(spec, inputs)
    for part in (0, 1):
        for g, w, p in zip(got[part], want[part], plain[part], strict=True):
            assert g.shape == p.shape and g.dtype == p.dtype
            assert relative_error(g, w) <= BUDGET * relative_error(p, w) + 1e-7
            assert relative_error(g, p) <= 2 * torch.finfo(p.dtype).eps


def op_arguments():
    """name -> arguments of every registered op of the package"""
    site = make_inputs("hc_pre", SHAPE, logit_std=2.0, with_pre_mix=True)
    x, fn, scale, base, pre_mix = site.values()
    f, _, post, comb = make_inputs("hc_post", SHAPE).values()
    head = list(make_inputs("hc_head", SHAPE).values())[1:]
    options, how = (4, 1e-6, 1e-6, "v4"), "eager"
    y, pre, post_out, comb_out, mixes, rstd = torch.ops.mhc_ops.pre_fwd(x, fn, scale, base, None, *options, how)
    _, head_mixes, _ = torch.ops.mhc_ops.head_fwd(x, *head, 1e-6, 1e-6, how)
    dy, dpre, dpost, dcomb, dmixes, dx = make_cotangents((y, pre, post_out, comb_out, mixes, x))
    gates = (mixes, scale, base, SHAPE.N, 4, 1e-6, "v4", how)
    logits = mixes[..., 2 * SHAPE.N :].unflatten(-1, (SHAPE.N, SHAPE.N)).contiguous()
    before, rest = (f, x, post, comb), (mixes, rstd, *options, how)
    streams = torch.ops.mhc_ops.post_fwd(*before, how)
    return {
        "sinkhorn_fwd": (logits, 4, 1e-6, "paper", how),
        "sinkhorn_bwd": (dcomb, logits, 4, 1e-6, "v4", how),
        "gates_fwd": gates,
        "gates_bwd": (dpre, None, dcomb, *gates),
        "project_fwd": (x, fn, 1e-6, how),
        "project_bwd": (dmixes, x, fn, mixes, rstd, how),
        "pre_bmm_fwd": (pre, x, how),
        "pre_bmm_bwd": (dy, pre, x, how),
        "post_bmm_fwd": (post, f, how),
        "post_bmm_bwd": (dx, post, f, how),
        "res_bmm_fwd": (comb, x, how),
        "res_bmm_bwd": (dx, comb, x, how),
        "pre_fwd": (x, fn, scale, base, pre_mix, *options, how),
        "pre_bwd": (dy, None, dpost, dcomb, x, fn, scale, base, None, *rest),
        "post_fwd": (*before, how),
        "post_bwd": (dx, *before, how),
        "post_pre_fwd": (*before, fn, scale, base, None, *options, how),
        "post_pre_bwd": (dx, dy, dpre, dpost, None, *before, streams, fn, scale, base, pre_mix, *rest),
        "head_fwd": (x, *head, 1e-6, 1e-6, how),
        "head_bwd": (dy, x, *head, head_mixes, rstd, 1e-6, 1e-6, how),
        "expand_fwd": (f, SHAPE.N, how),
        "expand_bwd": (dx, how),
    }


def test_every_registered_op_is_checked():
    assert set(op_arguments()) == set(LIBRARY.names)


@pytest.mark.parametrize("name", LIBRARY.names)
def test_opcheck(name):
    check_opcheck(getattr(torch.ops.mhc_ops, name).default, op_arguments()[name])


@pytest.mark.parametrize("name", CASES)
def test_fullgraph(name):
    fn, inputs = case(name, dtype=torch.bfloat16)
    check_fullgraph(fn, inputs, limit=1e-5)


def test_fullgraph_fp32_with_dynamic_tokens():
    fn, inputs = case("hc_post_pre_single")
    check_fullgraph(fn, inputs, limit=1e-5)
    compiled = torch.compile(fn, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in (SHAPE, MhcShape(1, 5, 3, 10)):
        _, inputs = case("hc_post_pre_single", shape=shape)
        assert_close(compiled(*inputs), fn(*inputs), 1e-6, "output")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_checkpoint(name, dtype):
    check_checkpoint(*case(name, dtype=dtype))


@pytest.mark.parametrize("name", CASES)
def test_strides(name):
    fn, inputs = case(name, dtype=torch.bfloat16)
    want, want_grad = gradients(fn, inputs)
    for position, t in enumerate(inputs):
        for variant in strided_variants(t):
            got, got_grad = gradients(fn, [*inputs[:position], variant, *inputs[position + 1 :]])
            assert_close(got, want, 1e-6, "output")
            assert_close(got_grad, want_grad, 4e-3, "gradient")  # matrix products may add in another order, and then round to bf16


@pytest.mark.parametrize("name", CASES)
def test_leading_dims_and_empty(name):
    fn, inputs = case(name)
    op = CASES[name][0]
    names = make_inputs(op, SHAPE, with_pre_mix=CASES[name][2])
    want, _ = gradients(fn, inputs)

    def cut(change):
        return [t if n in PER_SITE else change(t) for n, t in zip(names, inputs)]

    for index in ((1, 2), (slice(None), 1)):  # no leading dim; one
        got, grads = gradients(fn, cut(lambda t, i=index: t[i]))
        assert_close(got, [w[index] for w in want], 2e-6, "output")
    for empty in ((slice(None), slice(0, 0)), slice(0, 0)):
        tensors = cut(lambda t, i=empty: t[i])
        got, grads = gradients(fn, tensors)
        assert [g.shape for g in got] == [w[empty].shape for w in want]
        assert all(g.shape == t.shape and not g.any() for g, t in zip(grads, tensors))


@pytest.mark.parametrize("name", CASES)
def test_gradcheck_fp64(name):
    fn, inputs = case(name, dtype=torch.float64, shape=MhcShape(1, 2, 2, 3))

    def differentiable(*tensors):
        outputs = fn(*tensors)
        return tuple(o for o in ((outputs,) if isinstance(outputs, torch.Tensor) else outputs) if o.requires_grad)

    assert torch.autograd.gradcheck(differentiable, [t.requires_grad_() for t in inputs], eps=1e-6, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_double_backward_is_refused(name):
    fn, inputs = case(name)
    leaves = [t.requires_grad_() for t in inputs]
    outputs = fn(*leaves)
    outputs = [o for o in ([outputs] if isinstance(outputs, torch.Tensor) else outputs) if o.requires_grad]
    grads = torch.autograd.grad([o.square().sum() for o in outputs], leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        sum(g.sum() for g in grads).backward()


@pytest.mark.parametrize("name", [name for name in CASES if name != "hc_expand"])
def test_eager_is_the_reference_under_autograd(name):
    fn, inputs = case(name, dtype=torch.bfloat16, impl="eager")
    spec, _ = case(name, module=reference)
    for got, want in zip(gradients(fn, inputs), gradients(spec, inputs)):
        assert_close(got, want, 0.0, "eager")
    leaves = [t.requires_grad_() for t in inputs]
    outputs = fn(*leaves)
    first = outputs if isinstance(outputs, torch.Tensor) else outputs[0]
    (grad, *_) = torch.autograd.grad(first.float().square().sum(), leaves, create_graph=True, allow_unused=True)
    assert grad.requires_grad, "plain autograd can be differentiated again"


@pytest.mark.parametrize("name", ["hc_gates", "hc_pre", "hc_pre_return", "hc_pre_single", "hc_post_pre", "hc_post_pre_single"])
def test_any_output_alone(name):
    """Outputs that nobody uses hand None to the backward."""
    fn, inputs = case(name)
    spec, _ = case(name, module=reference)
    for position in range(len(fn(*inputs))):
        _, got = gradients(lambda *t, p=position: fn(*t)[p], inputs)
        _, want = gradients(lambda *t, p=position: spec(*t)[p], inputs)
        for g, w in zip(got, want):
            assert relative_error(g, torch.zeros_like(g) if w is None else w) <= 1e-5


@pytest.mark.parametrize("name", CASES)
def test_autocast_changes_nothing(name):
    fn, inputs = case(name, dtype=torch.bfloat16)
    want = gradients(fn, inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = gradients(fn, inputs)
    for part in (0, 1):
        assert_close(got[part], want[part], 0.0, "autocast")


@pytest.mark.parametrize("name", CASES)
def test_saved_for_backward(name):
    """The inputs themselves, the streams that come out, and per token no more than the mixes and rstd: no wide copy of anything."""
    shape = MhcShape(1, 7, 4, 200)
    fn, inputs = case(name, dtype=torch.bfloat16, shape=shape)
    leaves, saved = [t.requires_grad_() for t in inputs], []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        outputs = fn(*leaves)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
    known = {t.untyped_storage().data_ptr() for t in (*inputs, *outputs)}
    extra = sum(t.numel() * t.element_size() for t in saved if t.untyped_storage().data_ptr() not in known)
    assert extra <= shape.T * (shape.M + 1) * 4


def test_rstd_carries_no_gradient():
    fn, inputs = case("hc_project")
    mixes, rstd = fn(*(t.requires_grad_() for t in inputs))
    assert mixes.requires_grad and not rstd.requires_grad


def test_comb_is_applied_transposed():
    f, x, post, comb = make_inputs("hc_post", SHAPE, dtype=torch.float64).values()
    by_hand = post[..., None] * f[..., None, :] + torch.einsum("bsjk,bsjd->bskd", comb, x)
    assert relative_error(mhc_ops.hc_post(f, x, post, comb), by_hand) < 1e-14
    assert relative_error(mhc_ops.hc_post(f, x, post, comb.mT), by_hand) > 0.05
    assert relative_error(mhc_ops.res_bmm(comb, x), torch.einsum("bsjk,bsjd->bskd", comb, x)) < 1e-14


def test_return_pre_follows_pre_mix_unless_told():
    for op, results in (("hc_pre", 3), ("hc_post_pre", 4)):
        for with_pre_mix, return_pre, extra in ((False, None, 0), (False, True, 1), (True, None, 1), (True, False, 0)):
            inputs = make_inputs(op, SHAPE, with_pre_mix=with_pre_mix)
            assert len(getattr(mhc_ops, op)(**inputs, return_pre=return_pre)) == results + extra


def test_single_pass_chain_backpropagates_through_pre():
    """Three sublayers, each collapsing with the pre of the one before: gradients of the whole chain against the reference."""
    sites = [make_inputs("hc_pre", SHAPE, dtype=torch.float64, logit_std=3.0, seed=seed) for seed in (5, 6, 7)]
    x = sites[0].pop("x")
    parameters = [[t for name, t in site.items() if name != "x"] for site in sites]

    def chain(module):
        def run(x, *flat):
            first, *others = (flat[i : i + 3] for i in range(0, 9, 3))
            y, post, comb, pre = module.hc_pre(x, *first, return_pre=True)
            for site in others:
                x, y, post, comb, pre = module.hc_post_pre(torch.tanh(y), x, post, comb, *site, pre_mix=pre)
            return module.hc_post(torch.tanh(y), x, post, comb)

        return run

    inputs = [x, *(t for site in parameters for t in site)]
    got, want = gradients(chain(mhc_ops), inputs), gradients(chain(reference), inputs)
    assert_close(got[0], want[0], 1e-13, "output")
    assert_close(got[1], want[1], 1e-10, "gradient")
