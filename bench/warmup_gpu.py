#!/usr/bin/env python3
"""What the warmup is worth on a GPU: N processes of one node (all on one card) from start to the end of their first training step.

    python bench/warmup_gpu.py --processes 8

Cases, each with processes that start together:
  cold          empty cache folder, no warmup: the first step compiles
  cold+warmup   empty folder, `warmup()` first
  warm          the folder of the case before, `warmup()` first
  ahead         a folder filled by a process that sees no device (`compile_ahead`), moved, then `warmup()` first: nothing may compile
After the first step each process runs another sequence length and an evaluation; compilations in there are counted (0 is wanted).
Prints a table and, with --json FILE, writes all figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

CASES = ["cold", "cold+warmup", "warm", "ahead"]


def model_config(name: str) -> Any:
    """tiny as it is; flash and pro with their kernel sizes, but few layers and experts: those do not change which kernels are needed."""
    from train_example.config import PRESETS

    config = PRESETS[name]
    if name == "tiny":
        return config
    return dataclasses.replace(
        config, num_layers=4, compress_ratios=(0, 4, 128, 4), num_experts=8, experts_per_token=2, expert_dim=256, vocab_size=1024,
        num_hash_layers=1,
    )  # fmt: skip


def worker(args: argparse.Namespace) -> None:
    """One process of a case; prints its figures as JSON."""
    times = {"start": time.time()}
    import torch
    import triton

    from kernel_runtime import record
    from kernel_runtime.plan import Plan, plan_for
    from kernel_runtime.warmup import warmup
    from train_example.model import DeepSeekV4, fp32_islands

    torch.cuda.set_device(0)
    config = model_config(args.model)
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = DeepSeekV4(config, impl=args.impl)
    islands = {id(param) for island in fp32_islands(model) for param in island.parameters()}
    for param in model.parameters():  # and no buffer: FSDP2 casts parameters alone
        if id(param) not in islands:
            param.data = param.data.to(dtype)
    torch.cuda.synchronize()
    compiled: list[str] = []
    loaded: list[str] = []

    def listener(**event: Any) -> None:
        (loaded if event["cache_hit"] else compiled).append(event["src"].name)

    triton.knobs.compilation.listener = listener
    # all processes have started, imported and built: from here on is what the cases differ in
    (Path(args.meet) / str(args.rank)).touch()
    while len(list(Path(args.meet).iterdir())) < args.processes:
        time.sleep(0.005)
    times["ready"] = time.time()
    figures: dict[str, Any] = {"warmup": None}
    plan = Plan.from_json(args.plan.read_text()) if args.plan else plan_for(config, args.dtype)
    plan = plan.for_target(triton.runtime.driver.active.get_current_target())
    if args.warmup:
        report = warmup(plan, "cuda")
        figures["warmup"] = {
            "seconds": report.seconds, "compiled": report.count("compiled"), "cached": report.count("cached", "adopted"),
            "failed": [f"{r.kernel}: {r.note}" for r in report.failed], "messages": report.messages,
            "kernels": [(r.kernel, r.state, round(r.seconds, 3)) for r in sorted(report.rows, key=lambda r: -r.seconds)],
        }  # fmt: skip
    figures["compiled_before_step"], figures["loaded_before_step"] = len(compiled), len(loaded)

    def step(length: int, train: bool = True) -> None:
        ids = torch.randint(0, config.vocab_size, (args.batch, length), device="cuda")
        if train:
            model(ids, ids).loss.backward()
            model.zero_grad(set_to_none=True)
        else:
            with torch.no_grad():
                model(ids, ids)
        torch.cuda.synchronize()

    before = len(compiled)
    with record() as recording:
        begun = time.time()
        step(args.length)
        times["stepped"] = time.time()
        figures["first_step_seconds"] = times["stepped"] - begun
        figures["compiled_in_step"] = compiled[before:]
        before = len(compiled)
        begun = time.time()
        step(args.length)
        figures["second_step_seconds"] = time.time() - begun
        step(args.length * 3 // 4 + 1)
        step(args.length // 2 + 5, train=False)
        figures["compiled_later"] = compiled[before:]
    figures["not_in_plan"] = [spec.name for spec in recording.specs if spec not in plan]
    figures["mismatches"] = recording.mismatches
    figures["launched"] = len(recording.specs)
    figures["ready_to_first_step"] = times["stepped"] - times["ready"]
    figures["start_to_first_step"] = times["stepped"] - times["start"]
    print(json.dumps(figures))


def run_case(name: str, args: argparse.Namespace, folder: Path, warm: bool) -> dict[str, Any]:
    sos = {p for p in folder.glob("*/*.so")}
    with tempfile.TemporaryDirectory() as meet:
        command = [
            sys.executable, __file__, "--worker", "--processes", str(args.processes), "--meet", meet, "--model", args.model, "--dtype",
            args.dtype, "--length", str(args.length), "--batch", str(args.batch), "--impl", args.impl, *(["--warmup"] if warm else []),
            *(["--plan", str(args.plan.resolve())] if args.plan else []),
        ]  # fmt: skip
        env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
        started = []
        for rank in range(args.processes):
            local = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(args.processes)}
            started.append(subprocess.Popen([*command, "--rank", str(rank)], env=env | local, cwd=ROOT, stdout=subprocess.PIPE, text=True))
        try:
            outputs = [process.communicate(timeout=args.timeout)[0] for process in started]
        finally:
            for process in started:
                process.kill()
    if any(process.returncode for process in started):
        raise SystemExit(f"{name}: a process failed, see above")
    rows = [json.loads(output.strip().splitlines()[-1]) for output in outputs]
    return {"case": name, "rows": rows, "launchers_built": len({p for p in folder.glob('*/*.so')} - sos)}


def summary(case: dict[str, Any]) -> list[str]:
    rows = case["rows"]
    warm = [row["warmup"]["seconds"] for row in rows if row["warmup"]]
    return [
        case["case"], f"{max(warm):.2f}" if warm else "-", f"{max(r['first_step_seconds'] for r in rows):.2f}",
        f"{max(r['ready_to_first_step'] for r in rows):.2f}", f"{max(r['second_step_seconds'] for r in rows):.3f}",
        str(sum(r["compiled_before_step"] for r in rows)), str(sum(len(r["compiled_in_step"]) for r in rows)),
        str(sum(len(r["compiled_later"]) for r in rows)), str(case["launchers_built"]),
    ]  # fmt: skip


def main() -> int:
    from bench.common import need_device, positive

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=positive, default=8, help="processes on the one card")
    parser.add_argument("--model", default="flash", choices=("tiny", "flash", "pro"), help="sizes of the kernels")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"), help="of the streams")
    parser.add_argument("--impl", default="auto", choices=("auto", "triton"), help="of the ops")
    parser.add_argument("--plan", type=Path, help="a plan in JSON in place of the configuration's")
    parser.add_argument("--length", type=positive, default=512, help="tokens of a sequence in the first step")
    parser.add_argument("--batch", type=positive, default=1, help="sequences a process")
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES, help="which to run, in this order")
    parser.add_argument("--jobs", type=positive, default=8, help="processes that compile without a device, in the case ahead")
    parser.add_argument("--timeout", type=float, default=500.0, help="seconds a case may take")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--warmup", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--meet", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return 0
    need_device(parser)

    base = Path(tempfile.mkdtemp(prefix="warmup-bench-"))
    cases, ahead = [], None
    try:
        for name in args.cases:
            folder = base / {"cold": "a", "cold+warmup": "b", "warm": "b", "ahead": "d"}[name]
            if name == "ahead":
                ahead = fill_without_device(args, base / "c")
                (base / "c").rename(folder)  # an image or a mount shows it under another path, too
            cases.append(run_case(name, args, folder, warm=name != "cold"))
            print("done:", name, summary(cases[-1])[1:], *problems(cases[-1]), sep="\n  ", flush=True)
            if args.json:  # after each case: a run that is cut off has figures too
                args.json.write_text(json.dumps({"cases": cases, "ahead": ahead}, indent=1))
    finally:
        shutil.rmtree(base, ignore_errors=True)
    return report(args, cases, ahead)


def fill_without_device(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import torch

    from kernel_runtime.plan import plan_for

    major, minor = torch.cuda.get_device_capability(0)
    target = f"sm_{major}{minor}"
    plan = folder.with_suffix(".json")  # the model's own: with another number of experts its kernels are not the preset's
    plan.write_text(args.plan.read_text() if args.plan else plan_for(model_config(args.model), args.dtype).to_json())
    command = [sys.executable, "-m", "kernel_runtime.warmup", "--config", str(plan), "--target", target, "--cache-dir", str(folder),
               "--jobs", str(min(args.jobs, os.cpu_count() or 1)), "--report", "json"]  # fmt: skip
    begun = time.time()
    run = subprocess.run(command, cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, stdout=subprocess.PIPE, text=True)
    if not run.stdout.strip():
        raise SystemExit("ahead: the compilation without a device failed, see above")
    rows = json.loads(run.stdout)["rows"]
    failed = [f"{row['kernel']}: {row['note']}" for row in rows if row["state"] == "failed"]
    return {"target": target, "seconds": time.time() - begun, "kernels": len(rows), "failed": failed}


def problems(case: dict[str, Any]) -> list[str]:
    """What a case shows that must not be, each once."""
    found = []
    for row in case["rows"]:
        found += [f"launched but not in the plan: {name}" for name in row["not_in_plan"]]
        found += row["mismatches"]
        found += [f"compiled after the first step: {name}" for name in row["compiled_later"]]
        if row["warmup"]:
            found += [f"compiled in the first step: {name}" for name in row["compiled_in_step"]]
            found += row["warmup"]["failed"]
    if case["case"] in ("warm", "ahead"):
        if count := sum(row["compiled_before_step"] for row in case["rows"]):
            found.append(f"{count} kernels were compiled")
        if case["launchers_built"]:
            found.append(f"{case['launchers_built']} launchers were built")
    return [f"PROBLEM {case['case']}: {text}" for text in sorted(set(found))]


def report(args: argparse.Namespace, cases: list[dict[str, Any]], ahead: dict[str, Any] | None) -> int:
    import torch
    import triton

    head = ["case", "warmup s", "first step s", "both s", "second step s", "compiled before", "compiled in step", "compiled later",
            "launchers"]  # fmt: skip
    lines = [head, *(summary(case) for case in cases)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    for line in lines:
        print("  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip())
    versions = f"torch {torch.__version__}, triton {triton.__version__}, Python {platform.python_version()}"
    machine = f"{args.processes} processes on one {torch.cuda.get_device_name(0)}, {os.cpu_count()} cores"
    print(f"{machine}, {args.model} {args.dtype}, {versions}, {time.strftime('%Y-%m-%d')}; slowest process; counts over all processes")
    if ahead:
        made = f"{ahead['kernels']} kernels for {ahead['target']} in {ahead['seconds']:.1f} s with no device"
        print(f"ahead: {made}; failed: {ahead['failed'] or 'none'}")
    return 1 if (ahead and ahead["failed"]) or any(problems(case) for case in cases) else 0


if __name__ == "__main__":
    sys.exit(main())
