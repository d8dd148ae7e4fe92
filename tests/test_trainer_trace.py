"""The trace reader on hand-made traces, the table of growth of `compare`, and what the host and the ranks exchange in a layer."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.dist_util import run_distributed
from tests.trainer_util import gradients, run_config, sharded, tokens, worst
from train_example import compare, trace
from train_example.fused import swiglu
from train_example.moe import _grouped, _one_by_one, fits_grouped_mm

# ---- traces ---------------------------------------------------------------------------------------------------------------------

MAIN, GATHER, OTHER = 7, 20, 24


class Recorder:
    """Writes the events that torch.profiler would, times in us."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.number = 0

    def host(self, name: str, start: float, end: float, cat: str = "user_annotation", thread: int = 1, **args: Any) -> None:
        self.events.append({"ph": "X", "cat": cat, "name": name, "tid": thread, "ts": start, "dur": end - start, "args": args})

    def work(self, name: str, start: float, end: float, stream: int = MAIN, launched: float | None = None, thread: int = 1, **args: Any) -> None:
        self.number += 1
        launched = start if launched is None else launched
        self.host("cudaLaunchKernel", launched, launched, "cuda_runtime", thread, correlation=self.number)
        args = {"stream": stream, "correlation": self.number, **args}
        self.events.append({"ph": "X", "cat": "kernel", "name": name, "tid": stream, "ts": start, "dur": end - start, "args": args})

    def collective(self, name: str, start: float, end: float, stream: int, launched: float, group: str) -> None:
        self.work(f"ncclDevKernel_{name}_RING_LL", start, end, stream, launched, **{"Process Group Name": group})


def one_step(exchange_start: float, group: str) -> Recorder:
    """Computing 0-400 and 600-1000, an all-gather 300-700, an all-to-all that is ready at 420, and a reduce-scatter 1000-1100."""
    r = Recorder()
    r.host("train step 5", 0, 1200)
    r.work("gemm", 0, 400)
    r.collective("AllGather", 300, 700, GATHER, 50, "0")
    r.collective("SendRecv", exchange_start, exchange_start + 100, MAIN, 420, group)
    r.work("gemm", 600, 1000, OTHER, 500)
    r.collective("ReduceScatter", 1000, 1100, GATHER, 900, "0")
    r.work("after the step", 1300, 1400)
    return r


def test_exposed_communication_and_overlap():
    (found,) = trace.summarize(one_step(425, "3").events)
    assert (found.step, found.ms) == (5, 1.2)
    assert found.compute == pytest.approx(0.8)  # not what runs after the step
    assert found.communication == pytest.approx(0.5)  # 300-700, which covers the all-to-all, and 1000-1100
    assert found.exposed == pytest.approx(0.3)  # 400-600 and 1000-1100
    assert found.waited == pytest.approx(0.1)  # 500-600: what computes from 600 on had been launched at 500
    assert found.idle == pytest.approx(0.1)
    assert (found.all_gathers, found.all_gather, found.hidden) == (1, pytest.approx(0.4), pytest.approx(0.5))
    assert (found.all_to_alls, found.queued, found.same_group) == (1, 0, False)


def test_all_to_all_behind_an_all_gather():
    (found,) = trace.summarize(one_step(702, "0").events)
    assert (found.queued, found.queued_ms, found.same_group) == (1, pytest.approx(0.28), True)


@pytest.mark.parametrize(
    ("launched", "gather_launched", "why"),
    [(699, 50, "the host was late"), (420, 421, "the all-gather was asked for later")],
)
def test_not_queued(launched, gather_launched, why):
    r = one_step(702, "0")
    for event in r.events:
        if event["cat"] == "cuda_runtime" and event["args"]["correlation"] in (2, 3):
            event["ts"] = gather_launched if event["args"]["correlation"] == 2 else launched
    assert trace.summarize(r.events)[0].queued == 0, why


def test_parts_of_forward_backward_and_torch_itself():
    r = Recorder()
    r.host("train step 1", 0, 1000)
    r.host("part: mHC", 0, 200)
    r.host("part: attention op", 50, 100)
    r.host("MyOp", 60, 90, "cpu_op")
    r.work("forward", 70, 80)
    r.work("streams", 150, 170)
    r.host("MyOpBackward", 300, 400, "cpu_op", thread=2)
    r.work("backward", 310, 350, thread=2)
    r.host("FSDP::post_backward (layers.0)", 360, 370, thread=2)
    r.work("copy", 365, 366, thread=2)
    r.work("nobody's", 500, 507)
    for phase, thread, time in (("s", 1, 60), ("f", 2, 300)):
        r.events.append({"ph": phase, "cat": "fwdbwd", "name": "fwdbwd", "id": 9, "tid": thread, "ts": time})
    (found,) = trace.summarize(r.events)
    want = {"attention op": 0.05, "mHC": 0.02, "rest": 0.007, "FSDP copies": 0.001}
    assert found.parts == {name: pytest.approx(ms) for name, ms in want.items()}
    assert list(found.parts) == list(want), "the largest comes first"


