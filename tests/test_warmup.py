"""Registry, plan, keys, and the promise itself: after a warmup nothing compiles."""

import json
import subprocess
import sys

import pytest
import torch

from kernel_runtime import ModelShape, forbid_compile, interpreting, record
from kernel_runtime.registry import PRESETS, shape_of
from tests.warmup_tools import ROOT, arguments, cache_folder, fake_driver, forget, run_python, small_plan

pytestmark = pytest.mark.skipif(interpreting(), reason="under TRITON_INTERPRET=1 kernels are Python functions; nothing can be compiled")


@pytest.fixture
def hopper():
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", 90, 32)


def test_presets_are_the_trainers():
    from train_example.config import PRESETS as TRAINER

    for name, shape in PRESETS.items():
        assert shape_of(TRAINER[name], shape.dtype) == shape, name


def test_shape_of_a_run_configuration():
    from train_example.run_config import from_dict

    run = from_dict({"model": {"preset": "flash", "hidden_size": 2048}, "dtype": "bf16"}, "test")
    for config in (run, run.to_dict(), {"model": {"preset": "flash", "hidden_size": 2048}, "dtype": "bf16"}):
        shape = shape_of(config)
        assert (shape.hidden, shape.head_dim, shape.ratios, shape.dtype) == (2048, 512, (4, 128), "bf16")


def test_shape_of_refuses():
    with pytest.raises(ValueError, match="unknown model 'huge'"):
        shape_of("huge")
    with pytest.raises(ValueError, match="lacks hidden_size"):
        shape_of({"hc_mult": 4})
    with pytest.raises(ValueError, match="dtype must be one of bf16, fp16, fp32, got 'fp8'"):
        shape_of("tiny", "fp8")
    with pytest.raises(ValueError, match="hidden_size must be of whole numbers, got '64'"):
        shape_of({"preset": "tiny", "hidden_size": "64"})


@pytest.mark.parametrize("name", PRESETS)
def test_launch_and_ahead_of_time_keys_agree(name, hopper, tmp_path, monkeypatch):
    """For every registered specialisation, Triton's launch path asks for exactly the source and options that warmup compiles, for
    lengths of every divisibility class. Compilation itself is replaced, so this covers all kernels in seconds."""
    import triton.compiler

    from kernel_runtime.plan import plan_for

    asked = []

    class Stop(Exception):
        pass

    def compile(src, target=None, options=None, _env_vars=None):
        asked.append((src, target, options))
        raise Stop

    monkeypatch.setattr(triton.compiler, "compile", compile)
    plan = plan_for(name).by_name().for_target(hopper)
    assert len(plan)
    from triton.compiler.compiler import make_backend

    backend = make_backend(hopper)
    with fake_driver(hopper):
        for _, spec in plan:
            sizes = {"num_warps": spec.num_warps, "num_stages": spec.num_stages}
            expected = spec.source().hash(), backend.parse_options({**sizes, **spec.options})
            for length in (1, 7, 16, 4096):
                spec.kernel.device_caches.clear()
                with pytest.raises(Stop):
                    spec.launch((1,), *arguments(spec, length))
                src, target, options = asked.pop()
                assert target == hopper
                assert src.hash() == expected[0], f"{spec.name}: launch specialises on {src.signature} {src.attrs} for length {length}"
                assert backend.parse_options(options).hash() == expected[1].hash(), f"{spec.name}: options differ"
            spec.kernel.device_caches.clear()


def test_cache_made_without_a_device_is_used(hopper, tmp_path):
    """compile_ahead in a process that sees no device; another process, whose driver says sm_90, launches without compiling."""
    made = run_python(f"""
from kernel_runtime.warmup import compile_ahead
from warmup_tools import small_plan
report = compile_ahead(small_plan(), "sm_90", {str(tmp_path)!r})
assert report.count("compiled") == 4, report.table()
assert all(row.registers and row.spills == 0 and row.shared is not None for row in report.rows), report.table()
""")
    assert made.returncode == 0, made.stderr
    used = run_python(
        """
import triton
from triton.backends.compiler import GPUTarget
from kernel_runtime import forbid_compile
from warmup_tools import arguments, fake_driver, small_plan
seen = []
triton.knobs.compilation.listener = lambda **k: seen.append(k["cache_hit"])
with fake_driver(GPUTarget("cuda", 90, 32)) as driver, forbid_compile("error"):
    for _, spec in small_plan():
        for length in (1, 7, 16, 4096):
            spec.launch((length,), *arguments(spec, length))
assert seen == [True] * 4, seen
assert len(driver.launches) == 16
""",
        TRITON_CACHE_DIR=str(tmp_path),
    )
    assert used.returncode == 0, used.stderr


def test_launchers_are_in_the_cache(tmp_path, hopper):
    """The C launcher of each signature and the helper module, under the key that Triton's own driver computes."""
    from kernel_runtime.warmup import compile_ahead

    with cache_folder(tmp_path):
        report = compile_ahead(small_plan(), "sm_90", tmp_path)
        assert not report.messages, report.messages
        names = sorted(p.name.split(".")[0] for p in tmp_path.glob("*/*.so"))
    # two signatures: forward and backward differ in their pointers; N is a constant and no part of one
    assert names.count("cuda_utils") == 1 and names.count("__triton_launcher") >= 2, names


