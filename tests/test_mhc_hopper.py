"""The boundary's kernels for sm_90 (mhc_ops/hopper) against fp64, with poisoned outputs and scratch, and where they are chosen.

The grid of tests/test_mhc_grid.py runs them too, wherever N is 4.
"""

import pytest
import torch

import mhc_ops
from kernel_runtime import record
from mhc_ops import hopper
from reference.cases import relative_error
from reference.cases.mhc import MhcShape, make_inputs
from tests.op_checks import gradients
from tests.test_mhc_kernels import check

BF16 = torch.bfloat16
BACKWARD = "boundary_bwd_kernel"


def launched(function):
    """Names of the kernels that `function` launches"""
    with record() as launches:
        function()
    return [spec.name for spec in launches.specs]


def test_what_is_covered():
    assert hopper.covers(BF16, 4, 4096) and hopper.covers(BF16, 4, 64)
    assert not any(hopper.covers(*case) for case in ((BF16, 3, 4096), (BF16, 4, 100), (torch.float16, 4, 4096)))
    x = torch.zeros(2, 4, 64, dtype=BF16)
    assert not hopper.takes(x)


@pytest.mark.parametrize("tokens, groups", [(1, 1), (37, 6)])
def test_second_stage_of_sums(kernel_device, tokens, groups):
    """Sums over blocks of columns (3, no power of two) and over groups of tokens, against fp64"""
    if not hopper.has_gluon():
        pytest.skip("this Triton has no Gluon dialect as the kernels beside it need it")
    from mhc_ops.hopper import bwd

    d = 192
    spec = bwd.boundary_sums_spec(d)
    rows, m = d // bwd.BLOCK_COLUMNS, bwd.M
    parts = [torch.randn(*size, device=kernel_device) for size in ((groups, m, 4 * d), (groups, bwd.L), (rows, tokens, 16), (rows, tokens, 4))]
    sizes = ((m, 4 * d), (m,), (3,), (tokens, 16), (tokens, 4))
    got = [torch.full(size, float("nan"), device=kernel_device) for size in sizes]
    spec.launch((bwd.sum_programs(tokens, d),), *parts, *got, tokens, groups)
    dfn, gates, dcomb, dpost = (part.double().sum(0) for part in parts)
    for g, w in zip(got, (dfn, gates[:m], gates[m : m + 3], dcomb, dpost), strict=True):
        assert relative_error(g, w) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("tokens, d", [(1, 64), (16, 192), (37, 192), (700, 192), (129, 4096), (65, 7168)])
def test_against_fp64(monkeypatch, tokens, d):
    """Tails of tiles, of blocks of columns and of groups; more groups than tiles"""
    check("cuda", monkeypatch, "hc_post_pre", MhcShape(1, tokens, 4, d), BF16)


@pytest.mark.gpu
@pytest.mark.parametrize("convention", ["v4", "paper"])
@pytest.mark.parametrize("with_pre_mix, return_pre", [(True, None), (False, True)])
def test_conventions_and_single_pass(monkeypatch, convention, with_pre_mix, return_pre):
    check(
        "cuda", monkeypatch, "hc_post_pre", MhcShape(2, 50, 4, 192), BF16, with_pre_mix=with_pre_mix, return_pre=return_pre,
        convention=convention, iters=4, logit_std=3.0,
    )  # fmt: skip


@pytest.mark.gpu
def test_two_runs_are_equal():
    inputs = list(make_inputs("hc_post_pre", MhcShape(1, 900, 4, 192), device="cuda").values())
    runs = [gradients(mhc_ops.hc_post_pre, inputs) for _ in range(2)]
    for a, b in zip(*((*outputs, *grads) for outputs, grads in runs), strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_chosen_where_covered():
    """Not for other sizes, nor for tensors that do not lie at multiples of 16 bytes"""
    sm_90 = torch.cuda.get_device_capability() == (9, 0) and hopper.has_gluon()
    for shape, covered in ((MhcShape(1, 9, 4, 64), True), (MhcShape(1, 9, 3, 64), False), (MhcShape(1, 9, 4, 72), False)):
        inputs = make_inputs("hc_post_pre", shape, device="cuda")
        names = launched(lambda: gradients(mhc_ops.hc_post_pre, list(inputs.values())))  # noqa: B023 - called at once
        assert (BACKWARD in names) == (covered and sm_90)
    inputs = make_inputs("hc_post_pre", MhcShape(1, 9, 4, 64), device="cuda")
    x = inputs["x"]
    inputs["x"] = torch.cat((x.new_zeros(1), x.flatten()))[1:].view_as(x)
    assert BACKWARD not in launched(lambda: gradients(mhc_ops.hc_post_pre, list(inputs.values())))
