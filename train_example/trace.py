"""What a trace of `--profile` says of communication: `python -m train_example.trace FILE_OR_FOLDER ...`.

For each step and rank: how long the device computed, communicated, and communicated while nothing was computed (exposed); how much of
the all-gathers lay under computation; whether an all-to-all waited behind an all-gather; and the computing time by part of the model.

    exposed   length of (union of collectives) minus (union of everything else on the device)
    waited    the part of it during which something to compute had been launched and could not start; in the rest the host was late
    hidden    share of the all-gathers' union that lies under the union of everything else
    queued    an all-to-all that could have started, for it was launched and the work before it was done, while an all-gather launched
              earlier was not over, and started only after that one ended
    idle      the step, less the union of all device work

A collective's time includes waiting for the slowest rank. Parts: a kernel belongs to the innermost range of `annotate_parts` around its
launch, or, in a backward pass, around the forward op whose gradient it computes.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from train_example.files import parse_json

STEP, PART = "train step ", "part: "
# Ranges that torch opens itself
FOREIGN = {"FSDP::": "FSDP copies", "Optimizer.step": "optimizer"}
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
COLLECTIVES = {"allgather": "all-gather", "reducescatter": "reduce-scatter", "alltoall": "all-to-all", "sendrecv": "all-to-all"}
SLACK_US = 10.0  # an all-to-all that starts within this of being ready did not wait

Spans = list[tuple[float, float]]


@dataclass
class Work:
    """One kernel, copy or fill of the device; times in us. kind: "compute" or the collective. launched: the host's call, if known."""

    start: float
    end: float
    stream: Any
    kind: str
    launched: float
    group: str = ""
    part: str = "rest"
    name: str = ""


@dataclass
class StepSummary:
    """Of one step of one rank; times in ms."""

    step: int
    ms: float
    compute: float
    communication: float
    exposed: float
    waited: float
    idle: float
    all_gathers: int
    all_gather: float
    hidden: float  # share of all_gather under computation, 0 to 1
    all_to_alls: int
    all_to_all: float
    queued: int
    queued_ms: float
    same_group: bool  # whether any all-to-all shares a process group with an all-gather
    parts: dict[str, float] = field(default_factory=dict)


def annotate_parts(model: nn.Module) -> None:
    """Give the parts of every layer a profiler range."""
    for layer in (*model.layers, *(block.layer for block in model.mtp)):
        _annotate(layer, "forward", "mHC")  # what the ranges inside leave over
        for norm in (layer.attn_norm, layer.moe_norm):
            _annotate(norm, "forward", "norms")
        _annotate(layer.attn, "forward", "attention, rest")
        _annotate(layer.attn.core, "forward", "attention op")
        if layer.attn.compressor is not None:
            _annotate(layer.attn.compressor, "forward", "compressor")
        if layer.attn.indexer is not None:
            for owner, method in ((layer.attn.indexer, "forward"), (layer.attn, "_select"), (layer.attn, "_kl")):
                _annotate(owner, method, "indexer + KL")
        _annotate(layer.moe, "forward", "MoE")
    _annotate(model.head, "forward", "head + loss")


def _annotate(owner: Any, method: str, part: str) -> None:
    inner = getattr(owner, method)

    @functools.wraps(inner)
    def call(*args, **kwargs):
        with torch.profiler.record_function(PART + part):
            return inner(*args, **kwargs)

    setattr(owner, method, call)


