"""The parts of the Ascend gate that need no Ascend compiler: the reader of HIVM, the stand-in for torch, the verdict."""

import subprocess
import sys

import kernel_runtime.ascend.__main__ as main
from kernel_runtime.ascend.__main__ import Row, mended, table, traffic
from kernel_runtime.ascend.hivm import per_token, read
from tests.warmup_tools import ROOT

UB = "#hivm.address_space<ub>"
GM = "#hivm.address_space<gm>"
V = f"memref<?xf32, strided<[?], offset: ?>, {UB}>"
G = f"memref<?xf32, strided<[?], offset: ?>, {GM}>"
ARGUMENTS = f"%arg0: i64, %arg1: memref<?xi8, {GM}>, %arg2: memref<?xi8, {GM}>, %arg3: memref<?xf32, {GM}>, %arg4: memref<?xf32, {GM}>, %arg5: i32"
WHOLE = f"memref<1024xf32, strided<[1], offset: ?>, {GM}>"
TILE = f"offset: [%9], sizes: [1024], strides: [1] : memref<?xf32, {GM}> to {WHOLE}"
# A kernel of two tensors: a loop over tokens of unknown length; in it 4 x (load 1024 floats, multiply), one store, one element-wise loop.
HIVM = f"""
module attributes {{dlti = #dlti<"NPU" : <#dlti.dl_entry<"UB_SIZE", 1572864 : i32>, #dlti.dl_entry<"L1_SIZE", 4194304 : i32>>>}} {{
  func.func private @load_gm_to_ubuf_1d_float({G}, {V}, i32, f32, index) attributes {{hacc.always_inline}}
  func.func private @vmul_1d_float({V}, {V}, {V}) attributes {{hacc.always_inline}}
  func.func @k({ARGUMENTS}) attributes {{X}} {{
    %c0_i32 = arith.constant 0 : i32
    %c1_i32 = arith.constant 1 : i32
    %c4_i32 = arith.constant 4 : i32
    %c0 = arith.constant 0 : index
    %c1 = arith.constant 1 : index
    %c1024 = arith.constant 1024 : index
    %c0_i64 = arith.constant 0 : i64
    %c4096_i64 = arith.constant 4096 : i64
    %1 = hivm.hir.pointer_cast(%c0_i64) : memref<1024xf32, {UB}>
    %2 = hivm.hir.pointer_cast(%c4096_i64, %c0_i64) : memref<1024xf32, {UB}>
    scf.for %arg6 = %c0_i32 to %arg5 step %c1_i32  : i32 {{
      %3 = scf.for %arg7 = %c0_i32 to %c4_i32 step %c1_i32 iter_args(%arg8 = %1) -> (memref<1024xf32, {UB}>)  : i32 {{
        %view = memref.reinterpret_cast %arg3 to {TILE}
        %part = memref.subview %view[0] [%8] [1] : memref<1024xf32, strided<[1], offset: ?>, {GM}> to memref<?xf32, strided<[1], offset: ?>, {GM}>
        %cast = memref.cast %part : memref<?xf32, strided<[1], offset: ?>, {GM}> to {G}
        %cast_0 = memref.cast %2 : memref<1024xf32, {UB}> to {V}
        func.call @load_gm_to_ubuf_1d_float(%cast, %cast_0, %c0_i32, %cst, %c0) : ({G}, {V}, i32, f32, index) -> ()
        func.call @vmul_1d_float(%cast_0, %cast_0, %cast_0) : ({V}, {V}, {V}) -> ()
        scf.yield %arg8 : memref<1024xf32, {UB}>
      }}
      scf.if %10 {{
        func.call @vmul_1d_float(%cast_0, %cast_0, %cast_0) : ({V}, {V}, {V}) -> ()
      }} {{hivm.unlikely_condition}}
      %out = memref.reinterpret_cast %arg4 to {TILE}
      %cast_1 = memref.cast %out : memref<1024xf32, strided<[1], offset: ?>, {GM}> to {G}
      %cast_2 = memref.cast %3 : memref<1024xf32, {UB}> to {V}
      func.call @store_ubuf_to_gm_1d_float(%cast_2, %cast_1, %c0_i32) : ({V}, {G}, i32) -> ()
      scf.for %arg7 = %c0 to %c1024 step %c1 {{
        %5 = memref.load %1[%arg7] : memref<1024xf32, {UB}>
        memref.store %5, %2[%arg7] : memref<1024xf32, {UB}>
      }}
      scf.for %arg7 = %c0 to %c1 step %c1 {{
        %6 = memref.load %arg4[%arg7] : memref<?xf32, {GM}>
      }}
    }}
    return
  }}
}}
"""
OUTSIDE = f"""
    func.call @load_gm_to_ubuf_1d_float(%arg3, %1, %c0_i32, %cst, %c0) : (memref<1024xf32, {GM}>, {V}, i32, f32, index) -> ()
    return
"""


