"""Compiles one kernel specialisation to final HIVM for Ascend targets, on a machine with no NPU.

    Triton source -> TTIR (in this process) -> Linalg (triton-adapter-opt) -> HFusion -> HIVM, memory planned (bishengir-compile)

The last tool, `hivmc` (HIVM to object), ships with CANN alone. bishengir-compile calls it, so a stand-in is put on PATH that keeps the
HIVM module it was handed; that module, and not the exit status, is the proof of success.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from kernel_runtime.ascend import hivm

HIVMC = """#!/bin/sh
# Stand-in for CANN's hivmc: keeps the HIVM module. It makes no kernel.
[ "$1" = "--version" ] && { echo "hivmc 1.2.0 (000000000000 2026-01-01)"; exit 0; }
cp "$1" "$KEEP_HIVM"
"""
# what Triton-Ascend's own driver passes on: option of the kernel -> flag of bishengir-compile
FLAGS = {
    "multibuffer": "enable-auto-multi-buffer",
    "enable_auto_bind_sub_block": "enable-auto-bind-sub-block",
    "enable_hivm_auto_cv_balance": "enable-hivm-auto-cv-balance",
    "sync_solver": "enable-hivm-graph-sync-solver",
    "unit_flag": "enable-hivm-unit-flag-sync",
    "inject_barrier_all": "enable-hivm-inject-barrier-all-sync",
    "inject_block_all": "enable-hivm-inject-block-all-sync",
    "disable_auto_inject_block_sync": "disable-auto-inject-block-sync",
    "limit_auto_multi_buffer_only_for_local_buffer": "limit-auto-multi-buffer-only-for-local-buffer",
    "limit_auto_multi_buffer_of_local_buffer": "limit-auto-multi-buffer-of-local-buffer",
    "set_workspace_multibuffer": "set-workspace-multibuffer",
    "tile_mix_vector_loop": "tile-mix-vector-loop",
    "tile_mix_cube_loop": "tile-mix-cube-loop",
}


@dataclass
class Result:
    """stage is the last one reached: none, ttir, linalg, hivm. core is aiv (vector) or mix (cube and vector)."""

    stage: str = "none"
    error: str = ""
    seconds: float = 0.0
    core: str = ""
    report: hivm.Report | None = None


class CompileError(Exception):
    pass


def _ttir_and_linalg(spec: Any, arch: str, result: Result) -> tuple[str, Any]:
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend

    target = GPUTarget("npu", arch, 0)
    backend = make_backend(target)
    known = type(backend.parse_options({})).__dataclass_fields__
    if unknown := sorted(set(spec.ascend_options) - set(known)):
        raise CompileError(f"options {', '.join(unknown)} are unknown to Triton-Ascend, which refuses them at launch")
    options = backend.parse_options(spec.ascend_options)
    # exactly what a launch with 16-byte aligned tensors specialises on
    marks = [_Aligned() if spec.types.get(p.name, "").startswith("*") else None for p in spec.kernel.params]
    attrs = backend.get_attrs_descriptor(spec.kernel.params, [m or 0.5 for m in marks])
    source = ASTSource(spec.kernel, dict(spec.types), dict(spec.consts), attrs)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options)
    metadata = {"target": target, **options.__dict__, "hash": "0"}
    try:
        module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
        module = stages["ttir"](module, metadata)
    except Exception as error:  # Triton raises many types; the gate reports whatever it is
        raise CompileError(f"{type(error).__name__}: {error}" + (f" <- {error.__cause__}" if error.__cause__ else "")) from error
    result.stage = "ttir"
    try:
        linalg = stages["ttadapter"](module, metadata)
    except subprocess.CalledProcessError as error:
        stderr = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else str(error.stderr)
        raise CompileError(f"triton-adapter-opt failed: {_errors(stderr)}") from error
    result.stage = "linalg"
    core = re.search(r'mix_mode\s*=\s*"([^"]+)"', linalg)
    result.core = core[1] if core else ""
    return re.sub(r', mix_mode\s*=\s*"[^"]*"', "", linalg), options


class _Aligned:
    @staticmethod
    def data_ptr() -> int:
        return 16


def _errors(log: str) -> str:
    lines = [re.sub(r'loc\("[^"]*":(\d+):\d+\)', r"line \1", line) for line in log.splitlines() if "error:" in line]
    lines = [line for line in lines if "run BiShengHIR pipeline" not in line]
    return " | ".join(dict.fromkeys(lines)) or log[-600:].strip() or "no message"


def compile_to_hivm(
    spec: Any, targets: Sequence[str], compilers: Mapping[str, Path], timeout: float = 300.0, keep: Path | None = None
) -> dict[tuple[str, str], Result]:
    """(target, compiler) -> Result for `spec`; `compilers` are package folders of ascendnpu-ir by version.

    Triton's front end runs once, as it does not depend on either. The solver that places synchronisation in newer compilers takes most of
    the time for a long kernel, so it runs for the first target, and the other targets get the older algorithm, the only one of 1.0.0. A
    failure is in `error`; nothing is raised for a kernel that does not compile. `keep` is a folder for the HIVM modules.
    """
    front, start = Result(), time.perf_counter()
    linalg, options = "", None
    try:
        linalg, options = _ttir_and_linalg(spec, targets[0], front)
    except CompileError as error:
        front.error = str(error)
    front.seconds = time.perf_counter() - start
    results = {}
    for target in targets:
        for name, folder in compilers.items():
            result = replace(front)
            if not front.error:
                start = time.perf_counter()
                try:
                    text = _run_bishengir(linalg, options, target, folder, timeout, solve=target == targets[0])
                    result.stage = "hivm"
                    if keep is not None:
                        (keep / f"{spec.name}-{abs(hash(spec.identity)):x}-{target}-{name}.hivm.mlir").write_text(text)
                    result.report = hivm.read(text, list(spec.types))
                    _check_hivm(result.report, folder)
                except CompileError as error:
                    result.error = str(error)
                result.seconds = time.perf_counter() - start
            results[target, name] = result
    return results


@cache
def _has_solver(compiler: Path) -> bool:
    told = subprocess.run([str(compiler / "bin" / "bishengir-compile"), "--help"], capture_output=True, text=True, errors="replace")
    return FLAGS["sync_solver"] in told.stdout


def _run_bishengir(linalg: str, options: Any, arch: str, compiler: Path, timeout: float, solve: bool) -> str:
    with tempfile.TemporaryDirectory() as folder:
        source, kept, tools = Path(folder, "kernel.mlir"), Path(folder, "kept.mlir"), Path(folder, "tools")
        source.write_text(linalg)
        tools.mkdir()
        (tools / "hivmc").write_text(HIVMC)
        (tools / "hivmc").chmod(0o755)
        passed = [(flag, getattr(options, name, None)) for name, flag in FLAGS.items()]
        if not solve and getattr(options, "sync_solver", None) is None and _has_solver(compiler):
            passed.append((FLAGS["sync_solver"], False))
        command = [
            str(compiler / "bin" / "bishengir-compile"), str(source), f"--target={arch}",
            *(f"--{flag}={value}" for flag, value in passed if value is not None),
            "--enable-hfusion-compile=true", "--enable-hivm-compile=true", "--enable-triton-kernel-compile=true",
            "--mlir-disable-threading",  # its threads crash now and then
            "-o", str(Path(folder, "kernel")),
        ]  # fmt: skip
        env = dict(os.environ, KEEP_HIVM=str(kept), PATH=f"{tools}:{os.environ['PATH']}")
        try:
            run = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout, env=env, cwd=folder)
        except subprocess.TimeoutExpired as error:
            raise CompileError(f"bishengir-compile gave no result in {timeout:.0f} s") from error
        if not kept.exists() or not kept.stat().st_size:
            if run.returncode < 0:
                raise CompileError(f"bishengir-compile crashed (signal {-run.returncode})")
            raise CompileError(f"bishengir-compile (status {run.returncode}): {_errors(run.stdout + run.stderr)}")
        return kept.read_text()


def _check_hivm(report: hivm.Report, compiler: Path) -> None:
    for memory, used in report.planned.items():
        if used > report.limits.get(memory, used):
            raise CompileError(f"{memory} overflows: {used} bytes planned, {report.limits[memory]} available")
    if report.inline_asm:
        raise CompileError("inline assembly cannot be assembled for Ascend")
    bitcode = [p.read_bytes() for p in sorted((compiler / "lib").glob("meta_op.*.bc"))] if (compiler / "lib").exists() else []
    if bitcode:  # 1.0.0 ships none
        missing = sorted(n for n in report.externals if not any(n.encode() in raw for raw in bitcode))
        if missing:
            raise CompileError(f"functions that the runtime library does not have: {', '.join(missing)}")
