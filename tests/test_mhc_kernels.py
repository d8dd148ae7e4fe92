"""The fused mHC kernels against fp64: hc_project, hc_pre, hc_post, hc_post_pre, hc_head in both directions, outputs poisoned before.

In the interpreter shapes are tiny; a GPU runs every D, N and token count of the contract as well.
"""

import itertools
from functools import partial

import pytest
import torch

import mhc_ops
from kernel_runtime import record
from mhc_ops.pre import fwd as pre_kernels
from mhc_ops.project import fwd as project_kernels
from reference import mhc as reference
from reference.cases import relative_error
from reference.cases.mhc import MhcShape, make_inputs
from tests.op_checks import as_tuple, gradients, poison_empty

OPS = ("hc_project", "hc_pre", "hc_post", "hc_post_pre", "hc_head")
FEW = {"hc_pre": {"iters": 3}, "hc_post_pre": {"iters": 3}}  # for tests that are not about Sinkhorn's iterations: most of the interpreter's time
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Relative errors (norm). One rounding to bf16 is 1.7e-3, to fp16 2.1e-4; gradients of streams are rounded twice where the gradient of the
# streams between two sublayers is stored, and again under dp @ fn in tf32. Coefficients and parameters: the projection's 5e-5 (bf16, tensor
# core accumulation), amplified up to 3 times by logit std 3 through 20 iterations; 2e-6 where it is exact fp32.
STREAM_LIMIT = {BF16: 4e-3, FP16: 5e-4}
# The interpreter truncates where it stores bf16, which doubles the error; a GPU rounds.
INTERPRETER_STREAM_LIMIT = {BF16: 9e-3, FP16: 5e-4}
COEFFICIENT_LIMIT = {BF16: 1.5e-4, FP16: 6e-6, FP32: 6e-6}


def run(name, inputs, impl, stored=None, **options):
    """Outputs and gradients of the public function for the tensors `inputs`, by name; the cotangents have the dtypes of its outputs.

    impl "fp64": the reference in fp64. The boundary's second half is specified on the streams as they are stored, `stored`.
    """
    dtype = next(iter(inputs.values())).dtype
    if impl != "fp64":
        function = partial(getattr(mhc_ops, name), **options, impl=impl)
    elif name == "hc_post_pre":

        def function(f, x, post, comb, **site):
            streams = reference.hc_post(f, x, post, comb)
            rounded = streams + (stored.double() - streams).detach()
            return streams, *reference.hc_pre(rounded, **site, **options)

    else:
        function = partial(getattr(reference, name), **options)
    leaves = {k: (v.double() if impl == "fp64" else v.detach()).clone().requires_grad_() for k, v in inputs.items()}
    outputs = as_tuple(function(**leaves))
    generator = torch.Generator().manual_seed(7)
    pairs = []
    streams = {"hc_post_pre": 2, "hc_project": 0}.get(name, 1)  # outputs in the streams' dtype
    for i, o in enumerate(outputs):
        cotangent = torch.randn(o.shape, generator=generator).to(dtype if i < streams else torch.float32)
        if o.requires_grad:
            pairs.append((o, cotangent.to(o.device, o.dtype)))
    grads = torch.autograd.grad([o for o, _ in pairs], list(leaves.values()), [c for _, c in pairs])
    return {f"out{i}": o.detach() for i, o in enumerate(outputs)} | {f"d{n}": g for n, g in zip(leaves, grads)}


