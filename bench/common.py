"""What every bench shares: timing with and without a CUDA graph, the copy rate, launches, peak memory, and the files of a run.

A measurement is a `Row`. GB/s counts minimal bytes (inputs read once, outputs written once) and stands beside the rate at which the
device copied in the same run, counting bytes read and written.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import platform
import signal
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from kernel_runtime.env import installed

COPY_BYTES = 4 << 30


@dataclass
class Row:
    """ms: median of one call; bytes: minimal traffic, 0 if not stated; copy_gbs: the device's copy rate in the same run."""

    bench: str
    shape: str
    dtype: str
    op: str
    direction: str  # forward, backward, both
    provider: str
    graph: bool
    ms: float
    bytes: int = 0
    copy_gbs: float = 0.0
    launches: int = 0
    peak_mib: float = 0.0
    note: str = ""

    @property
    def gbs(self) -> float:
        return self.bytes / self.ms / 1e6

    @property
    def percent(self) -> float:
        return 100 * self.gbs / self.copy_gbs if self.copy_gbs else 0.0


def median_ms(fn: Callable[[], object], rep: int = 60) -> float:
    """Median of a call in ms over `rep` ms of calls, at least 9 (5 of a call of more than 10 ms); the L2 cache is flushed before each.

    Host time counts where it is longer than the device's.
    """
    from triton.runtime import driver
    from triton.testing import do_bench

    cache = driver.active.get_empty_cache_for_benchmark()

    def once() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        driver.active.clear_cache(cache)
        start.record()
        fn()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end))

    fn()
    first = once()
    if first > 10:  # do_bench would spend more calls on finding out how many it takes
        return statistics.median([first, *(once() for _ in range(max(4, int(rep / first))))])
    return float(do_bench(fn, warmup=10, rep=max(rep, int(9 * first)), return_mode="median"))


def copy_rate() -> float:
    """GB/s of a large copy on the current device, read and written bytes counted"""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").fill_(1)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / median_ms(lambda: target.copy_(source)) / 1e6


class Captured:
    """`fn` as a CUDA graph. A backward whose forward ran under `self.stream` can be captured; others would run on another stream."""

    stream: torch.cuda.Stream | None = None

    @classmethod
    def side(cls) -> torch.cuda.Stream:
        cls.stream = cls.stream or torch.cuda.Stream()
        return cls.stream

    def __init__(self, fn: Callable[[], object]) -> None:
        stream = self.side()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                fn()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            fn()

    def __call__(self) -> None:
        self.graph.replay()


def count_launches(*functions: Callable[[], object]) -> list[int]:
    """Kernels, copies and fills that one call of each starts on the device, in one session of the profiler (starting it takes longest)"""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    for fn in functions:
        fn()
    torch.cuda.synchronize()
    for activities in ([ProfilerActivity.CUDA], [ProfilerActivity.CUDA, ProfilerActivity.CPU]):  # the first is quicker to read
        with profile(activities=activities) as trace:
            for fn in functions:
                fn()
                torch.cuda.synchronize()
                torch.cuda._sleep(1)  # a kernel that nothing else starts: the end of this call
                torch.cuda.synchronize()
        counts = [0]
        for event in sorted((e for e in trace.events() if e.device_type == DeviceType.CUDA), key=lambda e: e.time_range.start):
            if "spin_kernel" in event.name:
                counts.append(0)
            else:
                counts[-1] += 1
        if len(counts) == len(functions) + 1:
            return counts[:-1]
    raise RuntimeError("the kernels that end the calls were not found among those profiled")


def peak_mib(fn: Callable[[], object]) -> float:
    """Peak device memory of one call beyond what is held before it, results included"""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = fn()
    torch.cuda.synchronize()
    del result
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def environment() -> dict[str, str]:
    found = {"device": torch.cuda.get_device_name(), "python": platform.python_version()}
    return found | {name: version for name, version in installed().items() if version}


def print_head(title: str) -> None:
    print(f"\n{title}")
    print(f"{'op':16s} {'direction':9s} {'provider':13s} {'graph':5s} {'ms':>8s} {'GB/s':>6s} {'% copy':>6s} {'launches':>8s} {'peak MiB':>9s}")


