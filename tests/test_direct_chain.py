"""The host side of a boundary in both directions, over shapes that come again: every direct launch is the one that Triton would make."""

import itertools

import pytest
import torch

from kernel_runtime import interpreting
from tests.warmup_tools import fake_driver

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


@pytest.fixture
def driver(monkeypatch, tmp_path):
    from triton.backends.compiler import GPUTarget

    from kernel_runtime import direct
    from mhc_ops.boundary import bwd, fwd
    from mhc_ops.pre import bwd as pre_bwd
    from mhc_ops.pre import fwd as pre_fwd
    from mhc_ops.project import bwd as project_bwd
    from mhc_ops.project import fwd as project_fwd

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(direct, "supported", lambda: True)
    monkeypatch.setattr(direct, "_device", lambda: 0, raising=False)
    monkeypatch.setattr(direct, "_stream", lambda device: 0)
    values = [v for m in (fwd, bwd, pre_fwd, pre_bwd, project_fwd, project_bwd) for v in vars(m).values()]

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
