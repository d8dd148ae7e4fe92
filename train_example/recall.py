"""How much of what the attention looks at the indexer finds, during a training with its KL loss and during one without.

    python -m train_example.recall --steps 200          two trainings of the tiny model, a picture and a table

Recall of a query: of the K compressed entries with the largest attention mass, the share that the indexer selected. Mass is the mean over
heads of softmax(window, all visible entries, sink), so that an entry the indexer left out counts too. Averaged over the queries that have
more than K entries to choose from, the CSA layers, and held-out text that is never trained on. `chance` is what K entries drawn blindly hit.

Shape letters: B batch, S sequence, N heads, C channels of a head, E compressed entries, K selected entries.
"""

import argparse
import csv
import dataclasses
import math
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from sparse_attn import sparse_attn_shared_kv
from train_example.attention import AttentionCore
from train_example.data import IGNORE, Dataset, Text, find_files, write_default_text
from train_example.optim import make_optimizer
from train_example.parallel import Parallel, init_parallel, pick_device, shutdown
from train_example.run_config import ConfigError, RunConfig
from train_example.step import train_step
from train_example.train import build_model

Point = tuple[int, float, float]  # steps done, recall, loss of the last step (nan before the first)


def attention_mass(q: Tensor, kv: Tensor, entries: Tensor, sinks: Tensor, window: int, ratio: int) -> Tensor:
    """Mean over heads of the weight on each entry, had the query attended to all it may see: fp32 [B, S, E], 0 at the others.

    q [B, S, N, C]; kv [B, S, C]; entries [B, E, C]; sinks [N].
    """
    _, lse = sparse_attn_shared_kv(q, kv, entries, None, sinks, cmp_ratio=ratio, window=window, return_lse=True)
    logits = torch.einsum("bsnc,bec->bsne", q.float(), entries.float()) * q.shape[-1] ** -0.5
    mass = (logits - lse[..., None].float()).exp().mean(2)
    return mass.masked_fill(torch.arange(entries.shape[1], device=q.device) >= visible_entries(q.shape[1], ratio, q.device)[:, None], 0)


def visible_entries(length: int, ratio: int, device: torch.device) -> Tensor:
    """Entries that are complete before each query, int64 [S]."""
    return torch.arange(1, length + 1, device=device) // ratio


def recall_of(mass: Tensor, indices: Tensor, ratio: int) -> tuple[Tensor, Tensor]:
    """Recall and chance of every query with more than K visible entries, both [B, S]; nan at the other queries.

    mass [B, S, E]; indices int32 [B, S, K], -1 where nothing is selected.
    """
    K, E = indices.shape[-1], mass.shape[-1]
    visible = visible_entries(mass.shape[1], ratio, mass.device).expand(mass.shape[:2])
    selects = visible > K
    if E <= K:
        nothing = torch.full_like(mass[..., 0], torch.nan)
        return nothing, nothing
    columns = torch.arange(E, device=mass.device)
    best = mass.masked_fill(columns >= visible[..., None], -1.0).topk(K, dim=-1).indices
    chosen = torch.zeros(*mass.shape[:2], E + 1, dtype=torch.bool, device=mass.device)
    chosen.scatter_(-1, torch.where(indices < 0, E, indices.long()), True)
    hits = chosen.gather(-1, best).float().mean(-1)
    return hits.masked_fill(~selects, torch.nan), (K / visible.clamp(min=1)).masked_fill(~selects, torch.nan)


