"""Launches without Triton's binding of arguments: what reaches the compiled kernel, and what takes Triton's own path. No device needed."""

import pytest
import torch

from kernel_runtime import interpreting
from kernel_runtime.workspace import ALIGNMENT, Layout, Piece
from tests.warmup_tools import fake_driver

pytestmark = pytest.mark.skipif(interpreting(), reason="under TRITON_INTERPRET=1 kernels are Python functions; nothing is launched")


class Pointer(Piece):
    """A tensor's memory, said to be on device 0"""

    def __init__(self, tensor, offset=0):
        super().__init__(tensor, tensor.data_ptr() + offset * tensor.element_size(), tensor.dtype)

    def get_device(self):
        return 0


class Launch:
    """Calls of the compiled kernel by the two paths; `direct` says which it was"""

    def __init__(self, spec, driver):
        self.spec, self.driver, self.through_triton = spec, driver, 0
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
        if self.narrow and any(isinstance(a, int) and not -(2**31) <= a < 2**31 for a in args[15:16]):
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
    assert len(recording.specs) == 6 and not recording.mismatches
    for spec in recording.specs:
        assert spec.direct is not None and spec.direct.known, spec.name
        monkeypatch.setattr(type(spec.kernel), "run", None)  # Triton's path
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()), forbid_compile("error"):
        got = gradients(function, inputs)
    torch.cuda.synchronize()
    for g, w in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
        assert torch.equal(g, w)
