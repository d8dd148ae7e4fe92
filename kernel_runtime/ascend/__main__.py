"""python -m kernel_runtime.ascend: compiles every registered kernel to HIVM for Ascend and fails where one does not compile.

Runs in an environment of its own with triton-ascend and no torch (`make ascend-check` makes it and puts the torch stand-in on the path).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kernel_runtime.ascend.compile import Result, compile_to_hivm
from kernel_runtime.ascend.hivm import per_token
from kernel_runtime.plan import named_entries
from kernel_runtime.registry import PRESETS, import_ops, registered_specs

TARGETS = ("Ascend910B3", "Ascend910_9382")
MEMORIES = ("UB", "L1", "L0C")
# not in the default run: as many residual streams as the mHC ops take
EXTRA_MODELS = {"streams8": replace(PRESETS["flash"], hc_mult=8)}

# What a compiler is known not to manage: compiler -> kernel -> part of the failure's text. Such a failure is shown and does not fail the
# run; any other does, and so does a kernel listed here whose specialisations all compile: it is to be taken off the list.
KNOWN_FAILURES: dict[str, dict[str, str]] = {}


@dataclass
class Row:
    """One kernel specialisation on one target with one compiler."""

    op: str
    kernel: str
    models: list[str]
    target: str
    compiler: str
    consts: dict[str, Any]
    hot: bool
    stage: str = ""
    error: str = ""
    seconds: float = 0.0
    core: str = ""
    planned: dict[str, int] = field(default_factory=dict)
    scalar_loops: int = 0
    short_scalar_loops: int = 0
    narrow_loops: int = 0
    loads: dict[str, int] = field(default_factory=dict)
    stores: dict[str, int] = field(default_factory=dict)
    workspace: int = 0
    dma: int = 0
    scalar_loads: int = 0
    vector: int = 0
    cube: int = 0
    a_token: dict[str, float] = field(default_factory=dict)  # see hivm.per_token
    minimal_bytes: float = 0.0

    @property
    def failure(self) -> str:
        if self.error:
            return self.error
        return f"{self.scalar_loops} scalar loops in a kernel listed as hot" if self.hot and self.scalar_loops else ""

    @property
    def known(self) -> bool:
        """Whether the row fails as KNOWN_FAILURES says."""
        part = KNOWN_FAILURES.get(self.compiler, {}).get(self.kernel)
        return bool(self.failure) and part is not None and part in self.failure


def mended(rows: list[Row]) -> list[str]:
    """Kernels of KNOWN_FAILURES, with their compiler, that were compiled and did not fail once."""
    kernels = {(row.compiler, row.kernel) for row in rows} - {(row.compiler, row.kernel) for row in rows if row.known}
    return [f"{kernel} with {name}" for name, listed in KNOWN_FAILURES.items() for kernel in listed if (name, kernel) in kernels]


def specs_of(model: str) -> list[tuple[str, Any]]:
    """(op, spec) of what a model launches: one that is known here by name, or a file as `python -m kernel_runtime.warmup` takes it."""
    import_ops()
    return list(registered_specs(EXTRA_MODELS[model])) if model in EXTRA_MODELS else named_entries(model)


def entries(models: list[str], pattern: str) -> Iterator[tuple[str, int, Any, list[str]]]:
    """(op, position among the op's specs, spec, models that need it) of every specialisation for Ascend, each once."""
    found: dict[Any, list[str]] = {}
    first: dict[Any, tuple[str, int, Any]] = {}
    for model in models:
        for position, (op, spec) in enumerate(specs_of(model)):
            if "ascend" in spec.targets and (pattern in spec.name or pattern in op):
                users = found.setdefault(spec.identity, [])
                if model not in users:
                    users.append(model)
                first.setdefault(spec.identity, (op, position, spec))
    for identity, users in found.items():
        yield (*first[identity], users)


def compiler_folders(folders: list[str]) -> dict[str, Path]:
    """name -> package folder of each ascendnpu-ir to run: the installed one and those named by `--compiler`."""
    import ascendnpuir

    paths = [Path(ascendnpuir.__file__).parent, *(Path(f).resolve() / "ascendnpuir" for f in folders)]
    if absent := [str(p) for p in paths if not (p / "bin" / "bishengir-compile").exists()]:
        raise FileNotFoundError(f"no bishengir-compile in {', '.join(absent)}")
    result = {}
    for path in paths:
        info = next(path.parent.glob("ascendnpu_ir-*.dist-info"), None)
        result[info.name.split("-")[1].removesuffix(".dist") if info else path.parent.name] = path
    return result


def run_entry(job: tuple[str, int, list[str], dict[str, Path], float, str]) -> dict[tuple[str, str], Result]:
    """Compiles in a worker: specs hold JIT functions, which cannot be sent, so the worker looks the spec up in its own registry."""
    model, position, targets, compilers, timeout, keep = job
    try:
        spec: Any = specs_of(model)[position][1]
        return compile_to_hivm(spec, targets, compilers, timeout, Path(keep) if keep else None)
    except Exception:  # an unforeseen error of the gate itself is a failure of that row, with its traceback
        failed = Result(error=f"the check itself failed: {traceback.format_exc(limit=3)}")
        return {(target, name): failed for target in targets for name in compilers}


def fill(row: Row, result: Result, spec: Any) -> None:
    row.stage, row.error, row.seconds, row.core = result.stage, result.error, result.seconds, result.core
    row.minimal_bytes = spec.minimal_bytes
    if (report := result.report) is not None:
        row.a_token = per_token(report, spec.tokens)
        row.planned = report.planned
        row.loads, row.stores, row.workspace = dict(report.loads), dict(report.stores), report.workspace
        for name in ("scalar_loops", "short_scalar_loops", "narrow_loops", "dma", "scalar_loads", "vector", "cube"):
            setattr(row, name, getattr(report, name))


def check(args: argparse.Namespace, found: list[tuple[str, int, Any, list[str]]]) -> list[Row]:
    compilers = compiler_folders(args.compiler)
    jobs = [(models[0], position, args.target, compilers, args.timeout, args.keep) for _, position, _, models in found]
    rows = []
    with ProcessPoolExecutor(args.jobs) as pool:
        for (op, _, spec, models), results in zip(found, pool.map(run_entry, jobs)):
            consts = {name: str(value) for name, value in spec.consts.items()}
            fresh = []
            for (target, compiler), result in results.items():
                fresh.append(Row(op, spec.name, models, target, compiler, consts, spec.hot))
                fill(fresh[-1], result, spec)
            for failure in dict.fromkeys(row.failure for row in fresh if row.failure and not row.known):
                where = ", ".join(f"{row.target} {row.compiler}" for row in fresh if row.failure == failure)
                print(f"FAIL {op} {spec.name} {consts} [{', '.join(models)}; {where}]\n     {failure}", file=sys.stderr, flush=True)
            rows.extend(fresh)
    return rows


def table(rows: list[Row]) -> str:
    """One line a specialisation and compiler; targets that agree are folded."""
    limits = {"UB": 192, "L1": 512, "L0C": 128}
    loops = ("scalar_loops", "short_scalar_loops", "narrow_loops")
    head = ["kernel", "models", "compiler", "target", "core", *(f"{m} KiB/{limits[m]}" for m in MEMORIES), "scalar", "short", "narrow", "s",
            "result"]  # fmt: skip
    folded: dict[tuple, list[Row]] = {}
    for row in rows:
        counts = [getattr(row, name) for name in loops]
        what = (row.kernel, str(row.consts), row.compiler, tuple(row.models), str(row.planned), row.failure, *counts)
        folded.setdefault(what, []).append(row)
    body = []
    for group in folded.values():
        row = group[0]
        memory = [f"{row.planned[m] / 1024:.1f}" if m in row.planned else "-" for m in MEMORIES]
        status = "ok" if not row.failure else f"known: {row.failure}" if row.known else f"FAIL after {row.stage}"
        body.append([row.kernel + ("*" if row.hot else ""), ",".join(row.models), row.compiler, ",".join(r.target for r in group), row.core,
                     *memory, *(str(getattr(row, n)) for n in loops), f"{sum(r.seconds for r in group):.1f}", status])  # fmt: skip
    widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip() for line in [head, *body])


