"""The KL loss's kernels against the fp64 reference, in the interpreter and on a GPU.

What is launched: test_kl_launches.py; sizes that only a GPU can take: test_kl_gpu.py.
"""

import dataclasses

import pytest
import torch

from reference.cases import indexer as cases
from reference.cases import relative_error
from tests.kl_util import BSND, FORMS, TND, compare, evaluate, exact, make
from tests.op_checks import poison_empty


@pytest.mark.parametrize("case", [BSND, TND], ids=lambda c: c.name)
@pytest.mark.parametrize("form", FORMS)
def test_loss_and_gradients(kernel_device, monkeypatch, case, form):
    poison_empty(monkeypatch)
    leaves, options = make(case, form, device=kernel_device)
    compare(leaves, options, reduction="mean", coefficient=0.7, deterministic=form.endswith("joint"))


@pytest.mark.parametrize("layout", ["BSND", "TND"])
@pytest.mark.parametrize("form", ["sparse/marginal", "dense/compressed"])
def test_offset_tensor(kernel_device, monkeypatch, layout, form):
    poison_empty(monkeypatch)
    case = dataclasses.replace(BSND if layout == "BSND" else TND, keys=5)
    leaves, options = make(case, form, device=kernel_device)
    offsets = [15, -3] if layout == "BSND" else [30, 2, 11]
    options["q_offset"] = torch.tensor(offsets, dtype=torch.int32, device=kernel_device)
    compare(leaves, options, denominator=torch.tensor(3, device=kernel_device))


