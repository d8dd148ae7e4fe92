"""SwapAdamW against torch.optim.AdamW: the same bits, whatever the buckets; checkpoints of either go on with the other."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist_util import run_distributed
from tests.trainer_util import gathered, parameters, run_config, sharded, tokens
from train_example import checkpoint, train
from train_example.adamw import ShardedAdamW
from train_example.checkpoint import init_optimizer_state
from train_example.optim import make_optimizer
from train_example.step import train_step
from train_example.swap_optimizer import ALIGN, SwapAdamW, pinned_zeros

SHAPES = [(3,), (1,), (37, 11), (64, 64), (5000, 3), (7,), (0,), (2, 1024)]
OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}


def groups(params: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:3], "weight_decay": 0.0}, {"params": params[3:], "weight_decay": 0.1}, {"params": [], "weight_decay": 0.3}]


def both(device: str, fused: bool | None, bucket_bytes: int) -> tuple[list, list, torch.optim.AdamW, SwapAdamW]:
    one = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in SHAPES]
    two = [torch.nn.Parameter(param.detach().clone()) for param in one]
    optimizers = torch.optim.AdamW(groups(one)[:2], fused=fused, **OPTIONS), SwapAdamW(groups(two), fused=fused, bucket_bytes=bucket_bytes, **OPTIONS)
    return one, two, *optimizers


def steps(one: list, two: list, resident: torch.optim.Optimizer, swap: SwapAdamW, count: int) -> None:
    """Random gradients, one of them missing in one step, and another learning rate each time."""
    for number in range(count):
        for index, (a, b) in enumerate(zip(one, two)):
            a.grad = torch.randn_like(a) if (number, index) not in ((2, 4), (3, 1)) else None
            b.grad = None if a.grad is None else a.grad.clone()
        for optimizer in (resident, swap):
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (number + 1)
            optimizer.step()


def check_equal(one: list, two: list, resident: torch.optim.Optimizer, swap: SwapAdamW) -> None:
    swap.synchronize()
    for a, b in zip(one, two):
        assert torch.equal(a, b), a.shape
        for name, value in resident.state[a].items():
            got = swap.state[b][name]
            assert torch.equal(got.cpu(), value.cpu()), (name, a.shape)
            assert name == "step" or got.device.type == "cpu"


@pytest.mark.parametrize("fused", [True, None])
@pytest.mark.parametrize("bucket", [8 * ALIGN, 24 * ALIGN, 2**26])
def test_same_bits(fused, bucket):
    found = both("cpu", fused, bucket)
    steps(*found, 5)
    check_equal(*found)
    swap = found[3]
    padded = sum(-(-torch.Size(shape).numel() // ALIGN) * ALIGN for shape in SHAPES)
    assert swap.resident_bytes()["host"] == 8 * padded
    assert swap.resident_bytes()["device"] <= 3 * bucket
    if bucket == 8 * ALIGN:
        assert len(swap.buckets) == padded // ALIGN + 1, "one for the empty group; parameters are cut where a slot ends"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("fused", [True, None])
def test_clipping_in_the_same_pass(device, fused):
    """Both optimizers against torch's on gradients that were divided before: the same bits, and the divided gradients are left behind."""
    plain = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in SHAPES]
    sharded, swapped = ([torch.nn.Parameter(param.detach().clone()) for param in plain] for _ in range(2))
    reference = torch.optim.AdamW(groups(plain)[:2], fused=fused, **OPTIONS)
    ours = ShardedAdamW(groups(sharded), fused=fused, **OPTIONS), SwapAdamW(groups(swapped), fused=fused, bucket_bytes=8 * ALIGN, **OPTIONS)
    init_optimizer_state(ours[0])
    for divisor in (None, 3.7, 1.25):
        for a, b, c in zip(plain, sharded, swapped):
            grad = torch.randn_like(a)
            b.grad, c.grad = grad.clone(), grad.clone()
            a.grad = grad if divisor is None else grad / torch.full((), divisor, device=device)
        reference.step()
        for optimizer in ours:
            optimizer.step(divisor=divisor)
    for a, b, c in zip(plain, sharded, swapped):
        assert torch.equal(a, b) and torch.equal(a, c), a.shape
        assert torch.equal(a.grad, b.grad) and torch.equal(a.grad, c.grad)
    for optimizer in ours:
        with pytest.raises(ValueError, match="no closure"):
            optimizer.step(lambda: 0)


