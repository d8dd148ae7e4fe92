"""Lightning indexer: scores with top-k, and the gradients of the selected scores, beside eager, torch.compile and cuDNN.

64 heads, Di 128, ratio 4, bf16 q and k, fp32 weights, random normal inputs, one sequence. Providers: ours; unsorted (ours, sorted=False);
reference (plain PyTorch, eager, in chunks) and compile (all scores at once, bf16 products, torch.topk, which knows no order of ties, under
torch.compile; for the smallest K alone), left out above --eager-limit tokens; cudnn (the frontend's score
kernel and its top-k, which hold all scores at once and whose order of equal scores is its own: not like for like), where installed.
TFLOP/s counts visible pairs, 2 x heads x Di each, forward, and 6 x selected x heads x Di backward; % is of the rate of a bf16 8192^3 product
in the same run. Peak memory is beyond what is held before the call, results included.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bench.attn import matmul_rate
from bench.common import Captured, Row, copy_rate, median_ms, peak_mib, print_table
from indexer import lightning_indexer
from reference.indexer import lightning_indexer as reference_indexer

HEADS, DIM, RATIO = 64, 128, 4
PROVIDERS = ("ours", "unsorted", "reference", "compile", "cudnn")


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 16384, 65536, 131072])
    parser.add_argument("--topk", nargs="+", type=int, default=[512, 1024, 2048], help="those above the number of blocks are left out")
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    parser.add_argument("--eager-limit", type=int, default=16384)


def run(args: argparse.Namespace) -> list[Row]:
    copy, product = copy_rate(), matmul_rate()
    print(f"copy {copy:.0f} GB/s, matmul {product:.0f} TFLOP/s")
    rows: list[Row] = []
    for tokens in args.tokens:
        inputs = make_inputs(tokens)
        visible = visible_blocks(tokens)
        for topk in (k for k in args.topk if k <= tokens // RATIO):
            here: list[Row] = []
            pairs, selected = int(visible.sum()), int(visible.clamp(max=topk).sum())
            for provider in args.providers:
                if provider in ("reference", "compile") and (tokens > args.eager_limit or (provider == "compile" and topk > min(args.topk))):
                    continue
                try:
                    for direction, fn in cases_of(provider, inputs, topk):
                        fn()
                        peak = peak_mib(fn)
                        count = 2 * pairs if direction == "forward" else 6 * selected
                        least = sum(x.nbytes for x in inputs) * (1 if direction == "forward" else 2) + 8 * tokens * topk
                        graphs = (False, True) if direction == "forward" and provider in ("ours", "unsorted") else (False,)
                        for graph in graphs:
                            ms = median_ms(Captured(fn) if graph else fn)
                            rate = count * HEADS * DIM / ms / 1e9
                            note = f"{rate:.0f} TFLOP/s, {100 * rate / product:.1f} % of matmul"
                            case = ("indexer", f"S {tokens}, K {topk}", "bf16", "scores + top-k", direction, provider, graph)
                            here.append(Row(*case, ms, least, copy, 0, peak, note))
                except Exception as error:  # a provider may be missing, not take the shape or run out of memory: say so and go on
                    print(f"{provider} S {tokens} K {topk}: {type(error).__name__}: {str(error)[:200]}")
                torch.cuda.empty_cache()
            torch._dynamo.reset()
            here.sort(key=lambda r: ("forward", "backward", "backward, det.").index(r.direction))
            print_table(f"indexer, S {tokens}, top {topk}, {HEADS} heads, Di {DIM}, bf16", here)
            rows += here
    return rows