def test_moved_folder_is_adopted(tmp_path, hopper):
    from kernel_runtime.warmup import compile_ahead, look

    plan = small_plan()
    with cache_folder(tmp_path / "a"):
        compile_ahead(plan, "sm_90", tmp_path / "a")
        (tmp_path / "a").rename(tmp_path / "b")
        assert {row.state for row in look(plan, hopper, tmp_path / "b").rows} == {"moved"}
        assert {row.state for row in compile_ahead(plan, "sm_90", tmp_path / "b").rows} == {"adopted"}
        assert {row.state for row in look(plan, hopper, tmp_path / "b").rows} == {"cached"}
        forget(plan)
        with cache_folder(tmp_path / "b"), fake_driver(hopper), forbid_compile("error"):
            for _, spec in plan:
                spec.launch((1,), *arguments(spec, 5))
    forget(plan)


def test_warmup_on_a_device_then_nothing_compiles(tmp_path, hopper, monkeypatch):
    """The API that a trainer calls, on a driver that says sm_90: first call compiles, second finds all, launches compile nothing."""
    from kernel_runtime import warmup as module

    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.device("meta"))  # no CUDA here: entering a device does nothing
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    plan, lines = small_plan(), []
    forget(plan)
    with cache_folder(tmp_path), fake_driver(hopper) as driver:
        with forbid_compile("error"):  # which means others: warmup compiles in four threads of its own
            first = module.warmup(plan, "cuda", log=lines.append, threads=4)
        assert first.count("compiled") == 4 and not first.failed, first.table()
        assert "4 compiled" in lines[-1]
        forget(plan)
        assert module.warmup(plan, "cuda").count("cached") == 4
        with forbid_compile("error") as guard:
            for _, spec in plan:
                for length in (1, 7, 16, 4096):
                    spec.launch((length,), *arguments(spec, length))
        assert not guard.seen and len(driver.launches) == 16
    forget(plan)


def test_guard_names_kernel_key_and_place(tmp_path, hopper):
    plan = small_plan()
    forget(plan)
    (_, spec), *_ = plan
    with cache_folder(tmp_path), fake_driver(hopper):
        told = r"sinkhorn_fwd_kernel was compiled after warmup \(key \w+\).*test_warmup"
        with forbid_compile() as guard, pytest.warns(RuntimeWarning, match=told):
            spec.launch((1,), *arguments(spec, 5))
        assert len(guard.seen) == 1
        forget(plan)
        unaligned = arguments(spec, 5)
        unaligned[0] = torch.empty(65)[1:]
        from kernel_runtime.guard import CompileForbidden

        with forbid_compile("error"), pytest.raises(CompileForbidden, match="logits not aligned to 16 bytes"):
            spec.launch((1,), *unaligned)
        forget(plan)
        messages = []
        with forbid_compile(messages.append):
            spec.launch((1,), *arguments(spec, 5))  # in the cache folder by now: a load, no compilation
        assert not messages
    with pytest.raises(ValueError, match="action must be"):
        forbid_compile("ignore")
    forget(plan)


def test_record_gives_a_plan(tmp_path, hopper):
    from kernel_runtime.plan import Plan
    from mhc_ops.sinkhorn.bwd import sinkhorn_bwd
    from mhc_ops.sinkhorn.fwd import sinkhorn_fwd

    forget(small_plan())
    with cache_folder(tmp_path), fake_driver(hopper), record() as recording:
        for tokens in (3, 48):
            logits = torch.zeros(tokens, 4, 4)
            sinkhorn_fwd(logits, 3, 1e-6, "v4")
            sinkhorn_bwd(logits, logits, 3, 1e-6, "v4")
    assert [spec.name for spec in recording.specs] == ["sinkhorn_fwd_kernel", "sinkhorn_bwd_kernel"]
    assert not recording.mismatches
    plan = recording.plan()
    again = Plan.from_json(plan.to_json())
    assert [s.identity for _, s in again] == [s.identity for _, s in plan]
    assert all(spec in small_plan() for _, spec in plan)
    forget(small_plan())


def test_record_finds_what_a_spec_does_not_declare(tmp_path, hopper):
    from kernel_runtime.guard import argument_mismatches

    (_, spec), *_ = small_plan()
    good = arguments(spec, 5)
    assert not list(argument_mismatches(spec, tuple(good)))
    bad = [good[0].bfloat16(), torch.empty(65)[1:], 2**31, 1]
    text = "\n".join(argument_mismatches(spec, tuple(bad)))
    expected = ("logits is declared *fp32 and passed as *bf16", "comb is not aligned", "T is declared i32 and passed as i64",
                "eps is declared fp32 and passed as i32")  # fmt: skip
    for part in expected:
        assert part in text, text


