"""mHC: a chain of sublayers, and the parts, beside eager, torch.compile and another library.

"full" is one sublayer of a chain: hc_pre, then hc_post_pre at every boundary, then hc_post, with F(y) = y; the time of the chain divided by
its sublayers. Providers: transformers (its DeepSeek-V4 modules, eager), reference (ours in plain PyTorch), compile (the reference under
torch.compile), ours, and liger-kernel where installed, which is not like for like: its convention is the paper's, with fn in bf16.
tile-kernels is not among them: its wheel (2.1.0) has no differentiable functions, and needs tilelang and torch 2.13.

Without a CUDA graph host time counts. A pass through autograd changes threads twice, which costs a chain the same however long it is:
--sublayers sets its length.

The whole bench takes several minutes, most of them for torch.compile: rows are printed as they are measured, files are written after every
shape, and --limit bounds the time for one op of one provider (compilation and tuning included), after which its other rows are left out
and a line says so. --shape, --ops and --providers pick a part; `python -m bench.run merge` puts the parts together.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

import mhc_ops
from bench.common import (
    Captured,
    Row,
    copy_rate,
    count_launches,
    median_ms,
    peak_mib,
    positive,
    print_head,
    print_row,
    print_table,
    time_limit,
    write,
)
from reference import mhc as reference
from reference.cases.mhc import BENCH_SHAPES, MhcShape, make_inputs

SUBLAYERS = 8  # the first and the last sublayer, and the start of the backward engine, weigh less in a longer chain
DRAWN = 64  # tokens whose values are drawn
PROVIDERS = ("transformers", "reference", "compile", "ours", "liger")
OPS = ("full", "hc_pre", "hc_post", "hc_post_pre", "hc_head", "hc_project", "hc_gates", "sinkhorn", "pre_bmm", "post_bmm", "res_bmm")


def minimal_rows(op: str, n: int) -> tuple[int, int]:
    """Least traffic of forward and backward in rows [D] a token; "full" reads x once before and once after the sublayer."""
    return {
        "full": (3 * n + 2, 5 * n + 3), "hc_pre": (n + 1, 2 * n + 1), "hc_post": (2 * n + 1, 3 * n + 2),
        "hc_post_pre": (2 * n + 2, 4 * n + 3), "hc_head": (n + 1, 2 * n + 1), "hc_project": (n, 2 * n), "hc_gates": (0, 0), "sinkhorn": (0, 0),
        "pre_bmm": (n + 1, 2 * n + 1), "post_bmm": (n + 1, n + 2), "res_bmm": (2 * n, 3 * n),
    }[op]  # fmt: skip


Pre = Callable[..., tuple[Tensor, Tensor, Tensor]]


def chain(pre: Pre, post: Callable[..., Tensor], boundary: Callable[..., tuple[Tensor, ...]] | None) -> Callable[..., Tensor]:
    """The streams after a chain of sublayers; `parameters` are fn, scale, base of each in turn."""

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        y, gate, comb = pre(x, *parameters[:3])
        for i in range(3, len(parameters), 3):
            site = parameters[i : i + 3]
            if boundary is not None:
                x, y, gate, comb = boundary(y, x, gate, comb, *site)
            else:
                x = post(y, x, gate, comb)
                y, gate, comb = pre(x, *site)
        return post(y, x, gate, comb)

    return run


def transformers_ops(shape: MhcShape) -> dict[str, Callable]:
    """The modules of transformers' DeepSeek-V4 and the mixing line of its decoder layer, as functions of their parameters"""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

    config = SimpleNamespace(hc_mult=shape.N, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-6, hidden_size=shape.D)
    with torch.device("meta"):
        norm = DeepseekV4HyperConnection(config).input_norm

    def pre(x: Tensor, fn: Tensor, scale: Tensor, base: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # its forward on a bare namespace: no cost of looking parameters up in a module
        site = SimpleNamespace(fn=fn, scale=scale, base=base, hc_mult=shape.N, hc_sinkhorn_iters=20, hc_eps=1e-6, input_norm=norm)
        post, comb, y = DeepseekV4HyperConnection.forward(site, x)
        return y, post, comb

    def post(f: Tensor, x: Tensor, gate: Tensor, comb: Tensor) -> Tensor:
        return gate.to(x.dtype).unsqueeze(-1) * f.unsqueeze(-2) + torch.matmul(comb.to(x.dtype).transpose(-1, -2), x)

    return {"full": chain(pre, post, None), "hc_pre": pre, "hc_post": post}


def plain_ops(module: object, compiled: bool = False) -> dict[str, Callable]:
    if compiled:
        import torch._functorch.config

        torch._functorch.config.donated_buffer = False  # a backward that runs again, as `measure` has it, may not give its inputs away

    def get(name: str) -> Callable:
        function = getattr(module, name)
        return torch.compile(function, dynamic=False) if compiled else function

    ops = {name: get(name) for name in OPS if name != "full"}
    # compiled in two pieces: one graph of all sublayers takes minutes to compile and is no faster
    return ops | {"full": chain(ops["hc_pre"], ops["hc_post"], None if compiled else get("hc_post_pre"))}


def liger_ops() -> dict[str, Callable]:
    from liger_kernel.transformers.functional import liger_mhc_coeffs, liger_mhc_post_res, liger_mhc_pre

    def pre(x: Tensor, fn: Tensor, scale: Tensor, base: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate, post, comb = liger_mhc_coeffs(x, fn.t().to(x.dtype), base, *scale.unbind())
        return liger_mhc_pre(x, gate), post, comb

    def post(f: Tensor, x: Tensor, gate: Tensor, comb: Tensor) -> Tensor:
        return liger_mhc_post_res(x, f, gate, comb)

    return {"full": chain(pre, post, None), "hc_pre": pre, "hc_post": post}


def providers(names: list[str], shape: MhcShape) -> dict[str, dict[str, Callable]]:
    """The wanted providers that are installed, op -> function"""
    makers: dict[str, tuple[str, Callable[[], dict[str, Callable]]]] = {
        "transformers": ("transformers.models.deepseek_v4", lambda: transformers_ops(shape)),
        "reference": ("torch", lambda: plain_ops(reference)),
        "compile": ("torch", lambda: plain_ops(reference, compiled=True)),
        "ours": ("torch", lambda: plain_ops(mhc_ops)),
        "liger": ("liger_kernel", liger_ops),
    }
    found = {}
    for name in names:
        package, make = makers[name]
        try:
            present = importlib.util.find_spec(package) is not None
        except ModuleNotFoundError:
            present = False
        if present:
            found[name] = make()
        else:
            print(f"{name}: not installed, left out")
    return found


def tokens_of(shape: MhcShape, tensors: Iterable[Tensor]) -> list[Tensor]:
    """Inputs of DRAWN tokens, repeated for all tokens of `shape`: drawing every value on the host takes seconds"""
    few = min(DRAWN, shape.T)
    return [
        t.repeat(1, -(-shape.T // few), *[1] * (t.dim() - 2))[:, : shape.T].reshape(shape.B, shape.S, *t.shape[2:])
        if t.shape[:2] == (1, few)
        else t
        for t in tensors
    ]


def make_case(op: str, shape: MhcShape, dtype: torch.dtype, sublayers: int) -> list[Tensor]:
    few = MhcShape(1, min(DRAWN, shape.T), shape.N, shape.D)
    first = make_inputs("hc_pre" if op == "full" else op, few, dtype=dtype, device="cuda").values()
    if op != "full":
        return tokens_of(shape, first)
    sites = [make_inputs("hc_pre", MhcShape(1, 1, shape.N, shape.D), dtype=dtype, seed=i, device="cuda") for i in range(1, sublayers)]
    return [*tokens_of(shape, first), *(t for s in sites for t in list(s.values())[1:])]


def measure(
    function: Callable, inputs: list[Tensor], count: int, graphs: Sequence[bool], rep: int
) -> Iterator[tuple[str, bool, float, int, float]]:
    """(direction, graph, ms, launches, peak MiB), the last three divided by `count`. Gradients of every input, random cotangents."""
    leaves = [t.detach().requires_grad_() for t in inputs]

    def forward() -> tuple[Tensor, ...]:
        out = function(*leaves)
        return tuple(o for o in ((out,) if isinstance(out, Tensor) else out) if o.requires_grad)

    stream = Captured.side()  # a backward runs on the stream of its forward, which has to be the one that is captured
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        outputs = forward()
        cotangents = [torch.randn_like(o) for o in outputs]

        def backward() -> tuple[Tensor, ...]:
            return torch.autograd.grad(outputs, leaves, cotangents, retain_graph=True)

        def both() -> tuple[Tensor, ...]:
            return torch.autograd.grad(forward(), leaves, cotangents)

        in_forward, in_both = count_launches(forward, both)
        started = {"forward": in_forward, "backward": in_both - in_forward, "both": in_both}
        for direction, fn in (("forward", forward), ("backward", backward), ("both", both)):
            launches, peak = started[direction] // count, peak_mib(fn) / count
            for graph in graphs:
                timed = Captured(fn) if graph else fn
                yield direction, graph, median_ms(timed, rep) / count, launches, peak
                del timed
    torch.cuda.synchronize()


def named_shape(text: str) -> MhcShape:
    sizes = [positive(size) for size in text.split(",")]
    if len(sizes) != 4 or not 2 <= sizes[2] <= 8:
        raise argparse.ArgumentTypeError(f"want B,S,N,D with N in 2 to 8, for example 1,4096,4,4096, got {text!r}")
    return MhcShape(*sizes)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", nargs="*", type=named_shape, default=[], help="B,S,N,D; default: the shapes of reference/cases/mhc.py")
    parser.add_argument("--ops", nargs="*", default=list(OPS), choices=OPS)
    parser.add_argument("--providers", nargs="*", default=list(PROVIDERS), choices=PROVIDERS)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--sublayers", type=positive, default=SUBLAYERS, help='of the chain that "full" is')
    parser.add_argument("--rep", type=positive, default=60, help="ms of calls that a median is taken of")
    parser.add_argument("--limit", type=float, default=120, help="seconds for one op of one provider, 0: no limit")
    parser.add_argument("--no-graph", action="store_true", help="only without a CUDA graph, host time included")
    parser.add_argument("--graph-only", action="store_true", help="only as a CUDA graph")


def run(args: argparse.Namespace) -> list[Row]:
    import torch._dynamo  # first calls import it: a limit that ends in the middle of that leaves a module that cannot be reset

    dtype = getattr(torch, args.dtype)
    shapes = args.shape or list(BENCH_SHAPES)
    rate = copy_rate()
    print(f"copy rate of this run: {rate:.0f} GB/s")
    graphs = [kind for kind, left_out in ((True, args.no_graph), (False, args.graph_only)) if not left_out]
    gc.collect()
    gc.freeze()  # every capture of a graph collects garbage, among all that imports have made
    rows: list[Row] = []
    for shape in shapes:
        here: list[Row] = []
        print_head(f"mHC {shape} {args.dtype}, as measured")
        for name, ops in providers(args.providers, shape).items():
            for op in (o for o in args.ops if o in ops):
                if op == "hc_gates" and shape.N != 4:
                    continue
                inputs = make_case(op, shape, dtype, args.sublayers)
                forward, backward = (units * shape.T * shape.D * dtype.itemsize for units in minimal_rows(op, shape.N))
                least = {"forward": forward, "backward": backward, "both": forward + backward}
                try:
                    with time_limit(args.limit):
                        for direction, *found in measure(ops[op], inputs, args.sublayers if op == "full" else 1, graphs, args.rep):
                            graph, ms, launches, peak = found
                            row = Row("mhc", str(shape), args.dtype, op, direction, name, graph, ms, least[direction], rate, launches, peak)
                            here.append(row)
                            print_row(row)
                except Exception as error:  # another library may not take the shape: say so and go on
                    print(f"{name} {op} {shape}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                torch.cuda.empty_cache()
        here.sort(key=lambda r: (args.ops.index(r.op), ("forward", "backward", "both").index(r.direction), not r.graph))
        print_table(f"mHC {shape} {args.dtype}", here)
        rows += here
        if rows:
            write(rows, args.out)
        torch._dynamo.reset()
    return rows
