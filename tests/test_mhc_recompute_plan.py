"""The replay of a block of layers by hand, and the planner of blocks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mhc_ops import hc_block_recompute, hc_post_pre, hc_pre, plan
from reference.cases.mhc import MhcShape, make_inputs

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("single_pass", [False, True])
def test_block_recompute_gives_the_inputs_of_every_sublayer(dtype, single_pass):
    K = 5
    sites = [make_inputs("hc_pre", MhcShape(2, 7, 3, 100), seed=i, dtype=dtype) for i in range(K)]
    x = streams = sites[0].pop("x")
    first: list[tuple[Tensor, Tensor]] = []
    fs, posts, combs, pres = [], [], [], []
    y, post, comb, own = hc_pre(x, **sites[0], return_pre=True)
    used = own
    for site in sites[1:]:
        first.append((streams, y))
        pres.append(used)
        fs.append(torch.sin(3 * y))
        posts.append(post)
        combs.append(comb)
        site.pop("x")
        pre_mix = own if single_pass else None
        streams, y, post, comb, after = hc_post_pre(fs[-1], streams, post, comb, **site, pre_mix=pre_mix, return_pre=True)
        used, own = (own if single_pass else after), after
    first.append((streams, y))
    pres.append(used)
    got_streams, got_y = hc_block_recompute(x, fs, posts, combs, pres)
    assert len(got_streams) == len(got_y) == K
    assert all(torch.equal(s, a) and torch.equal(t, b) for s, t, (a, b) in zip(got_streams, got_y, first))
    assert len({float(s.double().sum()) for s in got_streams}) == K


def test_block_recompute_refuses():
    x = torch.randn(2, 4, 8)
    pre, post, comb, f = torch.rand(2, 4), torch.rand(2, 4), torch.rand(2, 4, 4), torch.randn(2, 8)
    assert hc_block_recompute(x, [], [], [], [pre])[0][0].data_ptr() == x.data_ptr()
    with pytest.raises(ValueError, match=r"len\(pre\)"):
        hc_block_recompute(x, [], [], [], [])
    with pytest.raises(TypeError, match="f must be a sequence of tensors, got NoneType"):
        hc_block_recompute(x, None, [post], [comb], [pre, pre])
    with pytest.raises(ValueError, match="f has 2 tensors, wanted 1, one less than the 2 of pre"):
        hc_block_recompute(x, [f, f], [post], [comb], [pre, pre])
    with pytest.raises(TypeError, match="pre"):
        hc_block_recompute(x, [f], [post], [comb], [pre, pre.bfloat16()])
    with pytest.raises(ValueError, match="f"):
        hc_block_recompute(x, [f[:1]], [post], [comb], [pre, pre])
    with pytest.raises(ValueError, match="impl"):
        hc_block_recompute(x, [f], [post], [comb], [pre, pre], impl="fast")


def test_plan_of_the_published_sizes():
    found = plan(43, 4, 4096, 8192, 2)
    assert found.layers_per_block == pytest.approx(math.sqrt(4 * 43 / 6)) and round(found.layers_per_block, 1) == 5.4
    assert sorted(len(b) for b in found.blocks) == [4, 4, 5, 5, 5, 5, 5, 5, 5]
    assert [i for block in found.blocks for i in block] == list(range(43))
    output, coefficients = 8192 * 4096 * 2, 8192 * 4 * (2 * 24 + 1)
    assert found.kept_bytes == 86 * (output + coefficients) + 9 * 4 * output
    assert found.in_layer_bytes == 86 * (output + coefficients) + 43 * 4 * output
    assert found.stored_bytes == 86 * (output + coefficients - 8192 * 16) + 86 * 4 * output
    assert found.replayed_bytes == (9 * 4 + 1) * output


@pytest.mark.parametrize("layers", [1, 2, 7, 43, 61])
@pytest.mark.parametrize("boundaries", [(), (1,), (2, 3, 5)])
@pytest.mark.parametrize("size", [None, 1, 4, 100])
def test_blocks_cover_the_layers_and_cross_no_boundary(layers, boundaries, size):
    if boundaries and boundaries[-1] >= layers:
        with pytest.raises(ValueError, match="boundaries"):
            plan(layers, 4, 64, 8, 2, boundaries, layers_per_block=size)
        return
    found = plan(layers, 4, 64, 8, 2, boundaries, layers_per_block=size)
    assert [i for block in found.blocks for i in block] == list(range(layers))
    starts = {block.start for block in found.blocks}
    assert set(boundaries) <= starts and len(found.stages) == len(boundaries) + 1
    for stage in found.stages:
        lengths = [len(block) for block in stage.blocks]
        assert max(lengths) - min(lengths) <= 1 and (size is None or max(lengths) <= size)
    if size == 1:
        assert found.kept_bytes == found.in_layer_bytes


def test_plan_refuses():
    for bad in ({"num_layers": 0}, {"tokens": -1}, {"itemsize": 0}, {"hc_mult": 1}, {"hc_mult": 9}, {"boundaries": (5, 3)}, {"boundaries": (0,)},
                {"layers_per_block": 0}):  # fmt: skip
        with pytest.raises(ValueError, match="plan: "):
            plan(**{"num_layers": 10, "hc_mult": 4, "hidden": 64, "tokens": 8, "itemsize": 2, **bad})
    with pytest.raises(TypeError, match="plan: hidden"):
        plan(10, 4, 64.0, 8, 2)
    for bad in (3, "3", iter((3,))):
        with pytest.raises(TypeError, match="plan: boundaries must be a sequence of ints, got"):
            plan(10, 4, 64, 8, 2, bad)
