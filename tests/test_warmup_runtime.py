"""The run-time side without a device: a stand-in NPU backend executes the dispatch code, device properties, the environment report."""

import json
import subprocess
import sys

import pytest

from kernel_runtime.device import device_properties
from kernel_runtime.env import triton_problems
from tests.warmup_tools import ROOT, run_python

# A PrivateUse1 backend in Python: tensors that call themselves npu, with no memory. It proves which code runs, not what it computes.
FAKE_NPU = """
import os, sys, types
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

class Properties:
    name, cube_core_num, vector_core_num = "Fake910", 24, 48

class Module:
    current, entered = 0, []
    def is_available(self): return True
    def _is_in_bad_fork(self): return False
    def current_device(self): return self.current
    def device_count(self): return 2
    def get_device_properties(self, device): return Properties
    def device(self, device):
        import contextlib
        self.entered.append(str(device))
        return contextlib.nullcontext()

module = Module()
_setup_privateuseone_for_python_backend("npu", backend_module=module)
assert "torch_npu" not in sys.modules

class NpuTensor(torch.Tensor):
    @staticmethod
    def __new__(cls, shape, dtype=torch.float32, index=0):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=f"npu:{index}")
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func.namespace != "aten":
            return NotImplemented
        found = [a for a in args if isinstance(a, NpuTensor)][0]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return NpuTensor(tuple(found.shape), found.dtype, found.device.index)
        raise RuntimeError(f"{func} has no kernel on the stand-in")
"""


def test_npu_tensors_reach_the_registered_op():
    """select_impl takes the kernel for an npu tensor, the op's PrivateUse1 implementation runs, switches device and calls the launcher."""
    result = run_python(
        FAKE_NPU
        + """
import kernel_runtime.ops
from kernel_runtime import OpLibrary, select_impl
calls = []
launcher = types.ModuleType("fake_launcher")
def launch(x, factor):
    calls.append((str(x.device), factor, list(module.entered)))
    return NpuTensor(tuple(x.shape), x.dtype, x.device.index)
launcher.launch = launch
sys.modules["fake_launcher"] = launcher
op = OpLibrary("fake_npu_test").register(
    "scale(Tensor x, int factor, str impl) -> Tensor", fake=lambda x, factor: torch.empty_like(x), eager=lambda x, factor: x * factor,
    triton="fake_launcher:launch",
)
x = NpuTensor((2, 3), index=1)
assert select_impl("scale", "auto", x) == "triton" and select_impl("scale", "eager", x) == "eager"
names = torch._C._dispatch_dump("fake_npu_test::scale")
assert "PrivateUse1:" in names, names
with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Python)):
    y = op(x, 3, select_impl("scale", "auto", x))
assert calls and calls[0][:2] == ("npu:1", 3), calls
assert calls[0][2] == ["npu:1"], "the current device is npu:0, so the op must switch"
assert tuple(y.shape) == (2, 3)
assert "torch_npu" not in sys.modules
"""
    )
    assert result.returncode == 0, result.stderr


def test_npu_device_properties():
    result = run_python(
        FAKE_NPU
        + """
from kernel_runtime.device import device_properties
p = device_properties("npu")
assert (p.name, p.vector_cores, p.cube_cores) == ("Fake910", 48, 24), p
del Properties.cube_core_num  # an older torch_npu: Triton-Ascend's table is asked
import triton
class Driver:
    class utils:
        get_device_properties = staticmethod(lambda index: {"num_aicore": 20, "num_vectorcore": 40})
triton.runtime.driver.set_active(Driver())
p = device_properties("npu:1")
assert (p.vector_cores, p.cube_cores) == (40, 20), p
"""
    )
    assert result.returncode == 0, result.stderr


def test_cpu_device_properties():
    assert device_properties("cpu").vector_cores == 1
    with pytest.raises(RuntimeError, match="no kernels for device type 'meta'"):
        device_properties("meta:0")


@pytest.fixture
def triton_folder(tmp_path):
    def make(*backends, library=True):
        for name in backends:
            (tmp_path / "backends" / name).mkdir(parents=True, exist_ok=True)
            (tmp_path / "backends" / name / "compiler.py").touch()
        if library:
            (tmp_path / "_C").mkdir(exist_ok=True)
            (tmp_path / "_C" / "libtriton.so").touch()
        return tmp_path

    return make


def test_sound_installations(triton_folder):
    assert not triton_problems({"triton": "3.6.0"}, triton_folder("nvidia", "amd"))
    assert not triton_problems({}, None)


@pytest.mark.parametrize(
    ("versions", "backends", "library", "part"),
    [
        ({"triton": "3.6.0", "triton-ascend": "3.2.0"}, ("ascend",), True, "both installed"),
        ({"triton-ascend": "3.2.0"}, ("ascend", "nvidia"), True, "backends of both"),
        ({"triton-ascend": "3.2.0"}, ("nvidia",), True, "its backend is gone"),
        ({"triton": "3.6.0"}, ("ascend",), True, "are left in"),
        ({"triton": "3.6.0"}, ("nvidia",), False, "lacks its compiled library"),
        ({"triton": "3.6.0"}, (), True, "has no backend"),
    ],
)
def test_broken_installations_are_named_with_the_way_out(triton_folder, versions, backends, library, part):
    problems = triton_problems(versions, triton_folder(*backends, library=library))
    assert any(part in p for p in problems), problems
    assert all("pip uninstall -y triton triton-ascend" in p for p in problems)


def test_uninstalled_files_are_noticed():
    assert "cannot be imported" in triton_problems({"triton": "3.6.0"}, None)[0]


def test_environment_report():
    run = subprocess.run([sys.executable, "-m", "kernel_runtime.env", "--json"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    data = json.loads(run.stdout)
    assert "torch" in data["versions"] and data["devices"] and data["cache"]["folder"] and data["problems"] == []
