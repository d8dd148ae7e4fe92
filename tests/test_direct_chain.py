"""The host side of a boundary in both directions, over shapes that come again: every direct launch is the one that Triton would make, and
every replay launches what the launcher does."""

import gc
import importlib
import itertools
import threading

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from kernel_runtime import interpreting, replay
from kernel_runtime.workspace import Piece
from reference.cases.mhc import OPS
from tests.warmup_tools import fake_driver

FOLDERS = ("bmm", "boundary", "gates", "head", "post", "pre", "project", "sinkhorn")
pytestmark = pytest.mark.skipif(interpreting(), reason="under TRITON_INTERPRET=1 kernels are Python functions; nothing is launched")
N, D, M = 2, 16, 8


class Launcher:
    """Triton's launcher of one kernel, recording in place of starting"""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False

    def __init__(self, launches):
        self.launches = launches

    def __call__(self, x, y, z, stream, function, *args):
        self.launch(x, y, z, stream, function, False, False, None, None, *args)

    def launch(self, x, y, z, stream, function, *rest):
        arguments = [a.data_ptr() if hasattr(a, "data_ptr") else a for a in rest[8:]]
        self.launches.append(((x, y, z), stream, function, arguments))


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """Triton's cache folder: every kernel is compiled once"""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def driver(monkeypatch, kernels):
    from triton.backends.compiler import GPUTarget

    from kernel_runtime import direct

    monkeypatch.setenv("TRITON_CACHE_DIR", str(kernels))
    monkeypatch.setattr(direct, "supported", lambda: True)
    monkeypatch.setattr(direct, "_device", lambda: 0, raising=False)
    monkeypatch.setattr(direct, "_stream", lambda device: 0)
    modules = [importlib.import_module(f"mhc_ops.{name}.{part}") for name in FOLDERS for part in ("fwd", "bwd")]
    values = [v for m in modules for v in vars(m).values()]

    def forget():
        """Specs that were asked already whether they can be launched directly, and kernels of another driver"""
        for value in values:
            if hasattr(value, "cache_clear"):
                value.cache_clear()
            if hasattr(value, "device_caches"):
                value.device_caches.clear()

    forget()
    with fake_driver(GPUTarget("cuda", 90, 32)) as driver:
        functions = itertools.count(1)
        driver.load_binary = lambda *args: (object(), next(functions), 32, 0, 1024)
        driver.launcher_cls = lambda src, metadata: Launcher(driver.launches)
        yield driver
    forget()


def boundary(tokens, pre_mix):
    from mhc_ops.boundary.bwd import post_pre_bwd
    from mhc_ops.boundary.fwd import post_pre_fwd

    f, x, post, comb = torch.zeros(tokens, D), torch.zeros(tokens, N, D), torch.zeros(tokens, N), torch.zeros(tokens, N, N)
    site = torch.zeros(M, N * D), torch.zeros(3), torch.zeros(M), torch.zeros(tokens, N) if pre_mix else None
    options = 2, 1e-6, 1e-6, "v4"
    streams, y, pre, post_out, comb_out, mixes, rstd = post_pre_fwd(f, x, post, comb, *site, *options)
    grads = streams, y, pre if pre_mix else None, post_out, comb_out
    post_pre_bwd(*grads, f, x, post, comb, streams, *site, mixes, rstd, *options)


def test_a_chain_launches_what_triton_would(driver, monkeypatch):
    from kernel_runtime.launch import Spec

    launch, seen, kernels = Spec.launch, [], []

    def both(self, grid, *args):
        run, through = self.kernel.run, []
        self.kernel.run = lambda *a, **k: (through.append(1), run(*a, **k))[1]
        try:
            launch(self, grid, *args)
        finally:
            del self.kernel.run
        self.kernel[tuple(grid)](*args, **self.keywords)
        ours, tritons = driver.launches
        driver.launches.clear()
        count = len(args)  # what follows are constants, which the launcher does not look at
        assert ours[:3] == tritons[:3] and ours[3][:count] == tritons[3][:count] and len(ours[3]) == len(tritons[3]), self.name
        seen.append(not through)
        kernels.append(self.identity)

    monkeypatch.setattr(Spec, "launch", both)
    for tokens, pre_mix in ((1, False), (5, True), (33, False), (1, True), (16, False), (5, True)):
        boundary(tokens, pre_mix)
    for kernel in set(kernels):
        first = kernels.index(kernel)
        assert not seen[first] and all(s for s, k in zip(seen[first + 1 :], kernels[first + 1 :], strict=True) if k == kernel)
    assert len(set(kernels)) == 9 and len(kernels) == 36


