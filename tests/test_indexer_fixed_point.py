"""Sums of dk in whole numbers: any order gives the same bits, no number overflows, and what is not finite shows."""

import pytest
import torch

from indexer.fixed_point import GROUPS, make_scales
from indexer.gradients import slot_gradients
from indexer.kl_loss.fused import loss_and_gradients
from reference.cases import relative_error
from tests.op_checks import poison_empty

KEYS, HEADS, SLOTS = 9, 5, 6


def make(device, dtype=torch.float32, queries=13, batch=2, dim=20, seed=1):
    """(q, k, weights, indices, dscores): repeated indices, -1 and beyond the end, slots without a gradient, dI over many powers of two."""
    g = torch.Generator().manual_seed(seed)
    q, k, w = (torch.randn(batch, *shape, generator=g) for shape in ((queries, HEADS, dim), (KEYS, dim), (queries, HEADS)))
    indices = torch.randint(-1, KEYS + 1, (batch, queries, SLOTS), generator=g, dtype=torch.int32)
    grad = torch.randn(batch, queries, SLOTS, generator=g) * torch.exp(8 * torch.randn(batch, queries, 1, generator=g))
    grad[torch.rand(grad.shape, generator=g) < 0.2] = 0
    return [x.to(device) for x in (q.to(dtype), k.to(dtype), w, indices, grad)]


def rows_of(q, k, weights, indices, dscores):
    """fp64, of every slot: its row of dk, and the bound of its channels; 0 where nothing counts."""
    q, k, weights, dscores = (x.double() for x in (q, k, weights, dscores))
    on = (indices >= 0) & (indices < k.shape[1])
    dscores = torch.where(on, dscores, 0)
    listed = torch.where(on, indices, 0).long()
    entry = torch.arange(len(k), device=k.device)[:, None, None]
    wq = weights[..., None] * q
    positive = torch.einsum("btsd,bthd->btsh", k[entry, listed], q) > 0
    rows = torch.einsum("btsh,bthd->btsd", positive * dscores[..., None], wq)
    most = wq.abs().sum(2).amax(-1)
    return rows, dscores.abs() * most[..., None], listed + entry * k.shape[1]


def dk_of(rows, key, keys):
    return torch.zeros(keys, rows.shape[-1], dtype=rows.dtype, device=rows.device).index_add(0, key.flatten(), rows.flatten(0, 2))


@pytest.mark.parametrize("dtype, limit, dim", [(torch.float32, 3e-7, 7), (torch.float16, 1e-3, 7), (torch.float16, 1e-3, 128)])
def test_against_fp64_in_any_order(kernel_device, monkeypatch, dtype, limit, dim):
    """Queries in another order give the same bits."""
    poison_empty(monkeypatch)
    inputs = make(kernel_device, dtype, dim=dim)
    rows, _, key = rows_of(*inputs)
    want = dk_of(rows, key, 2 * KEYS)
    got = slot_gradients(*inputs, None, True)[1]
    assert relative_error(got.flatten(0, 1), want) < limit
    order = torch.randperm(inputs[0].shape[1], generator=torch.Generator().manual_seed(2)).to(kernel_device)
    turned = [x if i == 1 else x[:, order].contiguous() for i, x in enumerate(inputs)]
    assert torch.equal(slot_gradients(*turned, None, True)[1], got)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_no_overflow_at_the_bound(kernel_device, dtype, sign):
    """Every slot of every query is one key, and all rows are equal and as large as their bound: the sum is the bound's. To the bit, as all
    numbers are multiples of a unit; every other channel is negative, so that the lower half of a word borrows from the upper one, and one
    upper half holds nothing else."""
    queries = 2000 if kernel_device == "cuda" else 20
    q, k, weights, indices, _ = make(kernel_device, dtype, queries, batch=1)
    q, k, weights = torch.full_like(q, 1.5), torch.ones_like(k), torch.full_like(weights, 1.25)
    q[..., ::2] *= -sign
    q[..., 3] = 0
    k[..., ::2] = 0
    indices = torch.full_like(indices, 4)
    for size in (0.375, 0.375 * 2**-66, 0.375 * 2**66):
        got = slot_gradients(q, k, weights, indices, torch.full(indices.shape, size * sign, device=kernel_device), None, True)[1]
        want = queries * SLOTS * HEADS * 1.25 * size * sign * q[0, 0, 0].float()
        assert torch.equal(got[0, 4], want)
        assert (got[0, :4] == 0).all() and (got[0, 5:] == 0).all()


