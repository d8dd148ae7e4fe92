"""The KL loss's kernels: which of them run, when, and under checkpointing and torch.compile."""

import dataclasses
from functools import partial

import pytest
import torch

from indexer import indexer_kl_loss
from kernel_runtime.registry import registered_specs, shape_of
from reference.cases import indexer as cases
from tests.kl_util import BSND, FORMS, TND, compare, evaluate, exact, make
from tests.op_checks import check_checkpoint, check_fullgraph, check_opcheck, poison_empty


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
        scores = torch.where(options["indices"] < 0, torch.nan, scores)  # which is not looked at
        kept = scores.clone()
        for deterministic in (True, False):
            with monkeypatch.context() as patch:
                patch.setattr(launch, "LAUNCH_OBSERVERS", [lambda spec, args: seen.append(spec.name)])
                loss, _ = compare(leaves, options | dict(scores=scores), deterministic=deterministic)
            torch.testing.assert_close(loss, want[0], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(scores, kept, rtol=0, atol=0, equal_nan=True)
    assert {"rows_kernel", "loss_gradients_kernel"} <= set(seen) and "slot_scores_kernel" not in seen


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
    for name in ("slot_scores_kernel", "loss_gradients_kernel"):
        assert seen.count(name) == runs
    assert all(x.grad.abs().sum() > 0 for x in leaves)


def test_calls_that_come_again(kernel_device):
    """From the third call on a GPU starts the launches over with new addresses; values, dtypes, factors and forms change on the way."""
    leaves, options = make(BSND, "given/joint", device=kernel_device)
    for factor in (1.0, 1.0, 1.0, 0.5, 1.0, 0.5, 0.5) if kernel_device == "cuda" else (1.0, 0.5):
        leaves = [torch.randn_like(x) for x in leaves]
        compare(leaves, options, coefficient=factor)
    for _ in range(4 if kernel_device == "cuda" else 0):
        compare([leaves[0].half(), leaves[1].half(), leaves[2]], options, coefficient=0.5)
        leaves = [torch.randn_like(x) for x in leaves]
        compare(leaves, options, deterministic=True)


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
    rest = (0.2, 0.7, options["target"], case.cmp_ratio, case.q_offset, True, True, "triton")
    check_opcheck(op.LOSS, (*leaves, *constants, None, None, None, *rest))


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
