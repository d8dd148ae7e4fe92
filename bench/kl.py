"""KL loss of the indexer, value and gradients together, beside eager, torch.compile and cuDNN.

64 index heads, Di 128, ratio 4, attention of 64 heads and D 512, bf16, target "joint", random inputs, one sequence; the slots are those that
the indexer selects from random scores. Forms: given (teacher [S, K] ready-made), given det. (deterministic gradient of k), own (teacher from
q, cmp_kv and lse), each of them "+ scores" with the selection's scores as well; dense (all visible blocks, no slots). Providers: ours;
reference (plain PyTorch, eager, in chunks, fp32) and compile (all slots at once, bf16 products, under torch.compile; given and own for the
smallest K), left out above --eager-limit tokens; cudnn (the frontend's recomputed scores, target and gradients, no loss value; its dk is
not deterministic: not like for like), where installed.
TFLOP/s counts slots of valid pairs, 6 x heads x Di each for the gradients and 2 x 64 x 512 for an own teacher; % is of the rate of a bf16
8192^3 product in the same run. Peak memory is beyond what is held before the call, gradients included.

A row is printed as soon as it is measured; --seconds, --limit and `python -m bench.run merge` as in `bench.indexer`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bench.common import Captured, Row, median_ms, peak_mib, print_head
from bench.indexer import DIM, HEADS, RATIO, add_common_arguments, compile_kernels, left_out, make_inputs, rates, visible_blocks, within
from indexer import indexer_kl_loss, lightning_indexer
from reference.indexer_loss import indexer_kl_loss as reference_loss

ATTENTION_HEADS, ATTENTION_DIM, WINDOW = 64, 512, 128
FORMS = ("given", "given + scores", "given det.", "own", "own + scores", "dense")
PROVIDERS = ("ours", "reference", "compile", "cudnn")


@dataclass
class Problem:
    """Leaves of the indexer, and the main attention's constants; lse is that of logits of variance 1 on window and visible blocks."""

    leaves: list[Tensor]
    indices: Tensor
    scores: Tensor
    teacher: Tensor
    q: Tensor
    cmp_kv: Tensor
    lse: Tensor

    def options(self, form: str) -> dict[str, Tensor | None]:
        found: dict[str, Tensor | None] = dict(indices=None if form == "dense" else self.indices)
        if form.endswith("+ scores"):
            found["scores"] = self.scores
        return found | (dict(teacher=self.teacher) if form.startswith("given") else dict(q=self.q, cmp_kv=self.cmp_kv, lse=self.lse))


