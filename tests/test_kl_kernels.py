"""The KL loss's kernels against the fp64 reference, in the interpreter and on a GPU."""

import dataclasses
from functools import partial

import pytest
import torch

from indexer import indexer_kl_loss
from kernel_runtime import interpreting
from kernel_runtime.registry import registered_specs, shape_of
from reference.cases import indexer as cases
from reference.cases import relative_error
from tests.op_checks import check_checkpoint, check_fullgraph, check_opcheck, poison_empty

# form of the call / target
FORMS = ("given/joint", "given/marginal", *(f"{form}/{target}" for form in ("sparse", "dense") for target in ("joint", "compressed", "marginal")))
BSND = cases.IndexerCase("BSND", batch=2, seq=7, q_offset=13, topk=6, heads=3)
TND = cases.IndexerCase("TND", documents=(6, 0, 5), padding=2, q_offset=9, topk=5, attn_heads=2, attn_dim=48)
# 16 bit: dS' and the results are rounded; the interpreter truncates bf16 stores, which doubles their error
LIMIT = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2 if interpreting() else 6e-3}


def make(case, form, dtype=torch.float32, device="cpu", ties=True):
    """(leaves, keyword arguments): indices with holes, repeats, indices out of range or not yet visible, rows without any."""
    kind, target = form.split("/")
    leaves = list(cases.make_indexer(case, dtype, device=device, ties=ties).values())
    options = dict(target=target, **cases.layout(case, device))
    options["indices"] = None if kind == "dense" else cases.make_indices(case, device=device)
    if kind == "given":
        options["teacher"] = cases.make_teacher(case, device=device)
    else:
        options |= cases.make_attention(case, dtype, device=device)
        options["lse"][..., 3::4, 1:] = -torch.inf  # heads that saw nothing
    return leaves, options


def evaluate(leaves, options, impl, **more):
    """Loss and the gradients of q, k, weights."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    loss = indexer_kl_loss(*leaves, **options, impl=impl, **more)
    return loss.detach(), torch.autograd.grad(loss, leaves)


def exact(leaves, options, **more):
    """The same in fp64, by the reference under autograd."""
    wide = {name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for name, x in options.items()}
    return evaluate([x.double() for x in leaves], wide, "eager", **more)


def compare(leaves, options, want=None, loss_limit=2e-6, **more):
    want = exact(leaves, options, **{n: x for n, x in more.items() if n != "deterministic"}) if want is None else want
    loss, grads = evaluate(leaves, options, "triton", **more)
    assert loss.dtype == torch.float32 and loss.shape == ()
    assert abs(loss.item() - want[0].item()) <= loss_limit * max(1.0, abs(want[0].item())), f"{loss.item()} against {want[0].item()}"
    for name, x, got, wanted in zip(("dq", "dk", "dw"), leaves, grads, want[1]):
        assert got.dtype == x.dtype and got.shape == x.shape
        scale = wanted.double().norm().item()
        limit = LIMIT[leaves[0].dtype]
        assert (relative_error(got, wanted) <= limit) if scale > 1e-12 else (got.double().norm().item() < 1e-6), (
            f"{name}: {relative_error(got, wanted):.1e} allowed {limit:.0e}"
        )
    return loss, grads


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


@pytest.mark.parametrize("form", ["given/joint", "sparse/marginal"])
def test_scores_of_the_forward(kernel_device, monkeypatch, form):
    """With the selection's own scores nothing is computed again, and value and gradients are the same."""
    from indexer import lightning_indexer
    from kernel_runtime import launch

    poison_empty(monkeypatch)
    seen = []
    for case in (BSND, TND):
        leaves, options = make(case, form, device=kernel_device)
        layout = {n: options[n] for n in ("cmp_ratio", "q_offset", "cu_seqlens_q", "cu_seqlens_k") if n in options}
        options["indices"], scores = lightning_indexer(*leaves, case.topk, **layout, impl="triton")
        want = evaluate(leaves, options, "triton", deterministic=True)
        kept = scores.clone()
        with monkeypatch.context() as patch:
            patch.setattr(launch, "LAUNCH_OBSERVERS", [lambda spec, args: seen.append(spec.name)])
            loss, _ = compare(leaves, options | dict(scores=scores), deterministic=True)
        torch.testing.assert_close(loss, want[0], rtol=1e-6, atol=1e-7)
        assert torch.equal(scores, kept)
    assert "rows_kernel" in seen and "slot_scores_kernel" not in seen