def check(kernel_device, monkeypatch, name, shape, dtype=FP32, with_pre_mix=False, logit_std=1.0, inputs=None, **options):
    inputs = inputs or make_inputs(name, shape, dtype=dtype, logit_std=logit_std, with_pre_mix=with_pre_mix, device=kernel_device)
    with monkeypatch.context() as patch:
        poison_empty(patch)
        got = run(name, inputs, "triton", **options)
    want = run(name, inputs, "fp64", stored=got["out0"], **options)
    streams = STREAM_LIMIT if kernel_device == "cuda" else INTERPRETER_STREAM_LIMIT
    failed = []
    for key, w in want.items():
        g = got[key]
        # dpost and dcomb of the boundary sum over the stored gradient of the streams in between, as the composition of hc_pre and hc_post does
        from_stored = name == "hc_post_pre" and key in ("dpost", "dcomb")
        limit = (streams if dtype != FP32 and (g.dtype == dtype or from_stored) else COEFFICIENT_LIMIT)[dtype]
        error = relative_error(g, w)
        if g.shape != w.shape or not error <= limit:
            failed.append(f"{key} {tuple(g.shape)}: {error:.1e}, allowed {limit:.1e}")
    assert not failed, "; ".join(failed)
    return got


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("name", OPS)
def test_stream_counts(kernel_device, monkeypatch, name, n):
    check(kernel_device, monkeypatch, name, MhcShape(1, 5, n, 100), **FEW.get(name, {}))


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", OPS)
def test_dtypes(kernel_device, monkeypatch, name, dtype):
    check(kernel_device, monkeypatch, name, MhcShape(1, 9, 4, 100), dtype)


@pytest.mark.parametrize("convention", ["v4", "paper"])
@pytest.mark.parametrize("name", ["hc_pre", "hc_post_pre"])
@pytest.mark.parametrize("with_pre_mix, return_pre", [(True, None), (True, False), (False, True)])
def test_conventions_and_single_pass(kernel_device, monkeypatch, name, convention, with_pre_mix, return_pre):
    shape = MhcShape(1, 6, 3 if convention == "paper" else 4, 72)
    check(
        kernel_device, monkeypatch, name, shape, with_pre_mix=with_pre_mix, return_pre=return_pre, convention=convention, iters=4, hc_eps=1e-3,
        norm_eps=1e-2, logit_std=3.0,
    )  # fmt: skip


@pytest.mark.parametrize("tokens", [1, 37])
def test_token_counts(kernel_device, monkeypatch, tokens):
    check(kernel_device, monkeypatch, "hc_post_pre", MhcShape(1, tokens, 4, 40), iters=2)


def test_several_pieces_of_k(kernel_device, monkeypatch):
    """Splits of K, groups of the two-stage sums and a last piece of another length are all met."""
    steps, split = project_kernels.split_plan(3, 4 * 1100, 32, 32, 4)
    assert split > 1 and (4 * 1100) % (32 * steps)
    for name in ("hc_project", "hc_pre", "hc_head"):
        check(kernel_device, monkeypatch, name, MhcShape(1, 3, 4, 1100), **FEW.get(name, {}))


@pytest.mark.parametrize("name", OPS)
def test_strides(kernel_device, monkeypatch, name):
    """Every argument strided: a transposed layout where it has two dimensions or more, every second element otherwise"""
    inputs = make_inputs(name, MhcShape(2, 3, 4, 24), dtype=FP32, device=kernel_device)
    for key, t in inputs.items():
        wide = torch.full((*t.shape, 2), float("nan"), dtype=t.dtype, device=t.device)
        wide[..., 0] = t
        inputs[key] = wide[..., 0] if t.dim() < 2 else t.transpose(0, -1).contiguous().transpose(0, -1)
    check(kernel_device, monkeypatch, name, None, inputs=inputs, **FEW.get(name, {}))


@pytest.mark.parametrize("unused", [(0,), (1,), (1, 2), (0, 1, 2, 3), (3,)])
def test_outputs_without_gradient(kernel_device, unused):
    """Gradients of hc_post_pre when some of its outputs are not used: streams, y, post, comb, pre"""
    inputs = make_inputs("hc_post_pre", MhcShape(1, 3, 4, 40), dtype=FP32, device=kernel_device)

    def only_used(function, **extra):
        def call(*t):
            outputs = function(**dict(zip(inputs, t)), iters=2, return_pre=True, **extra)
            return [o for i, o in enumerate(outputs) if i not in unused]

        return call

    _, want = gradients(only_used(reference.hc_post_pre), [t.double() for t in inputs.values()])
    _, got = gradients(only_used(mhc_ops.hc_post_pre, impl="triton"), list(inputs.values()))
    for name, g, w in zip(inputs, got, want):
        assert relative_error(g, w) <= COEFFICIENT_LIMIT[FP32], name


