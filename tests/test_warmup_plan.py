"""What the trainer's model launches in a step is in the plan of its configuration: other sequence lengths and evaluation included.

In Triton's interpreter, so on a CPU; together with test_warmup.py (launch and compilation have equal keys for every entry of a plan) it
says that a step after warmup compiles nothing.
"""

import dataclasses

import pytest
import torch

from kernel_runtime import record
from kernel_runtime.registry import PRESETS, shape_of
from train_example.config import FLASH, TINY
from train_example.model import DeepSeekV4, fp32_islands

pytestmark = pytest.mark.interpret
TWO_LAYERS = dataclasses.replace(TINY, num_layers=2, compress_ratios=(4, 16), mtp_layers=0)
# as large as it gets for the kernels, and small elsewhere
FLASH_KERNELS = dataclasses.replace(
    FLASH, num_layers=3, compress_ratios=(0, 4, 128), mtp_layers=0, num_experts=2, experts_per_token=1, expert_dim=16, vocab_size=64,
    num_hash_layers=1, q_lora_rank=16, o_lora_rank=16, index_topk=16,
)  # fmt: skip


def check_steps(config, dtype, lengths, target=None):
    """A training step of each length and an evaluation in between; every launch must be in the plan (of the target, if one is named), with
    the arguments it declares. Returns the kernels' names."""
    from kernel_runtime.plan import plan_for
    from kernel_runtime.targets import parse_target

    torch.manual_seed(0)
    model = DeepSeekV4(config, impl="auto")
    islands = {id(param) for island in fp32_islands(model) for param in island.parameters()}
    for param in model.parameters():  # and no buffer: FSDP2 casts parameters alone
        if id(param) not in islands:
            param.data = param.data.to(dtype)
    plan = plan_for(config, {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype])
    if target is not None:
        plan = plan.for_target(parse_target(target))
    with record() as recording:
        for length, training in [*((length, True) for length in lengths), (lengths[-1] + 4, False)]:
            ids = torch.randint(0, config.vocab_size, (1, length + 1))
            with torch.set_grad_enabled(training):
                loss = model(ids[:, :-1], ids[:, 1:]).loss
            if training:
                loss.backward()
    assert recording.specs, "the model launched no kernel at all"
    assert not recording.mismatches, recording.mismatches
    missing = [f"{s.name} {dict(s.types)} {dict(s.consts)}" for s in recording.specs if s not in plan]
    assert not missing, "launched but not in the plan:\n" + "\n".join(missing)
    return {spec.name for spec in recording.specs}


@pytest.mark.timeout(900)
def test_a_step_launches_nothing_outside_the_plan():
    check_steps(TWO_LAYERS, torch.float32, (20, 19))


@pytest.mark.parametrize(("config", "sm_90"), [(TINY, False), (FLASH_KERNELS, False), (FLASH_KERNELS, True)], ids=["tiny", "flash", "sm_90"])
def test_bf16_launches_nothing_outside_the_plan(config, sm_90, monkeypatch):
    """As the trainer does it: parameters in bf16 but for the islands. Launches are only listed here, so sizes do not matter, and
    attention, mHC and indexer can be asked for what they take on sm_90."""
    from indexer import hopper as indexer_hopper
    from kernel_runtime import launch
    from mhc_ops import hopper
    from sparse_attn.shared_kv import choice

    def launch_nothing(self, grid, *args):
        for observer in launch.LAUNCH_OBSERVERS:
            observer(self, args)
        for value in args:
            if isinstance(value, torch.Tensor):
                value.data.zero_()  # results are written by nobody, and indices must be indices

    monkeypatch.setattr(launch.Spec, "launch", launch_nothing)
    if sm_90:
        monkeypatch.setattr(choice, "hopper_supports", lambda q: None)
        monkeypatch.setattr(hopper, "takes", lambda x, *others, aligned=hopper.ALIGNED: hopper.covers(x.dtype, *x.shape[-2:], aligned))
        monkeypatch.setattr(indexer_hopper, "takes", lambda q, *others: indexer_hopper.covers(q.dtype, *q.shape[-2:]))
    launched = check_steps(config, torch.bfloat16, (40, 150, 600), "sm_90" if sm_90 else "sm_80")
    of_sm_90 = {"hopper_bwd_kernel", "hopper_dense_pdz_kernel", "hopper_dense_dkv_kernel", "boundary_bwd_kernel", "expand_project_kernel"}
    of_sm_90 |= {"hopper_scores_kernel"}
    assert (launched & of_sm_90) == (of_sm_90 if sm_90 else set())


def test_csa_ratio_decides_which_layers_have_an_indexer():
    """It need not be the smallest ratio, and a model may have no such layer."""
    from kernel_runtime.plan import plan_for

    def kernels(**changes):
        plan = plan_for(dataclasses.replace(PRESETS["tiny"], **changes))
        overlaps = {(spec.consts["R"], spec.consts["OVERLAP"]) for op, spec in plan if "OVERLAP" in spec.consts}
        return overlaps, {op for op, _ in plan if op.startswith("indexer")}

    overlaps, indexer = kernels(ratios=(4, 16), csa_ratio=16)
    assert overlaps == {(4, False), (16, True)} and indexer
    assert kernels(ratios=(16, 128)) == ({(16, False), (128, False)}, set())
    assert kernels(ratios=()) == (set(), set())
    assert shape_of(dataclasses.replace(TINY, csa_ratio=16)).csa_ratio == 16
