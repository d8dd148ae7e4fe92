"""python -m kernel_runtime.env: what a bug report needs. Also finds an installation in which triton and triton-ascend are mixed."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

DISTRIBUTIONS = ("torch", "triton", "triton-ascend", "pytorch-triton", "torch_npu", "numpy", "transformers", "v4-triton-ops")
VARIABLES = ("TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_INTERPRET", "TRITON_ALWAYS_COMPILE", "TRITON_DEBUG", "TRITON_PTXAS_PATH",
             "TORCH_DEVICE_BACKEND_AUTOLOAD", "CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "ASCEND_HOME_PATH")  # fmt: skip


def installed() -> dict[str, str]:
    """Distribution -> version of those that matter and are installed."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _triton_folder() -> Path | None:
    spec = importlib.util.find_spec("triton")
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


def triton_problems(versions: dict[str, str], folder: Path | None) -> list[str]:
    """What is wrong with the Triton installation, each with the way out; empty if nothing.

    `triton` and `triton-ascend` install the same import package: the later one overwrites files of the earlier, and removing either
    leaves holes.
    """
    problems = []
    plain = versions.get("triton") or versions.get("pytorch-triton")
    ascend = versions.get("triton-ascend")
    way_out = "remove both (pip uninstall -y triton triton-ascend), then install one: '.[cuda]' or '.[ascend]'"
    if plain and ascend:
        problems.append(f"triton {plain} and triton-ascend {ascend} are both installed and overwrite each other's files; {way_out}")
    if folder is None:
        if plain or ascend:
            problems.append(f"triton is listed as installed but cannot be imported; {way_out}")
        return problems
    backends = folder / "backends"
    present = {p.name for p in backends.iterdir() if p.is_dir() and (p / "compiler.py").exists()} if backends.is_dir() else set()
    if not present:
        problems.append(f"{folder} has no backend, so no kernel can be compiled; {way_out}")
    if "ascend" in present and present & {"nvidia", "amd"}:
        problems.append(f"{folder} holds backends of both distributions ({', '.join(sorted(present))}); {way_out}")
    if ascend and not plain and present and "ascend" not in present:
        problems.append(f"triton-ascend {ascend} is installed but its backend is gone from {folder}; {way_out}")
    if plain and not ascend and "ascend" in present:
        problems.append(f"files of triton-ascend are left in {folder}; {way_out}")
    if not (folder / "_C").is_dir() or not any((folder / "_C").glob("libtriton*")):
        problems.append(f"{folder} lacks its compiled library; {way_out}")
    return problems


def _guarded(call: Callable[[], Any]) -> Any:
    """A report must not end in a traceback: what cannot be found out is said."""
    try:
        return call()
    except Exception as error:
        return f"not available ({type(error).__name__}: {error})"


def _devices() -> list[str]:
    import torch

    if not torch.accelerator.is_available():
        return ["none: CPU"]
    kind = torch.accelerator.current_accelerator().type  # type: ignore[union-attr]  # None only where is_available() is False
    module = torch.get_device_module(kind)
    lines = []
    for index in range(torch.accelerator.device_count()):
        capability = f", capability {'.'.join(map(str, module.get_device_capability(index)))}" if kind == "cuda" else ""
        lines.append(f"{kind}:{index} {module.get_device_name(index)}{capability}")
    if kind == "cuda":
        lines.append(f"CUDA {torch.version.cuda}, HIP {torch.version.hip}")
    return lines


def _cache() -> dict[str, Any]:
    from kernel_runtime import cache

    folder = cache.default_folder()
    entries = [p for p in folder.iterdir() if p.is_dir() and not p.name.startswith(".")] if folder.is_dir() else []
    problem = cache.why_not_writable(folder) if folder.is_dir() else "does not exist yet"
    return {"folder": str(folder), "entries": len(entries), "writable": problem or "yes"}


def _launches() -> str:
    from kernel_runtime.replay import unavailable

    reason = unavailable()
    return f"by Triton alone, which takes more host time: {reason}" if reason else "direct, and replayed where a call comes again"


def report() -> dict[str, Any]:
    """The report as plain data."""
    versions = installed()
    variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    return {
        "python": f"{platform.python_version()} {sys.executable}",
        "system": f"{platform.platform()}, {os.cpu_count()} cores",
        "versions": versions,
        "triton": str(_guarded(_triton_folder)),
        "devices": _guarded(_devices),
        "launches": _guarded(_launches),
        "cache": _guarded(_cache),
        "variables": variables,
        "problems": _guarded(lambda: triton_problems(versions, _triton_folder())),
    }


def main(argv: list[str] | None = None) -> int:
    """Prints the report; exit status 1 if the Triton installation is broken."""
    parser = argparse.ArgumentParser(prog="python -m kernel_runtime.env", description="Print what a bug report needs.")
    parser.add_argument("--json", action="store_true", help="as JSON")
    args = parser.parse_args(argv)
    data = report()
    if args.json:
        print(json.dumps(data, indent=1))
    else:
        for name, value in data.items():
            if isinstance(value, dict):
                value = ", ".join(f"{k} {v}" for k, v in value.items())
            elif isinstance(value, list):
                value = "\n".join(value) if name == "problems" else "; ".join(value)
            print(f"{name + ':':<12}{value or 'none'}")
    return 1 if data["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
