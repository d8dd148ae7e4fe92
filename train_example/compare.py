"""Compare two runs step by step: `python -m train_example.compare RUN_A RUN_B [--yardstick RUN_C ...]`.

For every step both runs have, the relative difference |a - b| / max(|a|, |b|) of each quantity. The exit status is 1 if one of the judged
quantities (--keys) differs by more than --tolerance at any step, or is in no step of both; --impl eager and --impl triton are to
agree to 1e-3 with the same seed.

Two runs that round differently drift apart however right both are. Hence the table of growth: the loss's difference over ever longer
spans of steps, counted from the first that both have, as it is and of the moving averages (decay 0.9), and beside it those of RUN_A and
yardsticks: runs that differ from RUN_A in rounding alone, by `--nudge` (one weight's last bit) or by the same batches in parts
(`--accumulate 2`, half the `--batch`). The mean of the signed difference, (b - a) / max(|a|, |b|), stands below.
Whether two implementations differ by more than rounding is better asked of fixed weights: train_example.compare_fixed.
"""

import argparse
import math
import statistics
import sys
from pathlib import Path
from typing import Any

from train_example.files import read_table, table
from train_example.metrics import EMA_DECAY, read_metrics

Series = list[tuple[int, float]]  # (step, difference)
QUANTITIES = ("loss", "lm_loss", "kl_loss", "mtp_loss", "grad_norm", "eval_bpb")


def relative_difference(a: float, b: float) -> float:
    """0 for equal numbers, infinite where one of them is not finite."""
    if a == b:
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b))


def common_rows(run_a: Path, run_b: Path) -> list[tuple[int, dict[str, Any], dict[str, Any]]]:
    """(step, row of a, row of b) for the steps that both runs have; ValueError for a folder without metrics or no such step."""
    rows = []
    for run in (run_a, run_b):
        path = run / "metrics.jsonl"
        if not path.is_file():
            raise ValueError(f"{run} is no run folder: it has no metrics.jsonl")
        rows.append({row["step"]: {key: value for key, value in row.items() if value is not None} for row in read_metrics(path)})
    steps = sorted(rows[0].keys() & rows[1].keys())
    if not steps:
        raise ValueError(f"{run_a} and {run_b} have no step in common")
    return [(step, rows[0][step], rows[1][step]) for step in steps]


def compare(run_a: Path, run_b: Path) -> dict[str, Series]:
    """Relative differences by quantity: (step, difference), for the steps in which both runs have it.

    Raises ValueError for a folder without metrics, or runs with no step in common.
    """
    pairs = common_rows(run_a, run_b)
    return {key: [(step, relative_difference(a[key], b[key])) for step, a, b in pairs if key in a and key in b] for key in QUANTITIES}


def _losses(run: Path) -> Series:
    return [(row["step"], row["loss"]) for row in read_metrics(run / "metrics.jsonl") if row.get("loss") is not None]


def smoothed_difference(run_a: Path, run_b: Path) -> Series:
    """(step, relative difference) of the two moving averages of the loss, over the steps both runs have from the first on."""
    losses = [dict(_losses(run)) for run in (run_a, run_b)]
    average: list[float] = []
    out = []
    for step in sorted(losses[0].keys() & losses[1].keys()):
        now = [by_step[step] for by_step in losses]
        average = [EMA_DECAY * old + (1 - EMA_DECAY) * new for old, new in zip(average, now)] if average else now
        out.append((step, relative_difference(*average)))
    return out


def mean_signed(run_a: Path, run_b: Path) -> float:
    """Mean over the common steps of the loss's relative difference with its sign: above 0 where b's loss is the larger one."""
    pairs = [(a["loss"], b["loss"]) for _, a, b in common_rows(run_a, run_b) if "loss" in a and "loss" in b]
    differences = [math.copysign(relative_difference(a, b), b - a) for a, b in pairs]
    return statistics.fmean(differences) if all(map(math.isfinite, differences)) else math.nan


def spans(first: int, last: int) -> list[range]:
    """Of 1 to `last`: 1, 2-3, 4-7, ..., twice as long each; from another `first` step on as long ones."""
    before, steps = first - 1, last - first + 1
    return [range(before + 2**i, min(before + 2 ** (i + 1), last + 1)) for i in range(steps.bit_length())]


def growth(differences: Series, within: list[range] | None = None) -> list[tuple[range, float, float]]:
    """Of each span of steps that has any: its median and largest difference. within: the spans, by default those of the series itself."""
    out = []
    for span in spans(differences[0][0], differences[-1][0]) if within is None else within:
        inside = [value for step, value in differences if step in span]
        if inside:
            out.append((span, statistics.median(inside), max(inside)))
    return out


def print_growth(series: dict[str, Series]) -> None:
    """series: (step, difference) by name; the spans are those of the first series, '-' where another one has no step of them."""
    print("relative difference of the loss, median and largest")
    print(f"{'steps':>11}" + "".join(f" {name:>23}" for name in series))
    first, *others = series.values()
    rows = growth(first)
    within = [span for span, _, _ in rows]
    tables = [{span: (median, largest) for span, median, largest in growth(differences, within)} for differences in others]
    for span, *own in rows:
        cells = [tuple(own), *(table.get(span) for table in tables)]
        text = "".join(f"   {cell[0]:10.2e} {cell[1]:9.2e}" if cell else f"{'-':>24}" for cell in cells)
        print(f"{span.start:5d}-{span.stop - 1:<5d}" + text)