def test_reader_counts_what_is_there():
    report = read(HIVM, ["x", "y", "T"])
    assert report.planned == {"UB": 8192} and report.limits["UB"] == 192 * 1024
    assert dict(report.loads) == {"x": 4 * 4096} and dict(report.stores) == {"y": 4096}
    assert (report.dma, report.vector, report.cube, report.workspace) == (5, 4, 0, 0)
    assert (report.scalar_loops, report.short_scalar_loops, report.narrow_loops) == (1, 1, 0)
    assert report.scalar_loads == 1 and "vmul_1d_float" in report.externals and not report.inline_asm


def test_figures_a_token():
    """A pass of the loop handles two tokens; what is outside of loops belongs to no token unless an argument of it is named."""
    report = read(HIVM.replace("    return\n", OUTSIDE), ["x", "y", "T"])
    assert [group.arguments for group in report.groups] == [{"x"}, {"x", "y"}] and report.loads == {"x": 5 * 4096}
    assert per_token(report, 2) == {"bytes": 12288, "workspace": 0, "dma": 3, "scalar_loads": 0.5, "vector": 2, "cube": 0}
    assert per_token(report, {"y": 2}) == {"bytes": 10240, "workspace": 0, "dma": 2.5, "scalar_loads": 0.5, "vector": 2, "cube": 0}
    assert per_token(report, {"y": 2, "x": 0.5})["bytes"] == 10240 + 8192
    assert per_token(report, 0) == {} == per_token(report, {"z": 1})


def test_both_vector_cores_count():
    """Beside a matrix core two vector cores halve the tiles, unless a guard leaves one of them out."""
    asked = HIVM.replace("    %1 = hivm", "    %0 = hivm.hir.get_sub_block_idx -> i64\n    %1 = hivm")
    assert read(asked, ["x", "y", "T"]).loads == {"x": 8 * 4096}
    guarded = asked.replace("{hivm.unlikely_condition}", "{limit_sub_block_id0}")
    assert read(guarded, ["x", "y", "T"]).loads == {"x": 4 * 4096} and read(guarded, ["x", "y", "T"]).vector == 5


def test_reader_sees_the_way_through_workspace():
    report = read(HIVM.replace("%arg3 to offset", "%arg2 to offset"), ["x", "y", "T"])
    assert report.workspace == 4 * 4096 and not report.loads


def test_reader_follows_the_code():
    """A vector call inside the element-wise loop makes it none; a narrow one is told apart."""
    call = f"func.call @vmul_1d_float(%2, %2, %2) : ({V}, {V}, {V}) -> ()"
    wide = HIVM.replace("memref.store %5", f"{call}\n        memref.store %5")
    assert read(wide, ["x", "y", "T"]).scalar_loops == 0
    narrow = HIVM.replace("memref<1024xf32", "memref<8xf32").replace("sizes: [1024]", "sizes: [8]")
    assert read(narrow, ["x", "y", "T"]).narrow_loops == 1


def row(**changes):
    made = Row("op", "kernel", ["flash"], "Ascend910_9382", "1.2.0", {}, True, stage="hivm", loads={"x": 16384}, stores={"y": 4096})
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_reader_takes_ops_that_are_no_calls():
    """ascendnpu-ir 1.0.0 leaves vector and DMA ops in the hivm dialect."""
    ops = HIVM.replace(
        f"func.call @load_gm_to_ubuf_1d_float(%cast, %cast_0, %c0_i32, %cst, %c0) : ({G}, {V}, i32, f32, index) -> ()",
        f"hivm.hir.load ins(%cast : {G}) outs(%cast_0 : {V}) pad_mode = <PadValue> pad_value = %cst : f32",
    )
    product = f"hivm.hir.vmul ins(%cast_0, %cast_0 : {V}, {V}) outs(%cast_0 : {V})"
    ops = ops.replace(f"func.call @vmul_1d_float(%cast_0, %cast_0, %cast_0) : ({V}, {V}, {V}) -> ()", product)
    assert ops.count("hivm.hir.vmul") == 2
    a, b = read(ops, ["x", "y", "T"]), read(HIVM, ["x", "y", "T"])
    assert (a.loads, a.stores, a.dma, a.vector, a.scalar_loops) == (b.loads, b.stores, b.dma, b.vector, b.scalar_loops)


