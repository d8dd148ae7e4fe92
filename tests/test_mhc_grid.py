"""hc_post_pre, which holds every kernel of a chain of sublayers, against fp64 on a GPU: a sample of the grid of logit std, hidden size,
streams and tokens in which every value comes at least twice. `python -m tests.test_mhc_grid` runs the full product.

Cotangents are random, comb is asymmetric (reference/cases/mhc.py). Errors are relative, by norm, over all tokens.
"""

import itertools

import pytest
import torch

import mhc_ops
from reference import mhc as reference
from reference.cases.mhc import MhcShape, make_inputs

STDS, HIDDEN = (1.0, 3.0, 6.0, 10.0), (100, 1280, 2560, 4096, 5120, 7168)
TOKENS, STREAMS = (1, 13, 127, 1024, 104_900), (2, 3, 4, 8)
SAMPLE = (
    (1.0, 100, 13, 2), (6.0, 100, 104_900, 2), (3.0, 1280, 127, 3), (10.0, 1280, 1024, 3), (6.0, 2560, 1, 4), (1.0, 2560, 1024, 4),
    (10.0, 4096, 13, 4), (6.0, 4096, 127, 4), (3.0, 5120, 104_900, 4), (10.0, 5120, 1, 4), (1.0, 7168, 127, 8), (3.0, 7168, 1024, 8),
)  # fmt: skip
CHUNK = 2048  # tokens of the fp64 reference at a time
PARAMETERS = ("fn", "scale", "base")
OUTPUTS = ("streams", "y", "post_out", "comb_out")
# A tensor of bf16 is rounded once or twice, and so is the gradient that dpost and dcomb are sums of (test_mhc_kernels.py).
ROUNDED = ("streams", "y", "df", "dx", "dpost", "dcomb")
STREAM_LIMIT, COEFFICIENT_LIMIT = 4e-3, 1.5e-4
# The projection of bf16 streams is accurate to 5e-5. What an error of that size does to a result is measured in fp64, case by case (it grows
# with the logits: 20 iterations do not converge there), and the kernels may be this many times further off.
PROJECTION_ERROR, BUDGET = 5e-5, 3.0


def make(std, d, tokens, n):
    """Inputs and cotangents on the GPU; a large case is drawn there."""
    small = MhcShape(1, min(tokens, CHUNK), n, d)
    inputs = make_inputs("hc_post_pre", small, logit_std=std, seed=n, device="cuda")
    if tokens > CHUNK:
        generator = torch.Generator("cuda").manual_seed(n)
        for name in ("f", "x"):
            size = (1, tokens, *inputs[name].shape[2:])
            inputs[name] = torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_(0.1, 1.0, generator=generator)
        for name in ("post", "comb"):
            inputs[name] = inputs[name].repeat(1, tokens // CHUNK + 1, *(1,) * (inputs[name].dim() - 2))[:, :tokens].contiguous()
    generator = torch.Generator("cuda").manual_seed(n + 1)
    sizes = ((n, d), (d,), (n,), (n, n))
    cotangents = [
        torch.empty(1, tokens, *s, dtype=torch.bfloat16 if s[-1] == d else torch.float32, device="cuda").normal_(generator=generator) for s in sizes
    ]
    return inputs, cotangents


def results(inputs, cotangents, stored=None, fn_error=None):
    """Outputs and gradients by name: of the kernels, or with `stored`, their new streams, of the reference in fp64."""
    if stored is None:
        leaves = {k: t.detach().requires_grad_() for k, t in inputs.items()}
        outputs = mhc_ops.hc_post_pre(**leaves, impl="triton")
    else:
        leaves = {k: t.double().requires_grad_() for k, t in inputs.items()}
        f, x, post, comb, fn, scale, base = leaves.values()
        streams = reference.hc_post(f, x, post, comb)
        rounded = streams + (stored.double() - streams).detach()  # the second half is specified on the streams as they are stored
        outputs = streams, *reference.hc_pre(rounded, fn if fn_error is None else fn * fn_error, scale, base)
    grads = torch.autograd.grad(outputs, list(leaves.values()), [c.to(o.dtype) for o, c in zip(outputs, cotangents, strict=True)])
    return dict(zip(OUTPUTS, (o.detach() for o in outputs))) | {f"d{k}": g for k, g in zip(leaves, grads)}


def check(std, d, tokens, n):
    inputs, cotangents = make(std, d, tokens, n)
    got = results(inputs, cotangents)
    squares = {name: [0.0, 0.0, 0.0] for name in got}  # of the error, of the change by an error of the projection, of the result
    sums = {f"d{name}": [0.0, 0.0] for name in PARAMETERS}
    generator = torch.Generator("cuda").manual_seed(5)
    fn_error = 1 + PROJECTION_ERROR * torch.randn(inputs["fn"].shape, dtype=torch.float64, device="cuda", generator=generator)

    def add(name, result, want, moved):
        for i, value in enumerate((result.double() - want, moved - want, want)):
            squares[name][i] += value.square().sum().item()

    for first in range(0, tokens, CHUNK):
        part = slice(first, first + CHUNK)
        chunk = {k: t if k in PARAMETERS else t[:, part] for k, t in inputs.items()}
        cut = [c[:, part] for c in cotangents]
        want, moved = (results(chunk, cut, got["streams"][:, part], e) for e in (None, fn_error))
        for name in got:
            if name in sums:
                sums[name] = [sums[name][0] + want[name], sums[name][1] + moved[name]]
            else:
                add(name, got[name][:, part], want[name], moved[name])
    for name, (want, moved) in sums.items():
        add(name, got[name], want, moved)
    failed = []
    for name, (error, sensitivity, size) in squares.items():
        error, sensitivity = ((value / size) ** 0.5 for value in (error, sensitivity))
        limit = (STREAM_LIMIT if name in ROUNDED else COEFFICIENT_LIMIT) + BUDGET * sensitivity
        if not error <= limit:
            failed.append(f"{name}: {error:.1e}, allowed {limit:.1e}")
    assert not failed, "; ".join(failed)


def test_the_sample_has_every_value_twice():
    for axis, values in enumerate((STDS, HIDDEN, TOKENS, STREAMS)):
        assert all(sum(case[axis] == value for case in SAMPLE) >= 2 for value in values)


@pytest.mark.gpu
@pytest.mark.parametrize("std, d, tokens, n", SAMPLE)
def test_against_fp64(std, d, tokens, n):
    check(std, d, tokens, n)


if __name__ == "__main__":
    for case in itertools.product(STDS, HIDDEN, TOKENS, STREAMS):
        check(*case)
        print(*case, "passed", flush=True)