@pytest.mark.parametrize("border", [False, True])
def test_scales_leave_room_and_no_more(kernel_device, monkeypatch, border):
    """The sum of the bounds times the scale: at most 2^30, and not below 2^28. Bounds over many powers of two, or on both sides of a border
    between groups, most below it."""
    poison_empty(monkeypatch)
    inputs = make(kernel_device)
    if border:
        inputs[0], inputs[2] = torch.ones_like(inputs[0]), torch.ones_like(inputs[2])
        inputs[4] = torch.full_like(inputs[4], 0.99 * 2**-31 / HEADS)
        inputs[4][:, ::9] *= 1.02
    _, bound, key = rows_of(*inputs)
    total = torch.zeros(2 * KEYS, dtype=torch.float64, device=kernel_device).index_add(0, key.flatten(), bound.flatten())
    scales = make_scales(inputs[0], *inputs[2:], None, 0, 26, 13, KEYS, 2 * KEYS).double()
    assert (scales.frexp().mantissa == 0.5).all()
    used = total > 0
    assert used.sum() > KEYS and (total * scales <= 2**30).all() and (total * scales >= 2**28)[used].all()


def test_in_pieces(kernel_device, monkeypatch):
    """More rows than a sum takes: pieces of queries, each with scales of its own."""
    import indexer.gradients as module

    inputs = make(kernel_device)
    whole = slot_gradients(*inputs, None, True)[1]
    monkeypatch.setattr(module, "MAX_SLOTS", SLOTS * 5)
    assert relative_error(slot_gradients(*inputs, None, True)[1], whole) < 1e-6


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("where, value", [("dscores", torch.nan), ("dscores", -torch.inf), ("weights", torch.inf), ("q", torch.nan)])
def test_what_is_not_finite_reaches_its_keys_alone(kernel_device, where, value):
    inputs = make(kernel_device, batch=1)
    clean = slot_gradients(*inputs, None, True)[1][0]
    q, _, weights, indices, dscores = inputs
    indices[0, 3] = torch.tensor([2, 5, -1, 2, 5, KEYS], dtype=torch.int32)
    dscores[0, 3] = 1.0
    if where == "dscores":
        dscores[0, 3, 1] = value
    else:
        (weights if where == "weights" else q)[0, 3, 0] = value
    got = slot_gradients(*inputs, None, True)[1][0]
    touched = {5} if where == "dscores" else {2, 5}
    assert {s for s in range(KEYS) if not got[s].isfinite().all()} == touched
    assert clean.isfinite().all() and all(got[s].isnan().all() for s in touched)


def test_nothing_to_add(kernel_device, monkeypatch):
    poison_empty(monkeypatch)
    inputs = make(kernel_device)
    inputs[4].zero_()
    inputs[1].fill_(torch.nan)  # not looked at
    assert all((x == 0).all() for x in slot_gradients(*inputs, None, True))
    assert (make_scales(inputs[0], *inputs[2:], None, 0, 26, 13, KEYS, 2 * KEYS) == 2.0**30).all() and GROUPS.value == 8


@pytest.mark.parametrize("form", ["atomics", "whole numbers", "with the loss"])
def test_gradients_too_small_for_a_reciprocal(kernel_device, form):
    """fp16 takes dI as parts of the row's largest one, whose reciprocal may be infinite: exp(-90) beside a slot that has it all."""
    q, k, weights, indices, grad = make(kernel_device, torch.float16, queries=3, batch=1)
    indices.fill_(-1)
    indices[..., :2] = torch.tensor([1, 2], dtype=torch.int32)
    if form == "with the loss":
        loss, counted = torch.empty(3, device=kernel_device), torch.empty(3, dtype=torch.int32, device=kernel_device)
        scores, teacher = torch.zeros_like(grad), torch.zeros_like(grad)
        scores[..., 1], teacher[..., 0] = -90.0, 1.0
        results = loss_and_gradients(q, k, weights, indices, scores, teacher, None, loss, counted, 1, KEYS, False)
        assert (loss == 0).all() and (counted == 1).all()
    else:
        grad.fill_(1e-39)
        results = slot_gradients(q, k, weights, indices, grad, None, form != "atomics")
    assert all(float(x.abs().max()) < 1e-36 for x in results)
