"""The trainer's model by itself: what a token sees, sequences too short to compress, positions, selection."""

from __future__ import annotations

import pytest
import torch

from reference.rope import apply_rope, rope_cos_sin
from tests.model_util import change, make, tokens
from train_example.attention import Attention, IndexerState
from train_example.config import TINY


@pytest.mark.parametrize("position", [0, 3, 16, 31, 46])
def test_a_token_changes_nothing_before_it(position):
    model = make(spread=0.1)
    ids, _ = tokens(batch=1)
    changed = ids.clone()
    changed[0, position] = (ids[0, position] + 7) % TINY.vocab_size
    with torch.no_grad():
        before, after = model(ids).logits, model(changed).logits
    torch.testing.assert_close(after[:, :position], before[:, :position], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(after[:, position], before[:, position], atol=1e-3)


def test_sequences_of_a_batch_do_not_meet():
    model = make(spread=0.1)
    ids, _ = tokens(batch=3)
    with torch.no_grad():
        together = model(ids).logits
        alone = torch.cat([model(ids[i : i + 1]).logits for i in range(3)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_reach_of_each_kind_of_layer():
    """A window-only model forgets what is `window` tokens away; HCA and CSA see the first token from afar."""
    ids, _ = tokens(batch=1, length=60)
    changed = ids.clone()
    changed[0, 0] = (ids[0, 0] + 7) % TINY.vocab_size
    for ratio, reaches in ((0, False), (16, True), (4, True)):
        model = make(change(num_layers=1, compress_ratios=(ratio,), index_topk=15), spread=0.1)
        with torch.no_grad():
            far = (model(ids).logits - model(changed).logits)[0, TINY.window :]
        assert (far.abs().max() > 1e-5) == reaches, ratio


@pytest.mark.parametrize("length", [1, 2, 3, 4, 15, 16, 17])
def test_short_sequences_leave_no_parameter_without_gradient(length):
    """Too short for a compressed entry, a rank still takes part in what sharding does for the compressors' parameters."""
    model = make(spread=0.05)
    out = model(*tokens(batch=1, length=length))
    out.loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        if length < 4 and (".compressor." in name or ".indexer." in name):
            assert not parameter.grad.any(), name


def test_short_sequence_sees_its_window_alone():
    """Below one entry a layer with a compressor is a window-only layer with the other rotary base."""
    config = change(num_layers=1, compress_ratios=(16,), mtp_layers=0)
    model = make(config, spread=0.1)
    window = make(change(config, compress_ratios=(0,)))
    window.load_state_dict(model.state_dict(), strict=False)
    window.window_frequencies = model.compressed_frequencies
    ids, _ = tokens(length=15)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, window(ids).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ratio", [0, 4, 16])
def test_attention_depends_on_distances_alone(ratio):
    """Rotation of q and kv, and back of the output: shifting every position by the same amount changes nothing."""
    torch.manual_seed(0)
    model = make(change(num_layers=1, compress_ratios=(ratio,), mtp_layers=0), spread=0.1)
    attention, x = model.layers[0].attn, torch.randn(2, 32, TINY.hidden_size)
    frequencies = model.compressed_frequencies if ratio else model.window_frequencies
    with torch.no_grad():
        outs = [attention(x, *rope_cos_sin(torch.arange(32) + shift, frequencies))[0] for shift in (0, 1000)]
        turned = apply_rope(outs[0], *rope_cos_sin(torch.arange(32), frequencies))
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-3, atol=1e-4)
    assert not torch.allclose(outs[0], turned, atol=1e-2), "the test has to be able to see a rotation"


def test_selected_entries_are_visible_and_topk_selects():
    model = make(spread=0.1)
    ids, labels = tokens(length=64)
    states: list[IndexerState] = []
    original = Attention._kl

    def spy(self, state, probs, q, entries):
        states.append(state)
        return original(self, state, probs, q, entries)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Attention, "_kl", spy)
        model(ids, labels)
    assert len(states) == 2
    visible = (torch.arange(64) + 1) // 4
    for state in states:
        assert state.indices.shape == (2, 64, TINY.index_topk)
        assert (state.indices < visible[None, :, None]).all()
        assert torch.equal((state.indices >= 0).sum(-1), visible.clamp(max=TINY.index_topk).expand(2, 64))
    assert TINY.shortest_selecting_length <= 36


@pytest.mark.parametrize("ratio", [0, 4, 16])
def test_attention_compiles_without_graph_breaks(ratio):
    """Forward and backward of an attention site, indexer loss included, in one graph (the expert dispatch reads counts on the host)."""
    model = make(change(num_layers=1, compress_ratios=(ratio,), mtp_layers=0), spread=0.05)
    attention, x = model.layers[0].attn, torch.randn(2, 40, TINY.hidden_size)
    rope = rope_cos_sin(torch.arange(40), model.compressed_frequencies)
    torch._dynamo.reset()
    results = []
    for run in (attention, torch.compile(attention, fullgraph=True, backend="aot_eager")):
        attention.zero_grad()
        out, kl = run(x, *rope, True)
        (out.sum() if kl is None else out.sum() + kl).backward()
        results.append([out, *([] if kl is None else [kl]), *(p.grad for p in attention.parameters())])
    for plain, compiled in zip(*results):
        torch.testing.assert_close(compiled, plain)
