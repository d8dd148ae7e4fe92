"""Memory that mHC adds to training, with and without recompute: bytes saved for backward, and on a GPU peak memory and time.

    python -m bench.recompute                              on a GPU: sizes of DeepSeek-V4-Flash
    python -m bench.recompute --device cpu --hidden 512 --tokens 64

A layer is two sublayers, each an RMS norm and a linear map; all other work of a real layer would be the same in every row. Rows:
    plain        residual connections, no mHC          stored       mHC through the fused ops
    eager        mHC as the reference under autograd   in-layer     the same, hc_recompute() around each layer
                                                       cross-layer  the same, around each block of plan()
"added" is what a row saves beyond "plain"; "gone" is the share of eager's added bytes that a row no longer adds.
"""

from __future__ import annotations

import argparse
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bench.common import need_device, positive
from kernel_runtime.env import installed
from mhc_ops import HyperConnection, hc_expand, hc_post, hc_recompute, plan

MODES = ("plain", "eager", "stored", "in-layer", "cross-layer")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Layer(nn.Module):
    """h [..., D] without mHC (hc_mult 0), streams [..., N, D] with it."""

    def __init__(self, hidden: int, hc_mult: int, dtype: torch.dtype, impl: str = "auto") -> None:
        super().__init__()
        self.impl = impl
        self.norms = nn.ModuleList(nn.RMSNorm(hidden, dtype=dtype) for _ in range(2))
        self.maps = nn.ModuleList(nn.Linear(hidden, hidden, bias=False, dtype=dtype) for _ in range(2))
        self.sites = nn.ModuleList(HyperConnection(hidden, hc_mult, impl=impl) for _ in range(2 if hc_mult else 0))
        for site in self.sites:
            site.reset_parameters(0.1, 1.0)  # coefficients that differ from token to token

    def sublayer(self, i: int, y: Tensor) -> Tensor:
        return self.maps[i](self.norms[i](y))

    def forward(self, h: Tensor) -> Tensor:
        if not self.sites:
            h = h + self.sublayer(0, h)
            return h + self.sublayer(1, h)
        first, second = self.sites
        h, y, post, comb = first(h)
        h, y, post, comb = second(h, (self.sublayer(0, y), post, comb))
        return hc_post(self.sublayer(1, y), h, post, comb, impl=self.impl)


class Stack(nn.Module):
    """Layers of one of MODES; embeddings [..., D] -> h or streams. The weights of all modes with mHC are those of the seed."""

    def __init__(self, mode: str, layers: int, hidden: int, hc_mult: int, dtype: torch.dtype, tokens: int, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.mode, self.hc_mult = mode, 0 if mode == "plain" else hc_mult
        self.layers = nn.ModuleList(Layer(hidden, self.hc_mult, dtype, "eager" if mode == "eager" else "auto") for _ in range(layers))
        size = None if mode == "cross-layer" else 1
        self.blocks = plan(layers, hc_mult, hidden, tokens, dtype.itemsize, layers_per_block=size).blocks

    def forward(self, h: Tensor) -> Tensor:
        if self.hc_mult:
            h = hc_expand(h, self.hc_mult)
        for block in self.blocks:
            with hc_recompute() if self.mode.endswith("layer") else nullcontext():
                for i in block:
                    h = self.layers[i](h)
        return h


class _Token:
    """Stands for one saved tensor as long as autograd keeps it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


def saved_bytes(module: nn.Module, run: Callable[[], Tensor]) -> int:
    """Bytes that autograd keeps for the backward pass of `run()`: distinct storages of saved tensors, without the module's parameters."""
    tokens: list[weakref.ref[_Token]] = []

    def pack(tensor: Tensor) -> _Token:
        token = _Token(tensor)
        tokens.append(weakref.ref(token))
        return token

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda token: token.tensor):
        out = run()
    storages = {s._cdata: s.nbytes() for t in tokens if (token := t()) is not None for s in [token.tensor.untyped_storage()]}
    for parameter in module.parameters():
        storages.pop(parameter.untyped_storage()._cdata, None)
    assert out.grad_fn is not None  # keeps the graph alive until here
    return sum(storages.values())