def print_row(r: Row) -> None:
    rate = f"{r.gbs:6.0f} {r.percent:6.1f}" if r.bytes else f"{'-':>6s} {'-':>6s}"
    graph = "yes" if r.graph else "no"
    print(f"{r.op:16s} {r.direction:9s} {r.provider:13s} {graph:5s} {r.ms:8.4f} {rate} {r.launches:8d} {r.peak_mib:9.1f} {r.note}", flush=True)


def print_table(title: str, rows: Sequence[Row]) -> None:
    print_head(title)
    for r in rows:
        print_row(r)


class OverLimit(Exception):
    """A measurement took longer than it may."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """OverLimit, which stops whatever Python runs (the compilation of a kernel, too), after so many seconds; 0: never. Main thread only."""

    def stop(*_: object) -> None:
        raise OverLimit(f"over {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def positive(text: str) -> int:
    """The type of a command's argument that counts something."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def need_device(parser: argparse.ArgumentParser, kind: str = "cuda") -> None:
    """Ends the command in one line where the device that it measures on is not here."""
    if kind != "cpu" and (torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")).type != kind:
        parser.error(f"this needs a device of kind {kind}, which is not here")


def read(files: Sequence[Path]) -> tuple[dict[str, str], list[Row]]:
    """Environment and rows of JSONL files that `write` made; ValueError if they are no such files, or come from different environments or
    benches."""
    known, found, rows = {f.name for f in fields(Row)}, [], []
    for file in files:
        try:
            first, *records = (json.loads(line) for line in file.read_text().splitlines())
            found.append(first["environment"])
            rows += [Row(**{k: v for k, v in record.items() if k in known}) for record in records]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file} is no JSONL file of a bench: {error}") from error
    if any(one != found[0] for one in found) or len({r.bench for r in rows}) != 1:
        raise ValueError(f"{', '.join(map(str, files))}: not one bench in one environment")
    return found[0], rows


def write(rows: Sequence[Row], folder: Path, versions: dict[str, str] | None = None) -> list[Path]:
    """CSV and JSONL of the rows with the environment, and a PNG where matplotlib is installed; returns the files. versions: the environment
    of rows that were measured before; None: this one"""
    if not rows:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    name = rows[0].bench
    table, lines, picture = (folder / f"{name}.{ending}" for ending in ("csv", "jsonl", "png"))
    columns = [f.name for f in fields(Row)] + ["gbs", "percent"]
    records = [asdict(r) | {"gbs": round(r.gbs, 1), "percent": round(r.percent, 2)} for r in rows]
    with table.open("w", newline="") as out:
        writer = csv.DictWriter(out, columns)
        writer.writeheader()
        writer.writerows(records)
    with lines.open("w") as out:
        out.write(json.dumps({"environment": versions or environment()}) + "\n")
        out.writelines(json.dumps(r) + "\n" for r in records)
    return [table, lines, *plot(rows, picture)]


def plot(rows: Sequence[Row], file: Path) -> list[Path]:
    """One panel a shape: bars of ms under a graph, a group for every op and direction."""
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed")
        return []
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [r for r in rows if r.graph] or list(rows)
    shapes = list(dict.fromkeys(r.shape for r in rows))
    providers = list(dict.fromkeys(r.provider for r in rows))
    figure, axes = pyplot.subplots(len(shapes), 1, figsize=(10, 3.2 * len(shapes)), squeeze=False)
    for axis, shape in zip(axes[:, 0], shapes):
        groups = list(dict.fromkeys((r.op, r.direction) for r in rows if r.shape == shape))
        for i, provider in enumerate(providers):
            found = {(r.op, r.direction): r.ms for r in rows if r.shape == shape and r.provider == provider}
            places = [g + (i - len(providers) / 2) * 0.8 / len(providers) for g, key in enumerate(groups) if key in found]
            axis.bar(places, [found[key] for key in groups if key in found], 0.8 / len(providers), label=provider, align="edge")
        axis.set(title=shape, ylabel="ms", yscale="log", xticks=range(len(groups)), xticklabels=[f"{o}\n{d}" for o, d in groups])
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    return [file]
