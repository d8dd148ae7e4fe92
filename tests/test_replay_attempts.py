"""Which calls become replays: recording from several threads, reasons that pass, and what a process can say about it."""

import re
import threading

import pytest
import torch
from torch.utils import _python_dispatch as modes

from kernel_runtime import interpreting, ops, replay
from tests.direct_tools import Calls, D, boundary_arguments

pytestmark = pytest.mark.skipif(interpreting(), reason="under TRITON_INTERPRET=1 kernels are Python functions; nothing is launched")


def test_threads_that_record_at_once_leave_no_mode_behind():
    """torch notes in one variable of the process whether a mode is on, and torch.compile compiles nothing while it says so. Entered and left
    crosswise by two threads, it would stay set."""
    first_in, second_in, first_out, errors = threading.Event(), threading.Event(), threading.Event(), []

    def first(x):
        first_in.set()
        second_in.wait(0.5)  # in vain, where one records after the other

    def second(x):
        second_in.set()
        first_out.wait(10.0)

    def work(launcher, after):
        try:
            assert replay.record(launcher, (torch.zeros(1),)) == (None, "it launches nothing")
        except BaseException as error:
            errors.append(error)
        after.set()

    threads = [threading.Thread(target=work, args=(first, first_out)), threading.Thread(target=work, args=(second, threading.Event()))]
    threads[0].start()
    first_in.wait(10.0)
    threads[1].start()
    for thread in threads:
        thread.join()
    assert not errors and second_in.is_set()
    assert not modes.is_in_torch_dispatch_mode()
    assert not getattr(modes, "is_in_any_mode_without_ignore_compile_internals", bool)()


@pytest.mark.parametrize("calls", [3, 40])
def test_a_reason_that_passes(driver, monkeypatch, calls):
    """A profiler of Triton's takes every launch through Triton's path; after it, calls of the same shape become replays, however long it was
    there."""
    import triton

    from mhc_ops.post.fwd import post_fwd

    made, replays = Calls(driver, monkeypatch), replay.Replays(4)
    arguments = (*boundary_arguments(5, False)[0][:4], "triton")
    attempts, record = [], replay.record
    monkeypatch.setattr(replay, "record", lambda *args: (attempts.append(1), record(*args))[1])
    with monkeypatch.context() as patch:
        chain = type(triton.knobs.runtime.launch_exit_hook)()
        chain.add(lambda metadata: None)
        patch.setattr(triton.knobs.runtime, "launch_enter_hook", chain)
        for _ in range(calls):
            assert not made(replays, lambda *a: [post_fwd(*a)], arguments)[2]
    assert len(attempts) <= replay.ATTEMPTS + 2
    assert re.fullmatch(r"0 replays of 0 shapes; 1 shapes not replayed: post\w+_kernel was started by Triton: .*", replays.summary())
    for _ in range(calls + 2):
        made(replays, lambda *a: [post_fwd(*a)], arguments)
    assert made(replays, lambda *a: [post_fwd(*a)], arguments)[2]
    assert replays.summary() == "1 replays of 1 shapes"


def test_attempts_become_rare(driver, monkeypatch):
    """A launcher that can never be repeated is watched a few times, then once for every doubling of its calls."""
    made, replays = Calls(driver, monkeypatch), replay.Replays(4)
    arguments, attempts = (*boundary_arguments(5, False)[0][:4], "triton"), []
    monkeypatch.setattr(replay, "record", lambda launcher, given: (attempts.extend(replays.seen.values()), (launcher(*given), "why"))[1])
    for _ in range(1100):
        made(replays, lambda f, *others: [f], arguments)
    assert attempts == [*range(2, replay.ATTEMPTS + 1), 17, 33, 65, 129, 257, 513, 1025]
    assert replays.summary() == "0 replays of 0 shapes; 1 shapes not replayed: why"


def test_memory_is_not_held_for_the_sake_of_a_replay(driver, monkeypatch):
    """Pieces of scratch that a launcher may use one after the other would be there all at once; large tensors are not recorded at all."""
    from mhc_ops.post.fwd import post_fwd

    made, arguments = Calls(driver, monkeypatch), (*boundary_arguments(5, False)[0][:4], "triton")
    size = sum(t.nbytes for t in arguments[:4])

    def launcher(pieces):
        return lambda *a: (post_fwd(*a), [torch.empty(1000) for _ in range(pieces)])[:1]

    def summary(pieces):
        replays = replay.Replays(4)
        for _ in range(3):
            made(replays, launcher(pieces), arguments)
        return replays.summary()

    monkeypatch.setattr(replay, "MAX_SCRATCH", 1 << 20)
    monkeypatch.setattr(replay, "MAX_BYTES", size)
    assert summary(1) == summary(3) == "1 replays of 1 shapes"
    monkeypatch.setattr(replay, "MAX_SCRATCH", 7999)
    assert summary(1) == "1 replays of 1 shapes" and "it has 2 pieces of scratch of more than 0 MiB" in summary(2)
    monkeypatch.setattr(replay, "MAX_BYTES", size - 1)
    assert summary(1) == "0 replays of 0 shapes; 1 shapes not replayed: its tensors take more than 0 MiB"


def test_report(replayed):
    import mhc_ops

    strided = torch.rand(7, 4, 2 * D)[..., ::2]  # which is copied before the launch
    for x in (torch.rand(3, 4, D), strided):
        for _ in range(3):
            mhc_ops.hc_post(x[:, 0].contiguous(), x, *(torch.rand(len(x), *tail) for tail in ((4,), (4, 4))))
    (line,) = [line for line in ops.replay_report() if line.startswith("mhc_ops::post_fwd")]
    assert re.fullmatch(r"mhc_ops::post_fwd: 1 replays of 1 shapes; 1 shapes not replayed: it calls aten\.\w+\.\w+", line), line
    assert not [line for line in ops.replay_report() if line.startswith("mhc_ops::sinkhorn")]


def test_report_says_why_there_are_no_replays(monkeypatch):
    from kernel_runtime import direct

    direct.unsupported.cache_clear()
    (line,) = ops.replay_report()
    assert line.startswith("no call is replayed: ") and (torch.version.cuda or "no CUDA" in line)
    try:
        for version, part in (("3.7.1", "triton 3.7.1 was not tried, only 3.6.x"), ("3.6.0", "")):
            direct.unsupported.cache_clear()
            monkeypatch.setattr(direct.triton, "__version__", version)
            monkeypatch.setattr(torch.version, "cuda", "13.0")
            assert direct.unsupported() == part
    finally:
        direct.unsupported.cache_clear()
