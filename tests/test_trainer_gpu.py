"""The trainer on GPUs, as a person starts it: two processes through NCCL against one, their traces, and kernels against eager."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from train_example import compare, trace

ROOT = Path(__file__).parents[1]
LAYERS = ["--model.num-layers", "3", "--model.compress-ratios", "0,4,16", "--model.hc-iters", "4"]
SITES = 4  # the layers and the MTP block
pytestmark = pytest.mark.gpu


def start(out: Path, processes: int, *settings: str) -> subprocess.Popen[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes > 1 else []
    command = [sys.executable, *launcher, "-m", "train_example.train", "--out", str(out), "--dtype", "bf16", "--deterministic", *LAYERS, *settings]
    once = ["--eval-every", "0", "--save-every", "0", "--seq-len", "64", "--warmup-steps", "2", "--lr", "2e-4"]
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.Popen([*command, *once], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def end(*runs: subprocess.Popen[str]) -> None:
    for run in runs:
        out, _ = run.communicate(timeout=240)
        assert run.returncode == 0, out[-3000:]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_equal_one_and_the_trace_tells_the_groups_apart(tmp_path):
    eager = ["--impl", "eager", "--steps", "4"]  # compiles nothing
    runs = [
        start(tmp_path / "one", 1, *eager, "--batch", "4"),
        start(tmp_path / "own", 2, *eager, "--batch", "2", "--profile", "3:5"),
        start(tmp_path / "shared", 2, *eager, "--batch", "2", "--profile", "3:5", "--ep-group", "shared", "--prefetch", "0"),
        start(tmp_path / "again", 2, *eager, "--batch", "2", "--recompute", "layer", "--reshard", "never"),
    ]
    end(*runs)
    again = compare.compare(tmp_path / "own", tmp_path / "again")["loss"]
    assert len(again) == 4 and max(value for _, value in again) < 1e-6, again
    for name in ("own", "shared"):
        differences = compare.compare(tmp_path / "one", tmp_path / name)["loss"]
        assert len(differences) == 4 and max(value for _, value in differences) < 1e-3, differences
        files = sorted((tmp_path / name / "traces").glob("*.json"))
        assert len(files) == 2
        for file in files:
            steps = trace.summarize(trace.read(file))
            assert [s.step for s in steps] == [3, 4]
            for s in steps:
                assert s.same_group == (name == "shared")
                # counts, rows there and back, and the rows' gradients
                assert s.all_to_alls == 5 * SITES and s.all_gathers > SITES
                assert 0 < s.exposed <= s.communication < s.ms
                assert {"mHC", "attention op", "MoE", "indexer + KL", "optimizer"} <= s.parts.keys()


def test_kernels_and_eager_agree(tmp_path):
    """Bits differ from the first step on, so this is about rounding: see train_example/NOTES.md for how it grows."""
    settings = ["--steps", "30", "--batch", "16"]
    end(*(start(tmp_path / impl, 1, "--impl", impl, *settings) for impl in ("eager", "triton")))
    found = compare.compare(tmp_path / "eager", tmp_path / "triton")
    assert len(found["loss"]) == 30
    assert max(value for _, value in found["loss"]) <= 1e-3, found["loss"]