@dataclass
class Result:
    """Of one mode; bytes a token and layer. peak_mib (beyond the weights) and ms are 0 where there is no GPU."""

    mode: str
    bytes: float
    peak_mib: float = 0.0
    ms: float = 0.0


def measure(mode: str, args: argparse.Namespace) -> Result:
    dtype = DTYPES[args.dtype]
    with torch.device(args.device):
        stack = Stack(mode, args.layers, args.hidden, args.hc_mult, dtype, args.tokens)
        h = torch.randn(1, args.tokens, args.hidden, dtype=dtype).requires_grad_()
    result = Result(mode, saved_bytes(stack, lambda: stack(h)) / args.tokens / args.layers)
    if args.device == "cpu":
        return result

    def step() -> None:
        out = stack(h)
        out.backward(torch.ones_like(out))
        stack.zero_grad()

    device = getattr(torch, args.device)
    times = []
    for _ in range(args.repeat + 2):
        device.synchronize()
        before = device.memory_allocated()
        device.reset_peak_memory_stats()
        start = time.perf_counter()
        step()
        device.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
        result.peak_mib = (device.max_memory_allocated() - before) / 2**20
    result.ms = sorted(times[2:])[args.repeat // 2]
    return result


def main(argv: list[str] | None = None) -> list[Result]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "npu", "cpu"), help="cpu: bytes alone")
    parser.add_argument("--dtype", default="bf16", choices=tuple(DTYPES), help="of streams and sublayers")
    parser.add_argument("--layers", type=positive, default=43)
    parser.add_argument("--hidden", type=positive, default=4096)
    parser.add_argument("--hc-mult", type=positive, default=4)
    parser.add_argument("--tokens", type=positive, default=4096)
    parser.add_argument("--repeat", type=positive, default=5, help="timed steps; the median counts")
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES, help="eager needs the most memory")
    args = parser.parse_args(argv)
    need_device(parser, args.device)
    try:
        plan(args.layers, args.hc_mult, args.hidden, args.tokens, DTYPES[args.dtype].itemsize)
    except ValueError as error:
        parser.error(str(error))
    versions = ", ".join(f"{name} {value}" for name, value in installed().items() if name in ("torch", "triton"))
    print(f"{args.layers} layers, {args.tokens} tokens, N {args.hc_mult}, D {args.hidden}, {args.dtype}, {args.device}, {versions}")
    results = [measure(mode, args) for mode in args.modes]
    by_mode = {result.mode: result for result in results}
    unit = args.hidden * DTYPES[args.dtype].itemsize
    print("saved for backward, and added to it, in units of D elements a token and layer")
    print(f"{'':12} {'saved':>9} {'added':>9} {'gone %':>7} {'peak MiB':>9} {'gone %':>7} {'ms':>8}")
    for result in results:
        added, gone, peak_gone = "", "", ""
        if "plain" in by_mode and result.mode != "plain":
            base, eager = by_mode["plain"], by_mode.get("eager")
            added = f"{(result.bytes - base.bytes) / unit:.2f}"
            if eager is not None:
                gone = f"{100 * (eager.bytes - result.bytes) / (eager.bytes - base.bytes):.1f}"
                if result.peak_mib:
                    peak_gone = f"{100 * (eager.peak_mib - result.peak_mib) / (eager.peak_mib - base.peak_mib):.1f}"
        peak, ms = (f"{result.peak_mib:.0f}", f"{result.ms:.2f}") if result.peak_mib else ("", "")
        print(f"{result.mode:12} {result.bytes / unit:9.2f} {added:>9} {gone:>7} {peak:>9} {peak_gone:>7} {ms:>8}")
    return results


if __name__ == "__main__":
    main()