def pieces(self, device):
    """Layout.allocate as on a GPU"""
    buffer = torch.empty(self.size, dtype=torch.float32, device=device)
    return [Piece(buffer, buffer.data_ptr() + first, dtype) for first, _, dtype in self.pieces]


class Calls:
    """Calls of the boundary's launchers through Replays; what they launched, by the part that an address has in the call"""

    def __init__(self, driver, monkeypatch):
        self.driver = driver
        monkeypatch.setattr("kernel_runtime.workspace.Layout.allocate", pieces)
        for name in ("_device", "_stream"):
            monkeypatch.setattr(replay, name, lambda *device: 0)
        self.forward, self.backward = replay.Replays(8), replay.Replays(16)

    def __call__(self, replays, launcher, arguments):
        """(launches, outputs, whether it was a replay)"""
        self.driver.launches.clear()
        found = replays.find(arguments[: replays.tensors], arguments[replays.tensors :])
        if found is None:
            out = replays.call(launcher, arguments)
        else:
            out = found[0](found[1])
        ins = {a.data_ptr(): ("in", i) for i, a in enumerate(arguments) if isinstance(a, torch.Tensor)}
        outs = {t.data_ptr(): ("out", i) for i, t in enumerate(out) if t is not None and t.numel()}
        scratch, seen = [], []
        for grid, stream, function, args in self.driver.launches:
            for a in args:
                if isinstance(a, int) and a > 2**32 and a not in ins and a not in outs:
                    scratch.append(a)
            seen.append((grid, stream, function, args))
        first = min(scratch, default=0)
        name = lambda a: ins.get(a) or outs.get(a) or (("scratch", a - first) if a in scratch else a)  # noqa: E731 - used once
        shapes = type(out), [None if t is None else (t.shape, t.stride(), t.dtype) for t in out]
        return [(grid, stream, function, [name(a) for a in args]) for grid, stream, function, args in seen], shapes, found is not None


def boundary_arguments(tokens, pre_mix):
    f, x, post, comb = (torch.rand(tokens, *tail) for tail in ((D,), (N, D), (N,), (N, N)))
    site = torch.rand(M, N * D), torch.rand(3), torch.rand(M), torch.rand(tokens, N) if pre_mix else None
    dpre = torch.rand(tokens, N) if pre_mix else None
    grads = torch.rand(tokens, N, D), torch.rand(tokens, D), dpre, torch.rand(tokens, N), torch.rand(tokens, N, N)
    options = 2, 1e-6, 1e-6, "v4", "triton"
    saved = f, x, post, comb, torch.rand(tokens, N, D), *site, torch.rand(tokens, M), torch.rand(tokens)
    return (f, x, post, comb, *site, *options), (*grads, *saved, *options)


def test_replays_launch_what_the_launchers_do(driver, monkeypatch):
    from mhc_ops.boundary.bwd import post_pre_bwd
    from mhc_ops.boundary.fwd import post_pre_fwd

    calls, first = Calls(driver, monkeypatch), {}
    for pre_mix in (False, True):
        boundary(5, pre_mix)  # by Triton's path, which passes constants too
    for case in ((5, False), (33, True), (5, False), (1, False), (33, True), (5, False), (1, False), (33, True), (1, False), (5, False)):
        forward, backward = boundary_arguments(*case)
        for replays, launcher, arguments in ((calls.forward, post_pre_fwd, forward), (calls.backward, post_pre_bwd, backward)):
            *found, replayed = calls(replays, launcher, arguments)
            times, want = first.setdefault((case, launcher), [0, found])
            assert len(found[0]) == 3 and found == want
            assert replayed == (times >= 2)
            first[case, launcher][0] += 1
    assert calls.forward.count == calls.backward.count == 3


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
        "zeros": lambda *a: (post_fwd(*a), torch.zeros(3))[0],
        "copy": lambda f, *a: post_fwd(f.clone(), *a),
        "elsewhere": lambda f, x, *a: post_fwd(f, elsewhere, *a),
        "part": lambda f, x, *a: post_fwd(f[1:], x[1:], *(t[1:] for t in a)),
        "nothing": lambda f, *a: torch.empty_like(f),
        "input": lambda *a: (post_fwd(*a), a[0]),
        "view": lambda *a: post_fwd(*a)[1:],
    }
    for name, launcher in launchers.items():
        replay.record(launcher, arguments)
        assert replay.record(launcher, arguments)[1] is None, name
    twice = (arguments[0], elsewhere, elsewhere.view(-1)[: 5 * N].view(5, N), arguments[3])  # one address, two inputs
    assert replay.record(post_fwd, twice)[1] is None
    assert view.data_ptr() != elsewhere.data_ptr() and replay.record(post_fwd, (arguments[0], elsewhere, *arguments[2:]))[1] is not None
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


