"""Kernels against eager on the same weights: `python -m train_example.compare_fixed RUN [--batches 16]`.

Two trainings that round differently part in time, which hides whether one of them is wrong. Here nothing is updated: the newest checkpoint
of RUN is loaded once a variant, and every variant gets the next batches of the run. What is left between two of them is what one pass
rounds, and a systematic part shows as one that does not average out over batches.

    fp32      the eager ops in fp32, from the same bf16 weights: what both others approximate
    eager     in bf16 with fp32 islands
    triton    the same with kernels

Of the losses: mean and standard error of the signed relative difference over batches, and the largest one. Of the gradients, by part of the
model, relative to the norm of the mean gradient: the difference of one batch (root mean square), and the systematic part: the root of the
mean product of the differences of two batches, with that mean's sign (differences that have nothing to do with each other have products of
either sign), and what one standard error over the batches (jackknife) makes of it. Of the choices: the share of (token, expert) and (query,
entry) pairs of one variant that the other does not have.
"""

import argparse
import dataclasses
import math
import os
import statistics
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from train_example import checkpoint
from train_example.attention import AttentionCore
from train_example.data import Dataset, Text, find_files
from train_example.model import fp32_islands
from train_example.moe import Router
from train_example.optim import make_optimizer
from train_example.parallel import init_parallel, pick_device
from train_example.run_config import ConfigError, RunConfig, from_dict, read_file
from train_example.step import LOSSES
from train_example.train import be_deterministic, build_model

VARIANTS = {"fp32": ("eager", "fp32"), "eager": ("eager", "bf16"), "triton": ("triton", "bf16")}
# by the first match in a parameter's name
PARTS = {"indexer": "indexer", "compressor": "compressor", "_hc": "mHC", "hc_head": "mHC", "router": "routers", "experts": "experts",
         "shared": "shared expert", "norm": "norms", "attn": "attention", "proj": "MTP's projections", "embed": "embedding",
         "head": "head"}  # fmt: skip


class Pass(NamedTuple):
    """One batch, forward and backward."""

    losses: dict[str, float]
    gradients: dict[str, Tensor]  # by part of the model, each one flat vector in fp64 on the host
    choices: dict[str, list[Tensor]]  # "experts" and "entries": of each site a boolean mask [..., all there are]


def part(name: str) -> str:
    """The part of the model that a parameter belongs to."""
    return next(title for key, title in PARTS.items() if key in name)


class Choices:
    """Records what routers and indexers choose in the model's forward."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: dict[str, list[Tensor]] = {"experts": [], "entries": []}
        for module in model.modules():
            if isinstance(module, Router):
                module.register_forward_hook(self._experts)
            elif isinstance(module, AttentionCore):
                module.register_forward_pre_hook(self._entries)

    def _experts(self, module: Router, _: Any, out: tuple[Tensor, Tensor]) -> None:
        self.seen["experts"].append(mask(out[0], module.config.num_experts))

    def _entries(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        entries, indices = args[2], args[3]
        if indices is not None:
            self.seen["entries"].append(mask(indices, entries.shape[1]))

    def take(self) -> dict[str, list[Tensor]]:
        out, self.seen = self.seen, {"experts": [], "entries": []}
        return out


def mask(chosen: Tensor, size: int) -> Tensor:
    """chosen [..., k] integers, -1 for none -> [..., size] boolean."""
    columns = torch.where(chosen < 0, size, chosen).long()  # the last column, dropped again, takes what is none
    return torch.zeros(*chosen.shape[:-1], size + 1, dtype=torch.bool, device=chosen.device).scatter_(-1, columns, True)[..., :size]


def run_pass(model: nn.Module, batch: tuple[Tensor, Tensor], choices: Choices) -> Pass:
    """Losses, gradients and choices of one batch; the gradients are taken out of the model."""
    device = next(model.parameters()).device
    out = model(batch[0].to(device), batch[1].to(device))
    out.loss.backward()
    by_part: dict[str, list[Tensor]] = {}
    with torch.no_grad():
        for name, param in model.named_parameters():
            grad, param.grad = param.grad, None
            if grad is not None:
                local = grad.to_local() if isinstance(grad, DTensor) else grad
                by_part.setdefault(part(name), []).append(local.flatten().cpu().double())
    losses = {key: getattr(out, key).item() for key in LOSSES}
    return Pass(losses, {name: torch.cat(parts) for name, parts in by_part.items()}, choices.take())


def signed(a: float, b: float) -> float:
    """(b - a) / max(|a|, |b|)."""
    return (b - a) / max(abs(a), abs(b)) if a != b else 0.0


def loss_bias(values: list[float]) -> tuple[float, float, float]:
    """Mean, standard error (infinite for a single value) and largest magnitude of signed differences."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return statistics.fmean(values), error, max(abs(value) for value in values)


