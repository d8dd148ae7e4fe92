"""The trainer's experts and routers."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tests.model_util import change, make, tokens
from train_example.config import TINY
from train_example.moe import Experts, TopKRouter, hash_table


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
    out = experts(x, counts, counts.tolist)
    for row, expert in enumerate((0, 0, 0, 2)):
        gate, up = (experts.w_gate_up[expert] @ x[row]).chunk(2)
        hidden = F.silu(torch.minimum(gate, torch.tensor(0.05))) * up.clamp(-0.05, 0.05)
        torch.testing.assert_close(out[row], experts.w_down[expert] @ hidden)
    out.sum().backward()
    for weight in experts.parameters():
        assert [bool(weight.grad[e].any()) for e in range(4)] == [True, False, True, False]
    empty = experts(x[:0], torch.zeros(4, dtype=torch.int64), lambda: [0] * 4)
    assert empty.shape == (0, 64) and empty.grad_fn is not None
    with pytest.raises(ValueError, match="counts has 3 entries"):
        experts(x, counts[:3], lambda: [3, 0, 1])


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
