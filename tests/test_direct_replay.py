"""Replays: what differs from the recorded call is none, what cannot be repeated is not recorded, how many there are, and failing allocations."""

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from kernel_runtime import interpreting, replay
from tests.direct_tools import Calls, D, N, boundary, boundary_arguments

pytestmark = pytest.mark.skipif(interpreting(), reason="under TRITON_INTERPRET=1 kernels are Python functions; nothing is launched")


def test_what_differs_from_the_recorded_call_is_no_replay(driver, monkeypatch):
    import triton

    from mhc_ops.boundary import fwd
    from tests.test_eager_call import Watching

    calls = Calls(driver, monkeypatch)
    arguments, _ = boundary_arguments(5, False)
    given, options = arguments[:8], arguments[8:]
    find = lambda *changed: calls.forward.find((*changed, *given[len(changed) :]), options) is not None  # noqa: E731 - used often
    for _ in range(2):
        assert not find()
        calls(calls.forward, fwd.post_pre_fwd, arguments)
    f, x, post, comb, *_ = given
    assert find() and find(f.clone(), x.clone())
    assert not find(f.double()) and not find(f, x.bfloat16()) and not find(f[:4]) and not find(f, x, post[:4])
    assert not find(f.t().contiguous().t()) and not find(f, f) and not find(f, x, post, comb.clone().requires_grad_())
    assert not find(torch.nn.Parameter(f)) and not find(torch.zeros(5, D, dtype=torch.cfloat).conj().imag)
    assert calls.forward.find(given, (2, 1e-5, *options[2:])) is None and calls.forward.find((*given[:7], torch.rand(5, N)), options) is None
    with Watching():
        assert not find()
    with torch.inference_mode():
        assert not find()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert not find()
    got = []
    torch.func.grad(lambda t: (got.append(find()), t.sum())[1])(torch.zeros(2))
    torch.vmap(lambda t: (got.append(find()), t)[1])(torch.zeros(2))
    assert got == [False] * 2
    for owner, name, value in (
        (replay, "_device", lambda: 1), (triton.knobs.runtime, "debug", True), (fwd.expand_split_kernel, "pre_run_hooks", [1]),
        (fwd.expand_split_kernel, "device_caches", {}),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert not find()
    from kernel_runtime import record

    with record():
        assert not find()
    assert find()
    odd = torch.zeros(5 * D + 1)[1:].view(5, D)  # found, since its address is no metadata, and not replayed
    found, tensors = calls.forward.find((odd, *given[1:]), options)
    assert odd.data_ptr() % 16 and found(tensors) is None


def test_what_cannot_be_repeated_is_not_recorded(driver, monkeypatch):
    from mhc_ops.post.fwd import post_fwd

    Calls(driver, monkeypatch)
    arguments, elsewhere = boundary_arguments(5, False)[0][:4], torch.zeros(5, N, D)
    view = elsewhere[1:]
    launchers = {
        "ones": lambda *a: (post_fwd(*a), torch.ones(3))[0],
        "copy": lambda f, *a: post_fwd(f.clone(), *a),
        "elsewhere": lambda f, x, *a: post_fwd(f, elsewhere, *a),
        "part": lambda f, x, *a: post_fwd(f[1:], x[1:], *(t[1:] for t in a)),
        "nothing": lambda f, *a: torch.empty_like(f),
        "input": lambda *a: (post_fwd(*a), a[0]),
        "view": lambda *a: post_fwd(*a)[1:],
    }
    for name, launcher in launchers.items():
        replay.record(launcher, arguments)
        assert not isinstance(replay.record(launcher, arguments)[1], replay.Replay), name
    twice = (arguments[0], elsewhere, elsewhere.view(-1)[: 5 * N].view(5, N), arguments[3])  # one address, two inputs
    assert replay.record(post_fwd, twice)[1] == "two of its tensors have one address"
    other = replay.record(post_fwd, (arguments[0], elsewhere, *arguments[2:]))[1]
    assert view.data_ptr() != elsewhere.data_ptr() and isinstance(other, replay.Replay)
    assert replay.record(lambda *a: (post_fwd(*a), None), arguments)[1].results == [0, None]


def test_the_number_of_replays_is_limited(driver, monkeypatch):
    from mhc_ops.post.fwd import post_fwd

    calls = Calls(driver, monkeypatch)
    replays = replay.Replays(4)
    monkeypatch.setattr(replay, "MAX_REPLAYS", 3)
    for tokens in (1, 2, 3, 4, 5, 4, 3, 2, 1, 5, 5, 4):
        calls(replays, lambda *a: [post_fwd(*a)], (*boundary_arguments(tokens, False)[0][:4], "triton"))
    assert replays.count == 3 and sorted(key[1][0] for key in replays.found) == [2, 3, 4]
    for tokens in range(6, 40):
        calls(replays, lambda *a: [post_fwd(*a)], (*boundary_arguments(tokens, False)[0][:4], "triton"))
    assert len(replays.seen) <= 12


def test_no_memory_during_a_replay(driver, monkeypatch):
    """It fails before anything is launched, and the next one is right."""
    from mhc_ops.boundary.bwd import post_pre_bwd

    calls = Calls(driver, monkeypatch)
    _, arguments = boundary_arguments(5, False)
    want = [calls(calls.backward, post_pre_bwd, arguments) for _ in range(3)][-1]
    allocate, left = replay.ALLOCATE["cpu"], []

    def failing(*like):
        if not left:
            raise torch.OutOfMemoryError("no memory left")
        left.pop()
        return allocate(*like)

    for successes in range(8):
        with monkeypatch.context() as patch:
            patch.setitem(replay.ALLOCATE, "cpu", failing)
            left[:] = range(successes)
            with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
                calls(calls.backward, post_pre_bwd, arguments)
        assert not driver.launches
        assert calls(calls.backward, post_pre_bwd, arguments) == want


def test_a_replay_fills_new_memory_where_torch_does(driver, monkeypatch):
    from mhc_ops.post.fwd import post_fwd

    Calls(driver, monkeypatch)
    arguments = (*boundary_arguments(5, False)[0][:4], "triton")
    replays = replay.Replays(4)
    for _ in range(2):
        replays.call(post_fwd, arguments)
    torch.use_deterministic_algorithms(True)
    try:
        found, tensors = replays.find(arguments[:4], arguments[4:])
        assert found(tensors).isnan().all()  # nothing runs here that would write it
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("calls_before", [0, 1, 2], ids=["plain", "recorded", "replayed"])
def test_no_memory_leaves_nothing_held(driver, monkeypatch, calls_before):
    """Wherever an allocation fails, what was allocated before it goes with the exception, without the garbage collector."""
    from mhc_ops.boundary.bwd import post_pre_bwd
    from mhc_ops.boundary.fwd import post_pre_fwd

    calls = Calls(driver, monkeypatch)
    boundary(5, False)
    left, failures = [], 0

    def limited(make):
        def inner(*args, **kwargs):
            if not left:
                raise torch.OutOfMemoryError("no memory left")
            left.pop()
            tensor = make(*args, **kwargs)
            storages.append(StorageWeakRef(tensor.untyped_storage()))
            return tensor

        return inner

    storages = []
    arguments = boundary_arguments(5, False)
    pairs = ((replay.Replays, 8, post_pre_fwd, arguments[0]), (replay.Replays, 16, post_pre_bwd, arguments[1]))
    for make, tensors, launcher, given in pairs:
        for successes in range(20):
            replays = make(tensors)
            for _ in range(calls_before):
                calls(replays, launcher, given)
            gc.disable()
            try:
                with monkeypatch.context() as patch:
                    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
                        patch.setattr(owner, name, limited(getattr(owner, name)))
                    patch.setitem(replay.ALLOCATE, "cpu", limited(replay.ALLOCATE["cpu"]))
                    left[:] = range(successes)
                    try:
                        calls(replays, launcher, given)
                    except torch.OutOfMemoryError:
                        failures += 1
                driver.launches.clear()
                held = [i for i, storage in enumerate(storages) if not storage.expired()]
                assert not held, (launcher.__name__, successes, held, len(storages))
            finally:
                gc.enable()
                storages.clear()
    assert failures == 8 + 8
