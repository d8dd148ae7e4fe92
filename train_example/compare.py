"""Compare two runs step by step: `python -m train_example.compare RUN_A RUN_B`.

For every step both runs have, the relative difference |a - b| / max(|a|, |b|) of each quantity. The exit status is 1 if one of the judged
quantities (--keys) differs by more than --tolerance at any step, or is in no step of both; --impl eager and --impl triton are to
agree to 1e-3 with the same seed.
"""

import argparse
import json
import math
import sys
from pathlib import Path

from train_example.metrics import read_metrics

QUANTITIES = ("loss", "lm_loss", "kl_loss", "mtp_loss", "grad_norm", "eval_bpb")


def relative_difference(a: float, b: float) -> float:
    """0 for equal numbers, infinite where one of them is not finite."""
    if a == b:
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b))


def compare(run_a: Path, run_b: Path) -> dict[str, list[tuple[int, float]]]:
    """Relative differences by quantity: (step, difference), for the steps in which both runs have it.

    Raises ValueError for a folder without metrics, or runs with no step in common.
    """
    rows = []
    for run in (run_a, run_b):
        path = run / "metrics.jsonl"
        if not path.is_file():
            raise ValueError(f"{run} is no run folder: it has no metrics.jsonl")
        rows.append({row["step"]: row for row in read_metrics(path)})
    steps = sorted(rows[0].keys() & rows[1].keys())
    if not steps:
        raise ValueError(f"{run_a} and {run_b} have no step in common")
    pairs = [(step, rows[0][step], rows[1][step]) for step in steps]
    return {key: [(step, relative_difference(a[key], b[key])) for step, a, b in pairs if key in a and key in b] for key in QUANTITIES}


def other_texts(run_a: Path, run_b: Path) -> bool:
    """Whether the two runs are known to have read different texts."""
    files = [run / "environment.json" for run in (run_a, run_b)]
    return all(f.is_file() for f in files) and len({json.loads(f.read_text())["text_sha256"] for f in files}) > 1


def main(argv: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m train_example.compare", description=__doc__, formatter_class=raw)
    parser.add_argument("run_a", type=Path, metavar="RUN_A", help="run folder")
    parser.add_argument("run_b", type=Path, metavar="RUN_B", help="run folder")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="largest relative difference that passes (default: %(default)s)")
    parser.add_argument("--keys", nargs="+", default=["loss"], choices=QUANTITIES, help="quantities that are judged (default: loss)")
    parser.add_argument("--steps", action="store_true", help="print the differences of every step, not only the largest")
    args = parser.parse_args(argv)
    try:
        found = compare(args.run_a, args.run_b)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if other_texts(args.run_a, args.run_b):
        print("the runs read different texts (environment.json): differences say little")
    if args.steps:
        print("step " + " ".join(f"{key:>12}" for key in QUANTITIES))
        by_key = {key: dict(values) for key, values in found.items()}
        for step, _ in found["loss"]:
            print(f"{step:4d} " + " ".join(f"{by_key[key][step]:12.3e}" if step in by_key[key] else f"{'-':>12}" for key in QUANTITIES))
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
