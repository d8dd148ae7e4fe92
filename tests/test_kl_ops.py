"""indexer_kl_loss: the contract of the public function and of its registered op."""

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import indexer
from indexer import indexer_kl_loss
from indexer.kl_loss import op as kl_op
from reference import indexer_loss as loss_reference
from reference.cases import indexer as cases
from reference.cases import relative_error
from tests.indexer_util import BSND, DTYPES, EMPTY, FORMS, LAYOUTS, TND, K, Q, W, index_inputs, kl_options, layout_of
from tests.op_checks import assert_close, check_checkpoint, check_fullgraph, check_opcheck, gradients, strided_variants


@LAYOUTS
@DTYPES
@pytest.mark.parametrize("form", FORMS)
def test_loss_is_the_reference(case, dtype, form):
    inputs = index_inputs(case, dtype)
    indices, options = kl_options(case, form, dtype)
    options |= dict(reduction="mean", coefficient=0.25)
    want, want_grads = gradients(lambda *x: loss_reference.indexer_kl_loss(*x, indices, **options), inputs)
    for impl in ("auto", "eager"):
        got, grads = gradients(lambda *x, impl=impl: indexer_kl_loss(*x, indices, **options, impl=impl), inputs)
        assert got[0].shape == () and got[0].dtype == torch.float32
        assert_close(got, want, 1e-6, "loss")
        # bf16: the gradients of q are rounded once more, when they are scaled
        assert_close(grads, want_grads, 1e-6 if dtype == torch.float32 else 4e-3, "gradient")
        assert [g.dtype for g in grads] == [x.dtype for x in inputs]


@LAYOUTS
@DTYPES
@pytest.mark.parametrize("form", FORMS)
def test_loss_contract(case, dtype, form):
    inputs = index_inputs(case, dtype, weights_dtype=dtype)
    indices, options = kl_options(case, form, dtype)
    denominator = torch.tensor(11)

    def fn(*x):
        return indexer_kl_loss(*x, indices, **options, denominator=denominator, coefficient=2.0)

    check_fullgraph(fn, inputs)
    check_checkpoint(fn, inputs)
    want = fn(*inputs)
    for position in range(3):
        for variant in strided_variants(inputs[position]):
            assert relative_error(fn(*inputs[:position], variant, *inputs[position + 1 :]), want) < 1e-6
    if "q" in options:
        for name in ("q", "cmp_kv"):
            for variant in strided_variants(options[name]):
                assert relative_error(indexer_kl_loss(*inputs, indices, **options | {name: variant}), want * 11 / 2) < 1e-6


def test_loss_compiled_eager_form():
    indices, options = kl_options(TND, "sparse")
    check_fullgraph(lambda *x: indexer_kl_loss(*x, indices, **options, reduction="mean", impl="eager"), index_inputs(TND))


@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("form", FORMS)
def test_loss_opcheck(case, dtype, form):
    inputs = index_inputs(case, dtype)
    indices, options = kl_options(case, form, dtype)
    _, tensors, numbers = layout_of(case)
    constants = (indices, *(options.get(name) for name in ("teacher", "q", "cmp_kv", "lse", "scores")), *tensors)
    for wanted in (True, False):
        check_opcheck(kl_op.LOSS, (*inputs, *constants, 0.2, 0.7, options["target"], *numbers, wanted, False, "eager"))
    _, _, *grads = kl_op.LOSS(*inputs, *constants, 0.2, 0.7, options["target"], *numbers, True, False, "eager")
    check_opcheck(kl_op.BACKWARD, (*grads, torch.tensor(0.3, dtype=grads[1].dtype), 0.7, inputs[2].dtype, "eager"))


