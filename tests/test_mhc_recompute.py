"""Recompute of mHC: the same bits as without, the bytes it is there for, and what autograd puts around it."""

from __future__ import annotations

import gc
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from bench.recompute import Stack, saved_bytes
from mhc_ops import hc_post, hc_post_pre, hc_pre, hc_recompute, plan
from mhc_ops.recompute import record
from reference.cases.mhc import MhcShape, make_inputs
from tests.recompute_util import BF16, FP32, HIDDEN, LAYERS, TOKENS, N, gradients, make_stack, replays, same


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("mode", ["in-layer", "cross-layer"])
def test_gradients_are_bit_equal(monkeypatch, mode, dtype):
    want = gradients(make_stack("stored", dtype), dtype=dtype)
    seen = replays(monkeypatch)
    assert same(gradients(make_stack(mode, dtype), dtype=dtype), want)
    # streams between two sublayers, once each; streams between layers of a block too; y where the norm saves it
    blocks = len(make_stack(mode).blocks)
    assert seen.count("replay_streams") == 2 * LAYERS - blocks
    assert 1 < blocks < LAYERS if mode == "cross-layer" else blocks == LAYERS


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("mode", ["in-layer", "cross-layer"])
@pytest.mark.parametrize("where", ["whole", "layer", "sublayer", "norm"])
def test_with_checkpoint_around_and_inside(monkeypatch, where, mode, dtype):
    want = gradients(make_stack("stored", dtype), dtype=dtype)
    stack = make_stack(mode, dtype)
    targets = {
        "whole": [stack],
        "layer": stack.layers,
        "sublayer": [m for la in stack.layers for m in la.maps],
        "norm": [m for la in stack.layers for m in la.norms],
    }
    for module in targets[where]:
        module.forward = lambda h, inner=module.forward: checkpoint(inner, h, use_reentrant=False)
    seen = replays(monkeypatch)
    assert same(gradients(stack, dtype=dtype), want)
    assert seen or where == "layer"


@pytest.mark.parametrize("wrap", [None, "non-reentrant", "reentrant"])
@pytest.mark.parametrize("mode", ["stored", "in-layer", "cross-layer"])
def test_what_is_alive_after_the_forward_pass(mode, wrap):
    """Streams inside a region are freed, outputs of sublayers are not; a checkpoint around it frees those too."""
    stack, streams, outputs = make_stack(mode), [], []
    for layer in stack.layers:
        layer.sites[1].register_forward_hook(lambda module, args, out: streams.append(StorageWeakRef(out[0].untyped_storage())))
        layer.maps[0].register_forward_hook(lambda module, args, out: outputs.append(StorageWeakRef(out.untyped_storage())))
    h = torch.randn(2, 3, HIDDEN).requires_grad_()
    out = stack(h) if wrap is None else checkpoint(stack, h, use_reentrant=wrap == "reentrant")
    assert len(streams) == len(outputs) == LAYERS
    assert all(ref.expired() == (mode != "stored" or wrap is not None) for ref in streams)
    assert all(ref.expired() == (wrap is not None) for ref in outputs)
    out.sum().backward()
    assert all(ref.expired() for ref in (*streams, *outputs))