def test_plans_survive_json():
    from kernel_runtime.plan import Plan, plan_for

    for name in PRESETS:
        plan = plan_for(name)
        assert [s.identity for _, s in Plan.from_json(plan.to_json())] == [s.identity for _, s in plan]
    with pytest.raises(ValueError, match="no plan of format"):
        Plan.from_json("[]")


def test_kernels_that_are_never_chosen_are_not_compiled(hopper):
    """The attention has kernels for sm_90, which take the place of the portable ones there: for bf16 alone, and unless asked by name."""
    from kernel_runtime.plan import Plan, plan_for
    from kernel_runtime.targets import parse_target

    def names(plan, target):
        return {spec.name for _, spec in plan.for_target(parse_target(target))}

    plan = Plan.from_json(plan_for("flash").to_json())
    both = {"attention_fwd_kernel", "hopper_fwd_kernel"}
    assert names(plan, "sm_90") & both == {"hopper_fwd_kernel"} and "places_kernel" in names(plan, "sm_90")
    assert names(plan.by_name(), "sm_90") & both == both
    for target in ("sm_80", "sm_100", "gfx942"):
        assert names(plan, target) & both == {"attention_fwd_kernel"}, target
    assert names(plan_for("flash", "fp32"), "sm_90") & both == {"attention_fwd_kernel"}


def test_a_kernel_of_two_users_is_left_out_where_both_leave_it(hopper):
    from dataclasses import replace

    from kernel_runtime.plan import Plan

    (op, spec), *_ = small_plan()
    for marks, kept in (((), (90,)), True), (((90,), ()), True), (((90, 100), (90,)), False):
        plan = Plan.of((op, replace(spec, yields_on=mark)) for mark in marks)
        assert (spec in plan.for_target(hopper)) == kept, marks


def cli(*args, cache):
    command = [sys.executable, "-m", "kernel_runtime.warmup", *args, "--cache-dir", str(cache)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_command_line(tmp_path):
    (tmp_path / "plan.json").write_text(small_plan().to_json())
    plan = ("--config", str(tmp_path / "plan.json"), "--target", "sm_90")
    listed = cli(*plan, "--dry-run", cache=tmp_path / "c")
    assert listed.returncode == 0 and "4 missing" in listed.stdout, listed.stdout + listed.stderr
    assert cli(*plan, "--check", cache=tmp_path / "c").returncode == 1
    filled = cli(*plan, "--report", "json", cache=tmp_path / "c")
    assert filled.returncode == 0, filled.stderr
    rows = json.loads(filled.stdout)["rows"]
    assert [row["state"] for row in rows] == ["compiled"] * 4 and all(row["bytes"] > 0 for row in rows)
    assert cli(*plan, "--check", cache=tmp_path / "c").returncode == 0


def answer(capsys, *args, cache):
    """Exit status and what went to stderr of the command line, without a process of its own."""
    from kernel_runtime.warmup import main

    try:
        status = main([*args, "--cache-dir", str(cache)])
    except SystemExit as stop:
        status = stop.code
    return status, capsys.readouterr().err


def test_command_line_errors(tmp_path, capsys):
    half, other = tmp_path / "half.json", tmp_path / "other.json"
    half.write_text('{"model": ')
    other.write_text("[]")
    for args, part in (
        (("--config", "huge", "--target", "sm_90"), "unknown model 'huge'"),
        (("--config", "tiny", "--target", "h200"), "unknown target 'h200'"),
        (("--config", "tiny", "--target", "sm_13"), "unknown target 'sm_13', wanted one of sm_80, "),
        (("--config", "tiny", "--device", "mps"), "device 'mps' is not here"),
        (("--config", "tiny", "--target", "Ascend910B3"), "make ascend-check"),
        (("--config", "tiny", "--target", "sm_90", "--jobs", "0"), "--jobs must be at least 1"),
        (("--config", str(half), "--target", "sm_90"), "half.json: Expecting value"),
        (("--config", str(other), "--target", "sm_90"), "other.json: no plan of format"),
    ):
        status, said = answer(capsys, *args, cache=tmp_path)
        assert status == 2 and part in said, said
    if not torch.accelerator.is_available():
        assert "name a --target" in answer(capsys, "--config", "tiny", cache=tmp_path)[1]
        said = cli("--config", "tiny", "--device", "cuda", cache=tmp_path)
        assert (said.returncode, said.stderr) == (2, "error: device 'cuda' is not here, wanted auto or cpu\n")


def test_failed_kernel_is_a_row_and_an_exit_status(tmp_path):
    plan = small_plan()
    data = json.loads(plan.to_json())
    for forward in (data["kernels"][0], data["kernels"][2]):
        del forward["types"]["eps"]
    (tmp_path / "plan.json").write_text(json.dumps(data))
    result = cli("--config", str(tmp_path / "plan.json"), "--target", "sm_90", "--jobs", "2", cache=tmp_path / "c")
    assert result.returncode == 1 and "2 compiled, 2 failed" in result.stdout, result.stdout


def test_cpu_compiles_nothing():
    from kernel_runtime.warmup import warmup

    report = warmup(ModelShape(64, 4, 4, 32, 16, (4,), 4, 32, 8), "cpu")
    assert not report.rows and "the CPU" in report.summary()
