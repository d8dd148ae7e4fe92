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


def without_replays(monkeypatch, form, case):
    with monkeypatch.context() as patch:
        patch.setattr(replay, "MAX_REPLAYS", 0)
        for call in CALLS:
            patch.setattr(call, "replays", replay.Replays(call.replays.tensors))
        return run(form, case)


def chain_case(tokens, device, seed=1, dim=1280):
    first, second = (make_inputs("hc_pre", MhcShape(1, tokens, 4, dim), seed=seed + i, dtype=torch.bfloat16, device=device) for i in (0, 1))
    return [*first.values(), *list(second.values())[1:]]


def test_storage_that_was_freed_and_gathered_again(counted, monkeypatch):
    """As FSDP2 does it with its unsharded parameters: the tensor stays, its memory goes after use and is another one the next time."""
    x, *values = chain_case(300, "cuda")
    want = without_replays(monkeypatch, plain, [x, *values])
    parameters = [torch.nn.Parameter(v.clone()) for v in values]
    cotangents = make_cotangents(plain(x, *parameters))
    addresses, held = set(), []
    for _ in range(5):
        for p, v in zip(parameters, values, strict=True):
            storage = p.untyped_storage()
            size = storage.nbytes()
            storage.resize_(0)
            held.append(torch.full((size,), 255, dtype=torch.uint8, device="cuda"))  # takes the place that was freed
            storage.resize_(size)
            with torch.no_grad():
                p.copy_(v)
        addresses.add(parameters[0].data_ptr())
        leaf = x.detach().clone().requires_grad_()
        outputs = plain(leaf, *parameters)
        got = *(o.detach() for o in outputs), *torch.autograd.grad(outputs, [leaf, *parameters], cotangents)
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    assert len(addresses) > 1 and len(counted) >= 2 * 3 * 3 and all(counted)


def test_recording_in_a_graph_and_replaying_outside(counted, monkeypatch):
    """The second call of a shape, which is recorded, is captured: its memory is the graph's, and a replay outside makes its own."""
    case = chain_case(77, "cuda")
    want = without_replays(monkeypatch, plain, case)
    leaves = [t.detach().clone().requires_grad_() for t in case]
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        cotangents = make_cotangents(plain(*leaves))

        def step():
            outputs = plain(*leaves)
            return *(o.detach() for o in outputs), *torch.autograd.grad(outputs, leaves, cotangents)

        step()  # the backward's first call; the forward's second, which is recorded
    torch.cuda.synchronize()
    for call in CALLS:
        call.replays.found.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    outside = [step() for _ in range(2)]
    for t in captured:
        t.zero_()
    graph.replay()
    torch.cuda.synchronize()
    for got in (captured, *outside):
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    assert counted[-12:] == [True] * 12
    places = [t.data_ptr() for got in (captured, *outside) for t in got]
    assert len(set(places)) == len(places)


def test_two_devices_in_turn_and_at_once(counted, monkeypatch):
    """Replays belong to a device; a backward pass over both runs in two threads of autograd's, which record and replay at the same time."""
    from torch.utils import _python_dispatch as modes

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    cases = [chain_case(300, f"cuda:{i}", seed=3 * i) for i in range(2)]
    want = []
    for i, case in enumerate(cases):
        with torch.cuda.device(i):
            want.append(without_replays(monkeypatch, plain, case))
    for _ in range(6):
        for i, case in enumerate(cases):
            with torch.cuda.device(i):
                got = run(plain, case)
            assert all(torch.equal(g, w) for g, w in zip(got, want[i], strict=True)), i
    assert counted and len(counted) > 40 and all(counted)
    for _ in range(6):
        leaves = [[t.detach().clone().requires_grad_() for t in case] for case in cases]
        outputs = []
        for i, own in enumerate(leaves):
            with torch.cuda.device(i):
                outputs.append(plain(*own)[0])
        torch.autograd.backward(outputs, [make_cotangents((o,))[0] for o in outputs])
        for i, own in enumerate(leaves):
            assert all(torch.equal(t.grad, w) for t, w in zip(own, want[i][1:], strict=True)), i
    before = len(counted)
    with torch.no_grad():  # device 0 is current: no replay of device 1's, but the op
        assert torch.equal(plain(*cases[1])[0], want[1][0]) and len(counted) == before
    assert not modes.is_in_torch_dispatch_mode()


def test_replays_hold_no_memory(counted):
    import gc

    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    gc.disable()
    try:
        for _ in range(4):
            case = chain_case(1000, "cuda")
            run(plain, case)
            del case
        torch.cuda.synchronize()
        for _ in range(100):  # autograd's own thread lets go a little after the caller goes on
            if torch.cuda.memory_allocated() == before:
                break
            torch.cuda._sleep(10_000_000)
            torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before and counted
    finally:
        gc.enable()


def test_eager_calls_of_a_compiled_function(counted, monkeypatch):
    """Past torch.compile's limit of recompilations its function runs eagerly, and replays; compiled calls before and after do not mind."""
    import torch._dynamo as dynamo

    cases = [chain_case(tokens, "cuda", dim=64) for tokens in (3, 5, 7, 9)]
    want = [without_replays(monkeypatch, plain, case) for case in cases]
    dynamo.reset()
    limit = "recompile_limit" if hasattr(dynamo.config, "recompile_limit") else "cache_size_limit"
    with dynamo.config.patch({limit: 2}):
        compiled = torch.compile(plain, dynamic=False, backend="aot_eager")
        for _ in range(4):
            for case, expected in zip(cases, want, strict=True):
                got = run(compiled, case)
                assert all(torch.equal(g, w) for g, w in zip(got, expected, strict=True))
    assert all(counted)
    dynamo.reset()


def test_modes_that_come_and_go(counted, monkeypatch):
    """no_grad, inference mode, autocast, a profiler of torch's and a hook of Triton's between calls of one shape: the same bits, and replays
    afterwards."""
    import triton

    case = chain_case(77, "cuda")
    (want, *_) = without_replays(monkeypatch, plain, case)
    chain = type(triton.knobs.runtime.launch_exit_hook)()
    chain.add(lambda metadata: None)
    autocast = lambda: torch.autocast("cuda", torch.bfloat16)  # noqa: E731 - a name each in the list below
    profile = lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])  # noqa: E731 - as above
    for _ in range(3):
        for mode in (torch.no_grad, torch.inference_mode, autocast, profile, torch.enable_grad):
            with mode():
                assert torch.equal(plain(*case)[0], want)
        with monkeypatch.context() as patch:
            patch.setattr(triton.knobs.runtime, "launch_enter_hook", chain)
            assert torch.equal(plain(*case)[0], want)
    before = len(counted)
    assert torch.equal(plain(*case)[0], want) and len(counted) == before + 3