@pytest.mark.parametrize("mode", ["in-layer", "cross-layer"])
def test_save_on_cpu_around_a_region_sees_every_tensor_once(mode):
    stack = make_stack(mode)
    want = gradients(make_stack("stored"))
    places: list[tuple[int, ...]] = []
    refs: list[StorageWeakRef] = []

    def pack(tensor: Tensor) -> Tensor:
        refs.append(StorageWeakRef(tensor.untyped_storage()))  # keeps its number from being given to another one
        places.append((tensor.untyped_storage()._cdata, tensor.storage_offset(), *tensor.size(), *tensor.stride()))
        return tensor.detach().clone()

    def run(h: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
            return stack(h)

    assert same(gradients(stack, run), want)
    assert len(places) == len(set(places))
    assert [place[2:6] for place in places].count((2, 3, N, HIDDEN)) == len(stack.blocks)  # the streams that enter each region, no others
    stack.zero_grad()
    with torch.autograd.graph.save_on_cpu():
        out = stack(torch.randn(1, TOKENS, HIDDEN))
    out.sum().backward()


@pytest.mark.parametrize("mode", ["in-layer", "cross-layer"])
def test_backward_twice(mode):
    assert same(gradients(make_stack(mode), again=2), gradients(make_stack("stored")))


@pytest.mark.parametrize("mode", ["in-layer", "cross-layer"])
def test_gradient_of_some_inputs_only(mode):
    """autograd.grad runs some of the nodes; what the others would have replayed must not be in the way."""
    found = []
    for each in ("stored", mode):
        stack = make_stack(each)
        h = torch.randn(2, 3, HIDDEN, generator=torch.Generator().manual_seed(2)).requires_grad_()
        out = stack(h)
        weights = [la.maps[1].weight for la in stack.layers]
        found.append([*torch.autograd.grad(out.square().sum(), weights, retain_graph=True), *torch.autograd.grad(out.sum(), [h])])
    assert same(*found)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("convention", ["v4", "paper"])
def test_kernels(kernel_device, fused, convention):
    """Two layers by hand, single-pass (pre_mix) in the second, on the Triton kernels."""
    shape = MhcShape(1, 5, 4, 40) if kernel_device == "cpu" else MhcShape(1, 1021, 4, 5120)
    sites = [make_inputs("hc_pre", shape, seed=i, device=kernel_device) for i in range(4)]
    dtype = sites[0]["x"].dtype

    def run(region) -> list[Tensor]:
        parameters = [{k: v.clone().requires_grad_() for k, v in site.items() if k in ("fn", "scale", "base")} for site in sites]
        x = start = sites[0]["x"].clone().requires_grad_()
        options = {"convention": convention, "return_pre": True, "impl": "triton", "iters": 3 if kernel_device == "cpu" else 20}
        with region:
            y, post, comb, pre = hc_pre(x, **parameters[0], **options)
            for i, p in enumerate(parameters[1:]):
                f = torch.sin(y)  # saves y
                pre_mix = pre if i else None
                if fused:
                    x, y, post, comb, pre = hc_post_pre(f, x, post, comb, **p, pre_mix=pre_mix, **options)
                else:
                    x = hc_post(f, x, post, comb, impl="triton")
                    y, post, comb, pre = hc_pre(x, **p, pre_mix=pre_mix, **options)
            x = hc_post(torch.sin(y), x, post, comb, impl="triton")
        x.backward(torch.randn(x.shape, generator=torch.Generator().manual_seed(7)).to(x))
        return [start.grad, *(t.grad for p in parameters for t in p.values())]

    assert dtype == BF16
    assert same(run(nullcontext()), run(hc_recompute()))


@pytest.mark.parametrize("n", [2, 4])
def test_bytes_saved_for_backward(n):
    """As the specification defines it: what eager mHC adds to a layer, against what is added with recompute. bf16, as it counts fp32 copies."""
    layers, tokens, hidden = 12, 4, 1024
    saved = {}
    for mode in ("plain", "eager", "stored", "in-layer", "cross-layer"):
        stack = Stack(mode, layers, hidden, n, BF16, tokens)
        h = torch.randn(1, tokens, hidden).to(BF16).requires_grad_()
        saved[mode] = saved_bytes(stack, lambda stack=stack, h=h: stack(h))
    added = {mode: saved[mode] - saved["plain"] for mode in saved}
    planned = plan(layers, n, hidden, tokens, 2)
    # the planner's bytes are the ones that autograd holds; pre is not needed here, as the norm keeps an fp32 copy in place of y
    pre = 2 * layers * tokens * n * 4
    assert added["stored"] == planned.stored_bytes
    assert added["in-layer"] == planned.in_layer_bytes - pre
    assert added["cross-layer"] == planned.kept_bytes - pre
    gone = {mode: 1 - added[mode] / added["eager"] for mode in added}
    assert gone["in-layer"] >= (0.85 if n == 4 else 0.80)
    assert gone["cross-layer"] > gone["in-layer"] + 0.03
    if n == 4:  # the published formula for eager mHC is (7N - 3) elements of D a sublayer
        assert added["eager"] / (2 * layers * tokens * hidden * 2) == pytest.approx(7 * n - 3, rel=0.15)


def test_y_that_the_sublayer_saves_is_not_kept():
    """An fp32 norm saves its input itself: without mHC that is the residual stream, with recompute it is nothing."""
    saved = {}
    for mode in ("plain", "stored", "in-layer"):
        stack = Stack(mode, 2, 256, N, FP32, TOKENS)
        h = torch.randn(1, TOKENS, 256).requires_grad_()
        saved[mode] = saved_bytes(stack, lambda stack=stack, h=h: stack(h))
    output = TOKENS * 256 * 4
    planned = plan(2, N, 256, TOKENS, 4)
    assert saved["stored"] - saved["plain"] == planned.stored_bytes
    assert saved["in-layer"] - saved["plain"] == planned.in_layer_bytes - 2 * 2 * output


def live_values() -> list[record.Value]:
    return [o for o in gc.get_objects() if type(o) is record.Value]


@pytest.mark.parametrize("mode", ["in-layer", "cross-layer"])
def test_replayed_tensors_do_not_outlive_their_use(mode):
    stack = make_stack(mode, layers=8)
    h = torch.randn(1, TOKENS, HIDDEN).requires_grad_()
    out = stack(h)
    assert all(value.result is None and value.tensor is None for value in live_values())
    alive: list[int] = []

    def count(module, args, grads):
        alive.append(sum(value.result is not None and value.result.dim() == 4 for value in live_values()))

    for layer in stack.layers:
        layer.maps[0].register_full_backward_hook(count)
    out = stack(h)
    out.sum().backward()
    longest = max(len(block) for block in stack.blocks)
    # in the attention of a layer the streams after it are done with, all but those of this block's earlier layers
    assert max(alive) <= 2 * longest - 1 and len(alive) == 8
    del out
    assert not live_values()  # without gc.collect(): nothing is held by a cycle


def test_no_grad_keeps_nothing():
    stack = make_stack("cross-layer")
    with torch.no_grad(), hc_recompute():
        inner = stack(torch.randn(1, TOKENS, HIDDEN))
        assert not live_values()
    assert not inner.requires_grad
