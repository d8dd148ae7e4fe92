"""mHC kernels under what goes wrong or wild: no memory in the middle, logits of +-1e4, torch.compile of a module on a GPU."""

import time

import pytest
import torch
from torch import nn

import mhc_ops
from kernel_runtime import replay
from mhc_ops import HyperConnection, HyperHead, hc_expand, hc_post
from reference import mhc as reference
from reference.cases import relative_error
from reference.cases.mhc import MhcShape, make_inputs
from tests.op_checks import gradients

SHAPE = {"cpu": MhcShape(1, 3, 4, 24), "cuda": MhcShape(1, 300, 4, 1280)}


def chain(x, *parameters):
    """Two sublayers: every launcher of the boundary, of hc_pre and of hc_post, in both directions"""
    y, post, comb = mhc_ops.hc_pre(x, *parameters[:3], iters=2, impl="triton")
    x, y, post, comb = mhc_ops.hc_post_pre(torch.tanh(y), x, post, comb, *parameters[3:], iters=2, impl="triton")
    return mhc_ops.hc_post(torch.tanh(y), x, post, comb, impl="triton")


def chain_inputs(device):
    first, second = (make_inputs("hc_pre", SHAPE[device], seed=seed, device=device) for seed in (1, 2))
    return [*first.values(), *list(second.values())[1:]]


class NoMemory:
    """torch.empty, torch.empty_like, Tensor.new_empty and the allocations of replays fail at their `at`-th call, as a device's do."""

    def __init__(self, monkeypatch, at):
        self.calls, self.at = 0, at
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            monkeypatch.setattr(owner, name, self.counting(getattr(owner, name)))
        for device, make in replay.ALLOCATE.items():
            monkeypatch.setitem(replay.ALLOCATE, device, self.counting(make))

    def counting(self, make):
        def inner(*args, **kwargs):
            self.calls += 1
            if self.calls == self.at:
                raise torch.OutOfMemoryError("no memory left")
            return make(*args, **kwargs)

        return inner


def test_no_memory_at_any_allocation_leaves_nothing_broken(kernel_device, monkeypatch):
    inputs = chain_inputs(kernel_device)
    want = gradients(chain, inputs)
    for _ in range(3 if kernel_device == "cuda" else 0):
        gradients(chain, inputs)  # from here on replays
    with monkeypatch.context() as patch:
        count = NoMemory(patch, -1)
        gradients(chain, inputs)
    assert count.calls > 20
    for at in range(1, count.calls + 1, count.calls // 4 if kernel_device == "cpu" else 1):  # the interpreter takes a second a pass
        with monkeypatch.context() as patch:
            NoMemory(patch, at)
            with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
                gradients(chain, inputs)
        if kernel_device == "cuda" or at > count.calls // 2:
            got = gradients(chain, inputs)
            for g, w in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
                assert torch.equal(g, w)


@pytest.mark.gpu
def test_no_memory_on_the_device_leaves_nothing_broken():
    """A real failure, in forward or backward: what is held afterwards is what was held before, and the next pass is right."""
    x, *parameters = chain_inputs("cuda")
    inputs = [x.repeat(1, 60, 1, 1), *parameters]  # 18,000 tokens, 184 MB of streams
    want = gradients(chain, inputs)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held, total = torch.cuda.memory_allocated(), torch.cuda.get_device_properties(0).total_memory
    failures = 0
    for more in (0.1, 0.3, 0.6, 0.9, 1.2, 1.6):  # GB that may be allocated
        torch.cuda.set_per_process_memory_fraction((held + more * 1e9) / total)
        try:
            gradients(chain, inputs)
        except torch.OutOfMemoryError:
            failures += 1
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        # autograd's own thread lets go of a finished pass, its gradients included, a little after the caller goes on
        for _ in range(200):
            if torch.cuda.memory_allocated() == held:
                break
            time.sleep(0.01)
        assert torch.cuda.memory_allocated() == held
        torch.cuda.empty_cache()
    assert failures >= 3
    got = gradients(chain, inputs)
    for g, w in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
        assert torch.equal(g, w)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # NumPy's, in the interpreter: sigmoid(-1e4) is 0
@pytest.mark.parametrize("convention", ["v4", "paper"])
def test_logits_of_1e4(kernel_device, convention):
    """Through scale, which multiplies mixes of about 1, and alone: coefficients as in fp64, everything finite."""
    inputs = make_inputs("hc_gates", MhcShape(1, 7, 4, 1), device=kernel_device)
    inputs["scale"] = torch.tensor([1e4, -1e4, 1e4], device=kernel_device)
    outputs, grads = gradients(lambda *t: mhc_ops.hc_gates(*t, convention=convention, impl="triton"), list(inputs.values()))
    want = reference.hc_gates(*(t.double() for t in inputs.values()), convention=convention)
    for got, w in zip(outputs, want):
        assert relative_error(got, w) <= 2e-3  # one ulp of a logit of 1e4 is 1e-3
    assert all(torch.isfinite(t).all() for t in (*outputs, *grads))
    site = make_inputs("hc_pre", SHAPE[kernel_device], device=kernel_device)
    site["scale"] = inputs["scale"]
    outputs, grads = gradients(lambda *t: mhc_ops.hc_pre(*t, convention=convention, impl="triton"), list(site.values()))
    assert all(torch.isfinite(t).all() for t in (*outputs, *grads))


class Block(nn.Module):
    """Two sublayers, the boundary between them, and the head"""

    def __init__(self, d):
        super().__init__()
        self.one, self.two, self.head = HyperConnection(d), HyperConnection(d), HyperHead(d)
        self.first, self.second = nn.Linear(d, d, dtype=torch.bfloat16), nn.Linear(d, d, dtype=torch.bfloat16)

    def forward(self, h):
        streams, y, post, comb = self.one(hc_expand(h))
        f = torch.nn.functional.silu(self.first(y))
        streams, y, post, comb = self.two(streams, (f, post, comb))
        return self.head(hc_post(self.second(y), streams, post, comb))


@pytest.mark.gpu
def test_a_compiled_module_on_a_gpu():
    """torch.compile(fullgraph=True) with Inductor, the kernels inside, forward and backward, for two lengths"""
    torch.manual_seed(3)
    with torch.device("cuda"):
        block = Block(256)
    compiled = torch.compile(block, fullgraph=True)
    for tokens in (64, 100):
        h = torch.randn(1, tokens, 256, dtype=torch.bfloat16, device="cuda")
        cotangent = torch.randn_like(h)
        found = []
        for module in (block, compiled):
            leaf = h.clone().requires_grad_()
            out = module(leaf)
            out.backward(cotangent)
            found.append([out.detach(), leaf.grad, *(p.grad.clone() for p in block.parameters())])
            block.zero_grad()
        for eager, traced in zip(*found, strict=True):
            assert relative_error(traced, eager) <= 2e-2  # Inductor rounds to bf16 at other places
