"""compress_kv on a GPU: checked against fp64, then timed beside the eager form and torch.compile.

    python -m bench.run compress [--tokens 4096 65536] [--providers triton reference compile] [--tune]

GB/s count the minimal bytes (kv, gate and the gradient of the result read once, results written once) and stand beside the rate at which
the same device copies, measured in the same run. Calls are captured in a CUDA graph that goes over several sets of inputs, together larger
than any cache, so neither launches nor the L2 cache are measured. The backward of the two baselines is (forward + backward) - forward.
--tune times other tiles than the tables' and prints them; it changes nothing.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from bench.common import Row, copy_rate, positive, print_head, print_row
from reference.cases import relative_error
from reference.cases.sparse_attn import CompressCase, compress_inputs
from reference.compress import compress_kv as reference
from sparse_attn import compress_kv
from sparse_attn.compress import bwd, fwd
from sparse_attn.compress.op import BACKWARD, FORWARD

D = 512
SHAPES = ((4, True), (128, False))  # ratio, overlap: the two compressors of DeepSeek-V4
COLD_BYTES = 400e6  # of inputs that a timing goes over
PROVIDERS = ("triton", "reference", "compile")
LIMIT = 3e-3  # relative error against fp64 of bf16 results: their rounding is 1.6e-3


def time_graph(calls: Sequence[Callable[[], object]], repeats: int = 7) -> float:
    """Seconds of one of the calls, which are captured one after the other; median over replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(repeats):
        start.record()
        for _ in range(5):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / 5 / len(calls))
    return statistics.median(times)


def minimal_bytes(case: CompressCase) -> tuple[int, int]:
    """Of the forward and of the backward, in bf16."""
    token = case.S * case.D * (2 if case.overlap else 1)
    entry = case.S // case.ratio * case.D
    return 2 * (2 * token + entry), 2 * (4 * token + entry)


def check(case: CompressCase) -> None:
    """Raises where the kernels' result or a gradient is not that of fp64; buffers hold NaN before."""
    inputs = compress_inputs(case, seed=3, dtype=torch.bfloat16, device="cuda")
    names = ("kv", "gate", "position_bias")
    dout = torch.randn(FORWARD(*inputs.values(), None, "eager").shape, device="cuda").bfloat16()
    empty = torch.empty, torch.empty_like
    torch.empty, torch.empty_like = ((lambda *a, make=make, **k: fill_nan(make(*a, **k))) for make in empty)
    try:
        got = [FORWARD(*inputs.values(), None, "triton"), *BACKWARD(dout, *inputs.values(), None, "triton")]
    finally:
        torch.empty, torch.empty_like = empty
    wide = {**inputs, **{n: inputs[n].double().requires_grad_() for n in names}}
    out = reference(**wide)
    want = [out, *torch.autograd.grad(out, [wide[n] for n in names], dout.double())]
    errors = [relative_error(g, w) for g, w in zip(got, want)]
    print(f"check ratio {case.ratio} overlap {case.overlap} S {case.S}: " + " ".join(f"{e:.1e}" for e in errors), flush=True)
    if not all(e <= LIMIT for e in errors):
        raise SystemExit("the kernels are wrong")


def fill_nan(x: torch.Tensor) -> torch.Tensor:
    return x.fill_(float("nan") if x.is_floating_point() else 2**30)


