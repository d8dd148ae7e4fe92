"""Launches without Triton's binding of arguments: what reaches the compiled kernel, and what takes Triton's own path. No device needed."""

import importlib
import inspect
import itertools
import operator
import pkgutil
import threading

import pytest
import torch

from kernel_runtime import interpreting
from kernel_runtime.registry import OP_PACKAGES
from kernel_runtime.workspace import ALIGNMENT, Layout, Piece
from tests.warmup_tools import fake_driver

pytestmark = pytest.mark.skipif(interpreting(), reason="under TRITON_INTERPRET=1 kernels are Python functions; nothing is launched")


class Pointer(Piece):
    """A tensor's memory, said to be on a device"""

    device = 0

    def __init__(self, tensor, offset=0):
        super().__init__(tensor, tensor.data_ptr() + offset * tensor.element_size(), tensor.dtype)

    def get_device(self):
        return self.device


class Launch:
    """Calls of the compiled kernel by the two paths; `direct` says which it was"""

    def __init__(self, spec, driver):
        self.spec, self.driver, self.through_triton, self.device = spec, driver, 0, 0
        functions = itertools.count(1000)
        driver.get_current_device = lambda: self.device
        driver.load_binary = lambda *args: (object(), next(functions), 32, 0, 1024)  # every kernel a function of its own
        run = spec.kernel.run

        def count(*args, **kwargs):
            self.through_triton += 1
            return run(*args, **kwargs)

        spec.kernel.run = count

    def __call__(self, grid, *args):
        before = self.through_triton
        self.driver.launches.clear()
        self.spec.launch(grid, *args)
        (self.got,) = self.driver.launches
        return self.through_triton == before


class Launcher:
    """Triton's launcher of one kernel, recording in place of starting"""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = False, True

    def __init__(self, launches, narrow):
        self.launches, self.narrow = launches, narrow

    def __call__(self, x, y, z, stream, function, *args):
        self.launch(x, y, z, stream, function, False, True, "scratch" if self.global_scratch_size else None, None, *args)

    def launch(self, *args):
        if self.narrow and not -(2**31) <= operator.index(args[15]) < 2**31:
            raise OverflowError("signed integer is greater than maximum")  # as the C code does, before anything is started
        self.launches.append(args)


@pytest.fixture
def launch(monkeypatch, tmp_path):
    import triton
    from triton.backends.compiler import GPUTarget

    from kernel_runtime import direct
    from mhc_ops.sinkhorn.fwd import forward_spec

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(direct, "supported", lambda: True)
    monkeypatch.setattr(direct, "_stream", lambda device: 70 + device)
    monkeypatch.setattr(direct, "_device", lambda: triton.runtime.driver.active.get_current_device(), raising=False)
    forward_spec.cache_clear()
    spec = forward_spec(torch.float32, 2, 2, "v4")
    before = spec.kernel.run
    with fake_driver(GPUTarget("cuda", 90, 32)) as driver:
        driver.launcher_cls = lambda src, metadata: Launcher(driver.launches, src.signature["T"] == "i32")
        yield Launch(spec, driver)
    spec.kernel.run = before
    spec.kernel.device_caches.clear()
    forward_spec.cache_clear()
    assert triton.runtime.driver._active is not driver


def pointers():
    return Pointer(torch.zeros(64)), Pointer(torch.zeros(64))


def test_the_kernel_gets_what_triton_would_pass(launch):
    a, b = pointers()
    assert not launch((3,), a, b, 5, 1e-6)  # compiles
    function, metadata = launch.got[4], launch.got[9]
    for grid, whole in (((4,), (4, 1, 1)), ((4, 5), (4, 5, 1)), ((4, 5, 6), (4, 5, 6))):
        assert launch(grid, a, b, 6, 0.5)
        assert launch.got[:13] == (*whole, 70, function, False, True, None, None, metadata, None, None, None)
        assert launch.got[13:17] == (a.data_ptr(), b.data_ptr(), 6, 0.5)
        assert len(launch.got) == 13 + len(launch.spec.kernel.arg_names)
    assert launch((1,), b, a, 1, 1.0) and launch((1,), b, a, 16, 1.0)  # lengths that Triton would tell apart


