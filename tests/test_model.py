"""The example trainer's model by itself: gradients everywhere, losses, causality, short sequences, initialisation, refusals.

Its agreement with transformers is in test_hf_parity.py.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from reference.rope import apply_rope, rope_cos_sin
from train_example.attention import Attention, IndexerState
from train_example.config import FLASH, PRESETS, PRO, TINY, ModelConfig
from train_example.model import DeepSeekV4, fp32_islands
from train_example.moe import Experts, TopKRouter, hash_table

IGNORE = -100


def change(config: ModelConfig = TINY, **changes) -> ModelConfig:
    return dataclasses.replace(config, **changes)


def tokens(batch: int = 2, length: int = 48, seed: int = 0, vocabulary: int = TINY.vocab_size) -> tuple[Tensor, Tensor]:
    """input_ids and labels [batch, length] of a random text."""
    ids = torch.randint(0, vocabulary, (batch, length + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def make(config: ModelConfig = TINY, seed: int = 0, spread: float = 0.0, **kwargs) -> DeepSeekV4:
    """`spread` adds noise to every parameter, so that nothing stays at the zero or one it is initialised with."""
    torch.manual_seed(seed)
    model = DeepSeekV4(config, **kwargs)
    if spread:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(spread * torch.randn_like(parameter))
    return model


# ---- losses and gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mtp_ratio", [0, 4, 16])
def test_every_parameter_gets_a_gradient(mtp_ratio):
    model = make(change(mtp_compress_ratio=mtp_ratio))
    out = model(*tokens())
    out.loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


def test_losses_add_up_and_are_local_sums_over_the_given_number():
    model = make(spread=0.05)
    ids, labels = tokens()
    labels[0, 10:20] = IGNORE
    out = model(ids, labels)
    assert out.loss.item() == pytest.approx((out.lm_loss + out.kl_loss + out.mtp_loss).item(), rel=1e-6)
    valid = (labels != IGNORE).sum()
    other = model(ids, labels, num_valid_tokens=3 * valid)
    for name in ("loss", "lm_loss", "kl_loss", "mtp_loss"):
        assert getattr(out, name).item() == pytest.approx(3 * getattr(other, name).item(), rel=1e-6), name
    assert out.lm_loss.item() == pytest.approx(F.cross_entropy(out.logits.flatten(0, 1), labels.flatten()).item(), rel=1e-6)
    # Two processes with a sequence each, one global number: their losses and gradients add up to those of one process with both.
    parts = [model(ids[i : i + 1], labels[i : i + 1], num_valid_tokens=int(valid)) for i in range(2)]
    assert sum(part.loss.item() for part in parts) == pytest.approx(out.loss.item(), rel=1e-5)


def test_coefficients():
    ids, labels = tokens()
    plain = make(spread=0.05)(ids, labels)
    scaled = make(change(kl_coefficient=0.25, mtp_weight=0.9), spread=0.05)(ids, labels)
    assert plain.kl_loss > 0
    assert scaled.kl_loss.item() == pytest.approx(0.25 * plain.kl_loss.item(), rel=1e-6)
    assert scaled.mtp_loss.item() == pytest.approx(3 * plain.mtp_loss.item(), rel=1e-6)
    assert scaled.lm_loss == plain.lm_loss


def test_kl_trains_the_indexer_and_nothing_else():
    model = make(spread=0.05)
    model(*tokens()).kl_loss.backward()
    for name, parameter in model.named_parameters():
        moved = parameter.grad is not None and parameter.grad.abs().max() > 0
        assert moved == (".indexer." in name), name


def test_language_model_loss_does_not_reach_the_indexer():
    model = make(spread=0.05)
    out = model(*tokens())
    (out.lm_loss + out.mtp_loss).backward()
    assert all(p.grad is None or not p.grad.any() for name, p in model.named_parameters() if ".indexer." in name)


@pytest.mark.parametrize("target", ["joint", "compressed", "marginal"])
def test_training_on_kl_alone_lowers_it(target):
    model = make(change(kl_target=target), spread=0.05)
    ids, labels = tokens()
    optimizer = torch.optim.Adam([p for name, p in model.named_parameters() if ".indexer." in name], lr=1e-2)
    values = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = model(ids, labels).kl_loss
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    assert values[-1] < 0.8 * values[0]


def test_kl_coefficient_zero_warns_once_and_leaves_the_indexer_untrained():
    with pytest.warns(UserWarning, match="the indexer never trains") as record:
        model = make(change(kl_coefficient=0.0))
        out = model(*tokens())
        model(*tokens())
    assert len(record) == 1
    out.loss.backward()
    assert out.kl_loss == 0
    assert all((p.grad is None) == (".indexer." in name) for name, p in model.named_parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(change(kl_coefficient=0.0, compress_ratios=(0, 0, 16, 16)))  # no indexer, nothing to say


def test_mtp_predicts_the_token_after_the_next():
    """Loss only where label t and label t + 1 count; the label it learns is the second."""
    model = make(spread=0.05)
    ids, labels = tokens(length=12)
    captured = {}
    model.mtp[0].register_forward_hook(lambda module, args, output: captured.update(hidden=output[0], next_ids=args[2]))
    labels[1, 5] = IGNORE
    out = model(ids, labels)
    assert torch.equal(captured["next_ids"][:, :-1], ids[:, 1:])
    log_p = model.head(captured["hidden"]).log_softmax(-1)
    wanted = torch.tensor(0.0)
    for b in range(2):
        for t in range(11):
            if IGNORE not in (labels[b, t].item(), labels[b, t + 1].item()):
                wanted = wanted - log_p[b, t, labels[b, t + 1]]
    assert out.mtp_loss.item() == pytest.approx(TINY.mtp_weight * wanted.item() / (labels != IGNORE).sum().item(), rel=1e-5)


def test_without_labels_there_is_no_loss():
    ids, labels = tokens()
    model = make()
    out = model(ids)
    assert out.loss is out.lm_loss is out.kl_loss is out.mtp_loss is None
    assert torch.equal(out.logits, model(ids, labels).logits)
    assert out.expert_counts.shape == (TINY.num_layers, TINY.num_experts)


def test_no_label_counts():
    model = make()
    ids, labels = tokens()
    out = model(ids, torch.full_like(labels, IGNORE), num_valid_tokens=100)
    assert out.lm_loss == 0 and out.mtp_loss == 0
    out.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_gradients_in_fp64():
    """The whole graph against finite differences: one number, the change of the loss along a random direction in all parameters.

    The indexer's parameters stay out: they act on the other losses through a choice, whose gradient is not taken.
    """
    model = make(change(compress_ratios=(0, 4, 6, 4), swiglu_limit=100.0), spread=0.05).double()
    ids, labels = tokens(length=24)
    moving = [p for name, p in model.named_parameters() if ".indexer." not in name]
    generator = torch.Generator().manual_seed(7)
    direction = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in moving]
    cotangent = torch.randn(2, 24, TINY.vocab_size, generator=generator, dtype=torch.float64)

    def value() -> Tensor:
        return (model(ids, labels).logits * cotangent).sum()

    grads = torch.autograd.grad(value(), moving, allow_unused=True)
    wanted = sum((g * d).sum() for g, d in zip(grads, direction) if g is not None)
    step = 1e-6
    with torch.no_grad():
        ends = []
        for sign in (1, -2):
            for p, d in zip(moving, direction):
                p.add_(d, alpha=sign * step)
            ends.append(value())
    assert ((ends[0] - ends[1]) / (2 * step)).item() == pytest.approx(wanted.item(), rel=1e-5)


def test_recomputed_layers_give_the_same_gradients():
    ids, labels = tokens()
    results = []
    for recompute in (False, True):
        model = make(spread=0.05)
        for layer in (*model.layers, *model.mtp) if recompute else ():
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        out = model(ids, labels)
        out.loss.backward()
        results.append((out, [p.grad for p in model.parameters()]))
    (plain, grads), (recomputed, recomputed_grads) = results
    assert torch.equal(plain.loss, recomputed.loss) and torch.equal(plain.expert_counts, recomputed.expert_counts)
    assert all(torch.equal(a, b) for a, b in zip(grads, recomputed_grads))


# ---- causality and length -------------------------------------------------------------------------------------------------------


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


# ---- attention ------------------------------------------------------------------------------------------------------------------


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


# ---- experts --------------------------------------------------------------------------------------------------------------------


def test_expert_counts():
    ids, labels = tokens()
    out = make()(ids, labels)
    assert out.expert_counts.shape == (TINY.num_layers + 1, TINY.num_experts)
    assert (out.expert_counts.sum(1) == ids.numel() * TINY.experts_per_token).all()
    wanted = torch.bincount(hash_table(TINY, 0)[ids].flatten(), minlength=TINY.num_experts)
    assert torch.equal(out.expert_counts[0], wanted)


def test_experts_against_a_loop_over_tokens_and_a_zero_gradient_without_tokens():
    config = change(num_experts=4, swiglu_limit=0.05)
    experts = Experts(config)
    experts.init_weights(0.3)
    counts, x = torch.tensor([3, 0, 1, 0]), torch.randn(4, 64)
    out = experts(x, counts, counts.tolist())
    for row, expert in enumerate((0, 0, 0, 2)):
        gate, up = (experts.w_gate_up[expert] @ x[row]).chunk(2)
        hidden = F.silu(torch.minimum(gate, torch.tensor(0.05))) * up.clamp(-0.05, 0.05)
        torch.testing.assert_close(out[row], experts.w_down[expert] @ hidden)
    out.sum().backward()
    for weight in experts.parameters():
        assert [bool(weight.grad[e].any()) for e in range(4)] == [True, False, True, False]
    empty = experts(x[:0], torch.zeros(4, dtype=torch.int64), [0] * 4)
    assert empty.shape == (0, 64) and empty.grad_fn is not None
    with pytest.raises(ValueError, match="counts has 3 entries"):
        experts(x, counts[:3], [3, 0, 1])


def test_selection_bias_moves_the_choice_and_not_the_weights():
    router = TopKRouter(TINY)
    router.init_weights(0.3)
    x, ids = torch.randn(20, 64), torch.zeros(20, dtype=torch.int64)
    scores = F.softplus(x @ router.weight.T).sqrt()
    router.e_score_correction_bias[5] = 100.0
    chosen, weights = router(x, ids)
    assert (chosen == 5).any(1).all()
    picked = scores.gather(1, chosen)
    torch.testing.assert_close(weights, 1.5 * picked / picked.sum(1, keepdim=True))
    assert weights.dtype == torch.float32 and router(x.bfloat16(), ids)[1].dtype == torch.float32
    x[:] = 1e4 * x.sign()  # softplus underflows here: finite all the same
    router(x, ids)[1].sum().backward()
    assert router.weight.grad.isfinite().all()


@pytest.mark.parametrize(("vocabulary", "experts", "k"), [(264, 8, 2), (50, 256, 6), (5, 8, 2), (17, 7, 7), (100, 10, 3)])
def test_hash_table_reaches_every_expert(vocabulary, experts, k):
    config = change(vocab_size=vocabulary, num_experts=experts, experts_per_token=k)
    table = hash_table(config, 0)
    assert table.shape == (vocabulary, k) and table.dtype == torch.int64
    assert table.unique().tolist() == list(range(experts))
    assert all(len(set(row)) == k for row in table.tolist())
    torch.manual_seed(99)
    assert torch.equal(table, hash_table(config, 0)), "the table may not depend on the global RNG"
    if k < experts:
        assert not torch.equal(table, hash_table(config, 1))
        assert not torch.equal(table, hash_table(change(config, hash_seed=1), 0))


# ---- building -------------------------------------------------------------------------------------------------------------------


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