def traffic(rows: list[Row], target: str) -> str:
    """Markdown table of the static estimate, for one target and the newest compiler."""
    newest = max((row.compiler for row in rows), default="")
    lines = ["| kernel | bytes a token | minimum | ratio | through workspace | vector | cube | DMA | scalar loads |",
             "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    kernels = [row for row in rows if row.target == target and row.compiler == newest]

    def form(row: Row) -> str:
        """Constants that tell specialisations of one kernel apart"""
        others = [other.consts for other in kernels if other.kernel == row.kernel]
        differing = [name for name, value in row.consts.items() if any(consts.get(name) != value for consts in others)]
        return f" {', '.join(f'{name} {row.consts[name]}' for name in differing)}" if differing else ""

    for row in rows:
        if row.target != target or row.compiler != newest or row.error:
            continue
        moved = sum(row.loads.values()) + sum(row.stores.values()) + row.workspace
        told = row.a_token or {n: getattr(row, n) for n in ("workspace", "vector", "cube", "dma", "scalar_loads")}
        a_token = f"{row.a_token['bytes']:,.0f}" if row.a_token else f"{moved:,} a pass"
        minimum = f"{row.minimal_bytes:,.0f}" if row.minimal_bytes else "-"
        ratio = "-"
        if row.a_token and row.minimal_bytes:
            times = row.a_token["bytes"] / row.minimal_bytes
            ratio = f"{times:.2f}" if times > 0.99 else f"{times:.2f}: the registry's tokens or minimum is wrong"
        counts = " | ".join(f"{told[n]:,.1f}" for n in ("vector", "cube", "dma", "scalar_loads"))
        lines.append(f"| `{row.kernel}`{form(row)} | {a_token} | {minimum} | {ratio} | {told['workspace']:,.0f} | {counts} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernel_runtime.ascend", description=__doc__.splitlines()[0])
    models = f"models whose kernels are compiled: {', '.join((*PRESETS, *EXTRA_MODELS))}, a trainer configuration or a JSON plan"
    parser.add_argument("--model", nargs="+", default=list(PRESETS), help=models)
    parser.add_argument("--target", nargs="+", default=list(TARGETS), help="Ascend targets")
    parser.add_argument("--compiler", action="append", default=[], metavar="DIR", help="folder with a further ascendnpu-ir (repeatable)")
    parser.add_argument("--filter", default="", help="only kernels or ops whose name contains this")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a compiler may take for one kernel")
    parser.add_argument("--keep", default="", metavar="DIR", help="keep the HIVM modules there")
    parser.add_argument("--report", choices=("table", "json", "traffic"), default="table", help="what to print")
    parser.add_argument("--dry-run", action="store_true", help="list the kernels, compile nothing")
    args = parser.parse_args(argv)
    try:
        found = list(entries(args.model, args.filter))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.dry_run:
        for op, _, spec, users in found:
            print(f"{spec.name}{'*' if spec.hot else ''}  {op}  {','.join(users)}  {dict(spec.consts)}")
        print(f"{len(found)} kernels for Ascend (* = hot: no scalar loop allowed)")
        return 0
    if args.keep:
        Path(args.keep).mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    rows = check(args, found)
    if args.report == "json":
        print(json.dumps([asdict(row) | {"failure": row.failure} for row in rows], indent=1))
    else:
        print(table(rows) if args.report == "table" else traffic(rows, args.target[-1]))
    failed, known = (sum(bool(row.failure) and row.known == wanted for row in rows) for wanted in (False, True))
    summary = f"{len(rows)} compiled, {failed} failed, {known} known to fail, {time.perf_counter() - start:.0f} s (* = hot: no scalar loop allowed)"
    print(summary, file=sys.stderr if args.report == "json" else sys.stdout)
    if not rows:
        print("no kernel is registered for Ascend", file=sys.stderr)
    outdated = mended(rows)
    for name in outdated:
        print(f"{name} compiles now: take it off KNOWN_FAILURES", file=sys.stderr)
    return 1 if failed or outdated or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
