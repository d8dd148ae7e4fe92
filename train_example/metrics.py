"""What a person sees of a run: the log line, metrics.jsonl, and curves.png. Rank 0 alone uses this module."""

import json
import math
import resource
from pathlib import Path
from typing import Any

import torch

from train_example.config import ModelConfig
from train_example.files import parse_json, table
from train_example.run_config import ConfigError

# Dense peak of one device in TFLOP/s in bf16, from the vendors' data sheets. Other devices and other dtypes: --peak-tflops.
PEAK_BF16_TFLOPS = {"H200": 989.4, "H100 80GB HBM3": 989.4, "A100": 312.0}
EMA_DECAY = 0.9
CURVES = {
    "loss": ("loss, nats a token", ("loss", "lm_loss", "mtp_loss")),
    "kl": ("indexer KL, nats a token", ("kl_loss",)),
    "eval": ("held-out bits per byte", ("eval_bpb",)),
    "norm": ("gradient norm", ("grad_norm",)),
    "lr": ("learning rate", ("lr",)),
    "load": ("expert load, max / mean", ("expert_load",)),
}


def flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """Forward + backward FLOPs of a token, for MFU: 6 x (weights a token meets) + 12 x heads x head_dim x (keys a query attends to).

    Weights: all matrices but the embedding table, of the routed experts those of the experts_per_token chosen ones; the head counts once
    more for the MTP block. Keys: the causal mean over the sequence of min(window, t) plus the visible (or selected) compressed entries.
    Left out: norms, mHC's Sinkhorn, softmax, the indexer's scores, and anything computed a second time by `recompute`.
    """
    D, N, C, L = config.hidden_size, config.num_heads, config.head_dim, config.q_lora_rank
    M = config.hc_mult * (config.hc_mult + 2)
    total = 0.0
    for ratio in (*config.compress_ratios, *[config.mtp_compress_ratio] * config.mtp_layers):
        kind = config.kind(ratio)
        weights = D * L + L * N * C + D * C + N * C * config.o_lora_rank + config.o_groups * config.o_lora_rank * D
        weights += 3 * D * config.expert_dim * (config.experts_per_token + 1) + D * config.num_experts + 2 * M * config.hc_mult * D
        keys = sum(min(t, config.window) for t in range(1, seq_len + 1)) / seq_len
        if kind != "window":
            weights += 2 * D * C * (2 if kind == "csa" else 1)
            limit = config.index_topk if kind == "csa" else seq_len
            keys += sum(min(t // ratio, limit) for t in range(1, seq_len + 1)) / seq_len
        if kind == "csa":
            H, Ci = config.index_heads, config.index_head_dim
            weights += L * H * Ci + D * H + 4 * D * Ci
        total += 6 * weights + 12 * N * C * keys
    return total + 6 * (1 + config.mtp_layers) * D * config.vocab_size + 12 * config.mtp_layers * D * D


def peak_flops(device: torch.device, dtype: str, override_tflops: float) -> float | None:
    """Peak FLOP/s of one device, or None where it is not known (MFU is then n/a)."""
    if override_tflops != -1:
        return override_tflops * 1e12
    if device.type == "cuda" and dtype == "bf16":
        name = torch.cuda.get_device_name(device)
        return next((tflops * 1e12 for key, tflops in PEAK_BF16_TFLOPS.items() if key in name), None)
    return None


def memory_gib(device: torch.device) -> float:
    """Most memory this process has held so far: on the accelerator as torch's allocator counts it, on a CPU the resident set."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return getattr(torch, device.type).max_memory_allocated(device) / 2**30


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"


class MetricsLog:
    """Writes metrics.jsonl (one row a step) and train.log (what is printed), and draws curves.png.

    Args:
        out: run folder.
        total: steps of the whole run.
        start: steps already done; rows behind them (of a run that went on after its last checkpoint) are dropped.
    """

    def __init__(self, out: Path, total: int, start: int) -> None:
        self.out, self.total, self.recent_ms = out, total, []
        path = out / "metrics.jsonl"
        rows = [row for row in read_metrics(path) if row["step"] <= start] if path.exists() and start else []
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.file = path.open("a")
        self.log = (out / "train.log").open("a" if start else "w")

    def say(self, text: str) -> None:
        print(text, flush=True)
        self.log.write(text + "\n")
        self.log.flush()

    def row(self, row: dict[str, Any]) -> None:
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        self.recent_ms = [*self.recent_ms[-19:], row["ms"]]

    def evaluation(self, row: dict[str, Any]) -> None:
        """A line of its own: the step's row was written before the checkpoint, so that no checkpoint is ahead of its metrics."""
        self.file.write(json.dumps({"step": row["step"], "eval_bpb": row["eval_bpb"]}) + "\n")
        self.file.flush()
        self.say(f"step {row['step']}/{self.total} | held-out bits per byte {row['eval_bpb']:.4f}")

    def line(self, row: dict[str, Any]) -> str:
        eta = sorted(self.recent_ms)[len(self.recent_ms) // 2] / 1000 * (self.total - row["step"])
        mfu = "n/a" if row["mfu"] is None else f"{row['mfu']:.1%}"
        return (
            f"step {row['step']}/{self.total} | loss {row['loss_ema']:.4f} (lm {row['lm_loss']:.4f} kl {row['kl_loss']:.4f} mtp "
            f"{row['mtp_loss']:.4f}) | grad norm {row['grad_norm']:.3f} | lr {row['lr']:.2e} | {row['ms']:.0f} ms | "
            f"{row['tokens_per_s']:.0f} tokens/s a device | MFU {mfu} | {row['memory_gib']:.2f} GiB | "
            f"expert load {row['expert_load']:.2f} | ETA {_duration(eta)}"
        )

    def close(self) -> None:
        self.file.close()
        message = draw_curves(self.out)
        self.say(message)
        self.log.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """One row a step, its lines merged; a last line cut short by a crash is left out. ConfigError that names any other damaged line."""
    rows: dict[int, dict[str, Any]] = {}
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        what = f"{path} line {number}"
        try:
            row = table(parse_json(line, what), what)
        except ValueError as error:
            if number == len(lines):
                break
            raise ConfigError(str(error)) from error
        if type(row.get("step")) is not int or not all(value is None or _is_number(value) for value in row.values()):
            raise ConfigError(f"{what} is no row of a run: a whole number `step`, and numbers alone, got {str(row)[:100]}")
        rows.setdefault(row["step"], {}).update(row)
    return list(rows.values())


def _is_number(value: Any) -> bool:
    """Whether it is one that a float holds."""
    return type(value) is float or (type(value) is int and abs(value) < 2**1023)


def draw_curves(out: Path) -> str:
    """Draw curves.png from metrics.jsonl; returns a line that says what was done."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "curves.png was not drawn: matplotlib is not installed"
    rows = read_metrics(out / "metrics.jsonl")
    figure = Figure(figsize=(13, 7), layout="constrained")
    for axes, (title, keys) in zip(figure.subplots(2, 3).flat, CURVES.values()):
        for key in keys:
            points = [(row["step"], row[key]) for row in rows if row.get(key) is not None and math.isfinite(row[key])]
            axes.plot(*zip(*points), label=key, marker="o" if len(points) < 12 else None, linewidth=1) if points else None
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if len(keys) > 1 and axes.lines:
            axes.legend()
    figure.savefig(out / "curves.png", dpi=110)
    return f"curves: {out / 'curves.png'}"