def test_other_arguments_take_tritons_path(launch):
    a, b = pointers()
    launch((1,), a, b, 5, 1e-6)
    assert launch((1,), a, b, 5, 1e-6)
    assert not launch((1,), a, Pointer(torch.zeros(64), 1), 5, 1e-6)  # not aligned
    assert not launch((1,), Pointer(torch.zeros(64, dtype=torch.float16)), b, 5, 1e-6)
    assert not launch((1,), a, b, 2**40, 1e-6)
    assert launch.got[15] == 2**40
    assert launch((1,), a, b, 5, 1e-6)  # and none of them was learned


def test_the_first_launch_teaches_only_what_was_declared(launch):
    a, b = pointers()
    assert not launch((1,), a, Pointer(torch.zeros(64), 1), 5, 1e-6)
    assert not launch((1,), a, b, 2**40, 1e-6)
    assert not launch((1,), a, b, 5, 1e-6)
    assert launch((1,), a, b, 5, 1e-6)


def test_hooks_see_every_launch(launch, monkeypatch):
    import triton

    a, b = pointers()
    launch((1,), a, b, 5, 1e-6)
    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "launch_enter_hook", lambda metadata: seen.append(metadata.get()["name"]))
        assert not launch((1,), a, b, 5, 1e-6)
        assert launch.got[11] is triton.knobs.runtime.launch_enter_hook
        chain = type(triton.knobs.runtime.launch_exit_hook)()
        patch.setattr(triton.knobs.runtime, "launch_enter_hook", chain)
        assert launch((1,), a, b, 5, 1e-6)
        chain.add(lambda metadata: None)
        assert not launch((1,), a, b, 5, 1e-6)
    launch.spec.kernel.pre_run_hooks.append(lambda *args, **kwargs: seen.append("pre_run"))
    try:
        assert not launch((1,), a, b, 5, 1e-6)
    finally:
        launch.spec.kernel.pre_run_hooks.clear()
    assert seen == ["pre_run"]


def test_every_direct_launch_is_of_the_kernel_that_triton_would_pick(launch):
    """Triton's own binder says which; only a bool in place of an integer and an integer in place of a float are passed as their values."""
    aligned = Pointer(torch.zeros(64))
    pointers = [aligned, Pointer(torch.zeros(64)), Pointer(torch.zeros(64), 1), Pointer(torch.zeros(64), 4), Pointer(torch.zeros(0))]
    pointers += [Pointer(torch.zeros(64, dtype=t)) for t in (torch.int32, torch.bool, torch.float16, torch.float64)]
    lengths = [0, 1, 2, 15, 16, 17, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, -1, -16, -(2**31), -(2**31) - 1, True, False]
    numbers = [0.0, 1.0, 0.5, 16.0, float("inf"), float("nan"), 1e300, 1]
    calls = [(p, aligned, 5, 0.5) for p in pointers] + [(aligned, p, 5, 0.5) for p in pointers]
    calls += [(aligned, aligned, t, 0.5) for t in lengths] + [(aligned, aligned, 5, e) for e in numbers]
    launch((1,), aligned, aligned, 5, 0.5)
    binder = launch.spec.kernel.device_caches[0][4]
    key = lambda *args: binder(*args, **launch.spec.keywords)[1]  # noqa: E731 - used three times
    learned, function, straight = key(aligned, aligned, 5, 0.5), launch.got[4], 0
    for args in calls:
        plain = (*args[:2], int(args[2]), float(args[3]))
        if launch((1,), *args):
            straight += 1
            assert key(*plain) == learned and launch.got[4] is function, args
            assert str(launch.got[13:17]) == str((args[0].data_ptr(), args[1].data_ptr(), *args[2:]))
        else:
            assert key(*args) != learned and launch.got[4] is not function, args
    assert straight == 2 * 4 + 12 + len(numbers)
    assert len(launch.spec.direct.known) == 1


def test_the_current_device_decides_as_it_does_for_triton(launch, monkeypatch):
    a, b = pointers()
    assert not launch((1,), a, b, 5, 1e-6)
    first = launch.got[4]
    monkeypatch.setattr(Pointer, "device", 1)
    assert launch((1,), a, b, 5, 1e-6)  # still on device 0, whose memory or not
    assert launch.got[3] == 70 and launch.got[4] is first
    launch.device = 1
    assert not launch((1,), a, b, 5, 1e-6)  # device 1 has a kernel of its own
    second = launch.got[4]
    assert second is not first
    assert launch((1,), a, b, 5, 1e-6) and launch.got[3] == 71 and launch.got[4] is second
    launch.device = 0
    assert launch((1,), a, b, 5, 1e-6) and launch.got[3] == 70 and launch.got[4] is first


