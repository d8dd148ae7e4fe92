"""Sparse attention: window, all compressed entries, selected entries; forward, backward and deterministic backward.

Sizes of DeepSeek-V4: D 512, window 128, sinks; SCFA takes 512 of S / 4 entries (random scores), CFA all of S / 128. Providers: hopper and
portable, the launchers of the two kinds of kernels; reference (plain PyTorch, eager) and compile (the same under torch.compile), which keep
gathered keys of every query for the backward and are left out above --eager-limit tokens; flex (flex_attention, SWA alone, without sinks);
flashmla (SCFA, forward alone) and cudnn (the frontend's DSA: SCFA, backward alone, on sm_90 not deterministic), where they are installed.
TFLOP/s counts valid (query, key) pairs, 4 forward and 10 backward times pairs, heads and D; % is of the rate of a bf16 8192^3 product on
random data, measured anew before every row: the clock of a warm card is lower, by 10 % and more, for the product as for a kernel. GB/s
counts q, out, lse, dout, dq and the keys once.
Before the timing every provider's results are compared with those of the portable kernels, and the difference stands in the row.

A row is printed as soon as it is measured. --tokens, --heads, --modes, --providers and --directions choose rows; --seconds ends the run
before the row that would begin after that many, so that the whole table can be measured in parts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.common import Row, copy_rate, median_ms, peak_mib, positive, print_head, print_row
from kernel_runtime.registry import ModelShape
from reference.cases.sparse_attn import AttentionCase, valid_pairs
from reference.sparse_attn import sparse_attn_shared_kv as reference_attention

D, WINDOW, TOP_K = 512, 128, 512
RATIO = {"swa": 0, "cfa": 128, "scfa": 4}
PROVIDERS = ("hopper", "portable", "reference", "flex", "flashmla", "cudnn", "compile")
DIRECTIONS = ("forward", "forward + probs", "backward", "backward, det.")


@dataclass
class Problem:
    mode: str
    q: Tensor
    ori_kv: Tensor
    cmp_kv: Tensor | None
    indices: Tensor | None
    sinks: Tensor
    dout: Tensor
    pairs: int

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.q, self.ori_kv, self.cmp_kv, self.indices, self.sinks

    @property
    def options(self) -> tuple[object, ...]:
        """cuts and offsets of a pack (none), scale, ratio, window: what the launchers take after their tensors"""
        return None, None, None, None, None, D**-0.5, RATIO[self.mode], WINDOW


def make(mode: str, S: int, N: int, seed: int = 0) -> Problem:
    """bf16, drawn on the device; one sequence."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(generator=generator)

    t = torch.arange(1, S + 1, device="cuda")
    cmp_kv, indices = None, None
    if mode != "swa":
        entries = S // RATIO[mode]
        cmp_kv, visible = normal(1, entries, D), t // RATIO[mode]
        if mode == "scfa":
            indices = torch.full((1, S, TOP_K), -1, device="cuda", dtype=torch.int32)
            for begin in range(0, S, 1024):
                limit = visible[begin : begin + 1024, None]
                score = torch.rand((limit.shape[0], entries), device="cuda", generator=generator)
                value, entry = score.masked_fill(torch.arange(entries, device="cuda") >= limit, -1.0).topk(min(TOP_K, entries), dim=1)
                indices[0, begin : begin + 1024, : value.shape[1]] = torch.where(value >= 0, entry, -1).int()
    pairs = valid_pairs(AttentionCase("bench", mode, N=N, D=D, B=1, S=S, K=TOP_K, cmp_ratio=RATIO[mode] or 1, window=WINDOW), indices)
    return Problem(
        mode, normal(1, S, N, D), normal(1, S, D), cmp_kv, indices, torch.randn(N, device="cuda", generator=generator),
        normal(1, S, N, D), pairs,
    )  # fmt: skip


def launchers(x: Problem, provider: str) -> Iterator[tuple[str, Callable[[], object]]]:
    if provider == "hopper":
        from sparse_attn.shared_kv.hopper import hopper_supports
        from sparse_attn.shared_kv.hopper.bwd import attention_bwd
        from sparse_attn.shared_kv.hopper.fwd import attention_fwd

        if (reason := hopper_supports(x.q)) is not None:
            raise RuntimeError(reason)
    else:
        from sparse_attn.shared_kv.bwd import attention_bwd
        from sparse_attn.shared_kv.fwd import attention_fwd
    yield "forward", lambda: attention_fwd(*x.tensors, *x.options, False)
    if x.mode == "scfa":
        yield "forward + probs", lambda: attention_fwd(*x.tensors, *x.options, True)
    out, lse, _ = attention_fwd(*x.tensors, *x.options, False)
    yield "backward", lambda: attention_bwd(x.dout, *x.tensors, out, lse, *x.options, False)
    yield "backward, det.", lambda: attention_bwd(x.dout, *x.tensors, out, lse, *x.options, True)