def input_sets(case: CompressCase) -> list[list]:
    """[kv, gate, bias, dout] of as many calls as COLD_BYTES holds"""
    sets = []
    for seed in range(max(2, int(COLD_BYTES / minimal_bytes(case)[0]))):
        generator = torch.Generator("cuda").manual_seed(seed)
        C = 2 if case.overlap else 1
        shapes = ((1, case.S, C * D), (1, case.S, C * D), (case.ratio, C * D), (1, case.S // case.ratio, D))
        kv, gate, bias, dout = (torch.randn(s, device="cuda", generator=generator) for s in shapes)
        sets.append([kv.bfloat16(), gate.bfloat16(), bias, dout.bfloat16()])
    return sets


def kernel_times(case: CompressCase, sets: list[list]) -> tuple[float, float]:
    options = (case.ratio, case.overlap, None, "triton")
    forward = time_graph([lambda x=x: FORWARD(*x[:3], *options) for x in sets])
    return forward, time_graph([lambda x=x: BACKWARD(x[3], *x[:3], *options) for x in sets])


def autograd_times(fn: Callable[..., torch.Tensor], case: CompressCase, sets: list[list]) -> tuple[float, float]:
    """Forward and backward of a differentiable function, the backward as a difference."""
    leaves = [[t.clone().requires_grad_() for t in x[:3]] for x in sets]

    def both(x: list, tensors: list) -> object:
        return torch.autograd.grad(fn(*tensors, case.ratio, overlap=case.overlap), tensors, x[3])

    with torch.no_grad():
        forward = time_graph([lambda t=t: fn(*t, case.ratio, overlap=case.overlap) for t in leaves])
    return forward, time_graph([lambda x=x, t=t: both(x, t) for x, t in zip(sets, leaves)]) - forward


def measure(tokens: Sequence[int], providers: Sequence[str], rate: float) -> list[Row]:
    compiled = torch.compile(lambda *a, **k: compress_kv(*a, **k, impl="eager"), dynamic=False)
    rows = []
    print_head(f"compress_kv, D {D}, bf16, batch 1")
    for (ratio, overlap), S in itertools.product(SHAPES, tokens):
        case = CompressCase("", ratio, overlap, D=D, B=1, S=S)
        sets = input_sets(case)
        forms = {
            "triton": lambda c=case, x=sets: kernel_times(c, x),
            "reference": lambda c=case, x=sets: autograd_times(lambda *a, **k: compress_kv(*a, **k, impl="eager"), c, x),
            "compile": lambda c=case, x=sets: autograd_times(compiled, c, x),
        }
        for form in providers:
            torch.cuda.empty_cache()
            try:
                times = forms[form]()
            except Exception as error:  # a baseline that cannot be captured must not hide the rest
                print(f"{form}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
                continue
            for direction, seconds, count in zip(("forward", "backward"), times, minimal_bytes(case)):
                op = f"ratio {ratio}{', overlap' if overlap else ''}"
                rows.append(Row("compress", f"S {S}", "bf16", op, direction, form, True, seconds * 1e3, count, rate))
                print_row(rows[-1])
    return rows


def tune(tokens: Sequence[int], rate: float) -> None:
    shipped = fwd.forward_tiles, bwd.backward_tiles
    for ratio, overlap in SHAPES:
        BR = shipped[0](ratio, D, overlap).BR
        tiles = ((32, 2), (32, 4), (64, 4)) if BR > 16 else ((64, 1), (128, 1), (256, 1))
        cases = [CompressCase("", ratio, overlap, D=D, B=1, S=S) for S in tokens]
        sets = [input_sets(case) for case in cases]
        for (BD, warps), stages in itertools.product(tiles, (1, 2, 3)):
            fwd.forward_spec.cache_clear()
            bwd.backward_spec.cache_clear()
            for programs in (256, 512, 1024, 2048):
                fwd.forward_tiles = bwd.backward_tiles = lambda *_, t=(BR, BD, warps, programs, stages): fwd.Tiles(*t)
                line = f"tune ratio {ratio} BD {BD} warps {warps} stages {stages} programs {programs}:"
                for case, x in zip(cases, sets):
                    for direction, s, count in zip(("fwd", "bwd"), kernel_times(case, x), minimal_bytes(case)):
                        line += f"  S {case.S} {direction} {s * 1e6:.1f} us {100 * count / s / rate / 1e9:.0f} %"
                print(line, flush=True)
        del sets
    fwd.forward_tiles, bwd.backward_tiles = shipped
    fwd.forward_spec.cache_clear()
    bwd.backward_spec.cache_clear()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=positive, nargs="+", default=[4096, 65536])
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    parser.add_argument("--tune", action="store_true")


def run(args: argparse.Namespace) -> list[Row]:
    for ratio, overlap in (*SHAPES, (16, True), (128, True), (300, False)):
        case = CompressCase("", ratio, overlap, D=D, B=2, S=1027)
        check(case)
        check(replace(case, D=100))
    rate = copy_rate()
    print(f"copy {rate:.0f} GB/s")
    if args.tune:
        tune(args.tokens, rate)
    return measure(args.tokens, args.providers, rate)
