"""AdamW with its moments on the device against SwapAdamW: resident bytes, time of a step, and the bus it runs on.

    python -m bench.swap --parameters 0.6e9

"step" is what the next forward pass has to wait for; "with copies" also waits until the host has the last moments. GB/s is 8 bytes a
parameter over "with copies", in each direction; the ceiling is that of copies of 256 MiB between pinned memory and the device.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from bench.common import environment, need_device, positive
from train_example.swap_optimizer import SwapAdamW

# weights of a layer of DeepSeek-V4-Flash with four of its experts: the sizes a rank holds
SHAPES = [(4, 4096, 4096), (4, 4096, 2048), (32768, 1024), (8192, 4096), (4096, 8192), (1024, 4096), (512, 4096), (4096,), (24, 16384), (3,)]
OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}


def make(count: float) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    params: list[torch.nn.Parameter] = []
    while sum(param.numel() for param in params) < count:
        params += [torch.nn.Parameter(torch.randn(shape, device="cuda")) for shape in SHAPES]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def milliseconds(fn: Callable[[], object], end: Callable[[], object], rep: int) -> tuple[float, float]:
    """Medians over `rep` calls: until the current stream is through, and until `end` too."""
    steps, wholes = [], []
    for _ in range(rep):
        torch.cuda.synchronize()
        begun, stream = time.perf_counter(), torch.cuda.current_stream()
        fn()
        stream.synchronize()
        steps.append(time.perf_counter() - begun)
        end()
        wholes.append(time.perf_counter() - begun)
    return sorted(steps)[rep // 2] * 1e3, sorted(wholes)[rep // 2] * 1e3


def ceiling() -> dict[str, float]:
    """GB/s of copies to the device, to the host, and of each while both run."""
    host = [torch.empty(2**26, pin_memory=True) for _ in range(2)]
    device = [torch.empty(2**26, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def copies(which: tuple[int, ...]) -> None:
        for _ in range(4):
            for i in which:
                with torch.cuda.stream(streams[i]):
                    (device[0] if i == 0 else host[1]).copy_(host[0] if i == 0 else device[1], non_blocking=True)

    found = {}
    for name, which in (("to the device", (0,)), ("to the host", (1,)), ("each of both", (0, 1))):
        copies(which)
        found[name] = 4 * host[0].nbytes / milliseconds(lambda which=which: copies(which), torch.cuda.synchronize, 5)[1] / 1e6
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=0.6e9, help="at least this many")
    parser.add_argument("--buckets", default="4,16,64,256", help="slot sizes to try, MiB")
    parser.add_argument("--rep", type=positive, default=7, help="steps to time")
    args = parser.parse_args()
    need_device(parser)
    print(environment())
    print("bus, GB/s:", ", ".join(f"{name} {rate:.1f}" for name, rate in ceiling().items()))
    columns = f"{'weight+grad+state B/param':>28}{'state on device GiB':>22}{'on host GiB':>13}{'step ms':>10}{'with copies':>13}{'GB/s':>8}"
    print(f"{'optimizer':24}{columns}{'set up s':>10}")
    want = None
    for bucket in (None, *map(int, args.buckets.split(","))):
        params = make(args.parameters)
        count = sum(param.numel() for param in params)
        torch.cuda.synchronize()
        before, begun = torch.cuda.memory_allocated(), time.perf_counter()
        if bucket is None:
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(params, **OPTIONS)
            end, host = torch.cuda.synchronize, 0
        else:
            optimizer = SwapAdamW(params, bucket_bytes=bucket * 2**20, **OPTIONS)
            end, host = optimizer.synchronize, optimizer.resident_bytes()["host"]
        optimizer.step()  # AdamW makes its moments here
        end()
        setup, state = time.perf_counter() - begun, torch.cuda.memory_allocated() - before
        step, whole = milliseconds(optimizer.step, end, args.rep)
        moments = [optimizer.state[param]["exp_avg_sq"].flatten()[:1000].cpu() for param in params]
        got = torch.cat([*moments, *[param.detach().flatten()[:1000].cpu() for param in params]])
        want = got if want is None else want
        name = "AdamW, fused" if bucket is None else f"SwapAdamW, {bucket} MiB"
        rate = "" if bucket is None else f"{8 * count / whole / 1e6:.1f}"
        total = (before + state) / count
        equal = "" if torch.equal(got, want) else "  NOT EQUAL"
        print(f"{name:24}{total:28.2f}{state / 2**30:22.3f}{host / 2**30:13.3f}{step:10.2f}{whole:13.2f}{rate:>8}{setup:10.2f}{equal}")
        del optimizer, params, moments, end
        torch.cuda.empty_cache()
    print(f"{count / 1e9:.3f} G parameters, fp32; bits of all rows compared after {args.rep + 1} steps")


if __name__ == "__main__":
    main()
