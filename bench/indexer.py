"""Lightning indexer: scores with top-k, and the gradients of the selected scores, beside eager, torch.compile and cuDNN.

64 heads, Di 128, ratio 4, bf16 q and k, fp32 weights, random normal inputs, one sequence. Providers: ours; unsorted (ours, sorted=False);
reference (plain PyTorch, eager, in chunks) and compile (all scores at once, bf16 products, torch.topk, which knows no order of ties, under
torch.compile; for the smallest K alone), left out above --eager-limit tokens; cudnn (the frontend's score
kernel and its top-k, which hold all scores at once and whose order of equal scores is its own: not like for like), where installed.
TFLOP/s counts visible pairs, 2 x heads x Di each, forward, and 6 x selected x heads x Di backward; % is of the rate of a bf16 8192^3 product
in the same run. Peak memory is beyond what is held before the call, results included.

A row is printed as soon as it is measured. --tokens, --topk, --providers and --directions choose rows; --seconds ends the run before the row
that would begin after that many, and a provider that takes longer than --limit for one of its rows is left out, so that the whole table can be
measured in parts (`python -m bench.run merge`).
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from bench.attn import matmul_rate
from bench.common import Captured, Row, copy_rate, median_ms, peak_mib, positive, print_head, print_row, time_limit
from indexer import lightning_indexer
from kernel_runtime.registry import ModelShape, import_ops, registered_specs
from reference.indexer import lightning_indexer as reference_indexer

HEADS, DIM, RATIO = 64, 128, 4
PROVIDERS = ("ours", "unsorted", "reference", "compile", "cudnn")
DIRECTIONS = ("forward", "backward", "backward, det.")


def make_inputs(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q [1, S, H, Di], k [1, S / 4, Di] in bf16, weights [1, S, H] in fp32, drawn on the device"""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, device="cuda", dtype=dtype).normal_(generator=generator)

    weights = normal(1, tokens, HEADS, dtype=torch.float32) * (HEADS * DIM) ** -0.5
    return normal(1, tokens, HEADS, DIM), normal(1, tokens // RATIO, DIM), weights


def visible_blocks(tokens: int) -> Tensor:
    return torch.arange(1, tokens + 1, device="cuda") // RATIO


def autograd(
    function: Callable[..., tuple[Tensor, Tensor]], inputs: tuple[Tensor, ...], deterministic: Callable[..., tuple[Tensor, Tensor]] | None
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Forward without gradients, then the backward of every score of a slot that is not empty."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]

    def forward() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return function(*leaves)

    yield "forward", forward
    for name, run in (("backward", function), ("backward, det.", deterministic)):
        if run is None:
            continue
        indices, scores = run(*leaves)
        cotangent = torch.randn_like(scores).masked_fill(indices < 0, 0)
        yield name, lambda scores=scores, cotangent=cotangent: torch.autograd.grad(scores, leaves, cotangent, retain_graph=True)


def all_scores(q: Tensor, k: Tensor, weights: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """What one writes without kernels: scores of every pair, those to come masked, torch.topk."""
    scores = (torch.einsum("bshd,bkd->bshk", q, k).float().relu() * weights[..., None]).sum(2)
    seen = torch.arange(1, q.shape[1] + 1, device=q.device)[:, None] // RATIO
    values, indices = scores.masked_fill(torch.arange(k.shape[1], device=q.device) >= seen, -torch.inf).topk(topk)
    return torch.where(values > -torch.inf, indices, -1).int(), values


def cudnn_forward(inputs: tuple[Tensor, ...], topk: int) -> Callable[[], object]:
    from cudnn import DSA

    q, k, weights = inputs[0], inputs[1][:, :, None], inputs[2].bfloat16()
    lengths = visible_blocks(q.shape[1]).int()

    def run() -> object:
        scores = DSA.indexer_forward_wrapper(q, k, weights, ratio=RATIO)["scores"]
        return DSA.indexer_top_k_wrapper(scores.reshape(q.shape[1], -1), lengths, topk, next_n=1, return_val=True)

    return run


def cases_of(provider: str, inputs: tuple[Tensor, ...], topk: int) -> Iterator[tuple[str, Callable[[], object]]]:
    if provider in ("ours", "unsorted"):

        def ours(*x: Tensor, deterministic: bool = False) -> tuple[Tensor, Tensor]:
            return lightning_indexer(*x, topk, cmp_ratio=RATIO, sorted=provider == "ours", deterministic=deterministic, impl="triton")

        directions = autograd(ours, inputs, lambda *x: ours(*x, deterministic=True))
        return directions if provider == "ours" else iter([next(directions)])
    if provider == "cudnn":
        return iter([("forward", cudnn_forward(inputs, topk))])

    def plain(*x: Tensor) -> tuple[Tensor, Tensor]:
        return reference_indexer(*x, topk, cmp_ratio=RATIO)

    if provider == "compile":
        compiled = torch.compile(all_scores, dynamic=False)
        return autograd(lambda *x: compiled(*x, topk), inputs, None)
    return autograd(plain, inputs, None)


def compile_kernels(op: str, topks: list[int], attention_heads: int = 64, attention_dim: int = 512) -> None:
    """The kernels of one op at once, in as many processes as there are cores; those of packed documents, which no row needs, are left out."""
    from kernel_runtime.plan import Plan
    from kernel_runtime.warmup import compile_ahead

    import_ops()
    shapes = [ModelShape(64, 4, attention_heads, attention_dim, 128, (RATIO,), HEADS, DIM, topk) for topk in topks]
    specs = [(name, spec) for shape in shapes for name, spec in registered_specs(shape) if name == op]
    needed = [x for x in specs if not x[1].consts.get("TABLE") and x[1].types.get("weights", "*fp32") == "*fp32"]
    major, minor = torch.cuda.get_device_capability()
    print(compile_ahead(Plan.of(needed), f"sm_{major}{minor}", jobs=min(16, os.cpu_count() or 1)).summary(), flush=True)


def add_common_arguments(parser: argparse.ArgumentParser, tokens: list[int], eager_limit: int, providers: tuple[str, ...]) -> None:
    """Of this bench and that of the loss."""
    parser.add_argument("--tokens", nargs="+", type=positive, default=tokens)
    parser.add_argument("--topk", nargs="+", type=positive, default=[512, 1024, 2048], help="those above the number of blocks are left out")
    parser.add_argument("--providers", nargs="+", choices=providers, default=list(providers))
    parser.add_argument("--eager-limit", type=int, default=eager_limit, help="tokens up to which reference and compile run")
    parser.add_argument("--rep", type=positive, default=30, help="ms of calls that a median is taken over; at least 9 calls")
    parser.add_argument("--limit", type=float, default=120, help="seconds that one row may take, compilation included; 0: any")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no row is begun after this many seconds")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, [4096, 16384, 65536, 131072], 16384, PROVIDERS)
    parser.add_argument("--directions", nargs="+", choices=DIRECTIONS, default=list(DIRECTIONS))


def left_out(provider: str, tokens: int, topk: int, args: argparse.Namespace) -> bool:
    return provider in ("reference", "compile") and (tokens > args.eager_limit or (provider == "compile" and topk > min(args.topk)))


def measured(provider: str, inputs: tuple[Tensor, ...], topk: int, args: argparse.Namespace, copy: float, product: float) -> Iterator[Row]:
    """The rows of one provider."""
    tokens = inputs[0].shape[1]
    visible = visible_blocks(tokens)
    pairs, selected = int(visible.sum()), int(visible.clamp(max=topk).sum())
    for direction, fn in cases_of(provider, inputs, topk):
        if direction not in args.directions:
            continue
        fn()
        peak = peak_mib(fn)
        count = 2 * pairs if direction == "forward" else 6 * selected
        least = sum(x.nbytes for x in inputs) * (1 if direction == "forward" else 2) + 8 * tokens * topk
        graphs = (True, False) if direction == "forward" and provider in ("ours", "unsorted") else (False,)
        for graph in graphs:
            ms = median_ms(Captured(fn) if graph else fn, rep=args.rep)
            rate = count * HEADS * DIM / ms / 1e9
            note = f"{rate:.0f} TFLOP/s, {100 * rate / product:.1f} % of matmul"
            case = ("indexer", f"S {tokens}, K {topk}", "bf16", "scores + top-k", direction, provider, graph)
            yield Row(*case, ms, least, copy, 0, peak, note)


def limited(rows: Iterator[Row], seconds: float) -> Iterator[Row]:
    """The rows, each of which may take so many seconds to come (OverLimit otherwise)."""
    while True:
        with time_limit(seconds):
            row = next(rows, None)
        if row is None:
            return
        yield row


def within(args: argparse.Namespace, deadline: float, what: str, rows: Callable[[], Iterator[Row]]) -> list[Row]:
    """The rows of one provider, printed as they come; none after the deadline. Of this bench and that of the loss."""
    found: list[Row] = []
    if time.monotonic() > deadline:
        print(f"no time left for {what}", flush=True)
        return found
    try:
        for row in limited(rows(), args.limit):
            print_row(row)
            found.append(row)
    except Exception as error:  # a provider may be missing, not take the shape or run out of memory: say so and go on
        print(f"{what}: {type(error).__name__}: {str(error)[:200]}", flush=True)
    torch.cuda.empty_cache()
    return found


def rates() -> tuple[float, float]:
    """GB/s of a copy and TFLOP/s of a product, which are printed."""
    copy, product = copy_rate(), matmul_rate()
    print(f"copy {copy:.0f} GB/s, matmul {product:.0f} TFLOP/s", flush=True)
    return copy, product


def run(args: argparse.Namespace) -> list[Row]:
    deadline = time.monotonic() + args.seconds
    speeds = rates()
    if {"ours", "unsorted"} & set(args.providers):
        compile_kernels("indexer.lightning", args.topk)
    rows: list[Row] = []
    for tokens in args.tokens:
        inputs = make_inputs(tokens)
        for topk in (k for k in args.topk if k <= tokens // RATIO):
            print_head(f"indexer, S {tokens}, top {topk}, {HEADS} heads, Di {DIM}, bf16")
            for provider in args.providers:
                if not left_out(provider, tokens, topk, args):
                    make = partial(measured, provider, inputs, topk, args, *speeds)
                    rows += within(args, deadline, f"{provider} S {tokens} K {topk}", make)
            torch._dynamo.reset()
    return rows
