"""--compile: a few whole graphs, none of them compiled again for a later step or another length, and the numbers of a run without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from tests.trainer_util import run_config, sharded, tokens
from train_example import compiled
from train_example.attention import RMSNorm
from train_example.model import DeepSeekV4
from train_example.optim import make_optimizer
from train_example.step import train_step


@pytest.fixture
def whole_graphs(monkeypatch):
    """Counts from nothing; graphs are traced and run as they are: no code is generated for them, which would take most of the time."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile(function, backend="eager", **options))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    if dist.is_initialized():
        dist.destroy_process_group()


def losses(lengths: list[int], **changes: Any) -> tuple[list[dict[str, Any]], list[int]]:
    """Results of a step of each length, and the graphs there are behind each."""
    config = run_config(model={"mtp_layers": 0, "hc_iters": 2}, **changes)
    model, _ = sharded(config)
    optimizer = make_optimizer(model, config)
    results, graphs = [], []
    for step, length in enumerate(lengths, 1):
        results.append(train_step(model, optimizer, config, [tokens(2, length, seed=step)], step))
        graphs.append(counters["stats"]["unique_graphs"])
    return results, graphs


@pytest.mark.parametrize(
    ("impl", "recompute", "expected"),
    [
        # attention's products and rotations 3, those of compressors and indexer 3, norms 2, routers 2, shared expert, sum of rows, loss 3
        ("auto", "mhc", 13),
        # and the two sites of mHC, its end and its head 4, pooling 2
        ("eager", "none", 19),
    ],
)
def test_graphs_are_few_and_stay(whole_graphs, impl, recompute, expected):
    lengths = [40, 40, 56]
    got, graphs = losses(lengths, impl=impl, recompute=recompute, compile=True)
    assert graphs == [expected] * len(lengths)
    assert not counters["graph_break"]
    want, _ = losses(lengths, impl=impl, recompute=recompute)
    for a, b in zip(got, want):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)


@torch._dynamo.config.patch(recompile_limit=8)  # pytest's monkeypatch would hide the name afterwards, and nothing would compile any more
def test_many_sizes_of_one_part(whole_graphs):
    """A graph belongs to the code, not to the module: the norms of a model share theirs, with and without gradients."""
    norms = torch.nn.ModuleList(RMSNorm(size, 1e-6) for size in (8, 16, 24, 32, 40, 48))
    for norm in norms:
        torch.nn.init.normal_(norm.weight)
    compiled.compile_parts(norms, "auto", torch.device("cpu"))
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            for norm in norms:
                x = torch.randn(2, 5, *norm.weight.shape)
                torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, norm.weight.shape, norm.weight, 1e-6))
    assert counters["stats"]["unique_graphs"] == 12


@pytest.mark.gpu
def test_the_torch_of_a_gpu_machine_traces_eager_whole(whole_graphs):
    """On the CPU, but by another torch than that of development, whose dynamo may know less: a break is an error."""
    _, graphs = losses([40, 56], impl="eager", compile=True)
    assert graphs[0] == graphs[1] > 0 and not counters["graph_break"]


def test_beside_kernels_only_routers_and_loss_are_compiled():
    with torch.device("meta"):
        model = DeepSeekV4(run_config().model)
    named = {module: name for name, module in model.named_modules()}

    def listed(impl: str, device: str) -> set[str]:
        return {f"{named[module]}.{method}".lstrip(".") for module, method in compiled.parts(model, impl, torch.device(device))}

    few = {"loss_sum", *(f"layers.{i}.moe.router.forward" for i in range(3)), "mtp.0.layer.moe.router.forward"}
    assert listed("triton", "cuda") == listed("auto", "cuda") == few
    assert few < listed("auto", "cpu") < listed("eager", "cuda")