@pytest.mark.parametrize("case", [BSND, TND], ids=lambda c: c.name)
@pytest.mark.parametrize("how, runs", [("full", 2), ("policy", 1)])
def test_scores_of_the_forward_under_checkpointing(kernel_device, monkeypatch, case, how, runs):
    """Selection and loss in one checkpointed layer: the selection that runs again gives the same slots and scores; the policy keeps the loss.

    New memory is not poisoned here: an older torch's checkpoint makes an empty leaf by torch.empty, which cannot be filled.
    """
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    from indexer import lightning_indexer, save_kl_policy
    from kernel_runtime import launch

    leaves, options = make(case, "sparse/joint", device=kernel_device)
    del options["indices"]
    layout = {n: options[n] for n in ("cmp_ratio", "q_offset", "cu_seqlens_q", "cu_seqlens_k") if n in options}

    def layer(*x):
        with torch.no_grad():
            indices, scores = lightning_indexer(*x, case.topk, **layout, impl="triton")
        return indexer_kl_loss(*x, indices, scores=scores, **options, deterministic=True, impl="triton")

    def run(fn):
        seen = []
        with monkeypatch.context() as patch:
            patch.setattr(launch, "LAUNCH_OBSERVERS", [lambda spec, args: seen.append(spec.name)])
            x = [x.detach().requires_grad_() for x in leaves]
            loss = fn(*x)
            grads = torch.autograd.grad(loss, x)
        return loss.detach(), grads, seen.count("rows_kernel")

    contexts = {} if how == "full" else dict(context_fn=partial(create_selective_checkpoint_contexts, save_kl_policy))
    want, wanted, once = run(layer)
    loss, grads, times = run(lambda *x: checkpoint(layer, *x, use_reentrant=False, **contexts))
    assert times == runs * once and torch.equal(loss, want)
    assert all(torch.equal(a, b) for a, b in zip(grads, wanted))


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


@pytest.mark.parametrize("how, runs", [("full", 2), ("policy", 1)])
def test_policy_runs_the_kernels_once(kernel_device, monkeypatch, how, runs):
    from functools import partial

    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    from indexer import save_kl_policy
    from kernel_runtime import launch

    seen = []
    monkeypatch.setattr(launch, "LAUNCH_OBSERVERS", [lambda spec, args: seen.append(spec.name)])
    leaves, options = make(dataclasses.replace(BSND, batch=1, seq=2), "given/joint", device=kernel_device)
    leaves = [x.requires_grad_() for x in leaves]
    extra = dict(context_fn=partial(create_selective_checkpoint_contexts, save_kl_policy)) if how == "policy" else {}

    def layer(q, k, weights):
        return indexer_kl_loss(q * 2, k * 2, weights * 2, **options, impl="triton")

    checkpoint(layer, *leaves, use_reentrant=False, **extra).backward()
    for name in ("slot_scores_kernel", "rows_kernel", "gradients_kernel"):
        assert seen.count(name) == runs
    assert all(x.grad.abs().sum() > 0 for x in leaves)


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
    monkeypatch.setattr(module, "PARTIAL_BYTES", 4 * BSND.topk * BSND.head_dim * 3)
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


def test_backward_that_comes_again(kernel_device):
    """From the third call on a GPU starts the backward's launch over with new addresses; values, dtypes and factors change on the way."""
    leaves, options = make(BSND, "given/joint", device=kernel_device)
    for factor in (1.0, 1.0, 1.0, 0.5, 1.0, 0.5, 0.5) if kernel_device == "cuda" else (1.0, 0.5):
        leaves = [torch.randn_like(x) for x in leaves]
        compare(leaves, options, coefficient=factor)
    for _ in range(4 if kernel_device == "cuda" else 0):
        compare([leaves[0].half(), leaves[1].half(), leaves[2]], options, coefficient=0.5)


def test_no_gradients_wanted(kernel_device):
    """Without a leaf that wants a gradient only the value is computed."""
    from kernel_runtime.launch import LAUNCH_OBSERVERS

    seen = []
    for form in ("given/joint", "dense/joint"):
        leaves, options = make(dataclasses.replace(BSND, batch=1, seq=3), form, device=kernel_device)
        LAUNCH_OBSERVERS.append(lambda spec, args: seen.append(spec.name))
        try:
            with torch.no_grad():
                loss = indexer_kl_loss(*leaves, **options, impl="triton")
        finally:
            LAUNCH_OBSERVERS.pop()
        torch.testing.assert_close(loss.double(), exact(leaves, options)[0], rtol=1e-6, atol=1e-6)
    assert "rows_kernel" in seen and not any("gradient" in name or "dense_d" in name for name in seen)


