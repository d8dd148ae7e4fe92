"""What the trainer's model launches in a step is in the plan of its configuration: other sequence lengths and evaluation included.

In Triton's interpreter, so on a CPU; together with test_warmup.py (launch and compilation have equal keys for every entry of a plan) it
says that a step after warmup compiles nothing.
"""

import dataclasses

import pytest
import torch

from kernel_runtime import record
from train_example.config import TINY
from train_example.model import DeepSeekV4

pytestmark = pytest.mark.interpret


@pytest.mark.timeout(900)
def test_a_step_launches_nothing_outside_the_plan():
    from kernel_runtime.plan import plan_for

    config = dataclasses.replace(TINY, num_layers=2, compress_ratios=(4, 16), mtp_layers=0)
    torch.manual_seed(0)
    model = DeepSeekV4(config, impl="auto")
    plan = plan_for(config, "fp32")
    with record() as recording:
        for length, training in ((20, True), (19, True), (23, False)):
            ids = torch.randint(0, config.vocab_size, (1, length + 1))
            with torch.set_grad_enabled(training):
                loss = model(ids[:, :-1], ids[:, 1:]).loss
            if training:
                loss.backward()
    assert recording.specs, "the model launched no kernel at all"
    assert not recording.mismatches, recording.mismatches
    missing = [f"{s.name} {dict(s.types)} {dict(s.consts)}" for s in recording.specs if s not in plan]
    assert not missing, "launched but not in the plan:\n" + "\n".join(missing)