def plot(runs: dict[str, Path], raw: dict[str, Series], smoothed: dict[str, Series], tolerance: float, file: Path) -> str:
    """Losses of the runs above, differences of a step and of the moving averages below; returns a line that says what was done.

    runs: by name, the first is the one that the others are compared with; raw and smoothed: by the names of the others.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return f"{file} was not drawn: matplotlib is not installed"
    figure = Figure(figsize=(10, 10), layout="constrained")
    panels = figure.subplots(3, 1, sharex=True)
    colors = {name: f"C{i}" for i, name in enumerate(runs)}
    first = next(iter(runs))
    for name, run in runs.items():
        losses = _losses(run)
        panels[0].plot([step for step, _ in losses], [loss for _, loss in losses], label=name, color=colors[name], linewidth=1)
    for axes, series, title in ((panels[1], raw, "of a step"), (panels[2], smoothed, "of the moving averages")):
        for name, differences in series.items():
            axes.plot(*zip(*differences), label=f"{name} against {first}", color=colors[name], linewidth=0.9)
        axes.axhline(tolerance, color="black", linewidth=0.8)
        axes.set(yscale="log", ylabel=f"relative difference {title}", ylim=(1e-7, None))
    panels[0].set(ylabel="loss, nats a token")
    panels[2].set(xlabel="step")
    for axes in panels:
        axes.grid(alpha=0.3)
        axes.legend()
    try:
        figure.savefig(file, dpi=100)
    except (OSError, ValueError) as error:  # no such folder, an ending that is no format
        return f"{file} was not drawn: {error}"
    return f"plot: {file}"


def named(runs: list[Path]) -> dict[str, Path]:
    """The folders by their own names; by their paths where two have one name, with a ' for every time that one comes again."""
    names = [run.name for run in runs]
    out: dict[str, Path] = {}
    for run in runs:
        name = run.name if names.count(run.name) == 1 else str(run)
        while name in out:
            name += "'"
        out[name] = run
    return out


def other_texts(run_a: Path, run_b: Path) -> bool:
    """Whether the two runs are known to have read different texts."""
    files = [run / "environment.json" for run in (run_a, run_b)]
    if not all(file.is_file() for file in files):
        return False
    a, b = (read_table(file).get("text_sha256") for file in files)
    return a is not None and b is not None and a != b


def other_settings(run_a: Path, run_b: Path) -> list[str]:
    """The settings in which two runs differ, but for their folder: "name a -> b"; none where one has no config.json."""
    files = [run / "config.json" for run in (run_a, run_b)]
    if not all(file.is_file() for file in files):
        return []
    a, b = map(_flat, files)
    names = sorted((a.keys() | b.keys()) - {"out", "model"})
    return [f"{name} {a.get(name)!r} -> {b.get(name)!r}" for name in names if a.get(name) != b.get(name)]


def _flat(file: Path) -> dict[str, Any]:
    """The settings in a file, those of the model as "model.NAME"."""
    settings = read_table(file)
    model = settings.get("model", {})
    model = {"preset": model} if isinstance(model, str) else table(model, f"{file}: model")
    return {**settings, **{f"model.{key}": value for key, value in model.items()}}


def main(argv: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m train_example.compare", description=__doc__, formatter_class=raw)
    parser.add_argument("run_a", type=Path, metavar="RUN_A", help="run folder")
    parser.add_argument("run_b", type=Path, metavar="RUN_B", help="run folder")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="largest relative difference that passes (default: %(default)s)")
    parser.add_argument("--keys", nargs="+", default=["loss"], choices=QUANTITIES, help="quantities that are judged (default: loss)")
    parser.add_argument("--steps", action="store_true", help="print the differences of every step, not only the largest")
    parser.add_argument("--yardstick", type=Path, nargs="+", default=[], metavar="RUN_C", help="runs like RUN_A but for their rounding")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw losses and differences")
    args = parser.parse_args(argv)
    others = [args.run_b, *args.yardstick]
    runs = named([args.run_a, *others])
    try:
        found = compare(args.run_a, args.run_b)
        raw = {name: compare(args.run_a, run)["loss"] for name, run in list(runs.items())[1:]}
        smoothed = {name: smoothed_difference(args.run_a, runs[name]) for name in raw}
        means = {name: mean_signed(args.run_a, runs[name]) for name, differences in raw.items() if differences}
        changes = {name: other_settings(args.run_a, runs[name]) for name in raw}
        texts_differ = other_texts(args.run_a, args.run_b)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, differing in changes.items():
        if differing:
            print(f"settings of {name}: {', '.join(differing)}")
    if texts_differ:
        print("the runs read different texts (environment.json): differences say little")
    if args.steps:
        print("step " + " ".join(f"{key:>12}" for key in QUANTITIES))
        by_key = {key: dict(values) for key, values in found.items()}
        for step, _ in found["loss"]:
            print(f"{step:4d} " + " ".join(f"{by_key[key][step]:12.3e}" if step in by_key[key] else f"{'-':>12}" for key in QUANTITIES))
    if found["loss"]:
        print_growth({label: series[name] for name in raw for label, series in ((name, raw), (f"{name}, smoothed", smoothed))})
        print("mean signed difference: " + ", ".join(f"{name} {mean:+.2e}" for name, mean in means.items()))
    if args.plot:
        print(plot(runs, raw, smoothed, args.tolerance, args.plot))
    failed = False
    for key, values in found.items():
        if not values:
            if key in args.keys:
                failed = True
                print(f"{key:10} in no step of both runs  MISSING")
            continue
        step, worst = max(values, key=lambda pair: pair[1])
        judged = key in args.keys
        verdict = "" if not judged else f"  {'ok' if worst <= args.tolerance else 'ABOVE'} {args.tolerance:g}"
        failed |= judged and worst > args.tolerance
        print(f"{key:10} largest relative difference {worst:.3e} at step {step} ({len(values)} compared){verdict}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
