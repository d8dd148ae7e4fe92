"""The vector BMM kernels against fp64, in Triton's interpreter and on a GPU."""

from functools import partial

import pytest
import torch

import mhc_ops
from mhc_ops.library import OPS as LIBRARY
from reference import mhc as reference
from reference.cases import relative_error
from reference.cases.mhc import MhcShape, make_inputs
from tests.op_checks import check_opcheck, gradients, poison_empty, strided_variants

OPS = ("pre_bmm", "post_bmm", "res_bmm")
# Times the error of PyTorch in the same dtype. bf16: the interpreter's stores truncate, which is up to twice the error of rounding.
BUDGET = {torch.float32: 4.0, torch.float16: 2.5, torch.bfloat16: 2.5}


def inputs_of(name, shape, dtype, device):
    return list(make_inputs(name, shape, dtype=dtype, device=device).values())


def launchers(name, npu):
    """The op's forward and backward as one differentiable function, in the form for GPUs or for Ascend."""
    from mhc_ops.bmm import bwd, fwd

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return getattr(fwd, f"{name}_fwd")(a, b, npu=npu)

        @staticmethod
        def backward(ctx, dout):
            return getattr(bwd, f"{name}_bwd")(dout, *ctx.saved_tensors, npu=npu)

    return Kernel.apply


def check(name, inputs, dtype, fn=None):
    fn = fn or (lambda *t: getattr(mhc_ops, name)(*t, impl="triton"))
    spec = getattr(reference, name)
    leaves = [t.double().requires_grad_() for t in inputs]
    generator = torch.Generator().manual_seed(7)  # the cotangent that `gradients` draws, as it was rounded
    out = spec(*leaves)
    cotangent = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.device, dtype).double()
    want = [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]
    for got, plain, w in zip(*([*r[0], *r[1]] for r in (gradients(fn, inputs), gradients(spec, inputs))), want):
        limit = BUDGET[dtype] * max(relative_error(plain, w), 1e-7)
        assert got.shape == plain.shape and got.dtype == plain.dtype
        assert relative_error(got, w) <= limit, f"{relative_error(got, w):.1e}, allowed {limit:.1e}"


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("n, tokens, d", [(2, 1, 100), (3, 5, 100), (4, 1, 5120), (5, 2, 1280), (6, 3, 33), (7, 2, 100), (8, 3, 100)])
def test_against_fp64(kernel_device, monkeypatch, name, dtype, n, tokens, d):
    poison_empty(monkeypatch)
    check(name, inputs_of(name, MhcShape(1, tokens, n, d), dtype, kernel_device), dtype)


@pytest.mark.parametrize("name", OPS)
def test_many_tokens(kernel_device, monkeypatch, name):
    poison_empty(monkeypatch)
    check(name, inputs_of(name, MhcShape(3, 100, 4, 20), torch.float32, kernel_device), torch.float32)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("n, tokens, d", [(2, 4, 5120), (3, 5, 100), (4, 7, 1280), (8, 3, 100)])
def test_form_for_ascend(kernel_device, monkeypatch, name, n, tokens, d):
    """Three programs, so that each walks over several tokens."""
    poison_empty(monkeypatch)
    for module in ("fwd", "bwd"):
        monkeypatch.setattr(f"mhc_ops.bmm.{module}.row_grid", lambda device, programs: min(programs, 3))
    check(name, inputs_of(name, MhcShape(1, tokens, n, d), torch.float32, kernel_device), torch.float32, launchers(name, npu=True))


@pytest.mark.parametrize("name", OPS)
def test_strides_and_empty(kernel_device, monkeypatch, name):
    poison_empty(monkeypatch)
    shape = MhcShape(1, 3, 4, 24)
    fn = partial(getattr(mhc_ops, name), impl="triton")
    inputs = inputs_of(name, shape, torch.float16, kernel_device)
    want = gradients(fn, inputs)
    for position, t in enumerate(inputs):
        for variant in strided_variants(t):
            got = gradients(fn, [*inputs[:position], variant, *inputs[position + 1 :]])
            assert all(torch.equal(g, w) for part in (0, 1) for g, w in zip(got[part], want[part]))
    (out,), grads = gradients(fn, [t[:, :0] for t in inputs])
    assert out.shape == (1, 0, *want[0][0].shape[2:])
    assert [g.shape for g in grads] == [t[:, :0].shape for t in inputs]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in LIBRARY.names if "bmm" in name])
def test_opcheck_with_kernels(name):
    op, direction = name.rsplit("_", 1)
    inputs = inputs_of(op, MhcShape(2, 3, 4, 100), torch.bfloat16, "cuda")
    if direction == "bwd":
        inputs = [getattr(reference, op)(*inputs), *inputs]
    check_opcheck(getattr(torch.ops.mhc_ops, name).default, (*inputs, "triton"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPS)
def test_offsets_beyond_int32(name):
    """110,000 tokens of 4 x 5120: the last token's first element is element 2.25e9."""
    shape = MhcShape(1, 110_000, 4, 5120)
    small = inputs_of(name, MhcShape(1, 1, 4, 5120), torch.bfloat16, "cuda")
    big = [t.expand(1, shape.T, *t.shape[2:]).contiguous() for t in small]
    fn = getattr(mhc_ops, name)
    leaves = [t.requires_grad_() for t in big]
    out = fn(*leaves, impl="triton")
    want, want_grads = gradients(lambda *t: fn(*t, impl="triton"), small)
    assert torch.equal(out[:, -1:], want[0])
    cotangent = torch.randn(want[0].shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to("cuda", torch.bfloat16)
    for g, w in zip(torch.autograd.grad(out, leaves, cotangent.expand(out.shape).contiguous()), want_grads):
        assert torch.equal(g[:, -1:], w)
