"""Training steps on layers of DeepSeek-V4-Flash's shapes: tokens a second a device, MFU, peak memory, and where a step's time goes.

    python -m bench.train                                          the four variants at 4096 tokens, one GPU
    python -m bench.train --seq-lens 16384 --recompute layer
    python -m bench.train --variants ours --recompute none mhc cross-layer layer --longest
    torchrun --standalone --nproc-per-node 2 -m bench.train        FSDP over both, experts split between them

The model is that of `train_example` with `--ratios` for layers, `--experts` experts a layer (6 of them a token, as published) and
`--vocab` rows of embedding and head; everything else has the published sizes. Variants: eager is `--impl eager`, the plain PyTorch of
`reference/`; ours is `--impl triton`; "+compile" adds `--compile`, which compiles the parts of a layer that `train_example/compiled.py` lists.

A step is forward, backward, gradient norm, clipping and AdamW of `--batch` sequences of random tokens; ms is the median. MFU is
`train_example.metrics.flops_per_token` x tokens a second / the device's bf16 peak. Peak memory includes weights and optimizer. The split
comes from one more step under the profiler (`train_example.trace`): computing time by part, collectives that nothing covers, idle time.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import gc
import itertools
import json
import os
import statistics
import tempfile
import time
import traceback
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from bench.common import environment, positive
from train_example import metrics, trace
from train_example.config import PRESETS
from train_example.optim import make_optimizer
from train_example.parallel import Parallel, check_experts, init_parallel, pick_device, shutdown
from train_example.run_config import MHC_RECOMPUTE, RECOMPUTE, RESHARD, RunConfig, integers
from train_example.step import train_step
from train_example.train import build_model, warm_kernels

VARIANTS = ("ours", "ours+compile", "eager", "eager+compile")


class Row(NamedTuple):
    """What to measure."""

    variant: str
    seq_len: int
    recompute: str
    batch: int


@dataclass
class Result:
    """Of one variant; ms is the median step, parts (ms) come from another one, and note says why there is no number."""

    variant: str
    seq_len: int
    batch: int
    recompute: str
    processes: int
    ep_group: str
    prefetch: int
    ms: float = 0.0
    tokens_per_s: float = 0.0
    mfu: float = 0.0
    peak_gib: float = 0.0
    loss: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    kernels: dict[str, float] = field(default_factory=dict)
    note: str = ""


def settings(args: argparse.Namespace, row: Row, ep_group: str = "own", prefetch: int = 1) -> RunConfig:
    variant, seq_len, recompute, batch = row
    ratios = tuple(args.ratios)
    sizes = {"compress_ratios": ratios, "num_layers": len(ratios), "num_experts": args.experts, "vocab_size": args.vocab}
    model = dataclasses.replace(PRESETS[args.preset], **sizes, num_hash_layers=1, mtp_layers=0)
    return RunConfig(
        preset=args.preset,
        model=model,
        seq_len=seq_len,
        batch=batch,
        steps=1000,
        lr=1e-5,
        ep=args.ep,
        ep_group=ep_group,
        prefetch=prefetch,
        reshard=args.reshard,
        device=args.device,
        dtype=args.dtype,
        impl="eager" if variant.startswith("eager") else "auto" if args.device == "cpu" else "triton",
        compile=variant.endswith("+compile"),
        recompute=recompute,
    )


def make_model(config: RunConfig, parallel: Parallel) -> nn.Module:
    """The sharded model with fresh weights made on the device, shard by shard: no host ever holds them."""
    model = build_model(config, parallel, fill=False)
    torch.manual_seed(config.seed + parallel.rank)
    with torch.no_grad():
        model.reset_parameters()
    return model


def measure(args: argparse.Namespace, parallel: Parallel, config: RunConfig, variant: str) -> Result:
    """Time steps, print the row, then profile one more."""
    result = Result(variant, config.seq_len, config.batch, config.recompute, parallel.world, config.ep_group, config.prefetch)
    device = parallel.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model = make_model(config, parallel)
    optimizer = make_optimizer(model, config)
    generator = torch.Generator().manual_seed(1 + parallel.rank)
    ids = torch.randint(0, config.model.vocab_size, (config.batch, config.seq_len + 1), generator=generator).to(device)
    batch = [(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())]

    times, losses = [], []
    for step in range(1, args.warmup + args.steps + 1):
        begun = time.perf_counter()
        losses.append(train_step(model, optimizer, config, batch, step)["loss"])
        times.append(1000 * (time.perf_counter() - begun))
    result.ms, result.loss = statistics.median(times[args.warmup :]), losses[0]
    result.tokens_per_s = config.batch * config.seq_len / result.ms * 1000
    peak = metrics.peak_flops(device, config.dtype, -1)
    if peak:
        result.mfu = metrics.flops_per_token(config.model, config.seq_len) * result.tokens_per_s / peak
    if device.type == "cuda":
        torch.cuda.synchronize()
        result.peak_gib = torch.cuda.max_memory_allocated() / 2**30
    if parallel.rank == 0:
        print(line(result), flush=True)  # the profile of an eager step takes longer than the steps
    if args.split and config.seq_len <= args.split_longest and device.type == "cuda":
        trace.annotate_parts(model)
        split(result, lambda: train_step(model, optimizer, config, batch, step + 1), args.traces and args.traces / _name(result, parallel))
    return result


def _name(result: Result, parallel: Parallel) -> str:
    return f"{result.variant}_{result.seq_len}x{result.batch}_{result.recompute}_{result.ep_group}_{result.prefetch}_rank{parallel.rank}.json"


def split(result: Result, step: Any, keep: Path | None) -> None:
    """Fill in parts and kernels from one step under the profiler."""
    with torch.profiler.profile(acc_events=True) as profiler, torch.profiler.record_function(f"{trace.STEP}1"):
        step()
        torch.accelerator.synchronize()  # the step ends when the optimizer does
    with tempfile.TemporaryDirectory() as folder:
        file = keep or Path(folder) / "trace.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(file))
        events = trace.read(file)
    (summary,) = trace.summarize(events)
    said = {"exposed": summary.exposed, "waited for": summary.waited, "all": summary.communication}
    communication = {f"communication, {name}": ms for name, ms in said.items()}
    result.parts = {**summary.parts, **communication, "idle": summary.idle, "step under the profiler": summary.ms}
    kernels: dict[str, float] = defaultdict(float)
    for work in trace.device_work(events):
        kernels[f"{work.part}: {work.name[:70]}"] += (work.end - work.start) / 1000
    result.kernels = dict(sorted(kernels.items(), key=lambda item: -item[1])[:40])


def attempt(args: argparse.Namespace, parallel: Parallel, config: RunConfig, variant: str) -> Result:
    """`measure`, or a Result that says why there is none."""
    try:
        return measure(args, parallel, config, variant)
    except (RuntimeError, AssertionError) as error:  # a row that does not work is a row that says so
        if parallel.world > 1:
            raise  # the other ranks wait in a collective
        what = "does not fit" if isinstance(error, torch.OutOfMemoryError) else type(error).__name__
        if what != "does not fit":
            traceback.print_exc()
        note = f"{what}: {str(error).splitlines()[0][:90]}"
        result = Result(variant, config.seq_len, config.batch, config.recompute, 1, config.ep_group, config.prefetch, note=note)
        print(line(result), flush=True)
        return result
    finally:
        torch._dynamo.reset()
        gc.collect()
        if parallel.device.type == "cuda":
            torch.cuda.empty_cache()


_COLUMNS = {"variant": "14", "S": ">7", "batch": ">5", "recompute": "11", "group": "6", "prefetch": ">8", "ms": ">9", "tokens/s": ">9"}
HEADER = " ".join(f"{name:{width}}" for name, width in {**_COLUMNS, "MFU": ">6", "peak GiB": ">8", "loss": ">8"}.items())


def line(r: Result) -> str:
    head = f"{r.variant:14} {r.seq_len:7d} {r.batch:5d} {r.recompute:11} {r.ep_group:6} {r.prefetch:8d}"
    return f"{head} {r.note}" if r.note else f"{head} {r.ms:9.1f} {r.tokens_per_s:9.0f} {r.mfu:6.1%} {r.peak_gib:8.1f} {r.loss:8.4f}"


def print_split(result: Result, kernels: int) -> None:
    if result.parts:
        print("    " + ", ".join(f"{name} {ms:.2f}" for name, ms in result.parts.items()), flush=True)
    for name, ms in list(result.kernels.items())[:kernels]:
        print(f"      {ms:8.2f} {name}")


def write(results: list[Result], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [dataclasses.asdict(r) for r in results]
    lines = [json.dumps({"environment": environment() if torch.cuda.is_available() else {}}), *map(json.dumps, rows)]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    plain = [{key: value for key, value in row.items() if not isinstance(value, dict)} for row in rows]
    with (folder / "train.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, plain[0])
        table.writeheader()
        table.writerows(plain)


def named_row(text: str) -> Row:
    """VARIANT:S:RECOMPUTE or VARIANT:S:RECOMPUTE:BATCH"""
    variant, seq_len, recompute, batch = ([*text.split(":"), "1"] + [""] * 3)[:4]
    numbers = seq_len.isdigit() and batch.isdigit()
    if variant not in VARIANTS or not numbers or recompute not in RECOMPUTE or _without_eager(variant, recompute):
        raise argparse.ArgumentTypeError(f"want VARIANT:S:RECOMPUTE or VARIANT:S:RECOMPUTE:BATCH, for example ours:4096:none, got {text!r}")
    return Row(variant, int(seq_len), recompute, int(batch))


def rows_wanted(args: argparse.Namespace) -> list[Row]:
    """Every row but those of --longest."""
    if args.rows:
        return list(args.rows)
    product = itertools.product(args.recompute, args.variants, args.seq_lens)
    return [Row(variant, seq_len, recompute, args.batch) for recompute, variant, seq_len in product if not _without_eager(variant, recompute)]


def _without_eager(variant: str, recompute: str) -> bool:
    return variant.startswith("eager") and recompute in MHC_RECOMPUTE


def run(args: argparse.Namespace, device: torch.device) -> list[Result]:
    """All rows, printed and written as they come; the process groups of each are its own."""
    results: list[Result] = []

    def measured(row: Row, ep_group: str, prefetch: int) -> Result:
        parallel = init_parallel(device, args.ep, 300.0, ep_group == "own")
        check_experts(args.experts, parallel)
        config = settings(args, row, ep_group, prefetch)
        results.append(attempt(args, parallel, config, row.variant))
        if parallel.rank == 0:
            print_split(results[-1], args.kernels)
            write(results, args.out)
        return results[-1]

    wanted = rows_wanted(args)
    for prefetch, ep_group in itertools.product(args.prefetch, args.ep_groups):
        for row in wanted:
            measured(row, ep_group, prefetch)
        for row in {row.variant + row.recompute: row for row in sorted(wanted, key=lambda row: row.seq_len)}.values() if args.longest else ():
            longer = row._replace(seq_len=2 * row.seq_len)
            while not measured(longer, ep_group, prefetch).note:
                longer = longer._replace(seq_len=2 * longer.seq_len)
    return results


def main(argv: list[str] | None = None) -> list[Result]:
    parser = argparse.ArgumentParser(prog="python -m bench.train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=VARIANTS, choices=VARIANTS)
    parser.add_argument("--seq-lens", nargs="+", type=int, default=[4096], metavar="S", help="tokens of a sequence")
    parser.add_argument("--recompute", nargs="+", default=["none"], choices=RECOMPUTE, help="mhc and cross-layer have no eager variant")
    parser.add_argument("--rows", nargs="+", type=named_row, metavar="ROW", help="VARIANT:S:RECOMPUTE[:BATCH] each, and no others")
    parser.add_argument("--longest", action="store_true", help="then double the longest of them until it does not fit")
    parser.add_argument("--preset", default="flash", choices=tuple(PRESETS), help="sizes that no other option names")
    parser.add_argument("--ratios", type=integers, default=(0, 4, 128, 4), metavar="N,N,...", help="compress ratio of each layer")
    parser.add_argument("--experts", type=int, default=8, help="routed experts a layer")
    parser.add_argument("--vocab", type=int, default=12032, help="rows of embedding and head; the published 129280 stand beside 43 layers")
    parser.add_argument("--batch", type=int, default=1, help="sequences a process")
    parser.add_argument("--steps", type=positive, default=5, help="timed steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--warm", action=argparse.BooleanOptionalAction, default=True, help="compile all kernels ahead, not each at its first use")
    parser.add_argument("--split", action=argparse.BooleanOptionalAction, default=True, help="profile one more step")
    parser.add_argument("--split-longest", type=int, default=1 << 30, metavar="S", help="but not of longer sequences")
    parser.add_argument("--kernels", type=int, default=0, help="how many of the largest kernels to print")
    parser.add_argument("--traces", type=Path, help="folder that keeps the profiles, a Chrome trace each")
    parser.add_argument("--ep", type=int, default=-1, help="processes that share the experts; -1 = all")
    parser.add_argument("--ep-groups", nargs="+", default=["own"], choices=("own", "shared"), help="process group of the experts' all-to-all")
    parser.add_argument("--prefetch", nargs="+", type=int, default=[1], help="layers whose weights are gathered ahead")
    parser.add_argument("--reshard", default="auto", choices=RESHARD, help="whether gathered weights are given up after the forward pass")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu shows that it runs, and no more")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder of the files written")
    args = parser.parse_args(argv)

    try:
        device = pick_device(args.device)
        first = settings(args, Row("ours", args.seq_lens[0], "none", args.batch))
    except ValueError as error:
        parser.error(str(error))
    if args.warm and any(row.variant.startswith("ours") for row in rows_wanted(args)):
        warm_kernels(first, device)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if rank == 0:
        if device.type == "cuda":
            print(", ".join(f"{name} {value}" for name, value in environment().items()))
        model = first.model
        sizes = f"hidden {model.hidden_size}, {model.num_heads} heads x {model.head_dim}, {args.experts} experts of {model.expert_dim}"
        print(f"layers {args.ratios}, {sizes}, vocabulary {args.vocab}, {args.dtype}, {world} processes, ep {args.ep}\n{HEADER}")
    results = run(args, device)
    shutdown()
    return results


if __name__ == "__main__":
    main()
