"""What may go past the dispatcher, and past a check that has passed once: kernel_runtime.ops.eager_call, mhc_ops.library.once_a_signature."""

import types

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernel_runtime import ops
from mhc_ops import library


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.fixture
def path(monkeypatch):
    """Calls with the arguments; returns which path took them, "launcher" or "op"."""
    seen = []

    def op(*arguments):
        seen.append("op")
        return arguments[0]

    def launcher(*arguments):
        seen.append("launcher")
        return arguments[0]

    monkeypatch.setitem(ops._LAUNCHERS, op, {"triton": "some.module:launcher", "none": None})
    monkeypatch.setattr(ops, "_load", lambda path: launcher)
    monkeypatch.setattr(ops, "_on_current_device", lambda arguments: True)  # there is no GPU where this runs
    call = ops.eager_call(op)

    def which(*arguments):
        seen.clear()
        call(*arguments)
        (only,) = seen
        return only

    return which


def test_plain_calls_take_the_launcher(path):
    x = torch.zeros(3)
    rest = (None, True, 3, 0.5, "v4", torch.float32, "triton")
    assert path(x, *rest) == "launcher"
    assert path(torch.nn.Parameter(x), *rest) == "launcher"
    with torch.no_grad():
        assert path(x, *rest) == "launcher"
    with torch.inference_mode():
        assert path(x, *rest) == "launcher"


def test_whoever_watches_or_transforms_gets_the_op(path):
    x, impl = torch.zeros(3), "triton"
    assert path(x, "eager") == path(x, "none") == path(x, "unknown") == "op"
    assert path(TwoTensor(x, x), impl) == "op"
    assert path(x, None, TwoTensor(x, x), impl) == "op"
    assert path(x, [x], impl) == "op"
    with Watching():
        assert path(x, impl) == "op"
    with FakeTensorMode() as mode:
        assert path(torch.zeros(3), impl) == "op"
    assert path(mode.from_tensor(x), impl) == "op"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert path(x, impl) == "op"
    got = []
    torch.vmap(lambda t: (got.append(path(t, impl)), t)[1])(x)
    torch.func.grad(lambda t: (got.append(path(t, impl)), t.sum())[1])(x)
    torch.func.functionalize(lambda t: (got.append(path(t, impl)), t + 1)[1])(x)
    make_fx(lambda t: (got.append(path(t, impl)), t + 1)[1])(x)
    assert got == ["op"] * 4
    assert path(x, impl) == "launcher"  # and none of them stays


def test_a_view_with_a_pending_minus_sign_gets_the_op(path):
    """A kernel would read its memory, in which the sign is not."""
    negated = torch.ones(1, dtype=torch.complex64).conj().imag
    assert negated.is_contiguous() and negated.is_neg()
    assert path(negated, "triton") == path(torch.zeros(3), negated, "triton") == "op"
    assert path(negated.resolve_neg(), "triton") == "launcher"


class OnCuda(torch.Tensor):
    """Said to be on a CUDA device"""

    index = 0
    is_cuda = True

    def get_device(self):
        return self.index


def test_the_first_tensor_decides_whether_the_device_is_the_current_one(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    first, second = (torch.zeros(1).as_subclass(OnCuda) for _ in range(2))
    second.index = 1
    assert ops._on_current_device((None, 3, second))
    assert not ops._on_current_device((None, first, second))
    assert not ops._on_current_device((torch.zeros(1), second))
    assert not ops._on_current_device((torch.zeros(1, device="meta"), second))
    assert not ops._on_current_device((None, 3))


def site(n=4, d=8, lead=(3,), dtype=torch.float32):
    x, wide = torch.zeros(*lead, n, d, dtype=dtype), torch.float32
    m = n * n + 2 * n
    f, post, comb = torch.zeros(*lead, d, dtype=dtype), torch.zeros(*lead, n, dtype=wide), torch.zeros(*lead, n, n, dtype=wide)
    return [f, x, post, comb, torch.zeros(m, n * d), torch.zeros(3), torch.zeros(m), torch.zeros(*lead, n)]


def wrong_ones(t):
    """Tensors like t, and what is none, that a check must not take for t"""
    yield t.to(torch.bfloat16)
    yield t.double()
    yield t.to("meta")
    yield t.to_sparse()
    yield t.unsqueeze(0)
    yield torch.cat([t, t])
    yield torch.nested.nested_tensor([t[0], t[0]] if t.dim() > 1 else [t, t])
    yield None
    yield t.tolist()
    yield t.numpy()
    yield types.SimpleNamespace(shape=t.shape, dtype=t.dtype, device=t.device, layout=t.layout)


@pytest.mark.parametrize("name", ["expansion", "site", "boundary"])
def test_what_has_passed_is_no_pass_for_anything_else(name):
    good = {"expansion": site()[:4], "site": site()[1:2] + site()[4:], "boundary": site()}[name]
    memoised, checked = getattr(library, f"check_{name}"), getattr(library, f"_check_{name}")
    memoised("op", *good)
    refused = 0
    for i, t in enumerate(good):
        for wrong in wrong_ones(t):
            arguments = [*good[:i], wrong, *good[i + 1 :]]
            try:
                checked("op", *arguments)
            except Exception as error:
                refused += 1
                with pytest.raises(type(error)) as got:
                    memoised("op", *arguments)
                assert str(got.value) == str(error)
                with pytest.raises(type(error)):  # nor is a refusal remembered as a pass
                    memoised("op", *arguments)
            else:
                memoised("op", *arguments)
    assert refused >= 10 * len(good) - 1  # all but None for pre_mix, and a batch of the streams


def test_the_memory_of_checks_is_bounded(monkeypatch):
    monkeypatch.setattr(library, "MAX_SIGNATURES", 8)
    calls = []
    check = library.once_a_signature(lambda op, *tensors: calls.append(op))
    passed = check.__closure__[[*check.__code__.co_freevars].index("passed")].cell_contents
    for size in range(50):
        check("op", torch.zeros(size))
        check("op", torch.zeros(size))
    assert len(calls) == 50 and len(passed) <= 8


def test_results_of_an_op_are_memory_of_their_own():
    """A reference may return its input or a view of it; an op that did would be wrong once either is written to."""
    op = ops.OpLibrary("results_test").register(
        "same(Tensor x, str impl) -> (Tensor, Tensor)", fake=lambda x: (torch.empty_like(x), x.new_empty(x.shape[::-1])), eager=lambda x: (x, x.t())
    )
    x = torch.randn(2, 3)
    for out, want in zip(op(x, "eager"), (x, x.t()), strict=True):
        assert torch.equal(out, want) and out.is_contiguous()
        assert out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