class Bias(NamedTuple):
    """Of the gradients of one part, over the norm of the mean reference."""

    one: float  # root mean square difference of a batch
    systematic: float  # the part that does not average out, negative where the products of two batches are so on average
    low: float  # one standard error below and above it
    high: float


def gradient_bias(references: list[Tensor], differences: list[Tensor]) -> Bias:
    """references and differences: a tensor a batch, two batches at least.

    The mean of <d_i, d_j> over i != j has the systematic part's square as its expectation: no noise meets itself. Its standard error is the
    jackknife's, over batches left out one by one.
    """
    norm = torch.stack(references).mean(0).norm().item()
    if norm == 0:
        return Bias(*[math.nan] * 4)
    stacked, count = torch.stack(differences), len(differences)
    products = stacked @ stacked.T / norm**2
    squares = products.diagonal()
    pairs = products.sum() - squares.sum()
    mean = pairs / (count * (count - 1))
    without = (pairs - 2 * (products.sum(1) - squares)) / ((count - 1) * (count - 2)) if count > 2 else torch.full((count,), math.nan)
    error = ((count - 1) / count * (without - without.mean()).square().sum()).sqrt()
    return Bias(squares.mean().sqrt().item(), *(_signed_root(x.item()) for x in (mean, mean - error, mean + error)))


def _signed_root(x: float) -> float:
    return math.copysign(math.sqrt(abs(x)), x)


def missing_share(a: list[Tensor], b: list[Tensor]) -> float:
    """Share of what the masks `a` have that the masks `b` lack; nan where a has nothing."""
    total = sum(int(x.sum()) for x in a)
    return sum(int((x & ~y.to(x.device)).sum()) for x, y in zip(a, b, strict=True)) / total if total else math.nan


def report(passes: dict[str, list[Pass]]) -> Iterator[str]:
    """Lines of the three tables; passes by variant, the same batches in each."""
    names = list(passes)
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    yield "loss: signed relative difference, mean +- standard error, largest"
    yield f"{'':16}" + "".join(f"{f'{b} - {a}':>34}" for a, b in pairs)
    for key in LOSSES:
        cells = []
        for a, b in pairs:
            mean, error, largest = loss_bias([signed(x.losses[key], y.losses[key]) for x, y in zip(passes[a], passes[b])])
            cells.append(f"  {mean:+9.1e} +- {error:7.1e}, {largest:9.1e}")
        yield f"{key:16}" + "".join(f"{cell:>34}" for cell in cells)
    yield "gradient: difference of one batch / systematic part (one standard error below, above), over the mean gradient's norm"
    for title in passes[names[0]][0].gradients:
        cells = []
        for a, b in pairs:
            old, new = ([p.gradients[title] for p in passes[name]] for name in (a, b))
            bias = gradient_bias(old, [y - x for x, y in zip(old, new)])
            cells.append(f"  {bias.one:7.1e} / {bias.systematic:+8.1e} ({bias.low:+8.1e}, {bias.high:+8.1e})")
        yield f"{title:16}" + "".join(f"{cell:>44}" for cell in cells)
    yield "choices that the other variant does not make"
    for title in ("experts", "entries"):
        shares = [statistics.fmean(missing_share(x.choices[title], y.choices[title]) for x, y in zip(passes[a], passes[b])) for a, b in pairs]
        yield f"{title:16}" + "".join(f"{share:34.1e}" for share in shares)


