"""Regions of recompute: what could be mistaken for what, nesting, errors, streams, torch.compile."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import mhc_ops
from bench.recompute import Layer, saved_bytes
from mhc_ops import hc_post, hc_recompute
from mhc_ops.recompute import record
from tests.recompute_util import FP32, HIDDEN, LAYERS, TOKENS, N, gradients, make_stack, replays, same


def test_view_of_y_is_replayed(monkeypatch):
    weight = torch.randn(HIDDEN, HIDDEN)
    site = mhc_ops.HyperConnection(HIDDEN, N)
    site.reset_parameters(0.1, 1.0)
    found = []
    for region in (nullcontext(), hc_recompute()):
        w = weight.clone().requires_grad_()
        x = torch.randn(2, 3, N, HIDDEN, generator=torch.Generator().manual_seed(2)).requires_grad_()
        seen = replays(monkeypatch) if found else []
        with region:
            _, y, post, comb = site(x)
            out = hc_post(y[1:].flatten(0, 1).mm(w).expand(2, 3, HIDDEN).contiguous(), x, post, comb)
        out.square().sum().backward()
        found.append([x.grad, w.grad])
    assert same(*found)
    assert seen == ["replay_collapse"]


def test_y_written_in_place_is_kept_as_it_is():
    site = mhc_ops.HyperConnection(HIDDEN, N)
    found = []
    for region in (nullcontext(), hc_recompute()):
        x = torch.randn(2, 3, N, HIDDEN, generator=torch.Generator().manual_seed(2)).requires_grad_()
        with region:
            _, y, post, comb = site(x)
            y.mul_(3).add_(1)
            out = hc_post(y.square(), x, post, comb)
            out = out.mul(1)
            out.add_(2)
            again = hc_post(torch.sin(y), out, post, comb)
        again.sum().backward()
        found.append([x.grad])
    assert same(*found)


def test_kept_tensor_written_in_place_is_an_error():
    """Without hooks autograd says so; under hooks it does not look."""
    site = mhc_ops.HyperConnection(HIDDEN, N)
    x = torch.randn(2, 3, N, HIDDEN).requires_grad_()
    with hc_recompute():
        _, y, post, comb = site(x)
        f = torch.tanh(y)
        out = hc_post(f, x, post, comb)
    f.data.add_(1)  # .data does not count as a write
    f.detach().add_(1)
    with pytest.raises(RuntimeError, match=r"hc_recompute: a tensor \[2, 3, 40\] .* modified by an inplace operation.*version 1, saved at version 0"):
        out.sum().backward()


def test_boundary_that_fails_leaves_the_region_watchful(monkeypatch):
    """Out of memory in the boundary, say, and caught: what is saved afterwards is still looked after."""
    from mhc_ops.boundary import api

    site = mhc_ops.HyperConnection(HIDDEN, N)
    x = torch.randn(2, 3, N, HIDDEN).requires_grad_()
    with hc_recompute():
        _, y, post, comb = site(x)
        with monkeypatch.context() as patch:
            patch.setattr(api, "apply_function", lambda *_: torch.empty(0).reshape(3))
            with pytest.raises(RuntimeError, match="shape"):
                site(x, (y, post, comb))
        f = torch.tanh(y)
        out = hc_post(f, x, post, comb)
        f.detach().add_(1)
    with pytest.raises(RuntimeError, match=r"hc_recompute: a tensor \[2, 3, 40\] .* modified by an inplace operation"):
        out.sum().backward()


def test_memory_that_is_used_again_is_not_mistaken():
    """Temporaries of the size of y die in the region, and others get their memory."""
    site = mhc_ops.HyperConnection(HIDDEN, N)
    site.reset_parameters(0.1, 1.0)
    found = []
    for region in (nullcontext(), hc_recompute()):
        x = start = torch.randn(2, 3, N, HIDDEN, generator=torch.Generator().manual_seed(2)).requires_grad_()
        with region:
            for _ in range(20):
                _, y, post, comb = site(x)
                f = torch.sin(y)
                del y
                for k in range(3):
                    f = torch.sin(f * (k + 1))
                x = hc_post(f, x, post, comb)
                del f, post, comb
        x.sum().backward()
        found.append([start.grad, site.fn.grad.clone()])
        site.zero_grad()
    assert same(*found)


def test_f_equal_to_y_and_to_another_f():
    """A recipe whose own input is replayed, and one tensor in two places."""
    sites = [mhc_ops.HyperConnection(HIDDEN, N) for _ in range(2)]
    found = []
    for region in (nullcontext(), hc_recompute()):
        x = torch.randn(2, 3, N, HIDDEN, generator=torch.Generator().manual_seed(2)).requires_grad_()
        with region:
            _, y, post, comb = sites[0](x)
            streams, y2, post2, comb2 = sites[1](x, (y, post, comb))
            out = hc_post(y, streams, post2, comb2) * hc_post(y2, streams, post, comb)
        out.sum().backward()
        found.append([x.grad])
    assert same(*found)


def test_another_stream_makes_its_own(monkeypatch):
    """What one stream replays may not be there yet for another."""
    stack = make_stack("cross-layer")
    want = gradients(make_stack("stored"))
    seen, calls = replays(monkeypatch), iter(range(10**6))
    monkeypatch.setattr(record, "_current_stream", lambda tensor: next(calls) // 50)
    assert same(gradients(stack), want)
    assert seen.count("replay_streams") > 2 * LAYERS - len(stack.blocks)


def test_a_checkpoint_inside_a_region_leaves_nothing_to_it():
    """Its hooks are the innermost ones: what they see is recomputed anyway, and the region must not keep it alive meanwhile."""
    layers = [Layer(HIDDEN, N, FP32) for _ in range(3)]
    outputs: list[StorageWeakRef] = []
    for layer in layers:
        layer.maps[0].register_forward_hook(lambda module, args, out: outputs.append(StorageWeakRef(out.untyped_storage())))
    x = torch.randn(1, TOKENS, N, HIDDEN).requires_grad_()
    with hc_recompute():
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False)
        assert all(ref.expired() for ref in outputs)
    x.sum().backward()
    assert len(outputs) == 6


def test_nested_regions_and_the_end_of_one():
    stack = make_stack("stored")
    want = gradients(stack)
    stack.zero_grad()

    def run(h: Tensor) -> Tensor:
        streams = mhc_ops.hc_expand(h, N)
        with hc_recompute():
            streams = stack.layers[0](streams)
            with hc_recompute():
                streams = stack.layers[1](streams)
            streams = stack.layers[2](streams)
        for layer in stack.layers[3:]:
            streams = layer(streams)
        return streams

    assert same(gradients(stack, run), want)
    assert mhc_ops.recompute.active.recording() is None


def test_error_in_a_region_ends_it():
    layer = Layer(HIDDEN, N, FP32)
    with pytest.raises(ValueError, match="hc_post: f has shape"), hc_recompute():
        _, y, post, comb = layer.sites[0](torch.randn(2, N, HIDDEN).requires_grad_())
        hc_post(y[:1], torch.randn(2, N, HIDDEN), post, comb)
    assert mhc_ops.recompute.active.recording() is None
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_decorator():
    layer = Layer(HIDDEN, N, FP32)
    x = torch.randn(1, TOKENS, N, HIDDEN).requires_grad_()
    plain = saved_bytes(layer, lambda: layer(x))
    assert saved_bytes(layer, lambda: hc_recompute()(layer.forward)(x)) < plain


def test_a_region_in_which_nothing_is_recomputed_warns():
    x = torch.randn(1, TOKENS, N, HIDDEN).requires_grad_()
    with pytest.warns(RuntimeWarning, match="no hc_pre, hc_post or hc_post_pre ran"), hc_recompute():
        Layer(HIDDEN, N, FP32, impl="eager")(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad(), hc_recompute():
            Layer(HIDDEN, N, FP32, impl="eager")(x)
        with hc_recompute(), hc_recompute():  # the inner one recomputes
            Layer(HIDDEN, N, FP32)(x)


def test_compiled_sublayers(monkeypatch):
    want = gradients(make_stack("stored"))
    stack = make_stack("cross-layer")
    seen = replays(monkeypatch)
    for layer in stack.layers:
        layer.sublayer = torch.compile(layer.sublayer, backend="aot_eager", fullgraph=True)
    got = gradients(stack)
    assert seen.count("replay_streams") == 2 * LAYERS - len(stack.blocks)
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(got, want))


def test_compiled_region_is_refused_and_a_compiled_layer_says_so():
    stack = make_stack("in-layer", layers=1)
    h = torch.randn(1, TOKENS, HIDDEN)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a region cannot be compiled"):
        torch.compile(stack, backend="aot_eager", fullgraph=True)(h)
    torch._dynamo.reset()
    stack.layers[0].compile(backend="aot_eager")
    with pytest.warns(RuntimeWarning, match="no hc_pre, hc_post or hc_post_pre ran"):
        stack(h)
