"""The trainer's model by itself: a gradient for every parameter, what the losses are, and whom they train."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.model_util import IGNORE, change, make, tokens
from train_example.config import TINY


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
