"""Mistakes seen in other trainers that show in the model's arithmetic on one process. (The others: test_trainer_parallel.py and _resume.py.)"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from indexer import indexer_kl_loss
from sparse_attn import sparse_attn_shared_kv
from tests.trainer_util import SMALL, plain_model, run_config, tokens
from train_example import model as model_module
from train_example.metrics import read_metrics
from train_example.model import Embedding
from train_example.moe import hash_table
from train_example.optim import make_optimizer
from train_example.parallel import moe_modules, shutdown
from train_example.step import balance_routers
from train_example.train import train


@pytest.mark.parametrize("length", [1, 3, 4, 17])
def test_no_nan_from_a_mask_in_bf16(length):
    """Short texts have queries that see no entry at all: their masked scores must not become inf - inf in bf16."""
    model = plain_model(run_config())
    islands = {param for island in model_module.fp32_islands(model) for param in island.parameters()}
    for param in model.parameters():
        param.data = param.data if param in islands else param.data.bfloat16()
    ids = torch.randint(0, 256, (2, length), generator=torch.Generator().manual_seed(length))
    out = model(ids, ids.roll(-1, 1))
    assert out.loss.isfinite()
    out.loss.backward()
    for name, param in model.named_parameters():
        assert param.grad is not None, name
        assert param.grad.isfinite().all(), name


def test_comb_is_applied_transposed():
    """out[k] = post[k] f + sum_j comb[j, k] x[j], with a comb that is far from symmetric; the other way round must differ."""
    g = torch.Generator().manual_seed(0)
    f, x = torch.randn(1, 2, 5, generator=g), torch.randn(1, 2, 4, 5, generator=g)
    post, comb = torch.rand(1, 2, 4, generator=g), torch.rand(1, 2, 4, 4, generator=g)
    out = model_module.hc_post(f, x, post, comb, impl="eager")
    want = post[..., None] * f[..., None, :] + torch.einsum("btjk,btjd->btkd", comb, x)
    wrong = post[..., None] * f[..., None, :] + torch.einsum("btkj,btjd->btkd", comb, x)
    torch.testing.assert_close(out, want)
    assert (out - wrong).abs().max() > 0.1


def selection(padded: bool) -> torch.Tensor:
    """[1, 8, K] entries of windows of 4 that a query may see: none, then entry 0, then both; `padded` adds slots of -1."""
    rows = [[-1, -1]] * 3 + [[0, -1]] * 4 + [[0, 1]]
    return torch.tensor([[[*row, -1, -1] if padded else row for row in rows]], dtype=torch.int32)


def test_empty_slots_leave_entry_0_alone():
    """A slot of -1 must not turn into entry 0: attention, the teacher's probabilities, the KL loss and its gradients do not see it."""
    found = []
    for padded in (False, True):
        g = torch.Generator().manual_seed(0)
        q, kv, entries = (torch.randn(shape, generator=g, requires_grad=True) for shape in ((1, 8, 2, 16), (1, 8, 16), (1, 2, 16)))
        sinks = torch.randn(2, generator=g)
        iq, ik, weights = (torch.randn(shape, generator=g, requires_grad=True) for shape in ((1, 8, 2, 16), (1, 2, 16), (1, 8, 2)))
        indices = selection(padded)
        options = {"cmp_ratio": 4, "window": 3}
        out, probs = sparse_attn_shared_kv(q, kv, entries, indices, sinks, return_cmp_probs=True, **options)
        kl = indexer_kl_loss(iq, ik, weights, indices, teacher=probs.detach(), target="joint", cmp_ratio=4, reduction="sum")
        (out.square().sum() + kl).backward()
        found.append([out, kl, probs[..., :2], *(t.grad for t in (q, kv, entries, iq, ik, weights))])
        assert (probs[..., 2:] == 0).all()
        assert (probs[:, :3] == 0).all()
        assert probs[0, 7, :2].min() > 0
    for got, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, want)