def test_loss_gradcheck_and_double_backward():
    indices, options = kl_options(BSND, "marginal", torch.float64)
    inputs = [x.requires_grad_() for x in index_inputs(BSND, torch.float64, ties=False)]

    def fn(*x):
        return indexer_kl_loss(*x, indices, **options, reduction="mean")

    assert torch.autograd.gradcheck(fn, inputs, fast_mode=True)
    (grad,) = torch.autograd.grad(fn(*inputs).square(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_loss_teacher_side_gets_no_gradient():
    indices, options = kl_options(BSND, "sparse")
    for impl in ("auto", "eager"):
        constants = [options[name].requires_grad_() for name in ("q", "cmp_kv", "lse")]
        loss = indexer_kl_loss(*(x.requires_grad_() for x in index_inputs(BSND)), indices, **options, impl=impl)
        assert torch.autograd.grad(loss, constants, allow_unused=True) == (None, None, None)


def test_loss_teacher_wins_over_the_attention():
    """With a teacher, q, cmp_kv and lse are not used; with "compressed", lse is not."""
    inputs = index_inputs(BSND)
    indices, options = kl_options(BSND, "given")
    attention = cases.make_attention(BSND)
    assert torch.equal(indexer_kl_loss(*inputs, indices, **options), indexer_kl_loss(*inputs, indices, **options, **attention))
    indices, options = kl_options(BSND, "compressed")
    want = indexer_kl_loss(*inputs, indices, **options)
    options["lse"] = None
    assert torch.equal(indexer_kl_loss(*inputs, indices, **options), want)


def test_loss_small_scale_is_not_rounded_to_bf16():
    """1 / 513 is no bf16 number: a scale rounded to bf16 would show in every element of the gradient, in the same direction."""
    indices, options = kl_options(BSND, "sparse", torch.bfloat16)
    inputs = index_inputs(BSND, torch.bfloat16)
    grads = [gradients(lambda *x, n=n: indexer_kl_loss(*x, indices, **options, denominator=n), inputs)[1] for n in (1, torch.tensor(513.0))]
    for whole, scaled in zip(*grads):
        assert abs((scaled.double() * 513 / whole.double()).nanmean().item() - 1) < 3e-4


@pytest.mark.parametrize("impl", ["eager", "auto"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.float16])
def test_loss_has_its_own_dtype_whatever_the_denominator_has(dtype, impl):
    indices, options = kl_options(BSND, "sparse")
    want = indexer_kl_loss(*index_inputs(BSND), indices, **options, denominator=3)
    got = indexer_kl_loss(*index_inputs(BSND), indices, **options, denominator=torch.tensor(3, dtype=dtype), impl=impl)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("shape", (*EMPTY, dict(seq=9, topk=0)), ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_loss_empty(shape, form):
    case = cases.IndexerCase("empty", **{"topk": 3} | shape)
    if form == "dense" and case.topk == 0:
        case = cases.IndexerCase("nothing visible", seq=2)
    indices, options = kl_options(case, form)
    (loss,), grads = gradients(lambda *x: indexer_kl_loss(*x, indices, **options, reduction="mean"), index_inputs(case))
    assert loss == 0 and all((g == 0).all() for g in grads)


INDICES = torch.zeros(2, 6, 3, dtype=torch.int32)
ATTENTION = dict(q=torch.zeros(2, 6, 2, 16), cmp_kv=torch.zeros(2, 3, 16), lse=torch.zeros(2, 6, 2))
TEACHER = torch.zeros(2, 6, 3)


@pytest.mark.parametrize(
    "indices, kwargs, error, message",
    [
        (INDICES.long(), ATTENTION, TypeError, "indices has dtype int64, wanted int32"),
        (INDICES[:, :5], ATTENTION, ValueError, r"indices has shape \[2, 5, 3\], wanted \[2, 6, K\]"),
        (None, dict(teacher=TEACHER), ValueError, "teacher with indices=None"),
        (INDICES, dict(teacher=TEACHER, target="compressed"), ValueError, "target='compressed' cannot be made from a given teacher"),
        (INDICES, dict(teacher=TEACHER.bfloat16()), TypeError, "teacher has dtype bfloat16, wanted float32"),
        (INDICES, dict(teacher=TEACHER[..., :2]), ValueError, r"teacher has shape \[2, 6, 2\], wanted \[2, 6, 3\]"),
        (INDICES, {}, ValueError, "q, cmp_kv, lse missing; without a teacher, target='joint' needs q, cmp_kv, lse"),
        (INDICES, ATTENTION | dict(lse=None), ValueError, "lse missing"),
        (INDICES, ATTENTION | dict(lse=None, target="marginal"), ValueError, "lse missing"),
        (INDICES, dict(q=ATTENTION["q"], target="compressed"), ValueError, "cmp_kv missing; .* needs q, cmp_kv$"),
        (INDICES, ATTENTION | dict(q=ATTENTION["q"].int()), TypeError, "q has dtype int32"),
        (INDICES, ATTENTION | dict(q=ATTENTION["q"][0]), ValueError, r"q has shape \[6, 2, 16\], wanted \[2, 6, N, D\]"),
        (INDICES, ATTENTION | dict(cmp_kv=ATTENTION["cmp_kv"].bfloat16()), TypeError, "cmp_kv has dtype bfloat16 but q has float32"),
        (INDICES, ATTENTION | dict(cmp_kv=ATTENTION["cmp_kv"][:, :2]), ValueError, r"cmp_kv has shape \[2, 2, 16\], wanted \[2, 3, 16\]"),
        (INDICES, ATTENTION | dict(lse=ATTENTION["lse"].bfloat16()), TypeError, "lse has dtype bfloat16, wanted float32"),
        (INDICES, ATTENTION | dict(lse=ATTENTION["lse"][..., :1]), ValueError, r"lse has shape \[2, 6, 1\], wanted \[2, 6, 2\]"),
        (INDICES, ATTENTION | dict(target="mean"), ValueError, "target must be one of 'joint', 'compressed', 'marginal', got 'mean'"),
        (INDICES, ATTENTION | dict(reduction="none"), ValueError, "reduction must be one of 'sum', 'mean', got 'none'"),
        (INDICES, ATTENTION | dict(denominator=0), ValueError, "denominator must be positive, got 0"),
        (INDICES, ATTENTION | dict(denominator=True), TypeError, "denominator must be a number, got bool"),
        (INDICES, ATTENTION | dict(denominator=torch.ones(2)), ValueError, r"denominator has shape \[2\], wanted \[\]"),
        (INDICES, ATTENTION | dict(denominator=torch.ones((), device="meta")), ValueError, "denominator is on meta"),
        (INDICES, ATTENTION | dict(coefficient="1"), TypeError, "coefficient must be a number, got str"),
        (INDICES, ATTENTION | dict(softmax_scale=torch.ones(())), TypeError, "softmax_scale must be a number, got Tensor"),
        (INDICES, ATTENTION | dict(softmax_scale=float("nan")), ValueError, "softmax_scale must be finite, got nan"),
        (INDICES, ATTENTION | dict(coefficient=float("inf")), ValueError, "coefficient must be finite, got inf"),
        (INDICES, ATTENTION | dict(denominator=float("inf")), ValueError, "denominator must be finite, got inf"),
        (INDICES, ATTENTION | dict(denominator=torch.tensor(True)), TypeError, "denominator has dtype bool, wanted a real number"),
        (INDICES, ATTENTION | dict(denominator=torch.tensor(1j)), TypeError, "denominator has dtype complex64, wanted a real number"),
        (INDICES, ATTENTION | dict(lse=ATTENTION["lse"].double()), TypeError, "lse has dtype float64, wanted float32"),
        (INDICES, dict(teacher=TEACHER.double()), TypeError, "teacher has dtype float64, wanted float32"),
        (None, ATTENTION | dict(scores=TEACHER), ValueError, "scores with indices=None"),
        (INDICES, ATTENTION | dict(scores=TEACHER.bfloat16()), TypeError, "scores has dtype bfloat16, wanted float32"),
        (INDICES, ATTENTION | dict(scores=TEACHER[..., :2]), ValueError, r"scores has shape \[2, 6, 2\], wanted \[2, 6, 3\]"),
        (INDICES.to_sparse(), ATTENTION, TypeError, "indices must be a strided tensor, got layout sparse_coo"),
    ],
)
def test_loss_errors(indices, kwargs, error, message):
    with pytest.raises(error, match="indexer_kl_loss: " + message):
        indexer_kl_loss(Q, K, W, indices, **kwargs)


@pytest.mark.parametrize("how, runs", [("none", 1), ("full", 2), ("policy", 1), ("list", 1)])
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_policy_runs_the_loss_once(how, runs, compiled, monkeypatch):
    count = []
    rows = loss_reference.indexer_kl_rows  # what the op runs on a CPU, once each time it runs
    monkeypatch.setattr(loss_reference, "indexer_kl_rows", lambda *args, **kwargs: count.append(1) or rows(*args, **kwargs))
    indices, options = kl_options(BSND, "sparse")
    inputs = index_inputs(BSND)

    def layer(q, k, weights):
        return indexer_kl_loss(q.sin(), k.sin(), weights * 2, indices, **options, denominator=3)

    kept = {"policy": indexer.save_kl_policy, "list": list(indexer.KL_OPS)}.get(how)
    extra = {} if kept is None else dict(context_fn=partial(create_selective_checkpoint_contexts, kept))

    def fn(*x):
        return layer(*x) if how == "none" else checkpoint(layer, *x, use_reentrant=False, **extra)

    want, want_grads = gradients(layer, inputs)
    if compiled:
        torch._dynamo.reset()
        fn = torch.compile(fn, fullgraph=True, backend="aot_eager")
    count.clear()
    got, grads = gradients(fn, inputs)
    assert len(count) == runs
    assert_close(got, want, 0.0 if not compiled else 1e-6, "loss")
    assert_close(grads, want_grads, 0.0 if not compiled else 1e-6, "gradient")


def test_no_gradients_are_computed_when_none_is_wanted():
    indices, options = kl_options(BSND, "sparse")
    inputs = index_inputs(BSND)
    want = indexer_kl_loss(*(x.requires_grad_() for x in inputs), indices, **options)
    seen = []

    class See(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is kl_op.LOSS:
                seen.append([x.numel() for x in out[2:]])
            return out

    with See(), torch.no_grad():
        assert torch.equal(indexer_kl_loss(*inputs, indices, **options), want.detach())
    assert seen == [[0, 0, 0]]


def test_deterministic_follows_torch(monkeypatch):
    """None asks torch; the op gets the answer as an argument."""
    indices, options = kl_options(BSND, "given")
    seen = []

    class See(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is kl_op.LOSS:
                seen.append(args[-2])
            return func(*args, **(kwargs or {}))

    with See():
        for answer, asked in ((False, None), (True, None), (True, False), (False, True)):
            monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda answer=answer: answer)
            indexer_kl_loss(*index_inputs(BSND), indices, **options, deterministic=asked)
    assert seen == [False, True, False, True]
