"""Compilation targets by name, what a compiled kernel uses on one, and the host-side launchers that Triton compiles too. Imports Triton."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from kernel_runtime.cache import STORAGE_ERRORS, binary_damage, entry_folder
from kernel_runtime.launch import CUDA_SMEM_LIMIT

TENSOR_COLUMNS = 512  # of tensor memory, on the NVIDIA architectures that have it
HIP_SHARED_LIMIT = {"gfx942": 64 * 1024, "gfx950": 160 * 1024}
EXTENSION = {"cuda": "cubin", "hip": "hsaco", "npu": "npubin"}


def parse_target(name: str) -> GPUTarget:
    """GPUTarget of "sm_90", "gfx942" or "Ascend910B3". ValueError for another form, and for an NVIDIA architecture that Triton does not know,
    on which its compiler ends the process."""
    if found := re.fullmatch(r"sm_?(\d{2,3})a?", name):
        if int(found[1]) not in CUDA_SMEM_LIMIT:
            raise ValueError(f"unknown target {name!r}, wanted one of {', '.join(f'sm_{arch}' for arch in sorted(CUDA_SMEM_LIMIT))}")
        return GPUTarget("cuda", int(found[1]), 32)
    if re.fullmatch(r"gfx[0-9a-f]{3,4}", name):
        return GPUTarget("hip", name, 32 if name.startswith(("gfx10", "gfx11", "gfx12")) else 64)
    if name.startswith("Ascend"):
        return GPUTarget("npu", name, 0)
    raise ValueError(f"unknown target {name!r}, wanted for example sm_90, gfx942 or Ascend910B3")


def target_name(target: GPUTarget) -> str:
    return f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch)


def shared_limit(target: GPUTarget) -> int | None:
    """Bytes of shared memory that one program may use, None where unknown."""
    table: dict[Any, int] = CUDA_SMEM_LIMIT if target.backend == "cuda" else HIP_SHARED_LIMIT
    return table.get(target.arch)


@dataclass(frozen=True)
class Resources:
    """Of one program: registers a thread, bytes (CUDA) or registers (AMD) spilled a thread, bytes of shared memory, columns of tensor memory."""

    registers: int | None
    spills: int | None
    shared: int
    columns: int = 0

    def excess(self, target: GPUTarget) -> str:
        """What the target has less of than a program needs; empty if it fits. A kernel beyond it compiles, and cannot be launched."""
        limit = shared_limit(target)
        if limit is not None and self.shared > limit:
            return f"{self.shared} bytes of shared memory, the target has {limit}"
        return f"{self.columns} columns of tensor memory, the target has {TENSOR_COLUMNS}" if self.columns > TENSOR_COLUMNS else ""


def resources(kernel: Any) -> Resources:
    """Reads a compiled kernel's binary; no device is needed."""
    target = kernel.metadata.target
    if target.backend == "hip":
        text = kernel.asm["amdgcn"]
        counts = {n: int(v) for n, v in re.findall(r"\.(vgpr_count|vgpr_spill_count|sgpr_spill_count):\s+(\d+)", text)}
        spilled = counts.get("vgpr_spill_count", 0) + counts.get("sgpr_spill_count", 0)
        return Resources(counts.get("vgpr_count"), spilled, kernel.metadata.shared)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True).stdout
    found = {n: int(v) for n, v in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    spills = found["STACK"] + found.get("LOCAL", 0) if "STACK" in found else None
    return Resources(found.get("REG"), spills, kernel.metadata.shared, getattr(kernel.metadata, "tmem_size", None) or 0)


def host_modules(source: Any, target: GPUTarget) -> list[tuple[str, str]]:
    """(name, C source) of what Triton compiles for the host when it first loads a kernel for NVIDIA: the launcher of its signature, and a
    helper module of all."""
    if target.backend != "cuda":
        return []
    from triton.backends.nvidia import driver

    constants = {(source.fn.arg_names.index(k),) if isinstance(k, str) else k: v for k, v in source.constants.items()}
    launcher = driver.make_launcher(constants, dict(source.signature.items()), None)  # no kernel here takes a descriptor as an argument
    return [("__triton_launcher", launcher), ("cuda_utils", _helper(driver.dirname))]


@cache
def _helper(folder: str) -> str:
    return Path(folder, "driver.c").read_text()


def _place(name: str, source: str) -> tuple[str, str]:
    """Key and file of a module, as triton.runtime.build.compile_module_from_src has them. The file's name holds the version of Python."""
    from triton.runtime.build import platform_key

    return hashlib.sha256((source + platform_key()).encode("utf-8")).hexdigest(), f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"


def host_module_missing(source: Any, target: GPUTarget, folder: Path) -> str:
    """Which of a kernel's C modules `folder` lacks and why; empty if none, so that its first launch calls no C compiler."""
    for name, text in host_modules(source, target):
        key, file = _place(name, text)
        path = entry_folder(folder, key) / file
        try:
            reason = binary_damage(path.read_bytes())
        except OSError:
            others = sorted(p.name for p in path.parent.glob(f"{name}.*")) if path.parent.is_dir() else []
            reason = f"there is only {', '.join(others)}" if others else "is not there"
        if reason:
            return f"its C module {file}: {reason}"
    return ""


def build_launcher(source: Any, target: GPUTarget, lock: Callable[[str], AbstractContextManager[Any]]) -> str:
    """Puts the C modules of a kernel's source into the cache folder; returns a warning or "".

    Without a driver here they are linked against an empty library of the driver's name, which is how the real one is found where the cache
    is used. `lock` gives the lock of a name: each is built once, and different ones at the same time (a third of a second each, as long as
    many kernels take).
    """
    try:
        for name, text in host_modules(source, target):
            _build_module(text, name, lock)
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        if isinstance(error, OSError) and error.errno in STORAGE_ERRORS:
            raise
        return f"launchers are not in the cache and will be compiled at the first launch: {error}"
    return ""


def _build_module(source: str, name: str, lock: Callable[[str], AbstractContextManager[Any]]) -> None:
    """What triton.runtime.build.compile_module_from_src does, with the same key, but without loading the result; a damaged one is replaced."""
    from triton.backends.nvidia import driver
    from triton.runtime.build import _build
    from triton.runtime.cache import get_cache_manager

    key, file = _place(name, source)
    manager = get_cache_manager(key)

    def whole() -> bool:
        path = manager.get_file(file)
        return path is not None and not binary_damage(Path(path).read_bytes())

    if whole():
        return
    with lock(key), tempfile.TemporaryDirectory() as folder:
        if whole():  # another process had the lock
            return
        try:
            libraries = driver.library_dirs()
        except (AssertionError, OSError, subprocess.CalledProcessError):  # no driver on this machine
            libraries = [driver.libdevice_dir, _empty_library(folder, "libcuda.so.1")]
        path = os.path.join(folder, f"{name}.c")
        Path(path).write_text(source)
        built = _build(name, path, folder, libraries, driver.include_dirs, driver.libraries, [])
        manager.put(Path(built).read_bytes(), file, binary=True)


def _empty_library(folder: str, name: str) -> str:
    compiler = os.environ.get("CC", "cc")
    command = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{name}", "-x", "c", os.devnull, "-o", os.path.join(folder, name)]
    subprocess.run(command, check=True, capture_output=True)
    return folder
