"""Rotary embedding against complex multiplication, its identities, and the published model's frequencies."""

import math

import pytest
import torch
from torch.autograd import gradcheck

from reference.rope import apply_rope, rope_cos_sin, rope_frequencies

YARN = {"factor": 16.0, "original_length": 65536, "beta_fast": 32.0, "beta_slow": 1.0}


def _positions(*shape):
    return torch.randint(0, 5000, shape, generator=torch.Generator().manual_seed(1))


def _x(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)


def test_rotation_is_complex_multiplication_on_the_last_channels():
    positions, w = _positions(2, 5), rope_frequencies(8, 10000.0, dtype=torch.float64)
    x = _x(2, 5, 3, 14)
    cos, sin = (c[:, :, None] for c in rope_cos_sin(positions, w))
    got = apply_rope(x, cos, sin)
    torch.testing.assert_close(got[..., :6], x[..., :6], rtol=0, atol=0)
    turn = torch.polar(torch.ones(2, 5, 4, dtype=torch.float64), positions[..., None] * w)[:, :, None]
    want = torch.view_as_real(torch.view_as_complex(x[..., 6:].unflatten(-1, (4, 2)).contiguous()) * turn).flatten(-2)
    torch.testing.assert_close(got[..., 6:], want, rtol=1e-12, atol=1e-12)


def test_inverse_undoes_and_product_depends_on_distance_alone():
    w = rope_frequencies(8, 160000.0, **YARN, dtype=torch.float64)
    x, y = _x(5, 12), _x(5, 12).flip(0)
    p = _positions(5)
    cos, sin = rope_cos_sin(p, w)
    torch.testing.assert_close(apply_rope(apply_rope(x, cos, sin), cos, sin, inverse=True), x, rtol=1e-12, atol=1e-12)
    far = rope_cos_sin(p + 1234, w)
    near_product = (apply_rope(x, cos, sin) * apply_rope(y, *rope_cos_sin(p + 3, w))).sum(-1)
    far_product = (apply_rope(x, *far) * apply_rope(y, *rope_cos_sin(p + 1237, w))).sum(-1)
    torch.testing.assert_close(far_product, near_product, rtol=1e-10, atol=1e-10)
    assert not torch.allclose((apply_rope(x, cos, sin) * apply_rope(y, *far)).sum(-1), near_product)


def test_whole_head_and_no_channel():
    x = _x(4, 6)
    cos, sin = rope_cos_sin(_positions(4), rope_frequencies(6, 100.0, dtype=torch.float64))
    torch.testing.assert_close(apply_rope(x, cos, sin).square().sum(-1), x.square().sum(-1))
    assert torch.equal(apply_rope(x, cos[..., :0], sin[..., :0]), x)


@pytest.mark.parametrize("inverse", [False, True])
def test_gradcheck(inverse):
    cos, sin = rope_cos_sin(_positions(3), rope_frequencies(4, 100.0, dtype=torch.float64))
    assert gradcheck(lambda x: apply_rope(x, cos, sin, inverse=inverse), [_x(3, 7).requires_grad_()])


def test_plain_frequencies():
    w = rope_frequencies(64, 10000.0)
    assert w.dtype == torch.float32 and w.shape == (32,) and w[0] == 1
    want = [10000.0 ** (-2 * i / 64) for i in range(32)]
    torch.testing.assert_close(w.double(), torch.tensor(want, dtype=torch.float64), rtol=6e-8, atol=0)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones():
    plain, yarn = rope_frequencies(64, 160000.0, dtype=torch.float64), rope_frequencies(64, 160000.0, **YARN, dtype=torch.float64)
    turns = 65536 * plain / (2 * math.pi)
    # floor and ceil move the ends by less than a pair
    step = 160000.0 ** (2 / 64)
    kept, stretched = turns > 32 * step, turns < 1 / step
    assert kept.any() and stretched.any() and not (kept | stretched).all()
    torch.testing.assert_close(yarn[kept], plain[kept])
    torch.testing.assert_close(yarn[stretched], plain[stretched] / 16)
    share = (plain / yarn)[~(kept | stretched)]
    assert (share >= 1).all() and (share <= 16).all() and (share.diff() > 0).all()


@pytest.mark.parametrize("rope_dim, head_dim", [(64, 512), (8, 32), (2, 16)])
@pytest.mark.parametrize("layer", ["main", "compress"])
def test_frequencies_and_rotation_are_those_of_the_published_model(rope_dim, head_dim, layer):
    pytest.importorskip("transformers", reason="the published model's code is a test dependency")
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding, apply_rotary_pos_emb

    config = DeepseekV4Config(
        hidden_size=64,
        head_dim=head_dim,
        partial_rotary_factor=rope_dim / head_dim,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    )
    theirs = DeepseekV4RotaryEmbedding(config)
    ours = rope_frequencies(rope_dim, 10000.0) if layer == "main" else rope_frequencies(rope_dim, 160000.0, **YARN)
    torch.testing.assert_close(ours, getattr(theirs, f"{layer}_inv_freq"), rtol=5e-7, atol=0)
    x, positions = _x(2, 3, 7, head_dim, dtype=torch.float32), torch.arange(7).expand(2, 7)
    their_cos, their_sin = theirs(x, position_ids=positions, layer_type=layer)
    cos, sin = rope_cos_sin(positions, ours)
    torch.testing.assert_close(cos, their_cos, rtol=0, atol=2e-6)
    for inverse in (False, True):
        want = apply_rotary_pos_emb(x, their_cos, -their_sin if inverse else their_sin)
        torch.testing.assert_close(apply_rope(x, cos[:, None], sin[:, None], inverse=inverse), want, rtol=0, atol=2e-5)


def test_dtypes_and_errors():
    cos, sin = rope_cos_sin(_positions(3), rope_frequencies(4, 100.0))
    assert cos.dtype == torch.float32
    assert apply_rope(_x(3, 6, dtype=torch.bfloat16), cos, sin).dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"rope_dim .*even.*7"):
        rope_frequencies(7, 100.0)
    with pytest.raises(ValueError, match="original_length"):
        rope_frequencies(8, 100.0, factor=4.0)


def test_traces_in_one_graph():
    def turn(x, positions):
        cos, sin = rope_cos_sin(positions, rope_frequencies(8, 160000.0, **YARN))
        return apply_rope(x, cos, sin)

    x = _x(5, 12, dtype=torch.float32)
    compiled = torch.compile(turn, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, torch.arange(5)), turn(x, torch.arange(5)))
