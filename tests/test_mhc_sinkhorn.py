"""sinkhorn: kernels against fp64, and the contract of the public function."""

import pytest
import torch

from mhc_ops import sinkhorn
from mhc_ops.sinkhorn import op
from reference import mhc as reference
from reference.cases import relative_error
from tests.op_checks import check_checkpoint, check_fullgraph, check_opcheck, gradients, poison_empty, strided_variants

# The kernels may be this many times further from fp64 than fp32 PyTorch: both sit at 1e-7 to 1e-6, a noisy ratio of small errors.
BUDGET = 8.0


def logits_of(shape, std=1.0, seed=0, dtype=torch.float32, device="cpu"):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std).to(device, dtype)


@pytest.mark.parametrize("convention", ["v4", "paper"])
@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("tokens, std", [(1, 1.0), (9, 10.0)])
def test_kernel_against_fp64(kernel_device, monkeypatch, convention, n, tokens, std):
    check_kernel(kernel_device, monkeypatch, convention, n, tokens, std)


@pytest.mark.parametrize("std", [1.0, 3.0, 6.0])
def test_kernel_many_tokens(kernel_device, monkeypatch, std):
    check_kernel(kernel_device, monkeypatch, "v4", 4, 300 if std == 3.0 else 17, std)


def check_kernel(kernel_device, monkeypatch, convention, n, tokens, std):
    poison_empty(monkeypatch)
    logits = logits_of((tokens, n, n), std, device=kernel_device)
    want, (want_grad,) = gradients(lambda z: reference.sinkhorn(z, convention=convention), [logits.double()])
    fp32, (fp32_grad,) = gradients(lambda z: reference.sinkhorn(z, convention=convention), [logits])
    got, (got_grad,) = gradients(lambda z: sinkhorn(z, convention=convention, impl="triton"), [logits])
    for name, g, f, w in (("comb", got[0], fp32[0], want[0]), ("dlogits", got_grad, fp32_grad, want_grad)):
        limit = BUDGET * max(relative_error(f, w), 1e-7)
        assert relative_error(g, w) <= limit, f"{name}: {relative_error(g, w):.1e}, allowed {limit:.1e}"


@pytest.mark.parametrize("iters", [1, 2, 9])
@pytest.mark.parametrize("convention", ["v4", "paper"])
def test_kernel_iteration_counts(kernel_device, convention, iters):
    logits = logits_of((5, 4, 4), 2.0, device=kernel_device)
    want, (want_grad,) = gradients(lambda z: reference.sinkhorn(z, iters=iters, convention=convention), [logits.double()])
    got, (got_grad,) = gradients(lambda z: sinkhorn(z, iters=iters, convention=convention, impl="triton"), [logits])
    assert relative_error(got[0], want[0]) < 2e-6
    assert relative_error(got_grad, want_grad) < 5e-6


def test_kernel_large_logits_stay_finite(kernel_device):
    logits = logits_of((6, 4, 4), 1e4, device=kernel_device)
    for convention in ("v4", "paper"):
        out, (grad,) = gradients(lambda z, c=convention: sinkhorn(z, convention=c, impl="triton"), [logits])
        assert out[0].isfinite().all() and grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernel_dtypes_and_strides(kernel_device, dtype):
    logits = logits_of((2, 7, 4, 4), dtype=dtype, device=kernel_device)
    want, (want_grad,) = gradients(lambda z: reference.sinkhorn(z, iters=4), [logits])
    for variant in [logits, *strided_variants(logits)]:
        got = sinkhorn(variant.detach().requires_grad_(), iters=4, impl="triton")
        assert got.dtype == torch.float32
        assert relative_error(got, want[0]) < 2e-6
        _, (grad,) = gradients(lambda z: sinkhorn(z, iters=4, impl="triton"), [variant])
        assert grad.dtype == dtype
        assert relative_error(grad, want_grad) < {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_contract(dtype):
    logits = logits_of((3, 5, 4, 4), dtype=dtype)
    check_fullgraph(sinkhorn, [logits])
    check_checkpoint(sinkhorn, [logits])
    want = sinkhorn(logits)
    for variant in strided_variants(logits):
        assert torch.equal(sinkhorn(variant), want)


@pytest.mark.parametrize("convention", ["v4", "paper"])
def test_opcheck(convention):
    logits, dcomb = logits_of((3, 4, 4)), logits_of((3, 4, 4), seed=1)
    check_opcheck(op.FORWARD, (logits, 5, 1e-6, convention, "eager"))
    check_opcheck(op.BACKWARD, (dcomb, logits, 5, 1e-6, convention, "eager"))


def test_gradcheck_fp64():
    assert torch.autograd.gradcheck(lambda z: sinkhorn(z, iters=4), logits_of((2, 3, 3)).double().requires_grad_())


@pytest.mark.parametrize("shape", [(0, 4, 4), (2, 0, 3, 3)])
def test_empty(shape):
    out, (grad,) = gradients(sinkhorn, [torch.zeros(shape)])
    assert out[0].shape == shape and grad.shape == shape


def test_double_backward_is_refused():
    z = logits_of((2, 4, 4)).requires_grad_()
    (grad,) = torch.autograd.grad(sinkhorn(z).square().sum(), z, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize(
    "args, kwargs, error, message",
    [
        (([[1.0]],), {}, TypeError, "logits must be a torch.Tensor, got list"),
        ((torch.zeros(4, 4, dtype=torch.int32),), {}, TypeError, "logits has dtype int32, wanted bfloat16"),
        ((torch.zeros(4, 3),), {}, ValueError, r"logits has shape \[4, 3\], wanted \[..., N, N\]"),
        ((torch.zeros(4),), {}, ValueError, r"logits has shape \[4\]"),
        ((torch.zeros(1, 1),), {}, ValueError, "N = 1 streams, wanted 2 to 8"),
        ((torch.zeros(9, 9),), {}, ValueError, "N = 9 streams, wanted 2 to 8"),
        ((torch.zeros(4, 4),), {"iters": 0}, ValueError, "iters must be at least 1, got 0"),
        ((torch.zeros(4, 4),), {"iters": 2.0}, TypeError, "iters must be an int, got float"),
        ((torch.zeros(4, 4),), {"convention": "v5"}, ValueError, "convention must be one of 'v4', 'paper', got 'v5'"),
        ((torch.zeros(4, 4),), {"impl": "cuda"}, ValueError, "impl must be one of 'auto', 'triton', 'eager', got 'cuda'"),
        ((torch.zeros(4, 4, dtype=torch.float64),), {"impl": "triton"}, ValueError, "impl='triton' cannot run here: kernels take bf16"),
    ],
)
def test_errors(args, kwargs, error, message):
    with pytest.raises(error, match=message):
        sinkhorn(*args, **kwargs)