@pytest.mark.parametrize("name", OPS)
def test_two_runs_are_bit_equal(kernel_device, name):
    inputs = make_inputs(name, MhcShape(1, 5 if kernel_device == "cpu" else 1021, 4, 40 if kernel_device == "cpu" else 1280), device=kernel_device)
    few = FEW.get(name, {}) if kernel_device == "cpu" else {}
    first, second = run(name, inputs, "triton", **few), run(name, inputs, "triton", **few)
    for key in first:
        assert torch.equal(first[key], second[key]), key


@pytest.mark.parametrize("with_pre_mix", [False, True])
@pytest.mark.parametrize("name", ["hc_pre", "hc_post_pre"])
def test_replay_from_coefficients_is_bit_equal(kernel_device, name, with_pre_mix):
    """What recompute relies on: streams by hc_post and y by pre_bmm, from saved coefficients, are those of the fused kernels."""
    shape = MhcShape(1, 3, 4, 40) if kernel_device == "cpu" else MhcShape(1, 1021, 4, 5120)
    inputs = make_inputs(name, shape, with_pre_mix=with_pre_mix, device=kernel_device)
    outputs = getattr(mhc_ops, name)(**inputs, **FEW[name], return_pre=True, impl="triton")
    *streams, y, _, _, pre = outputs
    if streams:
        replayed = mhc_ops.hc_post(*(inputs[k] for k in ("f", "x", "post", "comb")), impl="triton")
        assert torch.equal(streams[0], replayed)
    else:
        replayed = inputs["x"]
    assert torch.equal(y, mhc_ops.pre_bmm(inputs["pre_mix"] if with_pre_mix else pre, replayed, impl="triton"))


@pytest.fixture
def no_plans():
    """Launch plans are kept by shape; none from before is used, and none made inside stays."""
    from mhc_ops.boundary.fwd import expand_plan
    from mhc_ops.pre.bwd import site_plan

    plans = expand_plan, site_plan, pre_kernels.gates_plan, project_kernels.project_plan
    for plan in plans:
        plan.cache_clear()
    yield
    for plan in plans:
        plan.cache_clear()


@pytest.mark.interpret
def test_forms_for_ascend(monkeypatch, no_plans):
    """The forms that loop over their programs (and post_bwd without tuples) give the same as those of a GPU."""
    import mhc_ops.boundary.fwd
    import mhc_ops.head.fwd
    import mhc_ops.post.bwd
    import mhc_ops.post.fwd
    import mhc_ops.pre.bwd

    for module, names in (
        (mhc_ops.boundary.fwd, ("expand_split_spec", "gates_collapse_spec")),
        (mhc_ops.head.fwd, ("head_spec",)),
        (mhc_ops.post.fwd, ("post_spec",)),
        (pre_kernels, ("gates_collapse_spec",)),
        (mhc_ops.pre.bwd, ("gates_dpre_spec",)),
    ):
        for spec in names:
            original = getattr(module, spec)
            monkeypatch.setattr(module, spec, lambda *a, original=original: original(*a[:-1], True))
        monkeypatch.setattr(module, "row_grid", lambda device, programs: min(3, programs))
    with record() as recording:
        for name in OPS:
            for n in (3, 4):
                check("cpu", monkeypatch, name, MhcShape(1, 5, n, 40), **FEW.get(name, {}))
    assert {spec.name: spec.consts["LOOP"] for spec in recording.specs if "LOOP" in spec.consts} == dict.fromkeys(
        ("post_fwd_kernel", "expand_split_kernel", "gates_collapse_kernel", "gates_dpre_kernel", "head_fwd_kernel"), True
    )


