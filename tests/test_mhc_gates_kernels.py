"""The gates kernels against fp64, in Triton's interpreter and on a GPU."""

import pytest
import torch

from mhc_ops import hc_gates
from mhc_ops.gates import op
from reference import mhc as reference
from reference.cases import relative_error
from reference.cases.mhc import MhcShape, make_inputs
from tests.op_checks import check_opcheck, gradients, poison_empty, strided_variants

# The kernels may be this many times further from fp64 than fp32 PyTorch: both sit at 1e-8 to 1e-6, a noisy ratio of small errors.
BUDGET = 8.0
NAMES = ("pre", "post", "comb", "dmixes", "dscale", "dbase")


def inputs_of(n, tokens, std, device, seed=0):
    return list(make_inputs("hc_gates", MhcShape(1, tokens, n, 1), dtype=torch.float32, logit_std=std, seed=seed, device=device).values())


def flat(results):
    return [*results[0], *results[1]]


def check(inputs, names=NAMES, budget=BUDGET, **options):
    want = flat(gradients(lambda *t: reference.hc_gates(*t, **options), [t.double() for t in inputs]))
    fp32 = flat(gradients(lambda *t: reference.hc_gates(*t, **options), inputs))
    got = flat(gradients(lambda *t: hc_gates(*t, impl="triton", **options), inputs))
    for name, g, f, w in zip(names, got, fp32, want, strict=True):
        limit = budget * max(relative_error(f, w), 1e-7)
        assert g.shape == f.shape and g.dtype == torch.float32 and g.is_contiguous()
        assert relative_error(g, w) <= limit, f"{name}: {relative_error(g, w):.1e}, allowed {limit:.1e}"
    return got


@pytest.mark.parametrize("convention", ["v4", "paper"])
@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("tokens, std", [(1, 1.0), (9, 6.0)])
def test_against_fp64(kernel_device, monkeypatch, convention, n, tokens, std):
    poison_empty(monkeypatch)
    check(inputs_of(n, tokens, std, kernel_device), hc_mult=n, convention=convention)


def test_many_tokens(kernel_device, monkeypatch):
    """More programs than one tile of the reduction holds."""
    poison_empty(monkeypatch)
    monkeypatch.setattr("mhc_ops.gates.bwd.REDUCE_ROWS", 16)
    from mhc_ops.gates.bwd import reduce_spec

    reduce_spec.cache_clear()
    check(inputs_of(4, 300, 3.0, kernel_device), iters=4)
    reduce_spec.cache_clear()


@pytest.mark.parametrize("convention", ["v4", "paper"])
@pytest.mark.parametrize("iters", [1, 2, 9])
def test_iters_and_eps(kernel_device, convention, iters):
    got = check(inputs_of(3, 5, 2.0, kernel_device), hc_mult=3, iters=iters, hc_eps=0.03, convention=convention)
    if convention == "v4":
        bare = hc_gates(*inputs_of(3, 5, 2.0, kernel_device), hc_mult=3, iters=iters, hc_eps=0.0, impl="triton")
        assert relative_error(got[0] - bare[0], torch.full_like(got[0], 0.03)) < 1e-5


def test_outputs_nobody_uses(kernel_device, monkeypatch):
    poison_empty(monkeypatch)
    inputs = inputs_of(4, 5, 2.0, kernel_device)
    for position in range(3):
        _, want = gradients(lambda *t, p=position: reference.hc_gates(*t, iters=4)[p], inputs)
        _, got = gradients(lambda *t, p=position: hc_gates(*t, iters=4, impl="triton")[p], inputs)
        for g, w in zip(got, want):
            assert relative_error(g, w) <= 5e-6


def test_strides_and_empty(kernel_device, monkeypatch):
    poison_empty(monkeypatch)
    inputs = inputs_of(4, 5, 2.0, kernel_device)
    want = flat(gradients(lambda *t: hc_gates(*t, iters=2, impl="triton"), inputs))
    for position, t in enumerate(inputs):
        for variant in strided_variants(t):
            got = flat(gradients(lambda *a: hc_gates(*a, iters=2, impl="triton"), [*inputs[:position], variant, *inputs[position + 1 :]]))
            assert all(torch.equal(g, w) for g, w in zip(got, want))
    mixes, scale, base = inputs
    outputs, grads = gradients(lambda *t: hc_gates(*t, impl="triton"), [mixes[:, :0], scale, base])
    assert [tuple(o.shape) for o in outputs] == [(1, 0, 4), (1, 0, 4), (1, 0, 4, 4)]
    assert grads[0].shape == (1, 0, 24) and not grads[1].any() and not grads[2].any()


def test_parameter_gradients_are_deterministic(kernel_device):
    inputs = inputs_of(4, 65, 3.0, kernel_device)
    first, second = (flat(gradients(lambda *t: hc_gates(*t, iters=3, impl="triton"), inputs)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.gpu
def test_opcheck_with_kernels():
    mixes, scale, base = inputs_of(4, 5, 2.0, "cuda")
    outputs = hc_gates(mixes, scale, base)
    check_opcheck(op.FORWARD, (mixes, scale, base, 4, 5, 1e-6, "v4", "triton"))
    check_opcheck(op.BACKWARD, (*outputs, mixes, scale, base, 4, 5, 1e-6, "v4", "triton"))