@pytest.mark.parametrize("form", ["given/joint", "dense/marginal"])
def test_contract_with_kernels(kernel_device, form):
    """Compiled, checkpointed, strided, and as a registered op: the kernels inside."""
    case = dataclasses.replace(BSND, batch=1, seq=2)
    leaves, options = make(case, form, device=kernel_device, ties=False)

    def fn(*x):
        return indexer_kl_loss(*x, **options, impl="triton", reduction="mean", deterministic=True)

    check_fullgraph(fn, leaves)
    check_checkpoint(fn, leaves)
    turned = [x.transpose(0, -1).contiguous().transpose(0, -1) for x in leaves]
    torch.testing.assert_close(fn(*turned), fn(*leaves), rtol=0, atol=0)
    from indexer.kl_loss import op

    constants = [options.get(name) for name in ("indices", "teacher", "q", "cmp_kv", "lse", "scores")]
    layout = (case.cmp_ratio, None, None, case.q_offset, None)
    check_opcheck(op.LOSS, (*leaves, *constants, 0.2, 0.7, options["target"], *layout, True, True, "triton"))


@pytest.mark.parametrize(
    "sizes, message",
    [
        (dict(head_dim=144), "Di = 144; kernels take at most 128 channels"),
        (dict(topk=4097), "4097 slots a query; kernels take at most 4096"),
        (dict(attn_heads=129), "q has N = 129 heads; kernels take at most 128"),
        (dict(attn_dim=24), "q has D = 24 channels; kernels take multiples of 16 up to 512"),
        (dict(attn_dim=528), "q has D = 528 channels; kernels take multiples of 16 up to 512"),
    ],
)
def test_what_the_kernels_do_not_cover(sizes, message):
    """An explicit request is refused with the reason; "auto" takes the reference."""
    case = dataclasses.replace(BSND, batch=1, seq=2, **sizes)
    leaves, options = make(case, "sparse/joint")
    with pytest.raises(ValueError, match=message):
        indexer_kl_loss(*leaves, **options, impl="triton")
    torch.testing.assert_close(indexer_kl_loss(*leaves, **options), indexer_kl_loss(*leaves, **options, impl="eager"))


def test_specs_are_those_of_the_launcher(kernel_device, monkeypatch):
    """Every kernel that the forms launch for a model is in the registry, so that warmup compiles it."""
    from kernel_runtime.launch import LAUNCH_OBSERVERS

    shape = dataclasses.replace(shape_of("tiny"), heads=2, head_dim=16, index_heads=2, index_dim=16, index_topk=4)
    known = {spec.identity for op, spec in registered_specs(shape) if op.startswith("indexer")}
    seen = []
    LAUNCH_OBSERVERS.append(lambda spec, args: seen.append(spec))
    try:
        for layout in (dict(batch=1, seq=2), dict(documents=(2,))):
            case = cases.IndexerCase("specs", **layout, q_offset=8, heads=2, head_dim=16, topk=4, attn_heads=2, attn_dim=16)
            for form in FORMS:
                leaves, options = make(case, form, device=kernel_device)
                evaluate(leaves, options, "triton", deterministic="dense" in form or "given" in form)
    finally:
        LAUNCH_OBSERVERS.pop()
    missing = {spec.name for spec in seen if spec.identity not in known}
    assert seen and not missing


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_model_sizes_on_a_gpu(form):
    """More rows and keys than the interpreter can take, in bf16, against fp64 on the same numbers."""
    for case in (
        cases.IndexerCase("flash", batch=1, seq=1200, heads=64, head_dim=128, topk=512, attn_heads=64, attn_dim=512),
        cases.IndexerCase("packed", documents=(700, 90, 1, 2100), heads=8, head_dim=64, topk=256, attn_heads=128, attn_dim=64),
    ):
        leaves, options = make(case, form, torch.bfloat16, "cuda", ties=False)
        compare(leaves, options, loss_limit=1e-4, reduction="mean")


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["sparse/joint", "dense/joint"])
def test_deterministic_on_a_gpu(form):
    leaves, options = make(cases.IndexerCase("flash", batch=1, seq=3000, **cases.FLASH), form, torch.bfloat16, "cuda")
    first = evaluate(leaves, options, "triton", deterministic=True)
    for _ in range(3):
        again = evaluate(leaves, options, "triton", deterministic=True)
        assert torch.equal(first[0], again[0]) and all(torch.equal(a, b) for a, b in zip(first[1], again[1]))


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["given/joint", "sparse/compressed", "dense/joint"])
def test_memory_on_a_gpu(form):
    """Beyond inputs and gradients: two fp32 numbers a slot, or two chunks of 128 MiB and partial dk; nothing of slots x heads."""
    case = cases.IndexerCase("flash", batch=1, seq=16384, **cases.FLASH)
    leaves, options = make(case, form, torch.bfloat16, "cuda")
    leaves = [x.requires_grad_() for x in leaves]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = indexer_kl_loss(*leaves, **options, impl="triton")
    torch.cuda.synchronize()
    held = leaves[0].nbytes + 2 * leaves[1].nbytes + leaves[2].nbytes
    slots = 2 * 4 * 16384 * 512 if form != "dense/joint" else 2 * 2**27 + 2**26
    assert torch.cuda.max_memory_allocated() - before < held + slots + 2**24, loss