def load_variant(config: RunConfig, path: Path, device: torch.device) -> nn.Module:
    """The model of a checkpoint; in fp32 its weights outside the fp32 islands are rounded to bf16, as the others' are."""
    model = build_model(config, init_parallel(device, 1, config.startup_timeout), fill=False)
    checkpoint.load(path, model, make_optimizer(model, config))
    if config.dtype == "fp32":
        kept = {param for island in fp32_islands(model) for param in island.parameters()}
        with torch.no_grad():
            for param in model.parameters():
                if param not in kept:
                    param.copy_(param.bfloat16())
    return model


def batches_of(run: Path, config: RunConfig, path: Path, count: int) -> Iterable[tuple[Tensor, Tensor]]:
    """The next `count` batches of the run behind the checkpoint."""
    text = Text(find_files(config.data or str(run / "text")))
    data = Dataset(text, config.seq_len, config.eval_fraction, config.seed)
    place = {"text_sha256": text.fingerprint(), "seed": config.seed, "seq_len": config.seq_len, "eval_fraction": config.eval_fraction}
    checkpoint.check_data(path, place, False)
    sizes = {name: value for name, value in config.to_dict()["model"].items() if name != "preset"}
    first = checkpoint.read_progress(path, sizes)["data_tokens"] // config.seq_len
    return (data.batch(first + number * config.batch, config.batch) for number in range(count))


def compare_fixed(run: Path, variants: list[str], count: int, changes: dict[str, Any]) -> dict[str, list[Pass]]:
    """Passes by variant over the next `count` batches of `run`; `changes` are settings that replace the run's. One process."""
    if "RANK" in os.environ:
        raise ConfigError("compare_fixed runs in one process: start it without torchrun")
    if not (run / "config.json").is_file():
        raise ConfigError(f"{run} is no run folder: it has no config.json")
    config = dataclasses.replace(from_dict(read_file(str(run / "config.json")), str(run / "config.json")), nudge=0, **changes)
    path, device = checkpoint.find(str(run), run / "checkpoints"), pick_device(config.device)
    if device.type == "cpu" and "triton" in variants:
        raise ConfigError("variant triton needs an accelerator")
    if config.deterministic:
        be_deterministic()
    batches = list(batches_of(run, config, path, count))
    try:
        out = {}
        for name in variants:
            impl, dtype = VARIANTS[name]
            model = load_variant(dataclasses.replace(config, impl=impl, dtype=dtype), path, device)
            choices = Choices(model)
            out[name] = [run_pass(model, batch, choices) for batch in batches]
        return out
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def main(argv: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m train_example.compare_fixed", description=__doc__, formatter_class=raw)
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder with a checkpoint; its settings hold but for those below")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS, help="two or more (default: all three)")
    parser.add_argument("--batches", type=int, default=16, help="batches of the run's size, 2 or more (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or npu (default: %(default)s)")
    parser.add_argument("--data", help="the run's text, where it lies elsewhere now")
    args = parser.parse_args(argv)
    if args.batches < 2 or len(set(args.variants)) < 2:
        parser.error("at least two batches and two variants are needed")
    changes = {"device": args.device, "recompute": "none", "compile": False, "accumulate": 1, "swap_optimizer": False, "ep": -1}
    if args.data:
        changes["data"] = args.data
    warnings.filterwarnings("ignore", message="kl_coefficient is 0")
    try:
        passes = compare_fixed(args.run, list(dict.fromkeys(args.variants)), args.batches, changes)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for line in report(passes):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