@pytest.mark.interpret
def test_products_for_ascend(monkeypatch, no_plans):
    """Accumulators that start as a product, and operands that the matrix unit transposes."""
    import mhc_ops.project.bwd

    for module, name in ((project_kernels, "project_spec"), (mhc_ops.project.bwd, "dx_dfn_spec")):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, original=original: original(*a[:-1], True))
    mhc_ops.project.bwd.dx_plan.cache_clear()
    with record() as recording:
        for name in ("hc_project", "hc_pre", "hc_post_pre"):
            for d in (40, 64):  # K with a rest and without, in pieces of BK = 128
                check("cpu", monkeypatch, name, MhcShape(1, 19, 4, d), dtype=torch.bfloat16, **FEW.get(name, {}))
    mhc_ops.project.bwd.dx_plan.cache_clear()
    forms = {(spec.name, spec.consts.get("ASCEND", spec.consts.get("MODE"))) for spec in recording.specs}
    assert {("project_kernel", True), ("dx_dfn_kernel", "bf16")} <= forms
    inputs = [make_inputs("hc_post", MhcShape(1, 5, 5, 300), dtype=FP32)[k] for k in ("f", "x", "post", "comb")]
    dout = torch.randn(1, 5, 5, 300, generator=torch.Generator().manual_seed(3))
    got, want = (mhc_ops.post.bwd.post_bwd(dout, *inputs, npu=npu) for npu in (True, False))
    for g, w in zip(got, want):
        assert relative_error(g, w) < 1e-6


def test_bf16_projection_is_as_accurate_as_stated(kernel_device):
    shape = MhcShape(1, 5, 4, 100) if kernel_device == "cpu" else MhcShape(1, 1021, 4, 7168)
    for dtype, limit in ((BF16, 5e-5), (FP16, 2e-6), (FP32, 2e-6)):
        inputs = make_inputs("hc_project", shape, dtype=dtype, device=kernel_device)
        got, want = run("hc_project", inputs, "triton"), run("hc_project", inputs, "fp64")
        assert relative_error(got["out0"], want["out0"]) <= limit
        assert relative_error(got["out1"], want["out1"]) <= limit


GPU_SHAPES = [(d, 4) for d in (100, 1280, 2560, 4096, 5120, 7168)] + [(1280, 2), (1280, 3), (1280, 8), (5120, 3), (7168, 8), (100, 7)]


@pytest.mark.gpu
@pytest.mark.parametrize("d, n", GPU_SHAPES)
@pytest.mark.parametrize("name", OPS)
def test_gpu_shapes(monkeypatch, name, d, n):
    for tokens in (1, 300, 1021):
        check("cuda", monkeypatch, name, MhcShape(1, tokens, n, d), BF16)


@pytest.mark.gpu
@pytest.mark.parametrize("std", [1.0, 3.0])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_gpu_single_pass_and_paper(monkeypatch, dtype, std):
    for convention, pre_mix in itertools.product(("v4", "paper"), (False, True)):
        check(
            "cuda", monkeypatch, "hc_post_pre", MhcShape(1, 1021, 4, 1280), dtype, pre_mix, std, return_pre=True, convention=convention
        )  # fmt: skip


@pytest.mark.gpu
def test_gpu_offsets_beyond_int32():
    """106,000 tokens of 4 x 5120 are more than 2^31 elements: the last tokens agree with the same tokens by themselves."""
    tokens, last = 106_000, 300
    generator = torch.Generator("cuda").manual_seed(0)
    shape = MhcShape(1, last, 4, 5120)
    names = ("f", "x", "post", "comb")
    site = {k: v for k, v in make_inputs("hc_post_pre", shape, device="cuda").items() if k not in names}
    sizes = ((5120,), (4, 5120), (4,), (4, 4))
    whole = [torch.rand(1, tokens, *s, generator=generator, device="cuda").to(BF16 if 5120 in s else FP32) for s in sizes]
    results = []
    for part in (whole, [t[:, -last:] for t in whole]):
        leaves = {n: t.detach().requires_grad_() for n, t in zip(names, part)}
        streams, y, post, comb = mhc_ops.hc_post_pre(**leaves, **site, impl="triton")
        cotangents = [torch.ones_like(o) for o in (streams, y)]
        grads = torch.autograd.grad([streams, y], list(leaves.values()), cotangents)
        results.append([t[:, -last:].clone() for t in (streams, y, post, comb, *grads)])
        del leaves, streams, y, post, comb, cotangents, grads
    for i, (got, want) in enumerate(zip(*results)):
        assert relative_error(got, want) <= 4e-3, i
