"""Helpers of the warmup tests: a Triton driver without a device, and small plans."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "i32": torch.int32, "i64": torch.int64, "i8": torch.int8,
          "u8": torch.uint8, "i16": torch.int16, "i1": torch.bool, "fp64": torch.float64}  # fmt: skip


class FakeDriver:
    """Enough of a driver for Triton's launch path: kernels are specialised, compiled and "loaded", and a launch is only counted."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.launches: list[tuple[Any, ...]] = []
        self.launcher_cls = lambda src, metadata: lambda *args: self.launches.append(args)
        self.utils = self

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 * 1024}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, Any, int, int, int]:
        return object(), 1, 32, 0, 1024


@contextlib.contextmanager
def fake_driver(target: Any) -> Iterator[FakeDriver]:
    """Triton sees a device of `target` inside the block."""
    import triton

    driver = FakeDriver(target)
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(driver)
    try:
        yield driver
    finally:
        triton.runtime.driver._active = before


@contextlib.contextmanager
def cache_folder(path: Path) -> Iterator[Path]:
    """Triton's cache folder is `path` inside the block."""
    before = os.environ.get("TRITON_CACHE_DIR")
    os.environ["TRITON_CACHE_DIR"] = str(path)
    try:
        yield path
    finally:
        if before is None:
            del os.environ["TRITON_CACHE_DIR"]
        else:
            os.environ["TRITON_CACHE_DIR"] = before


def forget(plan: Any) -> None:
    """Empties the launch tables in memory, as in a process that has just started."""
    for _, spec in plan:
        spec.kernel.device_caches.clear()


def small_plan(sizes: tuple[int, ...] = (2, 4)) -> Any:
    """Two kernels a size that compile in well under a second each."""
    from kernel_runtime.plan import Plan
    from mhc_ops.sinkhorn.bwd import backward_spec
    from mhc_ops.sinkhorn.fwd import forward_spec

    specs = [make(torch.float32, n, 3, "v4") for n in sizes for make in (forward_spec, backward_spec)]
    return Plan.of(("mhc_ops.sinkhorn", spec) for spec in specs)


def arguments(spec: Any, integer: int) -> list[Any]:
    """Run-time arguments as a launcher would pass them: tensors, one integer for all lengths, floats."""
    made: list[Any] = []
    for kind in spec.types.values():
        if kind.startswith("*"):
            made.append(torch.empty(64, dtype=DTYPES[kind[1:]]))
        else:
            made.append(0.5 if "fp" in kind else integer)
    return made


def run_python(code: str, **env: str) -> subprocess.CompletedProcess:
    """Runs `code` in a fresh interpreter from the checkout."""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT / "tests") + ":" + str(ROOT), **env},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def in_mount(command: list[str], mount: Path, options: str, prepare: str = "true") -> subprocess.CompletedProcess:
    """Runs `command` in a mount namespace where `mount` is a tmpfs with `options`; `prepare` is a shell command run before it."""
    script = f'mount -t tmpfs -o {options} tmpfs "{mount}" && {prepare} && exec "$@"'
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tests") + ":" + str(ROOT), "TMPDIR": str(mount.parent)}
    inside = ["unshare", "-rm", "sh", "-c", script, "sh", *command]
    return subprocess.run(inside, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


def mounts_possible() -> bool:
    if shutil.which("unshare") is None:
        return False
    probe = subprocess.run(["unshare", "-rm", "sh", "-c", "mount -t tmpfs tmpfs /mnt"], capture_output=True)
    return probe.returncode == 0