@pytest.mark.parametrize("heads, dim, attn_heads, attn_dim", [(1, 16, 1, 16), (64, 128, 5, 512), (70, 10, 70, 32), (2, 64, 128, 80)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("form", ["sparse/compressed", "dense/joint"])
def test_heads_channels_dtypes(kernel_device, monkeypatch, heads, dim, attn_heads, attn_dim, dtype, form):
    poison_empty(monkeypatch)
    sizes = dict(heads=heads, head_dim=dim, attn_heads=attn_heads, attn_dim=attn_dim)
    case = cases.IndexerCase("shape", batch=1, seq=3, q_offset=30, topk=4, **sizes)
    leaves, options = make(case, form, dtype, kernel_device, ties=False)
    leaves[1][..., 2::5, :] = 0  # products of exactly 0: relu'(0) = 0
    compare(leaves, options)


@pytest.mark.parametrize("form", ["given/joint", "sparse/compressed", "sparse/marginal"])
def test_many_slots(kernel_device, monkeypatch, form):
    """More slots than a tile of any kernel, most of them repeats."""
    poison_empty(monkeypatch)
    leaves, options = make(cases.IndexerCase("slots", batch=1, seq=2, q_offset=200, topk=1100, heads=2), form, device=kernel_device)
    compare(leaves, options)


@pytest.mark.parametrize("form", ["dense/joint", "dense/compressed"])
def test_many_blocks_in_chunks(kernel_device, monkeypatch, form):
    """More visible blocks than a tile of any kernel; queries and batch entries in several chunks."""
    import indexer.lightning.fwd as lightning

    poison_empty(monkeypatch)
    case = cases.IndexerCase("blocks", batch=2, seq=9, q_offset=138, cmp_ratio=1, heads=2, attn_heads=1, attn_dim=16)
    leaves, options = make(case, form, device=kernel_device)
    monkeypatch.setattr(lightning, "SCORE_BUFFER", 5 * 147)
    compare(leaves, options)


@pytest.mark.parametrize("form", ["given", "sparse", "dense"])
def test_marginal_is_joint_weighted_by_mass(kernel_device, form):
    """A token at a time: value and gradients of "marginal" are those of "joint" times the teacher's mass on the token's slots."""
    case = dataclasses.replace(BSND, batch=1, seq=4)
    leaves, options = make(case, f"{form}/joint", device=kernel_device, ties=False)
    compared = 0
    for t in range(4):
        token = [x[:, t : t + 1] if i != 1 else x for i, x in enumerate(leaves)]
        mine = {n: x[:, t : t + 1] if n in ("indices", "teacher", "q", "lse") and x is not None else x for n, x in options.items()}
        mine["q_offset"] = case.q_offset + t
        joint, marginal = (evaluate(token, mine | {"target": target}, "triton") for target in ("joint", "marginal"))
        visible = min(leaves[1].shape[1], (mine["q_offset"] + 1) // case.cmp_ratio)
        if form == "dense":
            z = torch.einsum("nd,kd->nk", mine["q"][0, 0], mine["cmp_kv"][0, :visible]) * mine["q"].shape[-1] ** -0.5
            weights = (z - mine["lse"][0, 0, :, None]).exp().mean(0) if mine["lse"].isfinite().all() else None
        else:
            slots = mine["indices"][0, 0]
            valid = (slots >= 0) & (slots < visible)
            if form == "given":
                weights = mine["teacher"][0, 0][valid]
            else:
                z = torch.einsum("nd,kd->nk", mine["q"][0, 0], mine["cmp_kv"][0, slots[valid].long()]) * mine["q"].shape[-1] ** -0.5
                weights = (z - mine["lse"][0, 0, :, None]).exp().mean(0) if mine["lse"].isfinite().all() else None
        if weights is None or weights.sum() == 0:
            continue
        compared += 1
        torch.testing.assert_close(marginal[0], weights.sum() * joint[0], rtol=1e-5, atol=1e-7)
        for one, two in zip(joint[1], marginal[1]):
            torch.testing.assert_close(two, weights.sum() * one, rtol=1e-4, atol=1e-7)
    assert compared >= 2


@pytest.mark.parametrize("form", ["given/joint", "sparse/joint"])
def test_rows_that_do_not_count(kernel_device, form):
    """No valid slot, or no teacher mass: loss 0, zero gradients, not in the mean. What stands at other slots and keys is not looked at."""
    case = dataclasses.replace(BSND, batch=1, seq=5)
    leaves, options = make(case, form, device=kernel_device, ties=False)
    options["indices"] = torch.tensor([3, 1, -1, 2, 99, 3], dtype=torch.int32, device=kernel_device).repeat(1, 5, 1)
    options["indices"][0, 1] = -1
    if form == "given/joint":
        options["teacher"] = torch.rand(1, 5, 6, device=kernel_device) + 0.1
        options["teacher"][0, 3] = 0
        options["teacher"][..., 2] = torch.nan
    else:
        options["lse"][:] = 3.0
        options["lse"][0, 3] = torch.inf
        options["cmp_kv"][:, 0] = torch.nan
    leaves[1][:, 0] = torch.nan  # the row that empty slots point at
    clean = [x.nan_to_num(0.0) for x in leaves]
    clean_options = {n: x.nan_to_num(0.0) if n in ("cmp_kv", "teacher") else x for n, x in options.items()}
    want = exact(clean, clean_options, reduction="mean")
    loss, grads = compare(leaves, options, want, reduction="mean")
    assert all((g[0, [1, 3]] == 0).all() for g in (grads[0], grads[2])) and (grads[1][0, 0] == 0).all()
    total = evaluate(leaves, options, "triton")[0]
    torch.testing.assert_close(total, 3 * loss)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("target", ["joint", "marginal"])
def test_teacher_by_slots_and_by_whole_rows(kernel_device, monkeypatch, whole, target):
    """Both ways to an own teacher, the second in chunks of queries and batch entries."""
    from indexer.kl_loss import fwd
    from indexer.lightning import fwd as lightning
    from kernel_runtime import launch

    seen = []
    poison_empty(monkeypatch)
    monkeypatch.setattr(fwd, "whole_rows_pay", lambda *sizes: whole)
    monkeypatch.setattr(lightning, "SCORE_BUFFER", 2 * 4 * 5)
    monkeypatch.setattr(launch, "LAUNCH_OBSERVERS", [lambda spec, args: seen.append(spec.name)])
    leaves, options = make(BSND, f"sparse/{target}", device=kernel_device)
    compare(leaves, options)
    assert (seen.count("dense_teacher_kernel"), "slot_teacher_kernel" in seen) == ((4, False) if whole else (0, True))


def test_where_whole_rows_pay():
    """Up to 1.6 times as many visible blocks as selected ones."""
    from indexer.kl_loss.fwd import whole_rows_pay

    sizes = ((4096, 512, 0, True), (8192, 512, 0, False), (16384, 2048, 0, True), (16, 512, 16000, False), (8, 512, 0, True))
    for queries, slots, offset, pays in sizes:
        keys = (queries + offset) // 4
        visible = [min(keys, (t + offset + 1) // 4) for t in range(queries)]
        assert whole_rows_pay(queries, keys, slots, 4, offset) == pays
        assert pays == (sum(visible) <= 1.6 * sum(min(v, slots) for v in visible))


def test_single_slot_gives_exact_zero(kernel_device):
    leaves, options = make(dataclasses.replace(BSND, topk=1), "given/joint", device=kernel_device)
    loss, grads = evaluate(leaves, options, "triton")
    assert loss == 0 and all((g == 0).all() for g in grads)


@pytest.mark.parametrize("form", ["given/joint", "sparse/compressed", "dense/compressed"])
def test_large_scores(kernel_device, form):
    """Scores of some thousands and teacher logits of some hundreds: no overflow, and the loss is right."""
    leaves, options = make(dataclasses.replace(BSND, batch=1), form, device=kernel_device, ties=False)
    leaves[2] = leaves[2] * 3000
    if "q" in options:
        options["q"] = options["q"] * 100
    # fp32 scores of this size carry an error of 1e-4, which the softmax turns into as much of a relative error
    want = exact(leaves, options)
    loss, grads = evaluate(leaves, options, "triton")
    assert relative_error(loss, want[0]) < 1e-4
    for got, wanted in zip(grads, want[1]):
        assert got.isfinite().all() and relative_error(got, wanted) < 2e-3


def test_deterministic_in_pieces(kernel_device, monkeypatch):
    """Bit-equal in a second run; in several pieces, and against atomics, the same up to the order of the sum."""
    import indexer.gradients as module

    leaves, options = make(dataclasses.replace(BSND, seq=4), "given/joint", device=kernel_device)
    one, two, fast = (evaluate(leaves, options, "triton", deterministic=x)[1] for x in (True, True, False))
    assert all(torch.equal(a, b) for a, b in zip(one, two))
    monkeypatch.setattr(module, "MAX_SLOTS", BSND.topk * 3)
    pieces = evaluate(leaves, options, "triton", deterministic=True)[1]
    for a, b, c in zip(one, fast, pieces):
        assert relative_error(b, a) < 1e-6 and relative_error(c, a) < 1e-6


def test_backward_scales_as_the_reference_does(kernel_device):
    """Each product rounded once: 1 / 513 is no bf16 or fp16 number, and a scale rounded first would show in most elements."""
    from indexer.kl_loss.bwd import indexer_kl_loss_bwd
    from indexer.kl_loss.op import _scale

    dloss = torch.tensor(1 / 513, device=kernel_device)
    for dtype in (torch.float16, torch.float32) + ((torch.bfloat16,) if kernel_device == "cuda" else ()):  # interpreted bf16 stores truncate
        grads = [torch.randn(5000, device=kernel_device).to(d) for d in (dtype, torch.float32, torch.float32)]
        for weights_dtype in {torch.float32, dtype}:
            for got, want in zip(indexer_kl_loss_bwd(*grads, dloss, 0.7, weights_dtype), _scale(*grads, dloss, 0.7, weights_dtype)):
                assert got.dtype == want.dtype and torch.equal(got, want)


def test_sum_over_more_rows_than_a_block(kernel_device, monkeypatch):
    """The one program that adds the rows up walks over blocks of them: loss and number, the last block short."""
    from indexer.kl_loss import fwd

    monkeypatch.setattr(fwd, "TOTAL_ROWS", 64)
    fwd.total_spec.cache_clear()
    try:
        rows = torch.rand(150, device=kernel_device)
        counted = torch.randint(0, 2, (150,), dtype=torch.int32, device=kernel_device)
        total, count = torch.full((), torch.nan, device=kernel_device), torch.full((), -1, dtype=torch.int32, device=kernel_device)
        fwd.total_spec().launch((1,), rows, counted, total, count, 0.5, 150)
        torch.testing.assert_close(total.double(), 0.5 * rows.double().sum(), rtol=1e-6, atol=0)
        assert count == counted.sum()
    finally:
        fwd.total_spec.cache_clear()
