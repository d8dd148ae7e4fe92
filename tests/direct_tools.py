"""What the tests of direct launches and replays share: a driver that records in place of starting, and calls of a boundary's launchers.

A plugin of conftest.py, so that its fixtures are known.
"""

import importlib
import itertools

import pytest
import torch

from kernel_runtime import replay
from kernel_runtime.workspace import Piece
from tests.warmup_tools import fake_driver

FOLDERS = ("bmm", "boundary", "gates", "head", "post", "pre", "project", "sinkhorn")
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


@pytest.fixture(scope="session")
def kernels(tmp_path_factory):
    """Triton's cache folder: every kernel is compiled once"""
    return tmp_path_factory.mktemp("kernels")


def forget(modules):
    """Specs that were asked already whether they can be launched directly, and kernels of another driver"""
    for value in [value for name in modules for value in vars(importlib.import_module(name)).values()]:
        if hasattr(value, "cache_clear"):
            value.cache_clear()
        if hasattr(value, "device_caches"):
            value.device_caches.clear()


@pytest.fixture
def driver(monkeypatch, kernels):
    from triton.backends.compiler import GPUTarget

    from kernel_runtime import direct

    monkeypatch.setenv("TRITON_CACHE_DIR", str(kernels))
    monkeypatch.setattr(direct, "supported", lambda: True)
    monkeypatch.setattr(direct, "_device", lambda: 0, raising=False)
    monkeypatch.setattr(direct, "_stream", lambda device: 0)
    modules = [f"mhc_ops.{name}.{part}" for name in FOLDERS for part in ("fwd", "bwd")]
    forget(modules)
    with fake_driver(GPUTarget("cuda", 90, 32)) as driver:
        functions = itertools.count(1)
        driver.load_binary = lambda *args: (object(), next(functions), 32, 0, 1024)
        driver.launcher_cls = lambda src, metadata: Launcher(driver.launches)
        yield driver
    forget(modules)


def boundary(tokens, pre_mix):
    from mhc_ops.boundary.bwd import post_pre_bwd
    from mhc_ops.boundary.fwd import post_pre_fwd

    f, x, post, comb = torch.zeros(tokens, D), torch.zeros(tokens, N, D), torch.zeros(tokens, N), torch.zeros(tokens, N, N)
    site = torch.zeros(M, N * D), torch.zeros(3), torch.zeros(M), torch.zeros(tokens, N) if pre_mix else None
    options = 2, 1e-6, 1e-6, "v4"
    streams, y, pre, post_out, comb_out, mixes, rstd = post_pre_fwd(f, x, post, comb, *site, *options)
    grads = streams, y, pre if pre_mix else None, post_out, comb_out
    post_pre_bwd(*grads, f, x, post, comb, streams, *site, mixes, rstd, *options)


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