@pytest.fixture
def replayed(driver, monkeypatch):
    """The public functions run on a CPU as they do on a GPU, but for the kernels; one entry for every replay"""
    from kernel_runtime import impl, ops

    Calls(driver, monkeypatch)
    monkeypatch.setattr(impl, "KERNEL_DEVICES", ("cpu",))
    monkeypatch.setattr(ops, "_on_current_device", lambda arguments: True)
    count, run = [], replay.Replay.__call__
    monkeypatch.setattr(replay.Replay, "__call__", lambda self, tensors: (count.append(1), run(self, tensors))[1])
    modules = [importlib.import_module(f"mhc_ops.{name}.op") for name in FOLDERS]
    for call in [c for m in modules for c in vars(m).values() if isinstance(c, ops.EagerCall)]:
        monkeypatch.setattr(call, "replays", replay.Replays(call.replays.tensors))
    return count


@pytest.mark.parametrize("op", [op for op in OPS if op != "hc_expand"])
def test_replays_are_differentiable(replayed, op):
    """Of every public function, in both directions, from the third call on; no kernel runs, so shapes and None are what there is to see."""
    import mhc_ops
    from reference.cases.mhc import MhcShape, make_inputs

    inputs = [t.requires_grad_() for t in make_inputs(op, MhcShape(1, 3, 4, D), dtype=torch.float32).values()]
    found = []
    for _ in range(4):
        out = getattr(mhc_ops, op)(*inputs)
        outputs = [o for o in ((out,) if isinstance(out, torch.Tensor) else out) if o.requires_grad]
        grads = torch.autograd.grad(outputs, inputs, [torch.ones_like(o) for o in outputs])
        found.append([(type(out), len(outputs)), *((t.shape, t.dtype, t.stride()) for t in (*outputs, *grads))])
    assert len(outputs) and found[1:] == found[:1] * 3
    assert len(replayed) == 4


@pytest.mark.parametrize("op", ["hc_pre", "hc_post", "hc_post_pre"])
def test_what_is_no_plain_tensor_is_named_after_replays_too(replayed, op):
    import mhc_ops
    from reference.cases.mhc import MhcShape, make_inputs

    inputs = list(make_inputs(op, MhcShape(1, 3, 4, D), dtype=torch.float32).values())
    for _ in range(3):
        getattr(mhc_ops, op)(*inputs)
    assert replayed
    nested = torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(1, 3)])
    for wrong in ([nested, *inputs[1:]], [*inputs[:-1], nested], [None] * len(inputs), [inputs[0].numpy(), *inputs[1:]]):
        with pytest.raises((TypeError, ValueError), match=f"^{op}: "):
            getattr(mhc_ops, op)(*wrong)


def test_threads_that_record_at_once(driver, monkeypatch):
    """Each sees its own launches and allocations alone."""
    from mhc_ops.boundary.bwd import post_pre_bwd

    calls = Calls(driver, monkeypatch)
    for pre_mix in (False, True):
        boundary(5, pre_mix)
    cases = {tokens: boundary_arguments(tokens, tokens % 2 == 0)[1] for tokens in range(3, 9)}
    errors = []

    def work(tokens):
        try:
            for _ in range(6):
                found = calls.backward.find(cases[tokens][:16], cases[tokens][16:])
                out = calls.backward.call(post_pre_bwd, cases[tokens]) if found is None else found[0](found[1])
                assert out[1].shape == (tokens, N, D)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(tokens,)) for tokens in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for arguments in cases.values():
        one, _ = calls.backward.find(arguments[:16], arguments[16:])
        other = replay.record(post_pre_bwd, arguments[:-1])[1]
        assert len(one.starts) == 3 and one.made == other.made and one.offsets == other.offsets and one.results == other.results
        assert [(s.grid, s.tail, s.pick(range(99))) for s in one.starts] == [(s.grid, s.tail, s.pick(range(99))) for s in other.starts]


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