def test_verdict():
    assert not row().failure
    assert "2 scalar loops in a kernel listed as hot" in row(scalar_loops=2).failure
    assert not row(scalar_loops=2, hot=False).failure
    assert row(error="UB overflows").failure == "UB overflows"
    assert "FAIL after linalg" in table([row(error="x", stage="linalg")])
    counts = dict.fromkeys(("workspace", "vector", "cube", "dma", "scalar_loads"), 0.0)
    assert "| 10,240 | 8,192 | 1.25 |" in traffic([row(a_token={"bytes": 10240.0, **counts}, minimal_bytes=8192.0)], "Ascend910_9382")
    assert "is wrong" in traffic([row(a_token={"bytes": 5120.0, **counts}, minimal_bytes=8192.0)], "Ascend910_9382")
    both = traffic([row(consts={"N": "4", "ADD": "True"}), row(consts={"N": "4", "ADD": "False"})], "Ascend910_9382")
    assert "| `kernel` ADD True | 20,480 a pass |" in both and "| `kernel` ADD False |" in both


def standin(code, path="kernel_runtime/ascend/standin"):
    command = [sys.executable, "-S", "-c", code]  # -S: no site-packages, so no real torch
    return subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": path}, capture_output=True, text=True)


def test_torch_standin():
    result = standin("""
import torch, torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch import nn, Tensor
assert torch.float32 is torch.float32 and torch.bfloat16.itemsize == 2 and {torch.float32: 1}[torch.float32] == 1
class Module(nn.Module):
    @once_differentiable
    def f(self): return 3
    @torch.no_grad()
    def g(self, x: Tensor | None): return 4
m = Module()
assert m.f() == 3 and m.g(None) == 4
try:
    bool(torch.cuda.is_available())
except TypeError as error:
    assert "stand-in" in str(error)
else:
    raise SystemExit("a question to a device must be an error")
""")
    assert result.returncode == 0, result.stderr


def test_torch_standin_never_hides_torch():
    run = subprocess.run([sys.executable, "-c", "import torch"], cwd=ROOT, env={"PYTHONPATH": "kernel_runtime/ascend/standin"},
                         capture_output=True, text=True)  # fmt: skip
    assert run.returncode != 0 and "torch is installed in this environment" in run.stderr


def test_known_failures_are_just_those(monkeypatch):
    """A listed kernel fails as listed without failing the run; another failure, compiler or kernel does not pass as known."""
    crash, other = "bishengir-compile crashed (signal 11)", "UB overflows"
    monkeypatch.setattr(main, "KNOWN_FAILURES", {"1.0.0": {"project_kernel": "crashed"}})
    rows = [
        Row("op", kernel, ["tiny"], "Ascend910B3", compiler, {}, True, error=error)
        for kernel, compiler, error in (
            ("project_kernel", "1.0.0", crash), ("project_kernel", "1.0.0", ""), ("project_kernel", "1.0.0", other),
            ("project_kernel", "1.2.0", crash), ("attention_fwd_kernel", "1.0.0", crash),
        )
    ]  # fmt: skip
    assert [row.known for row in rows] == [True, False, False, False, False]
    assert mended(rows) == [] and mended(rows[1:]) == ["project_kernel with 1.0.0"]
    assert "known: bishengir-compile crashed" in table(rows[:1]) and "FAIL" in table(rows[2:3])


def test_what_the_check_would_ignore_is_refused(monkeypatch, capsys):
    """`python -m kernel_runtime.warmup --target Ascend...` where its compiler is installed"""
    import importlib.util

    from kernel_runtime import warmup

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    for flags in (["--check"], ["--dtype", "bf16"], ["--cache-dir", "folder"], ["--save-plan", "plan.json"]):
        assert warmup.main(["--config", "tiny", "--target", "Ascend910B3", *flags]) == 2
        assert f"error: {flags[0]} has no meaning for Ascend910B3" in capsys.readouterr().err