def test_command_line(tmp_path, capsys):
    (tmp_path / "traces").mkdir()
    for rank, start in enumerate((425, 702)):
        (tmp_path / "traces" / f"steps_5_6_rank{rank}.json").write_text(json.dumps({"traceEvents": one_step(start, "0").events}))
    assert trace.main([str(tmp_path), "--parts"]) == 0
    out = capsys.readouterr().out
    assert out.count("share a group") == 2 and "rest 0.80" in out
    assert trace.main([str(tmp_path / "nothing")]) == 2
    (tmp_path / "cpu_rank0.json").write_text(json.dumps([e for e in one_step(0, "").events if e["cat"] != "kernel"]))
    assert trace.main([str(tmp_path / "cpu_rank0.json")]) == 2
    assert "taken on a CPU" in capsys.readouterr().err


# ---- growth of a difference -----------------------------------------------------------------------------------------------------


def test_growth_and_yardstick(tmp_path, capsys):
    losses = {"a": [4.0] * 6, "b": [4.0 * (1 + 1e-5 * 2**step) for step in range(6)], "c": [4.0] * 5 + [4.0004]}
    runs = []
    for name, values in losses.items():
        (tmp_path / name).mkdir()
        rows = [{"step": step, "loss": value} for step, value in enumerate(values, 1)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        runs.append(tmp_path / name)
    found = compare.growth(compare.compare(*runs[:2])["loss"])
    assert [(span.start, span.stop) for span, _, _ in found] == [(1, 2), (2, 4), (4, 7)]
    assert [largest for _, _, largest in found] == pytest.approx([1e-5, 4e-5, 32e-5], rel=1e-3)
    smoothed = compare.smoothed_difference(*runs[:2])
    assert smoothed[0][1] == pytest.approx(1e-5, rel=1e-3) and smoothed[1][1] == pytest.approx(1.1e-5, rel=1e-3)
    assert compare.main([str(runs[0]), str(runs[1]), "--yardstick", str(runs[2]), "--plot", str(tmp_path / "p.png")]) == 0
    out = capsys.readouterr().out
    assert "c, smoothed" in out and (tmp_path / "p.png").stat().st_size > 10_000
    assert math.isinf(compare.growth([(1, math.inf)])[0][2])


# ---- what a layer costs in collectives and host syncs ---------------------------------------------------------------------------


class Counter:
    """Counts all-to-alls by the dtype they carry, and reads of a tensor by the host."""

    def __init__(self) -> None:
        self.exchanges: dict[torch.dtype, int] = {}
        self.reads = 0
        self.kept = (dist.all_to_all_single, Tensor.tolist, Tensor.item)

    def __enter__(self) -> Counter:
        exchange, tolist, item = self.kept

        def counted_exchange(out: Tensor, rows: Tensor, **kwargs: Any) -> Any:
            self.exchanges[rows.dtype] = self.exchanges.get(rows.dtype, 0) + 1
            return exchange(out, rows, **kwargs)

        def read(method: Any) -> Any:
            def counted(tensor: Tensor) -> Any:
                self.reads += 1
                return method(tensor)

            return counted

        dist.all_to_all_single, Tensor.tolist, Tensor.item = counted_exchange, read(tolist), read(item)
        return self

    def __exit__(self, *_: Any) -> None:
        dist.all_to_all_single, Tensor.tolist, Tensor.item = self.kept


def _exchanges(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for recompute in ("none", "layer"):
        config = run_config(recompute=recompute)
        model, _ = sharded(config)
        ids, labels = tokens(2, 24, seed=rank)
        with Counter() as forward:
            loss = model(ids, labels, num_valid_tokens=96).loss
        with Counter() as backward:
            loss.backward()
        found[recompute] = [(c.exchanges.get(torch.int64, 0), c.exchanges.get(torch.float32, 0), c.reads) for c in (forward, backward)]
        found[f"gradients {recompute}"] = gradients(model)
        dist.barrier()
    config = run_config(ep_group="shared", prefetch=0)
    model, _ = sharded(config)
    model(ids, labels, num_valid_tokens=96).loss.backward()
    found["gradients shared"] = gradients(model)
    return found


def test_counts_cross_once_and_the_backward_asks_for_nothing_it_knows():
    sites = 4  # three layers and the MTP block
    for found in run_distributed(_exchanges, 2):
        assert found["none"] == [(sites, 2 * sites, sites), (0, 2 * sites, 0)]
        assert found["layer"][0] == (sites, 2 * sites, sites)
        counts, rows, reads = found["layer"][1]
        assert (counts, reads) == (0, 0), "the second forward knows the routing of the first"
        assert 3 * sites <= rows <= 4 * sites  # the recompute stops once it has what the backward needs
        for other in ("layer", "shared"):
            assert worst(found[f"gradients {other}"], found["gradients none"])[0] < 1e-6, other


def test_grouped_experts_equal_a_loop():
    """bf16, an expert without rows among them. (CUDA runs it in the trainer; here torch's own loop stands in for the kernel.)"""
    g = torch.Generator().manual_seed(3)
    sizes = [5, 0, 9, 2]
    x, w_in, w_out, cotangent = (
        (0.5 * torch.randn(*shape, generator=g)).bfloat16() for shape in ((16, 24), (4, 32, 24), (4, 24, 16), (16, 24))
    )
    results = []
    activate = lambda gate_up: swiglu(gate_up, 1.0)  # noqa: E731  (a name for the argument of a call)
    for experts in (
        lambda *leaves: _grouped(*leaves, torch.tensor(sizes), activate),
        lambda *leaves: _one_by_one(*leaves, sizes, 1.0, "auto"),
    ):
        leaves = [t.clone().requires_grad_() for t in (x, w_in, w_out)]
        out = experts(*leaves)
        out.backward(cotangent)
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    assert not results[0][2][1].any() and not results[0][3][1].any(), "no row, no gradient"
    assert not fits_grouped_mm(x, w_in, w_out), "a CPU loops"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_host_syncs_of_a_layer_on_one_gpu(recwarn):
    """None for grouped products, one for the loop over experts; the same result as on a CPU, whose counts the host knows."""
    from train_example.dispatch import dispatch_experts
    from train_example.moe import Experts

    config = run_config(model={"hidden_size": 64, "expert_dim": 32}).model
    experts = Experts(config).cuda()
    experts.init_weights(0.2)
    x = torch.randn(50, 64, device="cuda")
    ids, weights = torch.rand(50, 4, device="cuda").topk(2).indices, torch.rand(50, 2, device="cuda")
    results = []
    for expected, device, dtype in ((0, "cuda", torch.bfloat16), (1, "cuda", torch.float32), (None, "cpu", torch.float32)):
        experts.to(device, dtype).zero_grad()
        leaf = x.to(device, dtype, copy=True).requires_grad_()
        assert fits_grouped_mm(leaf, experts.w_gate_up, experts.w_down) == (expected == 0)
        recwarn.clear()
        torch.cuda.set_sync_debug_mode("default" if expected is None else "warn")
        try:
            y, _ = dispatch_experts(leaf, ids.to(device), weights.to(device), experts, config.num_experts, None)
            y.backward(torch.ones_like(y))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if expected is not None:
            assert sum("called a synchronizing" in str(w.message) for w in recwarn.list) == expected
        results.append([t.detach().float().cpu().clone() for t in (y, leaf.grad, *(p.grad for p in experts.parameters()))])
    for rounded, got, want in zip(*results, strict=True):
        assert float((rounded - want).norm() / want.norm()) < 3e-2
        assert float((got - want).norm() / want.norm()) < 1e-4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("ids", [[[0, 1], [2, 4]], [[0, -1], [2, 3]]], ids=["above", "below"])
def test_an_expert_that_does_not_exist_ends_the_process_on_one_gpu(ids):
    code = f"""
import torch
from train_example.dispatch import dispatch_experts
x, ids = torch.ones(2, 8, device="cuda"), torch.tensor({ids}, device="cuda")
dispatch_experts(x, ids, torch.ones(2, 2, device="cuda"), lambda rows, counts, sizes: rows, 4, None)
torch.cuda.synchronize()
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], stderr=subprocess.PIPE, text=True, timeout=120)
    assert ended.returncode != 0
    assert "expert_ids must lie in [0, 4)" in ended.stderr
