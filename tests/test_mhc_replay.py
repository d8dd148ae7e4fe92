"""mHC through replays on a GPU: bit for bit what the launchers give, for lengths that come again, in every form, with poisoned memory."""

import pytest
import torch

import mhc_ops
from kernel_runtime import replay
from mhc_ops.boundary import op as boundary
from mhc_ops.post import op as post
from mhc_ops.pre import op as pre
from reference.cases.mhc import MhcShape, make_cotangents, make_inputs

pytestmark = pytest.mark.gpu
CALLS = [m.__dict__[name] for m in (boundary, pre, post) for name in ("run_forward", "run_backward")]


@pytest.fixture
def counted(monkeypatch):
    """The number of replays that were run, their memory poisoned; every op starts with none recorded"""
    from kernel_runtime.direct import supported

    if not supported():
        pytest.skip("this version of Triton is launched through its own path")
    count, allocate = [], replay.ALLOCATE["cuda"]
    run = replay.Replay.__call__

    def counting(self, tensors):
        out = run(self, tensors)
        count.append(out is not None)
        return out

    monkeypatch.setattr(replay.Replay, "__call__", counting)
    monkeypatch.setitem(replay.ALLOCATE, "cuda", lambda *like: allocate(*like).fill_(float("nan")))
    for call in CALLS:
        monkeypatch.setattr(call, "replays", replay.Replays(call.replays.tensors))
    return count


def single_pass(x, fn, scale, base, fn2, scale2, base2):
    y, gate, comb, mix = mhc_ops.hc_pre(x, fn, scale, base, return_pre=True, impl="triton")
    x, y, gate, comb, mix = mhc_ops.hc_post_pre(torch.tanh(y), x, gate, comb, fn2, scale2, base2, pre_mix=mix, impl="triton")
    return mhc_ops.hc_post(torch.tanh(y), x, gate, comb, impl="triton"), mix


def plain(x, fn, scale, base, fn2, scale2, base2):
    y, gate, comb = mhc_ops.hc_pre(x, fn, scale, base, impl="triton")
    x, y, gate, comb = mhc_ops.hc_post_pre(torch.tanh(y), x, gate, comb, fn2, scale2, base2, impl="triton")
    return (mhc_ops.hc_post(torch.tanh(y), x, gate, comb, impl="triton"),)


def run(function, inputs):
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    outputs = function(*leaves)
    return *(o.detach() for o in outputs), *torch.autograd.grad(outputs, leaves, make_cotangents(outputs))


@pytest.mark.parametrize("form", [plain, single_pass], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_replays_give_the_same_bits(counted, monkeypatch, form, dtype):
    cases = []
    for tokens in (77, 1024, 13):
        first, second = (make_inputs("hc_pre", MhcShape(1, tokens, 4, 1280), seed=seed, dtype=dtype, device="cuda") for seed in (1, 2))
        cases.append([*first.values(), *list(second.values())[1:]])
    with monkeypatch.context() as patch:
        patch.setattr(replay, "MAX_REPLAYS", 0)
        want = [run(form, case) for case in cases]
    assert not counted
    for times in range(4):
        for case, expected in zip(cases, want):
            with torch.cuda.stream(torch.cuda.Stream()) if times == 3 else torch.cuda.stream(torch.cuda.current_stream()):
                got = run(form, case)
            torch.cuda.synchronize()
            for g, w in zip(got, expected, strict=True):
                assert torch.equal(g, w)
    assert counted == [True] * (2 * 3 * 6)  # from the third time on, three ops in both directions
    other = [t.clone().mul_(0.9) for t in cases[0]]
    got = run(form, other)
    with monkeypatch.context() as patch:
        patch.setattr(replay, "Replays", None)
        for call in CALLS:
            patch.setattr(call, "replays", None)
        expected = run(form, other)
    assert all(torch.equal(g, w) for g, w in zip(got, expected, strict=True))


def test_a_graph_of_replays(counted):
    inputs = list(make_inputs("hc_post_pre", MhcShape(1, 300, 4, 1280), device="cuda").values())
    leaves = [t.requires_grad_() for t in inputs]

    def step():
        outputs = mhc_ops.hc_post_pre(*leaves, impl="triton")
        return *outputs, *torch.autograd.grad(outputs, leaves, cotangents)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        cotangents = make_cotangents(mhc_ops.hc_post_pre(*leaves, impl="triton"))
        want = [t.detach().clone() for t in [step() for _ in range(4)][-1]]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    before = len(counted)
    with torch.cuda.graph(graph, stream=stream):
        got = step()
    assert len(counted) == before + 2
    for t in got:
        t.detach().zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_what_has_been_replayed_is_still_checked(counted):
    inputs = list(make_inputs("hc_post_pre", MhcShape(1, 33, 4, 64), device="cuda").values())
    for _ in range(4):
        mhc_ops.hc_post_pre(*inputs, iters=1)
    assert counted == [True] * 2
    for wrong, error in (
        ({"iters": 1.0}, TypeError), ({"iters": True}, TypeError), ({"hc_eps": -1.0}, ValueError), ({"norm_eps": []}, TypeError),
        ({"convention": "v3"}, ValueError), ({"return_pre": 1}, TypeError), ({"impl": "other"}, ValueError),
    ):  # fmt: skip
        with pytest.raises(error, match=f"hc_post_pre: {next(iter(wrong))}"):
            mhc_ops.hc_post_pre(*inputs, **{"iters": 1, **wrong})
    f, x, *rest = inputs
    with pytest.raises(TypeError, match="f has dtype"):
        mhc_ops.hc_post_pre(f.float(), x, *rest, iters=1)
    with pytest.raises(TypeError, match=r"must be a torch\.Tensor"):
        mhc_ops.hc_post_pre([1], x, *rest, iters=1)
    assert len(mhc_ops.hc_post_pre(*inputs, iters=1, return_pre=True)) == 5 and len(counted) == 3
    assert mhc_ops.hc_post_pre(*inputs, iters=1, impl="eager")[0].shape == x.shape and len(counted) == 3
