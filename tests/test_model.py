"""The trainer's model by itself: initialisation, dtypes, configurations and inputs that are refused.

Losses, attention and experts: test_model_losses.py, _attention.py and _experts.py; agreement with transformers: test_hf_parity.py.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.model_util import change, make, tokens
from train_example.config import FLASH, PRESETS, PRO, TINY, ModelConfig
from train_example.model import DeepSeekV4, fp32_islands


def test_initialisation_follows_the_rng():
    one, two, other = make(seed=3), make(seed=3), make(seed=4)
    for (name, a), b, c in zip(one.named_parameters(), two.parameters(), other.parameters()):
        assert torch.equal(a, b), name
        if a.unique().numel() > 1:  # not one of those that start at a constant
            assert not torch.equal(a, c), name
    ids, labels = tokens()
    assert torch.equal(one(ids, labels).loss, two(ids, labels).loss)
    assert one(ids, labels).lm_loss.item() == pytest.approx(torch.tensor(264.0).log().item(), abs=0.1)


def test_built_on_meta_and_materialised_is_the_same_model():
    with torch.device("meta"):
        model = DeepSeekV4(TINY)
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(float("nan") if tensor.is_floating_point() else -1)
    torch.manual_seed(3)
    model.reset_parameters()
    model.init_buffers("cpu")
    wanted = make(seed=3)
    for (name, a), b in zip((*model.named_parameters(), *model.named_buffers()), (*wanted.parameters(), *wanted.buffers())):
        assert torch.equal(a, b), name


def test_fp32_islands_hold_the_named_parameters_and_leave_layers_to_the_policy():
    model = make()
    islands = fp32_islands(model)
    inside = {id(p) for island in islands for p in island.parameters()}
    endings = ("fn", "base", "scale", "sinks", "position_bias", "norm.weight", "router.weight")
    for name, parameter in model.named_parameters():
        assert (id(parameter) in inside) == name.endswith(endings), name
        assert parameter.dim() > 0, name
    assert sum(len(list(island.parameters())) for island in islands) == len(inside), "islands may not overlap"
    assert fp32_islands(model.layers[1]) == [m for m in islands if m in set(model.layers[1].modules())]


def test_bf16_with_fp32_islands():
    """What a bf16 policy makes of the model: streams, logits and products in bf16, islands in fp32."""
    model = make(spread=0.02).bfloat16()
    for island in fp32_islands(model):
        island.float()
    model.init_buffers()
    ids, labels = tokens()
    out = model(ids, labels)
    out.loss.backward()
    assert out.logits.dtype == torch.bfloat16 and out.loss.dtype == torch.float32
    assert all(p.grad.isfinite().all() and p.grad.dtype == p.dtype for p in model.parameters())
    exact = make(spread=0.02)(ids, labels)
    assert out.lm_loss.item() == pytest.approx(exact.lm_loss.item(), rel=2e-2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 3}, r"compress_ratios must be one ratio for each of num_layers = 3 layers, got \(0, 4, 16, 4\)"),
        ({"compress_ratios": (0, 4, -1, 4)}, "compress_ratios must be integers of 0 or more"),
        ({"hidden_size": 0}, "hidden_size must be a number above 0, got 0"),
        ({"rope_head_dim": 15}, "rope_head_dim must be an even number"),
        ({"rope_head_dim": 48}, "rope_head_dim must be at most head_dim and index_head_dim, here 32, got 48"),
        ({"o_groups": 3}, "o_groups must be a divisor of num_heads = 4"),
        ({"kl_coefficient": -1.0}, "kl_coefficient must be 0 or more"),
        ({"kl_target": "teacher"}, "kl_target must be one of joint, compressed, marginal, got 'teacher'"),
        ({"hc_mult": 9}, "hc_mult must be 2 to 8, got 9"),
        ({"experts_per_token": 9}, "experts_per_token must be at most num_experts = 8"),
        ({"num_hash_layers": 5}, "num_hash_layers must be at most num_layers = 4"),
        ({"vocab_size": 4}, "vocab_size must be at least 5"),
        ({"mtp_layers": 2}, "mtp_layers must be 0 or 1, got 2"),
        ({"yarn_factor": 0.5}, "yarn_factor must be 1 or more"),
        ({"csa_ratio": 1}, "csa_ratio must be 2 or more"),
    ],
)
def test_config_that_cannot_work_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        change(**changes)


def test_config():
    assert PRESETS == {"tiny": TINY, "flash": FLASH, "pro": PRO}
    assert [FLASH.compress_ratios.count(r) for r in (0, 4, 128)] == [2, 21, 20]
    assert [TINY.kind(r) for r in (0, 1, 4, 16, 128)] == ["window", "window", "csa", "hca", "hca"]
    assert change(compress_ratios=[0, 4, 4, 0]).compress_ratios == (0, 4, 4, 0)
    assert all(field.metadata["help"] for field in dataclasses.fields(ModelConfig))


@pytest.mark.parametrize(
    ("ids", "labels", "options", "error", "message"),
    [
        (torch.zeros(4, dtype=torch.int64), None, {}, ValueError, r"input_ids must be \[B, S\].*got shape \(4,\)"),
        (torch.zeros(2, 0, dtype=torch.int64), None, {}, ValueError, "S at least 1"),
        (torch.zeros(1, 4, dtype=torch.int32), None, {}, TypeError, "input_ids must be int64, got torch.int32"),
        (torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int64), {}, ValueError, "labels must have the shape"),
        (torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4), {}, TypeError, "labels must be int64"),
        (torch.zeros(1, 4, dtype=torch.int64), None, {"num_valid_tokens": 4}, ValueError, "num_valid_tokens was given without labels"),
    ],
)
def test_inputs_that_cannot_work_are_refused(ids, labels, options, error, message):
    with pytest.raises(error, match=message):
        make()(ids, labels, **options)