def autograd(x: Problem, fn: Callable[..., Any], plain: bool = False) -> Iterator[tuple[str, Callable[[], object]]]:
    """fn(q, ori_kv, cmp_kv, sinks) under plain autograd; plain: fn is torch's own operators, and returns the probabilities too if asked to"""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in (x.q, x.ori_kv, x.cmp_kv, x.sinks)]

    def forward(**more: Any) -> Any:
        with torch.no_grad():
            return fn(*leaves, **more)

    yield "forward", forward
    if plain and x.mode == "scfa":
        yield "forward + probs", lambda: forward(return_cmp_probs=True)
    out = fn(*leaves)
    wanted = [t for t in leaves if t is not None]

    def backward(deterministic: bool) -> object:
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(deterministic)
        try:
            return torch.autograd.grad(out, wanted, x.dout, retain_graph=True, allow_unused=True)
        finally:
            torch.use_deterministic_algorithms(before)

    yield "backward", lambda: backward(False)
    if plain:
        yield "backward, det.", lambda: backward(True)


def eager(x: Problem, compiled: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    def run(q: Tensor, ori_kv: Tensor, cmp_kv: Tensor | None, sinks: Tensor, **more: Any) -> Any:
        return reference_attention(q, ori_kv, cmp_kv, x.indices, sinks, cmp_ratio=RATIO[x.mode] or None, window=WINDOW, **more)

    return autograd(x, torch.compile(run)) if compiled else autograd(x, run, plain=True)


def flex(x: Problem) -> Iterator[tuple[str, Callable[[], object]]]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    S = x.q.shape[1]
    mask = create_block_mask(lambda _b, _h, i, j: (j <= i) & (j > i - WINDOW), None, None, S, S, device="cuda")
    attend = torch.compile(flex_attention)

    def run(q: Tensor, ori_kv: Tensor, *_: Tensor | None) -> Tensor:
        kv = ori_kv[:, None]
        return attend(q.transpose(1, 2), kv, kv, block_mask=mask, enable_gqa=True, scale=D**-0.5).transpose(1, 2)

    return autograd(x, run)


def one_list(x: Problem) -> tuple[Tensor, Tensor]:
    """What others take: rows of both kinds of keys in one tensor, and a list of them for each query, its window's first; -1 names none."""
    assert x.cmp_kv is not None and x.indices is not None  # the case is SCFA
    S, device = x.q.shape[1], x.q.device
    t = torch.arange(S, device=device)[:, None]
    window = (t - WINDOW + 1 + torch.arange(WINDOW, device=device)).clamp(min=-1)
    lists = torch.cat([window, torch.where(x.indices[0] >= 0, x.indices[0] + S, -1)], 1).int()
    return torch.cat([x.ori_kv[0], x.cmp_kv[0]]), lists


def flashmla(x: Problem) -> Iterator[tuple[str, Callable[[], object]]]:
    """The sink joins as it does here."""
    from flash_mla import flash_mla_sparse_fwd

    keys, lists = one_list(x)
    keys, lists = keys[:, None], lists[:, None].contiguous()
    yield "forward", lambda: flash_mla_sparse_fwd(x.q[0], keys, lists, D**-0.5, D, attn_sink=x.sinks)[0][None]


def cudnn(x: Problem) -> Iterator[tuple[str, Callable[[], object]]]:
    """It takes the log-sum-exp of the keys alone."""
    from cudnn import DSA

    from sparse_attn import lse_without_sink
    from sparse_attn.shared_kv.fwd import attention_fwd

    S = x.q.shape[1]
    keys, lists = one_list(x)
    out, lse, _ = attention_fwd(*x.tensors, *x.options, False)
    of_keys = lse_without_sink(lse, x.sinks)

    def backward() -> tuple[Tensor, ...]:
        grads = DSA.sparse_attention_backward_wrapper(x.q[0], keys, out[0], x.dout[0], of_keys[0], x.sinks, lists, softmax_scale=D**-0.5)
        return grads["dq"][None], grads["dkv"][None, :S], grads["dkv"][None, S:], grads["d_sink"]

    yield "backward", backward


def results_of(value: object) -> tuple[Tensor, ...]:
    """out of a forward, the gradients of a backward: what providers are compared by"""
    return (value,) if isinstance(value, Tensor) else tuple(v for v in value if v is not None and v.numel())  # type: ignore[attr-defined]  # a tuple of tensors


def difference(got: object, want: object) -> float:
    """Largest relative difference (norm) of the tensors that both have."""
    pairs = zip(results_of(got), results_of(want))
    return max(float((g.double() - w.double()).norm() / w.double().norm().clamp_min(1e-30)) for g, w in pairs)


def compile_kernels(heads: list[int]) -> None:
    """All kernels at once, in as many processes as there are cores: one after the other at their first launch takes minutes."""
    import os

    from kernel_runtime.plan import Plan
    from kernel_runtime.registry import import_ops, registered_specs
    from kernel_runtime.warmup import compile_ahead

    import_ops()
    shapes = [ModelShape(64, 4, N, D, WINDOW, tuple(sorted(r for r in RATIO.values() if r)), 4, 32, TOP_K) for N in heads]
    plan = Plan.of((op, spec) for shape in shapes for op, spec in registered_specs(shape) if op == "sparse_attn.shared_kv")
    major, minor = torch.cuda.get_device_capability()
    print(compile_ahead(plan, f"sm_{major}{minor}", jobs=min(16, os.cpu_count() or 1)).summary())


def cases_of(x: Problem, provider: str, eager_limit: int) -> Iterator[tuple[str, Callable[[], object]]]:
    if provider in ("hopper", "portable"):
        return launchers(x, provider)
    if provider in ("flashmla", "cudnn"):
        return (flashmla if provider == "flashmla" else cudnn)(x) if x.mode == "scfa" else iter(())
    if x.q.shape[1] > eager_limit:
        return iter(())
    if provider == "flex":
        return flex(x) if x.mode == "swa" else iter(())
    return eager(x, provider == "compile")


def least_bytes(x: Problem, direction: str) -> int:
    keys = x.ori_kv.nbytes + (0 if x.cmp_kv is None else x.cmp_kv.nbytes) + (0 if x.indices is None else x.indices.nbytes)
    lse = 4 * x.q.numel() // D
    return (2 if direction.startswith("forward") else 4) * x.q.nbytes + lse + keys * (1 if direction.startswith("forward") else 2)


def matmul_rate() -> float:
    """TFLOP/s of a bf16 8192^3 product on random data"""
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    return 2 * 8192**3 / median_ms(lambda: a @ b) / 1e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--modes", nargs="+", choices=RATIO, default=list(RATIO))
    parser.add_argument("--tokens", nargs="+", type=positive, default=[4096, 16384, 65536])
    parser.add_argument("--heads", nargs="+", type=positive, default=[64, 128])
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    parser.add_argument("--directions", nargs="+", choices=DIRECTIONS, default=list(DIRECTIONS))
    parser.add_argument("--eager-limit", type=int, default=4096, help="tokens up to which reference, compile and flex run")
    parser.add_argument("--check-limit", type=int, default=16384, help="tokens up to which results are compared with the portable kernels'")
    parser.add_argument("--rep", type=positive, default=30, help="ms of calls that a median is taken over; at least 9 calls")
    parser.add_argument("--no-warmup", action="store_true", help="the kernels are in the cache: do not ask sixteen processes to make sure")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no row is begun after this many seconds")


def measured(x: Problem, provider: str, args: argparse.Namespace, copy: float, deadline: float) -> Iterator[Row]:
    """The rows of one provider; its results are compared with the portable kernels' where x is short enough."""
    S, N = x.q.shape[1:3]
    checked = provider not in ("portable", "flex") and args.check_limit >= S
    expected = dict(launchers(x, "portable")) if checked else {}
    for direction, fn in cases_of(x, provider, args.eager_limit):
        if direction not in args.directions:
            continue
        if time.monotonic() > deadline:
            print(f"no time left for {provider} {x.mode} {direction}, S {S}, N {N}", flush=True)
            return
        off = f", {difference(fn(), expected[direction]()):.1e}" if direction in expected else ""
        product, ms, peak = matmul_rate(), median_ms(fn, rep=args.rep), peak_mib(fn)
        rate = (4 if direction.startswith("forward") else 10) * x.pairs * N * D / ms / 1e9
        note = f"{rate:.0f} TFLOP/s, {100 * rate / product:.1f} % of matmul's {product:.0f}{off}"
        yield Row("attn", f"S {S}, N {N}", "bf16", x.mode, direction, provider, False, ms, least_bytes(x, direction), copy, 0, peak, note)


def run(args: argparse.Namespace) -> list[Row]:
    deadline = time.monotonic() + args.seconds
    copy = copy_rate()
    print(f"copy {copy:.0f} GB/s, matmul {matmul_rate():.0f} TFLOP/s", flush=True)
    if not args.no_warmup and ({"hopper", "portable"} & set(args.providers) or args.check_limit >= min(args.tokens)):
        compile_kernels(args.heads)
    rows: list[Row] = []
    for S in args.tokens:
        for N in args.heads:
            print_head(f"attention, S {S}, {N} heads, D {D}, bf16")
            for mode in args.modes:
                if time.monotonic() > deadline:
                    print(f"no time left for {mode}", flush=True)
                    continue
                x = make(mode, S, N)
                for provider in args.providers:
                    try:
                        for row in measured(x, provider, args, copy, deadline):
                            print_row(row)
                            rows.append(row)
                    except Exception as error:  # a provider may not take the shape or run out of memory: say so and go on
                        print(f"{provider} {mode} S {S} N {N}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                    torch.cuda.empty_cache()
                torch._dynamo.reset()
    return rows


def main() -> None:
    """Alone, without `bench.run`: the table on the screen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