def make(tokens: int, topk: int, seed: int = 1) -> Problem:
    inputs = make_inputs(tokens)
    with torch.no_grad():
        indices, scores = lightning_indexer(*inputs, topk, cmp_ratio=RATIO)
    generator = torch.Generator("cuda").manual_seed(seed)
    q = torch.empty(1, tokens, ATTENTION_HEADS, ATTENTION_DIM, device="cuda", dtype=torch.bfloat16).normal_(generator=generator)
    cmp_kv = torch.empty(1, tokens // RATIO, ATTENTION_DIM, device="cuda", dtype=torch.bfloat16).normal_(generator=generator)
    seen = (visible_blocks(tokens) + WINDOW).float().log() + 0.5
    lse = seen[None, :, None].expand(1, tokens, ATTENTION_HEADS).contiguous()
    teacher = torch.rand(indices.shape, device="cuda", generator=generator) / topk
    return Problem([x.requires_grad_() for x in inputs], indices, scores, teacher, q, cmp_kv, lse)


def both(loss: Callable[..., Tensor], x: Problem, form: str) -> Callable[[], object]:
    options = x.options(form)
    return lambda: torch.autograd.grad(loss(*x.leaves, **options), x.leaves)


def ours(x: Problem, form: str) -> Callable[[], object]:
    def loss(*leaves: Tensor, **options: object) -> Tensor:
        return indexer_kl_loss(*leaves, **options, cmp_ratio=RATIO, deterministic=form.endswith("det."), impl="triton")

    return both(loss, x, form)


def all_slots(q_index: Tensor, k_index: Tensor, weights: Tensor, indices: Tensor, **given: Tensor) -> Tensor:
    """What one writes without kernels, for one sequence: every gathered row and every product at once."""
    valid, rows = indices[0] >= 0, indices[0].clamp(min=0).long()
    scores = (torch.einsum("shd,skd->shk", q_index[0], k_index[0][rows]).float().relu() * weights[0, ..., None]).sum(1)
    if "teacher" in given:
        mean = given["teacher"][0]
    else:
        z = torch.einsum("snd,skd->snk", given["q"][0], given["cmp_kv"][0][rows]).float() * ATTENTION_DIM**-0.5
        mean = (z - given["lse"][0, ..., None]).exp().mean(1)
    p = torch.where(valid, mean, 0)
    p = p / p.sum(-1, keepdim=True).clamp(min=1e-30)
    predicted = torch.log_softmax(torch.where(valid, scores, -1e30), -1)
    return (torch.xlogy(p, p) - p * torch.where(valid, predicted, 0)).sum()


def cudnn(x: Problem, form: str) -> Callable[[], object]:
    from cudnn import DSA

    q, k, weights = (t.detach().bfloat16() for t in x.leaves)
    scale = ATTENTION_DIM**-0.5
    one = torch.ones((), device="cuda")

    def run() -> object:
        predicted = DSA.sparse_indexer_score_recompute_wrapper(q, k, weights, x.indices, qhead_per_kv_head=HEADS)["predict"]
        if form == "own":
            target = DSA.sparse_attn_score_recompute_wrapper(x.q, x.cmp_kv, x.lse, x.indices, softmax_scale=scale, qhead_per_kv_head=ATTENTION_HEADS)[
                "target"
            ]
        else:
            target = x.teacher.clone()  # the backward overwrites both
        return DSA.indexer_backward_wrapper(q, weights, k, target, predicted, x.indices, grad_loss=one)

    return run


def case_of(provider: str, x: Problem, form: str) -> Callable[[], object] | None:
    if provider == "ours":
        return ours(x, form)
    if provider == "cudnn":
        return cudnn(x, form) if form in ("given", "own") else None
    if form not in (("given", "own") if provider == "compile" else ("given", "own", "dense")):
        return None
    return both(torch.compile(all_slots, dynamic=False) if provider == "compile" else partial(reference_loss, cmp_ratio=RATIO), x, form)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, [4096, 16384, 65536], 4096, PROVIDERS)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))


def measured(provider: str, x: Problem, form: str, args: argparse.Namespace, copy: float, product: float) -> Iterator[Row]:
    """The rows of one provider and form: as a graph, called from Python."""
    tokens, topk = x.indices.shape[1:]
    visible = visible_blocks(tokens)
    pairs = int((visible if form == "dense" else visible.clamp(max=topk)).sum())
    flops = 6 * pairs * HEADS * DIM + (0 if form.startswith("given") else 2 * pairs * ATTENTION_HEADS * ATTENTION_DIM)
    least = 2 * sum(t.nbytes for t in x.leaves) + sum(t.nbytes for t in x.options(form).values() if t is not None)
    fn = case_of(provider, x, form)
    if fn is None:
        return
    fn()
    peak = peak_mib(fn)
    for graph in (True, False) if provider == "ours" else (False,):
        ms = median_ms(Captured(fn) if graph else fn, rep=args.rep)
        rate = flops / ms / 1e9
        note = f"{rate:.0f} TFLOP/s, {100 * rate / product:.1f} % of matmul"
        yield Row("kl", f"S {tokens}, K {topk}", "bf16", form, "both", provider, graph, ms, least, copy, 0, peak, note)


def run(args: argparse.Namespace) -> list[Row]:
    deadline = time.monotonic() + args.seconds
    speeds = rates()
    if "ours" in args.providers:
        compile_kernels("indexer.kl_loss", args.topk, ATTENTION_HEADS, ATTENTION_DIM)
    compile_kernels("indexer.lightning", args.topk)
    rows: list[Row] = []
    for tokens in args.tokens:
        for topk in (k for k in args.topk if k <= tokens // RATIO):
            x = make(tokens, topk)
            print_head(f"KL loss, S {tokens}, top {topk}, {HEADS} heads, Di {DIM}, bf16")
            for form in args.forms:
                if form == "dense" and topk != min(args.topk):
                    continue  # it has no slots
                for provider in args.providers:
                    if not left_out(provider, tokens, topk, args):
                        rows += within(args, deadline, f"{provider} {form} S {tokens} K {topk}", partial(measured, provider, x, form, args, *speeds))
            torch._dynamo.reset()
    return rows
