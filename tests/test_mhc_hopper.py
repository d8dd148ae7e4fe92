"""The boundary's kernels for sm_90 (mhc_ops/hopper) against fp64, with poisoned outputs and scratch, and where they are chosen.

The grid of tests/test_mhc_grid.py runs them too, wherever N is 4.
"""

import pytest
import torch

import mhc_ops
import mhc_ops.boundary.fwd
from kernel_runtime import record
from kernel_runtime.launch import Spec
from mhc_ops import hopper
from reference.cases import relative_error
from reference.cases.mhc import MhcShape, make_inputs
from tests.op_checks import gradients
from tests.test_mhc_kernels import check

BF16 = torch.bfloat16
FORWARD, BACKWARD = "expand_project_kernel", "boundary_bwd_kernel"


def launched(function):
    """Names of the kernels that `function` launches"""
    with record() as launches:
        function()
    return [spec.name for spec in launches.specs]


def test_what_is_covered():
    assert hopper.covers(BF16, 4, 4096) and hopper.covers(BF16, 4, 64)
    assert not any(hopper.covers(*case) for case in ((BF16, 3, 4096), (BF16, 4, 100), (torch.float16, 4, 4096)))
    assert hopper.covers(BF16, 4, 256, hopper.FORWARD_ALIGNED) and not hopper.covers(BF16, 4, 192, hopper.FORWARD_ALIGNED)
    x = torch.zeros(2, 4, 64, dtype=BF16)
    assert not hopper.takes(x)


@pytest.mark.parametrize("d, with_pre_mix, launches", [(512, False, 2), (512, True, 2), (192, False, 3)])
def test_forward_launches_where_taken(monkeypatch, d, with_pre_mix, launches):
    """The forward's form, its arguments against what its specs declare, in the order that a direct launch wants; launches are left out"""
    if not hopper.has_gluon():
        pytest.skip("this Triton has no Gluon dialect as the kernels here need it")
    seen = []
    monkeypatch.setattr(Spec, "launch", lambda spec, grid, *arguments: seen.append((spec, arguments)))
    monkeypatch.setattr(hopper, "takes", lambda x, *others, aligned=hopper.ALIGNED: hopper.covers(x.dtype, *x.shape[-2:], aligned))
    inputs = make_inputs("hc_post_pre", MhcShape(2, 3, 4, d), with_pre_mix=with_pre_mix)
    mhc_ops.boundary.fwd.post_pre_fwd(*inputs.values(), *(() if with_pre_mix else (None,)), 20, 1e-6, 1e-6, "v4")
    assert len(seen) == launches and (seen[0][0].name == FORWARD) == (launches == 2)
    for spec, arguments in seen:
        assert spec.kernel.arg_names == [*spec.types, *spec.consts]
        assert [kind.startswith("*") for kind in spec.types.values()] == [not isinstance(a, int | float) for a in arguments]


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
@pytest.mark.parametrize(
    "tokens, d", [(1, 64), (16, 192), (37, 192), (700, 192), (1, 256), (63, 256), (64, 768), (9000, 256), (129, 4096), (65, 7168)]
)
def test_against_fp64(monkeypatch, tokens, d):
    """Tails of tiles, of blocks of columns and of groups; more groups than tiles. The forward's kernels run from D = 256 on."""
    check("cuda", monkeypatch, "hc_post_pre", MhcShape(1, tokens, 4, d), BF16)


@pytest.mark.gpu
@pytest.mark.parametrize("convention", ["v4", "paper"])
@pytest.mark.parametrize("d", [192, 256])
@pytest.mark.parametrize("with_pre_mix, return_pre", [(True, None), (False, True)])
def test_conventions_and_single_pass(monkeypatch, convention, d, with_pre_mix, return_pre):
    check(
        "cuda", monkeypatch, "hc_post_pre", MhcShape(2, 50, 4, d), BF16, with_pre_mix=with_pre_mix, return_pre=return_pre,
        convention=convention, iters=4, logit_std=3.0,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("d", [192, 512])
def test_two_runs_are_equal(d):
    inputs = list(make_inputs("hc_post_pre", MhcShape(1, 900, 4, d), device="cuda").values())
    runs = [gradients(mhc_ops.hc_post_pre, inputs) for _ in range(2)]
    for a, b in zip(*((*outputs, *grads) for outputs, grads in runs), strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_chosen_where_covered():
    """Not for other sizes, nor for tensors that do not lie at multiples of 16 bytes"""
    sm_90 = torch.cuda.get_device_capability() == (9, 0) and hopper.has_gluon()
    for n, d, covered in ((4, 256, (True, True)), (4, 64, (False, True)), (3, 256, (False, False)), (4, 72, (False, False))):
        inputs = make_inputs("hc_post_pre", MhcShape(1, 9, n, d), device="cuda")
        names = launched(lambda: gradients(mhc_ops.hc_post_pre, list(inputs.values())))  # noqa: B023 - called at once
        assert (FORWARD in names, BACKWARD in names) == (covered if sm_90 else (False, False))
    inputs = make_inputs("hc_post_pre", MhcShape(1, 9, 4, 256), device="cuda")
    x = inputs["x"]
    inputs["x"] = torch.cat((x.new_zeros(1), x.flatten()))[1:].view_as(x)
    assert not {FORWARD, BACKWARD} & set(launched(lambda: gradients(mhc_ops.hc_post_pre, list(inputs.values()))))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens, d, with_pre_mix", [(1021, 4096, False), (1021, 4096, True), (200, 256, False)])
def test_streams_are_those_of_hc_post(tokens, d, with_pre_mix):
    """Bit for bit, and y follows from pre, as it comes in or goes out: recompute replays both by hc_post and pre_bmm"""
    inputs = make_inputs("hc_post_pre", MhcShape(1, tokens, 4, d), with_pre_mix=with_pre_mix, device="cuda")
    streams, y, _, _, pre = mhc_ops.hc_post_pre(**inputs, return_pre=True)
    assert torch.equal(streams, mhc_ops.hc_post(*(inputs[k] for k in ("f", "x", "post", "comb"))))
    assert torch.equal(y, mhc_ops.pre_bmm(inputs["pre_mix"] if with_pre_mix else pre, streams))