def read(path: Path) -> list[dict[str, Any]]:
    """Events of a Chrome trace, .json or .json.gz."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"damaged: {error}") from error
    events = parse_json(data, "the trace")
    events = events.get("traceEvents") if isinstance(events, dict) else events
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ValueError("no Chrome trace: it holds no list of events")
    return events


def union(spans: Iterable[tuple[float, float]]) -> Spans:
    """Disjoint ascending spans that cover the same points."""
    out: Spans = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)


def intersection(a: Spans, b: Spans) -> Spans:
    """Of two lists as `union` gives them."""
    out, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            out.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return out


def _part_of(name: str) -> str | None:
    if name.startswith(PART):
        return name.removeprefix(PART)
    return next((part for prefix, part in FOREIGN.items() if name.startswith(prefix)), None)


def _kind(event: dict[str, Any]) -> str:
    name = event["name"].lower()
    if "nccl" not in name and "hccl" not in name:
        return "compute"
    said = (str(event.get("args", {}).get("Collective name", "")) + " " + name).replace("_", "").lower()
    return next((kind for key, kind in COLLECTIVES.items() if key in said), "other collective")


def _parts_of_launches(events: list[dict[str, Any]]) -> dict[int, tuple[float, str | None]]:
    """By correlation id: when the host launched, and the part of the model it launched for."""
    forward_of, flows = {}, {}
    for event in events:
        if event.get("cat") == "fwdbwd":
            place = (event["tid"], event["ts"])
            if event["ph"] == "s":
                flows[event["id"]] = place
            else:
                forward_of[place] = event["id"]
    part_at_flow: dict[Any, str | None] = {}
    launches: dict[int, tuple[float, str | None]] = {}
    by_thread: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in ("user_annotation", "cpu_op", "cuda_runtime", "cuda_driver", "runtime"):
            by_thread[event["tid"]].append(event)
    flow_starts = {place: number for number, place in flows.items()}

    def walk(thread: list[dict[str, Any]], final: bool) -> None:
        stack: list[tuple[float, str | None, Any]] = []  # end, part, flow that leads to the forward op
        for event in sorted(thread, key=lambda e: (e["ts"], -e.get("dur", 0))):
            start = event["ts"]
            while stack and stack[-1][0] <= start:
                stack.pop()
            place = (event["tid"], start)
            if event["cat"] not in ("user_annotation", "cpu_op"):
                if final and "correlation" in event.get("args", {}):
                    launches[event["args"]["correlation"]] = (start, _resolve(stack, part_at_flow))
                continue
            part = _part_of(event["name"]) if event["cat"] == "user_annotation" else None
            flow = forward_of.get(place) if event["cat"] == "cpu_op" else None
            stack.append((start + event.get("dur", 0), part, flow))
            if not final and place in flow_starts:
                part_at_flow[flow_starts[place]] = _resolve(stack, {})

    for final in (False, True):
        for thread in by_thread.values():
            walk(thread, final)
    return launches


def _resolve(stack: list[tuple[float, str | None, Any]], part_at_flow: dict[Any, str | None]) -> str | None:
    for _, part, flow in reversed(stack):
        if part is None and flow is not None:
            part = part_at_flow.get(flow)
        if part is not None:
            return part
    return None


def device_work(events: list[dict[str, Any]]) -> list[Work]:
    launches = _parts_of_launches(events)
    out = []
    for event in events:
        if event.get("cat") not in DEVICE_WORK or event.get("ph") != "X":
            continue
        args, kind = event.get("args", {}), _kind(event)
        launched, part = launches.get(args.get("correlation", -1), (event["ts"], None))
        group = f"{args.get('Process Group Name', '')} {args.get('Process Group Description', '')}".strip()
        out.append(Work(event["ts"], event["ts"] + event.get("dur", 0), args.get("stream"), kind, launched, group, part or "rest", event["name"]))
    return sorted(out, key=lambda work: work.start)


def queued_behind(work: list[Work]) -> list[float]:
    """Of each all-to-all that waited behind an all-gather: how long, us."""
    gathers = [w for w in work if w.kind == "all-gather"]
    busiest: dict[Any, float] = defaultdict(float)
    for w in work:
        if w.kind == "compute":
            busiest[w.stream] += w.end - w.start
    main = max(busiest, key=lambda stream: busiest[stream], default=None)
    waits = []
    for mine in (w for w in work if w.kind == "all-to-all"):
        before = [w.end for w in work if w is not mine and w.launched < mine.launched and w.stream in (main, mine.stream) and w.kind != "all-gather"]
        ready = max(mine.launched, max(before, default=mine.launched))
        blocking = [g.end for g in gathers if g.launched < mine.launched and ready + SLACK_US < g.end <= mine.start + SLACK_US]
        if blocking:
            waits.append(max(blocking) - ready)
    return waits


def summarize(events: list[dict[str, Any]]) -> list[StepSummary]:
    """One summary for each step in the trace. ValueError for a trace without steps or without device work, or that torch did not write."""
    try:
        return _summaries(events)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no trace of torch's profiler: {error!r} in its events") from error


def _summaries(events: list[dict[str, Any]]) -> list[StepSummary]:
    windows = {
        int(event["name"].removeprefix(STEP)): (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].removeprefix(STEP).isdecimal() and event["name"].startswith(STEP)
    }
    everything = device_work(events)
    if not windows or not everything:
        raise ValueError("the trace has no " + ("step of the trainer" if not windows else "work of an accelerator: it was taken on a CPU"))
    return [_summary(step, *windows[step], everything) for step in sorted(windows)]


def _summary(step: int, begin: float, end: float, everything: list[Work]) -> StepSummary:
    work = [w for w in everything if begin <= w.start < end]
    by_kind: dict[str, list[Work]] = defaultdict(list)
    for w in work:
        by_kind[w.kind].append(w)
    spans = {kind: union((w.start, w.end) for w in items) for kind, items in by_kind.items()}
    compute = spans.get("compute", [])
    communication = union((w.start, w.end) for w in work if w.kind != "compute")
    covered = intersection(communication, compute)
    pending = union((w.launched, w.start) for w in by_kind["compute"])
    held_up = intersection(communication, pending)
    gathers, exchanges = by_kind["all-gather"], by_kind["all-to-all"]
    gather_spans = spans.get("all-gather", [])
    waits = queued_behind(work)
    parts: dict[str, float] = defaultdict(float)
    for w in by_kind["compute"]:
        parts[w.part] += (w.end - w.start) / 1000
    return StepSummary(
        step=step,
        ms=(end - begin) / 1000,
        compute=length(compute) / 1000,
        communication=length(communication) / 1000,
        exposed=(length(communication) - length(covered)) / 1000,
        waited=(length(held_up) - length(intersection(held_up, covered))) / 1000,
        idle=(end - begin - length(union((w.start, min(w.end, end)) for w in work))) / 1000,
        all_gathers=len(gathers),
        all_gather=length(gather_spans) / 1000,
        hidden=length(intersection(gather_spans, compute)) / length(gather_spans) if gather_spans else 0.0,
        all_to_alls=len(exchanges),
        all_to_all=sum(w.end - w.start for w in exchanges) / 1000,
        queued=len(waits),
        queued_ms=sum(waits) / 1000,
        same_group=bool({w.group for w in gathers} & {w.group for w in exchanges} - {""}),
        parts=dict(sorted(parts.items(), key=lambda item: -item[1])),
    )


_TIMES = ("ms", "compute", "comm", "exposed", "waited", "idle")
HEADER = (
    f"{'step':>5} {' '.join(f'{name:>8}' for name in _TIMES)} | {'all-gathers':>11} {'ms':>7} {'hidden':>7} | "
    f"{'all-to-alls':>11} {'ms':>7} {'queued':>6} {'ms':>7}"
)


def line(s: StepSummary) -> str:
    times = " ".join(f"{value:8.2f}" for value in (s.ms, s.compute, s.communication, s.exposed, s.waited, s.idle))
    return (
        f"{s.step:5d} {times} | {s.all_gathers:11d} {s.all_gather:7.2f} {s.hidden:7.1%} | "
        f"{s.all_to_alls:11d} {s.all_to_all:7.2f} {s.queued:6d} {s.queued_ms:7.3f}"
        + ("  all-to-all and all-gather share a group" if s.same_group else "")
    )


def main(argv: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m train_example.trace", description=__doc__, formatter_class=raw)
    parser.add_argument("paths", nargs="+", type=Path, metavar="FILE_OR_FOLDER", help="traces, or a run's folder or its traces/")
    parser.add_argument("--parts", action="store_true", help="also the computing time by part of the model")
    args = parser.parse_args(argv)
    files = [file for path in args.paths for file in ([path] if path.is_file() else sorted(path.rglob("*rank*.json*")))]
    if not files:
        print(f"error: no trace under {', '.join(map(str, args.paths))}", file=sys.stderr)
        return 2
    for file in files:
        try:
            steps = summarize(read(file))
        except (ValueError, OSError) as error:
            print(f"error: {file}: {error}", file=sys.stderr)
            return 2
        print(f"{file}\n{HEADER}")
        for summary in steps:
            print(line(summary))
            if args.parts:
                print("      " + ", ".join(f"{part} {ms:.2f}" for part, ms in summary.parts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