def test_loss_is_a_sum_over_one_number():
    """Twice the divisor halves every loss, the indexer's KL and MTP included: what makes accumulation steps add up."""
    model = plain_model(run_config())
    ids, labels = tokens(2, 24)
    one, two = (model(ids, labels, num_valid_tokens=n) for n in (10, 20))
    for name in ("loss", "lm_loss", "kl_loss", "mtp_loss"):
        a, b = float(getattr(one, name).detach()), float(getattr(two, name).detach())
        assert a > 0
        assert a / b == pytest.approx(2, rel=1e-6), name


def test_loss_is_no_mean_of_means():
    """Halves of a batch with different numbers of labels: sums over the same number add up to the whole."""
    model = plain_model(run_config())
    ids, labels = tokens(4, 24)
    labels[:2, 5:] = -100
    whole = model(ids, labels, num_valid_tokens=50).loss.detach()
    halves = [model(ids[i : i + 2], labels[i : i + 2], num_valid_tokens=50).loss.detach() for i in (0, 2)]
    assert float(sum(halves)) == pytest.approx(float(whole), rel=1e-6)
    assert halves[0] < halves[1] / 2


@pytest.mark.parametrize(("experts", "k", "vocabulary"), [(4, 2, 264), (8, 3, 300), (7, 2, 264), (256, 6, 1000)])
def test_hash_table_covers_every_expert(experts, k, vocabulary):
    config = dataclasses.replace(SMALL, num_experts=experts, experts_per_token=k, vocab_size=vocabulary)
    table = hash_table(config, 0)
    assert table.shape == (vocabulary, k)
    counts = table.flatten().bincount(minlength=experts)
    assert counts.min() > 0
    assert counts.max() <= 2 * math.ceil(vocabulary * k / experts), "no expert with far more token ids than its share"
    assert all(len(set(row)) == k for row in table.tolist())


def test_balance_moves_the_bias_of_top_k_routers_alone():
    model = plain_model(run_config())
    counts = torch.tensor([[9, 1, 1, 1]] * 4)
    balance_routers(model, counts, 0.5)
    biases = [getattr(moe.router, "e_score_correction_bias", None) for moe in moe_modules(model)]
    assert biases[0] is None, "the hash router has nothing to move"
    for bias in biases[1:]:
        assert bias.tolist() == [-0.5, 0.5, 0.5, 0.5]


def test_gradient_of_a_frequent_token_is_not_summed_in_bf16():
    embed = Embedding(3, 4).bfloat16()
    ids = torch.zeros(2, 2048, dtype=torch.int64)
    ids[0, 0] = 2
    out = embed(ids)
    assert out.dtype == torch.bfloat16 and torch.equal(out, embed.weight[ids])
    out.sum().backward()
    assert embed.weight.grad is not None
    assert embed.weight.grad[:, 0].tolist() == [4096, 0, 1], "4095 rounds to 4096"


def test_weight_decay_spares_what_is_no_matrix_or_an_island():
    config = run_config(weight_decay=0.1)
    model = plain_model(config)
    decayed = {id(p) for group in make_optimizer(model, config).param_groups if group["weight_decay"] for p in group["params"]}
    spared = ("fn", "base", "scale", "sinks", "position_bias", "norm.weight", "router.weight")
    for name, parameter in model.named_parameters():
        assert (id(parameter) in decayed) == (not name.endswith(spared)), name


def test_gradients_below_the_limit_are_not_clipped(tmp_path):
    """Nor made larger: a limit that is never reached and none give the same bits."""
    rows = []
    for clip in (-1.0, 1e9):
        out = tmp_path / str(clip)
        try:
            train(run_config(out=str(out), clip=clip, steps=2, adam_eps=1e-3))
        finally:
            shutdown()
        rows.append([(row["loss"], row["grad_norm"]) for row in read_metrics(out / "metrics.jsonl")])
    assert len(rows[0]) == 2 and rows[0] == rows[1]