def test_a_stream_is_asked_for_at_every_launch(launch, monkeypatch):
    from kernel_runtime import direct

    a, b = pointers()
    launch((1,), a, b, 5, 1e-6)
    for stream in (3, 4):
        monkeypatch.setattr(direct, "_stream", lambda device, stream=stream: stream)
        assert launch((1,), a, b, 5, 1e-6) and launch.got[3] == stream


@pytest.mark.parametrize("setting", ["runtime.debug", "kernel.debug"])
def test_another_setting_of_tritons_is_another_kernel(launch, monkeypatch, setting):
    """Also where the first launch of all is under it: a debug kernel is not for good."""
    import triton

    a, b = pointers()
    owner = triton.knobs.runtime if setting == "runtime.debug" else launch.spec.kernel
    with monkeypatch.context() as patch:
        patch.setattr(owner, "debug", True)
        assert not launch((1,), a, b, 5, 1e-6)
        assert launch((1,), a, b, 5, 1e-6)
        debug = launch.got[4]
    assert not launch((1,), a, b, 5, 1e-6) and launch.got[4] is not debug
    plain = launch.got[4]
    assert launch((1,), a, b, 5, 1e-6) and launch.got[4] is plain
    with monkeypatch.context() as patch:
        patch.setattr(owner, "debug", True)
        assert not launch((1,), a, b, 5, 1e-6) and launch.got[4] is debug


def test_an_instrumented_kernel_is_not_kept(launch, monkeypatch):
    import triton

    a, b = pointers()
    launch((1,), a, b, 5, 1e-6)
    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.compilation, "instrumentation_mode", "other")
        patch.setattr(launch.spec.kernel, "run", lambda *args, **kwargs: seen.append(triton.knobs.compilation.instrumentation_mode))
        launch.spec.launch((1,), a, b, 5, 1e-6)
    assert seen == ["other"]
    assert launch((1,), a, b, 5, 1e-6)


def test_a_launch_that_a_hook_swallows(launch, monkeypatch):
    """jit_cache_hook may say that nothing is to be compiled: Triton returns None."""
    import triton

    a, b = pointers()
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **kwargs: True)
        assert launch.spec.launch((1,), a, b, 5, 1e-6) is None
    assert not launch((1,), a, b, 5, 1e-6)
    assert launch((1,), a, b, 5, 1e-6)


def test_a_table_that_is_emptied_during_the_launch(launch, monkeypatch):
    """As another thread may do: nothing is learned from it."""
    a, b = pointers()
    with monkeypatch.context() as patch:
        patch.setattr(Launcher, "launch", lambda self, *args: (launch.spec.kernel.device_caches.clear(), self.launches.append(args)))
        assert not launch((1,), a, b, 5, 1e-6)
    assert not launch((1,), a, b, 5, 1e-6)
    assert launch((1,), a, b, 5, 1e-6)


