"""Keys of Triton's cache: the same in every process, whatever kernel is used first."""

import ast
import subprocess
import sys

import pytest

from kernel_runtime import interpreting
from tests.warmup_tools import ROOT

KEYS = """
import sys
from triton.language import constexpr
from kernel_runtime import launch
from kernel_runtime.plan import load_plan

settle, launch.settle = launch.settle, lambda kernel: None  # a Spec settles its kernel when it is made, in the plan's order every time
entries = [spec for _, spec in load_plan("tiny")]
for spec in entries[:: int(sys.argv[1])]:
    settle(spec.kernel)
    used = {(name, str(value)) for (name, _), (value, _) in spec.kernel.used_global_vals.items() if isinstance(value, constexpr)}
    assert len(used) == len({name for name, _ in used}), f"{spec.name}: the key orders constants of one name in two modules by address"
print("\\n".join(sorted({f"{spec.kernel.__module__} {spec.name} {spec.kernel.cache_key}" for spec in entries})))
"""


@pytest.mark.skipif(interpreting(), reason="under TRITON_INTERPRET=1 kernels are Python functions; they have no keys")
def test_keys_do_not_depend_on_what_is_used_first():
    """Kernels in the order of the plan and in the opposite one, in a process each: a constant of a helper once was in the key of the later
    of its two callers alone."""
    processes = [
        subprocess.Popen([sys.executable, "-c", KEYS, step], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for step in ("1", "-1")
    ]
    (first, error), (second, _) = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], error
    assert len(first.splitlines()) > 20 and first == second


def _is_device(function):
    return any("jit" in ast.dump(decorator) for decorator in function.decorator_list)


def test_no_device_function_calls_itself_by_name():
    """Nor through others of its module: Triton 3.2, which Triton-Ascend is, looks for the key of such a function without end."""
    found = 0
    for package in ("mhc_ops", "sparse_attn", "indexer", "kernel_runtime"):
        for file in sorted((ROOT / package).rglob("*.py")):
            functions = {f.name: f for f in ast.parse(file.read_text()).body if isinstance(f, ast.FunctionDef) and _is_device(f)}
            calls = {
                name: {c.func.id for c in ast.walk(f) if isinstance(c, ast.Call) and isinstance(c.func, ast.Name)} & functions.keys()
                for name, f in functions.items()
            }
            found += len(calls)
            for name in calls:
                reached: set[str] = set()
                while (further := set().union(*(calls[n] for n in reached or {name}))) - reached:
                    reached |= further
                assert name not in reached, f"{file.name}: {name} calls itself"
    assert found > 100
