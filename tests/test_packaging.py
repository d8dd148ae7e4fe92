"""The wheel holds the five packages and nothing else; importing them touches no device, prints nothing and needs no Triton; the README's
examples run as they stand."""

import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"mhc_ops", "sparse_attn", "indexer", "reference", "kernel_runtime"}
OP_PACKAGES = ("mhc_ops", "sparse_attn", "indexer")


def test_wheel_holds_the_five_packages(tmp_path):
    """Built from a copy: setuptools leaves build/lib where it builds, and would put a file that is gone since into the next wheel."""
    leftovers = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "runs", "*.egg-info")
    source = shutil.copytree(ROOT, tmp_path / "source", ignore=leftovers)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, source]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    top = {n.split("/", 1)[0] for n in names}
    assert {t for t in top if not t.endswith(".dist-info")} == PACKAGES
    assert {f"{p}/py.typed" for p in PACKAGES} <= set(names)
    sources = {str(f.relative_to(ROOT)) for p in PACKAGES for f in (ROOT / p).rglob("*.py")}
    assert {n for n in names if n.endswith(".py")} == sources


def test_import_touches_no_device_and_prints_nothing():
    code = (
        f"import {', '.join(sorted(PACKAGES))}, torch, sys\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert 'triton' not in sys.modules, 'importing the packages imported triton'\n"
        "assert 'torch_npu' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def readme_examples():
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)


def test_readme_has_examples():
    assert readme_examples()


@pytest.mark.parametrize("code", readme_examples())
def test_readme_examples_run(code, tmp_path):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0 and not run.stderr, run.stdout + run.stderr


@pytest.mark.parametrize("package", OP_PACKAGES)
def test_public_names(package):
    module = importlib.import_module(package)
    assert module.__all__ == sorted(module.__all__)
    for name in module.__all__:
        assert getattr(module, name).__doc__, f"{package}.{name} has no docstring"


def test_ops_packages_do_not_import_each_other():
    for package in OP_PACKAGES:
        others = [p for p in OP_PACKAGES if p != package]
        for file in (ROOT / package).rglob("*.py"):
            for line in file.read_text().splitlines():
                words = line.split()
                if words[:1] in (["import"], ["from"]):
                    assert words[1].split(".")[0] not in others, f"{file.relative_to(ROOT)}: {line.strip()}"


def test_kernels_do_not_import_the_reference():
    for package in OP_PACKAGES:
        for name in ("fwd.py", "bwd.py", "core.py"):
            for file in (ROOT / package).rglob(name):
                assert "reference" not in file.read_text().replace("reference/", ""), f"{file.relative_to(ROOT)} mentions the reference"


def test_extras_exclude_each_other():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert not any("ascend" in r for r in extras["cuda"])
    assert not any(r.split("=")[0].strip() == "triton" for r in extras["ascend"])