def test_threads_that_launch_at_once(launch):
    a, b = pointers()
    launch((1,), a, b, 5, 1e-6)
    kernel = launch.got[4]
    launch.driver.launches.clear()

    def work(first):
        for i in range(first, first + 200):
            launch.spec.launch((i + 1,), a if i % 2 else b, b if i % 2 else a, i, 1e-6)

    threads = [threading.Thread(target=work, args=(1000 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    launches = {args[15]: args for args in launch.driver.launches}
    assert sorted(launches) == [1000 * i + j for i in range(4) for j in range(200)]
    for i, args in launches.items():
        assert args[0] == i + 1 and args[4] is kernel
        assert args[13:15] == ((a if i % 2 else b).data_ptr(), (b if i % 2 else a).data_ptr())


def test_no_cache_grows_with_every_new_number_of_tokens():
    """Plans are kept by shape, so their number is limited; specs depend on sizes of the model alone."""
    sizes, found = {"tokens", "shape", "rows", "keys", "queries", "groups", "lead"}, []
    for package in OP_PACKAGES:
        for info in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
            if not info.name.endswith("__main__"):
                for name, value in vars(importlib.import_module(info.name)).items():
                    if hasattr(value, "cache_info") and not name.endswith("_spec") and sizes & set(inspect.signature(value).parameters):
                        found.append(name)
                        assert value.cache_info().maxsize is not None, f"{info.name}.{name}"
    assert {"project_plan", "site_plan", "gates_plan"} <= set(found)


def test_scratch_of_a_kernel_is_allocated_at_every_launch(launch, monkeypatch):
    monkeypatch.setattr(Launcher, "global_scratch_size", 64)
    a, b = pointers()
    launch((1,), a, b, 5, 1e-6)
    assert launch((1,), a, b, 6, 1e-6)
    assert launch.got[7] == "scratch" and launch.got[13:17] == (a.data_ptr(), b.data_ptr(), 6, 1e-6)


def test_record_and_forbid_compile_still_work(launch):
    from kernel_runtime import forbid_compile, record

    a, b = pointers()
    with record() as recording:
        launch((1,), a, b, 5, 1e-6)
        assert launch((1,), a, b, 5, 1e-6)
    assert recording.specs == [launch.spec] and not recording.mismatches
    with forbid_compile("error"):
        assert launch((1,), a, b, 5, 1e-6)
        launch.spec.kernel.device_caches.clear()  # as a process that has just started
        assert not launch((1,), a, b, 5, 1e-6)  # from the cache folder
        assert launch((1,), a, b, 5, 1e-6)


def test_kernels_with_several_specialisations_have_no_direct_launch(monkeypatch):
    from kernel_runtime import direct
    from mhc_ops.sinkhorn.fwd import forward_spec

    monkeypatch.setattr(direct, "supported", lambda: True)
    spec = forward_spec(torch.float32, 2, 2, "v4")
    names = list(spec.consts)
    make = lambda types, constants=names: direct.direct_launch(spec.kernel, types, constants, {})  # noqa: E731 - one line four times
    assert make(spec.types) is not None
    assert make(spec.types, names[1:]) is None
    assert make(dict(reversed(spec.types.items()))) is None
    assert make({**spec.types, "T": "i64"}) is None
    (parameter,) = (p for p in spec.kernel.params if p.name == "T")
    monkeypatch.setattr(parameter, "do_not_specialize", False)
    assert make(spec.types) is None


def test_layout_of_scratch():
    layout = Layout((3, torch.float32), (0, torch.bfloat16), (70, torch.bfloat16), (1, torch.float32))
    pieces = layout.allocate(torch.device("cpu"))
    assert [(p.numel(), p.dtype) for p in pieces] == [(3, torch.float32), (0, torch.bfloat16), (70, torch.bfloat16), (1, torch.float32)]
    start = pieces[0].data_ptr()
    assert [p.data_ptr() - start for p in pieces if p.numel()] == [0, ALIGNMENT, 3 * ALIGNMENT]
    for i, piece in enumerate(pieces):
        piece.fill_(i)
    assert [p.unique().tolist() for p in pieces] == [[0], [], [2], [3]]


@pytest.mark.gpu
def test_on_a_gpu_the_results_are_those_of_tritons_path(monkeypatch):
    """Bit for bit, with every launch of the second pass direct, on a stream of its own and under forbid_compile."""
    import mhc_ops
    from kernel_runtime import forbid_compile, record
    from kernel_runtime.direct import supported
    from kernel_runtime.launch import Spec
    from mhc_ops import hopper
    from reference.cases.mhc import MhcShape, make_inputs
    from tests.op_checks import gradients

    if not supported():
        pytest.skip("this version of Triton is launched through its own path")
    inputs = list(make_inputs("hc_post_pre", MhcShape(1, 77, 4, 256), device="cuda").values())
    function = lambda *t: mhc_ops.hc_post_pre(*t, impl="triton")  # noqa: E731 - used twice
    with monkeypatch.context() as patch:
        patch.setattr(Spec, "launch", lambda self, grid, *args: self.kernel[tuple(grid)](*args, **self.keywords))
        want = gradients(function, inputs)
    with record() as recording:
        gradients(function, inputs)
    forward = 2 if hopper.takes(inputs[1], aligned=hopper.FORWARD_ALIGNED) else 3
    assert len(recording.specs) == forward + 3 and not recording.mismatches
    for spec in recording.specs:
        assert spec.direct is not None and spec.direct.known, spec.name
        monkeypatch.setattr(type(spec.kernel), "run", None)  # Triton's path
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()), forbid_compile("error"):
        got = gradients(function, inputs)
    torch.cuda.synchronize()
    for g, w in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
        assert torch.equal(g, w)