def test_pinned_memory_is_whole_pages_of_its_own(monkeypatch):
    """cudaHostRegister takes pages, and two allocations on one page could not both be locked; they are let go with their last view."""
    calls: list[tuple[str, int, int]] = []

    class Runtime:
        status = 0

        def cudaHostRegister(self, pointer: int, count: int, flags: int) -> int:
            calls.append(("lock", pointer, count))
            return self.status

        def cudaHostUnregister(self, pointer: int) -> None:
            calls.append(("free", pointer, 0))

    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append(("wait", 0, 0)))
    device = torch.device("cuda", 0)
    held = [pinned_zeros(2, count, device) for count in (1024, 1000, 5, 0)]
    assert [tuple(tensor.shape) for tensor in held] == [(2, 1024), (2, 1000), (2, 5), (2, 0)]
    assert all(tensor.dtype == torch.float32 and not tensor.any() for tensor in held)
    assert [call[0] for call in calls] == ["lock"] * 3
    for tensor, (_, pointer, count) in zip(held, calls):
        assert pointer % mmap.PAGESIZE == 0
        assert (pointer, count) == (tensor.data_ptr(), tensor.nbytes)
        assert tensor.untyped_storage().data_ptr() == pointer, "where is_pinned looks"
    assert len({pointer // mmap.PAGESIZE for _, pointer, _ in calls}) == 3
    pointers = [pointer for _, pointer, _ in calls]
    view = held[0][1, :7]
    held.clear()
    del tensor
    assert [call[1] for call in calls if call[0] == "free"] == pointers[1:]
    del view
    assert calls[-2:] == [("wait", 0, 0), ("free", pointers[0], 0)]
    runtime.status = 2
    with pytest.raises(RuntimeError, match=r"the host cannot lock 0\.0 GiB of memory for the optimizer \(cudaHostRegister: error 2\)"):
        pinned_zeros(2, 10, device)


def test_filled_in_place_it_goes_on():
    """As a resume does: moments and steps of parameters that this one cuts and the other did not."""
    one, two, resident, swap = both("cpu", True, 2**26)
    steps(one, two, resident, swap, 3)
    swap.synchronize()
    other = SwapAdamW(groups(two), fused=True, bucket_bytes=8 * ALIGN, **OPTIONS)
    for param in two:
        for name, value in swap.state[param].items():
            other.state[param][name].copy_(value)
    steps(one, two, resident, other, 2)
    check_equal(one, two, resident, other)


@pytest.mark.gpu
@pytest.mark.parametrize("bucket", [8 * ALIGN, 2**26])
def test_same_bits_on_a_gpu_with_work_before_and_behind(bucket):
    """A slow kernel before each step delays the gradients, and one behind it the reuse of a slot: no copy may overtake them."""
    one, two, resident, swap = both("cuda", True, bucket)
    assert all(moment.is_pinned() for param in two if param.numel() for moment in (swap.state[param]["exp_avg"],))
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(3):
        for _ in range(5):
            busy = busy @ busy * 1e-2
        steps(one, two, resident, swap, 5)
    check_equal(one, two, resident, swap)


@pytest.mark.gpu
def test_pinned_memory_is_given_back():
    for _ in range(3):
        params = [torch.nn.Parameter(torch.randn(1000, 1000, device="cuda"))]
        swap = SwapAdamW(params, fused=True, **OPTIONS)
        params[0].grad = torch.randn_like(params[0])
        swap.step()
        moment = swap.state[params[0]]["exp_avg"]
        del swap
        assert moment.is_pinned(), "as long as a view of it lives"
        del moment


def test_refusals():
    param = torch.nn.Parameter(torch.randn(4, 6))
    with pytest.raises(TypeError, match=r"contiguous fp32, got one of shape \(4, 6\), torch.bfloat16"):
        SwapAdamW([torch.nn.Parameter(param.detach().bfloat16())], **OPTIONS)
    with pytest.raises(TypeError, match=r"contiguous fp32, got one of shape \(6, 4\)"):
        SwapAdamW([torch.nn.Parameter(param.detach().t())], **OPTIONS)
    with pytest.raises(ValueError, match="bucket_bytes must be 8192 or more, got 8191"):
        SwapAdamW([param], bucket_bytes=8191, **OPTIONS)
    with pytest.raises(ValueError, match="one device, got"):
        SwapAdamW([param, torch.nn.Parameter(torch.empty(2, device="meta"))], **OPTIONS)
    with pytest.raises(NotImplementedError, match="in place"):
        SwapAdamW([param], **OPTIONS).load_state_dict({})


def _two(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Experts split between two processes; hc_head.scale has one element, so rank 1 has an empty shard of it."""
    batches = [[tokens(1, 16, seed=10 * step + rank)] for step in range(3)]

    def run(swap: bool, first: int, resume: str = "", save: str = "") -> Any:
        config = run_config(ep=2, clip=0.05, swap_optimizer=swap)
        model, _ = sharded(config)
        optimizer = make_optimizer(model, config)
        assert isinstance(optimizer, SwapAdamW) == swap
        if resume:
            checkpoint.load(Path(folder, resume, "step_00000002"), model, optimizer)
        for step in range(first, 4):
            train_step(model, optimizer, config, batches[step - 1], step)
            if save and step == 2:
                checkpoint.save(Path(folder, save), model, optimizer, {"step": step}, {}, keep=1)
        moments = {f"{name} {kind}": optimizer.state[param][kind] for name, param in model.named_parameters() for kind in ("exp_avg", "exp_avg_sq")}
        counts = {name: float(optimizer.state[param]["step"]) for name, param in model.named_parameters()}
        return {**parameters(model), **gathered(moments)}, counts

    def equal(a: Any, b: Any) -> bool:
        return a[0].keys() == b[0].keys() and all(torch.equal(a[0][name], b[0][name]) for name in a[0]) and a[1] == b[1]

    want = run(False, 1, save="resident")
    found = {
        "straight": equal(run(True, 1, save="swap"), want),
        "resident to swap": equal(run(True, 3, resume="resident"), want),
        "swap to resident": equal(run(False, 3, resume="swap"), want),
        "steps": set(want[1].values()) == {3.0},
    }
    dist.barrier()
    return found


def test_checkpoints_of_two_processes_serve_both_optimizers(tmp_path):
    for found in run_distributed(_two, 2, str(tmp_path)):
        assert all(found.values()), found


def test_the_trainer_uses_it_on_accelerators_alone(monkeypatch):
    seen = []
    monkeypatch.setattr(train, "pick_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(train, "warm_kernels", lambda config, device: seen.append("past the check"))
    monkeypatch.setattr(train, "init_parallel", lambda *args: (_ for _ in ()).throw(StopIteration))
    with pytest.raises((StopIteration, RuntimeError)):
        train.train(run_config(swap_optimizer=True, device="cuda"))
    assert seen == ["past the check"]
