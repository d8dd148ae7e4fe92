"""A process that is killed or hangs: the others end in time with a message, and the last checkpoint is whole and goes on elsewhere."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from tests.test_trainer_config import ROOT, SMALL_ARGS
from tests.trainer_util import run_config
from train_example import checkpoint
from train_example import train as trainer
from train_example.metrics import read_metrics
from train_example.train import connection_lost, main

STEP_TIMEOUT = 30  # seconds; far above what a step takes on a slow and busy machine, which would end the runs early
ENDED = STEP_TIMEOUT + 150  # seconds until a test gives up; far below the limit before the first step (1800 s), which must not be what ended a run
STEPS = 100_000
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL between two GPUs; needs both")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, two_gpus])]


def parents() -> dict[int, int]:
    """Of every process that is there, whatever else starts and ends meanwhile."""
    of = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # one that has just ended
            of[int(stat.parent.name)] = int(stat.read_bytes().rpartition(b")")[2].split()[1])
    return of


class Run:
    """Two processes that train and save after every step, under torchrun or on their own."""

    def __init__(self, out: Path, device: str, torchrun: bool) -> None:
        self.out, self.device = out, device
        (out.parent / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 60)
        command = ["-m", "train_example.train", *self.settings(), "--out", str(out), "--steps", str(STEPS), "--save-every", "1", "--log-every", "1"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        if torchrun:
            places = [(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], {})]
        else:
            # The store is here, as a launcher's is, on a port that it has taken itself: one that is free now may be another's when rank 0 gets there.
            self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
            where |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            places = [([], {**where, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]
        self.log = out.parent / "said.txt"
        with self.log.open("w") as log:
            self.procs = [
                subprocess.Popen([sys.executable, *launcher, *command], cwd=out.parent, env={**env, **more}, stdout=log, stderr=log)
                for launcher, more in places
            ]

    def settings(self) -> list[str]:
        run = ["--device", self.device, "--impl", "eager", "--batch", "1", "--seq-len", "16", "--eval-every", "0", "--keep", "3"]
        return [*SMALL_ARGS, *run, "--step-timeout", str(STEP_TIMEOUT), "--data", str(self.out.parent / "text.txt")]

    def wait_for(self, what: str, seconds: float = 300) -> None:
        end = time.monotonic() + seconds
        try:
            while not any((self.out / "checkpoints").glob(what)):
                assert all(proc.poll() is None for proc in self.procs), self.log.read_text()
                assert time.monotonic() < end, self.log.read_text()
                time.sleep(0.02)
        except BaseException:
            self.end()
            raise

    def pid(self, rank: int) -> int:
        """Of the process with this RANK among the processes started here and their children; not of one that it has started itself."""
        own = {proc.pid for proc in self.procs}
        for pid in own | {child for child, parent in parents().items() if parent in own}:
            with contextlib.suppress(OSError):  # one that has just ended
                if {f"RANK={rank}".encode(), b"WORLD_SIZE=2"} <= set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")):
                    return pid
        raise AssertionError(f"no process of rank {rank}: {self.log.read_text()}")

    def _family(self) -> set[int]:
        own, of = {proc.pid for proc in self.procs if proc.poll() is None}, parents()
        while more := {child for child, parent in of.items() if parent in own} - own:
            own |= more
        return own

    def strike(self, sent: signal.Signals, seconds: float) -> tuple[int, float, str]:
        """Sends a signal to rank 1: exit status of the first process started here, seconds until it ended, and what was said."""
        try:
            os.kill(self.pid(1), sent)
            then = time.monotonic()
            status = self.procs[0].wait(seconds)
            took = time.monotonic() - then
        finally:
            self.end()
        return status, took, self.log.read_text()

    def end(self) -> None:
        for pid in self._family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for proc in self.procs:
            proc.wait(60)


@pytest.mark.parametrize("device", DEVICES)
def test_kill_one_of_two(tmp_path, device):
    """Under torchrun, in the middle of a save. One process then goes on from what is there."""
    run = Run(tmp_path / "run", device, torchrun=True)
    run.wait_for("step_*3/train_state.json")
    run.wait_for(".step_*.tmp")
    status, took, said = run.strike(signal.SIGKILL, ENDED)
    print(f"torchrun ended {took:.1f} s after rank 1 was killed, status {status}")
    assert status == 1, said
    assert re.search(r"exitcode\s*: -9", said), said
    newest = checkpoint.find("latest", run.out / "checkpoints")
    done = int(newest.name.removeprefix("step_"))
    assert [row["step"] for row in read_metrics(run.out / "metrics.jsonl")][:done] == list(range(1, done + 1))
    assert main([*run.settings(), "--out", str(run.out), "--resume", "latest", "--steps", str(done + 1)]) == 0
    rows = read_metrics(run.out / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, done + 2))
    assert rows[-1]["tokens"] == 16 * (2 * done + 1), "the place in the data, with one process instead of two"
    assert not list((run.out / "checkpoints").glob(f".step_{done + 1:08d}.tmp"))


@pytest.mark.parametrize("device", DEVICES)
def test_one_of_two_hangs(tmp_path, device):
    """Without torchrun nobody watches but the timeout: long (1800 s) up to the first step, step_timeout behind it."""
    run = Run(tmp_path / "run", device, torchrun=False)
    run.wait_for("step_*2/train_state.json")
    status, took, said = run.strike(signal.SIGSTOP, ENDED)
    print(f"rank 0 ended {took:.1f} s after rank 1 stopped, status {status}, step timeout {STEP_TIMEOUT} s")
    if device == "cpu":
        assert status == 1, said
        assert took > STEP_TIMEOUT / 2, took
        line = next(line for line in said.splitlines() if line.startswith("error: "))
        assert "rank 0: another process died, or did not answer within --step-timeout seconds; --resume latest goes on" in line
        assert "Traceback" not in said
    else:  # torch's watchdog ends the process
        assert status not in (0, None), said
        assert took > STEP_TIMEOUT / 2, took
        assert re.search(rf"Watchdog caught collective operation timeout: .*Timeout\(ms\)={1000 * STEP_TIMEOUT}\)", said), said
    assert checkpoint.find("latest", run.out / "checkpoints").name >= "step_00000002"


def test_timeouts_are_set_behind_the_first_step_alone(monkeypatch, tmp_path):
    seen: list[Any] = []
    step, start = trainer.train_step, trainer.init_parallel
    monkeypatch.setattr(trainer, "init_parallel", lambda *args: (seen.append(args[2]), start(*args))[1])
    monkeypatch.setattr(trainer, "train_step", lambda *args: (seen.append("step"), step(*args))[1])
    monkeypatch.setattr(trainer, "set_timeouts", lambda parallel, seconds: seen.append(seconds))
    settings = ["--startup-timeout", "900", "--step-timeout", "70", "--steps", "3", "--batch", "1", "--seq-len", "16", "--eval-every", "0"]
    assert main([*SMALL_ARGS, "--device", "cpu", "--out", str(tmp_path), "--save-every", "0", *settings]) == 0
    assert seen == [900.0, "step", 70.0, "step", "step"]


def test_what_counts_as_a_lost_connection(monkeypatch):
    gloo = RuntimeError("[/a/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer")
    assert not connection_lost(gloo), "without a process group there is nothing to lose"
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert connection_lost(gloo)
    assert connection_lost(torch.distributed.DistBackendError("NCCL error"))
    assert not connection_lost(RuntimeError("shapes differ"))
    assert run_config().step_timeout < run_config().startup_timeout