@torch.no_grad()
def indexer_recall(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """(recall, chance) of a model's CSA layers over batches of (input_ids [B, S], labels [B, S]); positions without a label are left out."""
    found: list[Tensor] = []
    counted = torch.empty(0)

    def look(core: nn.Module, arguments: tuple) -> None:
        q, kv, entries, indices, *_ = arguments
        if indices is not None:
            mass = attention_mass(q, kv, entries, core.sinks.detach(), core.window, core.ratio)
            both = torch.stack(recall_of(mass, indices, core.ratio))
            found.append(both[:, counted & both[0].isfinite()].double())

    hooks = [core.register_forward_pre_hook(look) for core in model.modules() if isinstance(core, AttentionCore)]
    device = next(model.parameters()).device
    model.eval()
    try:
        for input_ids, labels in batches:
            counted = (labels != IGNORE).to(device)
            model(input_ids.to(device))
    finally:
        for hook in hooks:
            hook.remove()
        model.train()
    if not found or not sum(x.shape[1] for x in found):
        raise ConfigError("no query has more entries than index_topk to choose from; take longer sequences or a smaller index_topk")
    recall, chance = torch.cat(found, 1).mean(1).tolist()
    return recall, chance


def follow(config: RunConfig, dataset: Dataset, parallel: Parallel, every: int) -> tuple[list[Point], float]:
    """Trains as `config` says; the recall before the first step and each `every` steps, and the chance."""
    model = build_model(config, parallel)
    optimizer = make_optimizer(model, config)
    points: list[Point] = []
    chance = loss = float("nan")
    for step in range(config.steps + 1):
        if step:
            loss = train_step(model, optimizer, config, [dataset.batch((step - 1) * config.batch, config.batch)], step)["lm_loss"]
        if step % every == 0 or step == config.steps:
            recall, chance = indexer_recall(model, dataset.held_out(0, 1, config.batch, config.eval_sequences))
            points.append((step, recall, loss))
            name = f"coefficient {config.model.kl_coefficient:g}"
            print(f"{name} | step {step} | recall {recall:.4f} | chance {chance:.4f} | lm {loss:.4f}", flush=True)
    return points, chance


def draw(curves: dict[float, list[Point]], chance: float, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    for coefficient, points in curves.items():
        axes.plot([p[0] for p in points], [p[1] for p in points], marker="o", markersize=3, label=f"kl_coefficient {coefficient:g}")
    axes.axhline(chance, color="grey", linestyle=":", label="chance")
    axes.set(xlabel="optimizer step", ylabel="recall on held-out text", title="Indexer: share of the entries of largest attention mass")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m train_example.recall", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of each training")
    parser.add_argument("--every", type=int, default=20, help="steps between measurements")
    parser.add_argument("--seq-len", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences a step")
    parser.add_argument("--eval-sequences", type=int, default=16, help="held-out sequences of a measurement; -1 = all")
    parser.add_argument("--coefficients", type=float, nargs="+", default=[1.0, 0.0], help="kl_coefficient of each training")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of the data, the same in each training")
    parser.add_argument("--data", default="", help="text file or folder; empty = the language reference that ships with Python")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "npu"))
    parser.add_argument("--out", type=Path, default=Path("runs/recall"), help="folder for recall.csv and recall.png")
    args = parser.parse_args(argv)
    if args.every < 1:
        parser.error(f"argument --every: 1 or more, got {args.every}")
    if not all(0 <= coefficient < math.inf for coefficient in args.coefficients):
        parser.error(f"argument --coefficients: numbers of 0 or more, got {args.coefficients}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        follow_all(args)
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.out / 'recall.csv'}, {args.out / 'recall.png'}")
    return 0


def follow_all(args: argparse.Namespace) -> None:
    """A training for each coefficient; writes the table and the picture."""
    run = RunConfig(steps=args.steps, seq_len=args.seq_len, batch=args.batch, seed=args.seed, eval_sequences=args.eval_sequences, device=args.device)
    parallel = init_parallel(pick_device(run.device), run.ep, run.startup_timeout, True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            default = Path(folder) / "text.txt"
            if not args.data:
                write_default_text(default)
            text = Text(find_files(args.data) if args.data else [default])
            dataset = Dataset(text, run.seq_len, run.eval_fraction, run.seed)
            curves: dict[float, list[Point]] = {}
            for coefficient in args.coefficients:
                torch.manual_seed(run.seed)
                sizes = dataclasses.replace(run.model, kl_coefficient=coefficient)
                curves[coefficient], chance = follow(dataclasses.replace(run, model=sizes), dataset, parallel, args.every)
    finally:
        shutdown()
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "recall.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["kl_coefficient", "step", "recall", "lm_loss", "chance"])
        writer.writerows([c, step, f"{r:.6f}", f"{loss:.6f}", f"{chance:.6f}"] for c, points in curves.items() for step, r, loss in points)
    draw(curves, chance, args.out / "recall.png")


if __name__ == "__main__":
    sys.exit(main())
