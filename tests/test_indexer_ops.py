"""lightning_indexer: the contract of the public function and of its registered op, and what both functions of the indexer share.

The loss: test_kl_ops.py.
"""

from functools import partial

import pytest
import torch

from indexer import indexer_kl_loss, lightning_indexer
from indexer.lightning import op as lightning_op
from reference import indexer as reference
from reference import indexer_loss as loss_reference
from reference.cases import indexer as cases
from tests.indexer_util import BSND, DTYPES, EMPTY, LAYOUTS, TND, K, Q, W, finite_topk, index_inputs, kl_options, layout_of
from tests.op_checks import assert_close, check_checkpoint, check_fullgraph, check_opcheck, gradients, strided_variants


@LAYOUTS
@DTYPES
def test_indexer_is_the_reference(case, dtype):
    inputs = index_inputs(case, dtype)
    for impl in ("auto", "eager"):
        (indices, scores), grads = gradients(partial(finite_topk, case=case, impl=impl), inputs)
        (want_indices, want_scores), want_grads = gradients(
            lambda *x: reference.lightning_indexer(*x, case.topk, **cases.layout(case)), inputs
        )
        assert torch.equal(indices, want_indices) and indices.dtype == torch.int32
        assert torch.equal(scores, want_scores.masked_fill(want_indices < 0, 0)) and scores.dtype == torch.float32
        assert_close(grads, want_grads, 1e-6 if dtype == torch.float32 else 1e-2, "gradient")
        assert [g.dtype for g in grads] == [x.dtype for x in inputs]


@LAYOUTS
@DTYPES
def test_indexer_contract(case, dtype):
    inputs = index_inputs(case, dtype, weights_dtype=dtype)
    fn = partial(finite_topk, case=case)
    check_fullgraph(fn, inputs)
    check_checkpoint(fn, inputs)
    inputs = index_inputs(case, dtype, weights_dtype=dtype, ties=False)  # another layout rounds another way, so ties may break elsewhere
    want = fn(*inputs)
    for position in range(3):
        for variant in strided_variants(inputs[position]):
            got = fn(*inputs[:position], variant, *inputs[position + 1 :])
            assert torch.equal(got[0], want[0])
            assert_close(got[1:], want[1:], 1e-6, "scores of a strided input")


def test_indexer_compiled_eager_form():
    check_fullgraph(partial(finite_topk, case=TND, impl="eager"), index_inputs(TND))


@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_indexer_opcheck(case, dtype):
    inputs = index_inputs(case, dtype)
    _, tensors, numbers = layout_of(case)
    check_opcheck(lightning_op.FORWARD, (*inputs, *tensors, case.topk, *numbers, True, 0, "eager"))
    indices, scores = lightning_op.FORWARD(*inputs, *tensors, case.topk, *numbers, True, 0, "eager")
    check_opcheck(lightning_op.BACKWARD, (torch.randn_like(scores), *inputs, indices, *tensors[:2], False, "eager"))


def test_indexer_gradcheck_and_double_backward():
    inputs = [x.requires_grad_() for x in index_inputs(TND, torch.float64, ties=False)]
    assert torch.autograd.gradcheck(lambda *x: finite_topk(*x, case=TND)[1], inputs, fast_mode=True)
    (grad,) = torch.autograd.grad(finite_topk(*inputs, case=TND)[1].square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_indexer_indices_are_not_differentiable():
    indices, scores = lightning_indexer(*(x.requires_grad_() for x in index_inputs(BSND)), BSND.topk)
    assert not indices.requires_grad and scores.requires_grad


@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_indexer_empty(shape):
    case = cases.IndexerCase("empty", **shape, topk=3)
    (indices, scores), grads = gradients(partial(finite_topk, case=case), index_inputs(case))
    assert indices.shape == scores.shape == (*index_inputs(case)[2].shape[:-1], 3) and (indices == -1).all()
    assert all((g == 0).all() for g in grads)


QT, KT, WT = torch.zeros(6, 4, 8), torch.zeros(3, 8), torch.zeros(6, 4)
CU, CK = torch.tensor([0, 4, 6], dtype=torch.int32), torch.tensor([0, 2, 3], dtype=torch.int32)
# errors of the arguments that both functions share: (q, k, weights), keyword arguments, error, message
SHARED_ERRORS = [
    ((None, K, W), {}, TypeError, "{q} must be a torch.Tensor, got NoneType"),
    ((Q.int(), K, W), {}, TypeError, "{q} has dtype int32, wanted bfloat16"),
    ((QT, K, W), {}, ValueError, r"{q} has shape \[6, 4, 8\], wanted \[B, S, H, Di\]"),
    ((Q[:, :, :0], K, W[..., :0]), {}, ValueError, r"{q} has shape \[2, 6, 0, 8\], wanted at least one head"),
    ((Q, K[:1], W), {}, ValueError, r"{k} has shape \[1, 3, 8\], wanted \[2, S3, 8\]"),
    ((Q, K[..., :4], W), {}, ValueError, r"{k} has shape \[2, 3, 4\], wanted \[2, S3, 8\]"),
    ((Q, K.bfloat16(), W), {}, TypeError, "{k} has dtype bfloat16 but {q} has float32; they must be equal"),
    ((Q, K.to("meta"), W), {}, ValueError, "{k} is on meta but {q} is on cpu"),
    ((Q, K, W[:, :5]), {}, ValueError, r"weights has shape \[2, 5, 4\], wanted \[2, 6, 4\]"),
    ((Q, K, W.half()), {}, TypeError, "weights has dtype float16, wanted float32$"),
    ((Q.bfloat16(), K.bfloat16(), W.half()), {}, TypeError, "weights has dtype float16, wanted float32, bfloat16"),
    ((Q, K, W), dict(cmp_ratio=0), ValueError, "cmp_ratio must be at least 1, got 0"),
    ((Q, K, W), dict(cmp_ratio=4.0), TypeError, "cmp_ratio must be an int, got float"),
    ((Q, K, W), dict(cmp_ratio=2**31), ValueError, "cmp_ratio must be at most 2147483647, got 2147483648"),
    ((QT, KT, WT), dict(cu_seqlens_q=CU), ValueError, "cu_seqlens_q without cu_seqlens_k"),
    ((Q, K, W), dict(cu_seqlens_k=CK), ValueError, "cu_seqlens_k without cu_seqlens_q"),
    ((Q, K, W), dict(cu_seqlens_q=CU, cu_seqlens_k=CK), ValueError, r"{q} has shape \[2, 6, 4, 8\], wanted \[T, H, Di\]"),
    ((QT, KT, WT), dict(cu_seqlens_q=CU.long(), cu_seqlens_k=CK), TypeError, "cu_seqlens_q has dtype int64, wanted int32"),
    ((QT, KT, WT), dict(cu_seqlens_q=CU, cu_seqlens_k=CK[:2]), ValueError, "cu_seqlens_q has 3 entries but cu_seqlens_k has 2"),
    ((QT, KT, WT), dict(cu_seqlens_q=CU[:0], cu_seqlens_k=CK[:0]), ValueError, "cu_seqlens_q is empty"),
    ((Q, K, W), dict(q_offset=1.5), TypeError, "q_offset must be an int, an int32 tensor or None, got float"),
    ((Q, K, W), dict(q_offset=2**31 - 6), ValueError, "q_offset must be at most 2147483641, got 2147483642"),
    ((Q.to_sparse(), K, W), {}, TypeError, "{q} must be a strided tensor, got layout sparse_coo"),
    ((Q, K, W), dict(q_offset=torch.zeros(2)), TypeError, "q_offset has dtype float32, wanted int32"),
    ((Q, K, W), dict(q_offset=torch.zeros(3, dtype=torch.int32)), ValueError, r"q_offset has shape \[3\], wanted \[2\]"),
    ((Q, K, W), dict(deterministic=1), TypeError, "deterministic must be a bool, got int"),
    ((Q, K, W), dict(impl="cuda"), ValueError, "impl must be one of 'auto', 'triton', 'eager', got 'cuda'"),
    ((Q.double(), K.double(), W.double()), dict(impl="triton"), ValueError, "impl='triton' cannot run here: kernels take bf16"),
]


@pytest.mark.parametrize("args, kwargs, error, message", SHARED_ERRORS)
def test_shared_errors(args, kwargs, error, message):
    with pytest.raises(error, match="lightning_indexer: " + message.format(q="q", k="k")):
        lightning_indexer(*args, 2, **kwargs)
    indices = torch.zeros(2, 6, 3, dtype=torch.int32) if isinstance(args[0], torch.Tensor) and args[0].dim() == 4 else None
    attention = dict(q=torch.zeros(*Q.shape[:2], 2, 16), cmp_kv=torch.zeros(2, 3, 16), lse=torch.zeros(2, 6, 2))
    with pytest.raises(error, match="indexer_kl_loss: " + message.format(q="q_index", k="k_index")):
        indexer_kl_loss(*args, indices, **attention, **kwargs)


@pytest.mark.parametrize(
    "topk, kwargs, error, message",
    [
        (0, {}, ValueError, "topk must be at least 1, got 0"),
        (-3, {}, ValueError, "topk must be at least 1, got -3"),
        (2.0, {}, TypeError, "topk must be an int, got float"),
        (2, dict(query_chunk=0), ValueError, "query_chunk must be at least 1, got 0"),
        (2, dict(query_chunk=True), TypeError, "query_chunk must be an int, got bool"),
        (2, dict(sorted=1), TypeError, "sorted must be a bool, got int"),
    ],
)
def test_indexer_errors(topk, kwargs, error, message):
    with pytest.raises(error, match="lightning_indexer: " + message):
        lightning_indexer(Q, K, W, topk, **kwargs)


@pytest.mark.parametrize("wanted", [False, True])
def test_eager_form_inside_the_op_is_deterministic_too(monkeypatch, wanted):
    """PyTorch's switch is on while the eager gradients are made, and as it was afterwards."""
    seen = []
    for module, name in ((loss_reference, "kl_of_rows"), (reference, "selected_scores")):
        original = getattr(module, name)
        note = lambda *a, f=original, **k: seen.append(torch.are_deterministic_algorithms_enabled()) or f(*a, **k)  # noqa: E731 - bound to this pass of the loop
        monkeypatch.setattr(module, name, note)
    indices, options = kl_options(BSND, "given")
    leaves = [x.requires_grad_() for x in index_inputs(BSND)]
    indexer_kl_loss(*leaves, indices, **options, deterministic=wanted).backward()
    lightning_indexer(*leaves, BSND.topk, deterministic=wanted)[1].nan_to_num(neginf=0).sum().backward()
    assert seen == [wanted, wanted] and not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("op", ["scores", "loss"])
def test_one_tensor_in_two_places_in_one_graph(op):
    """Queries and keys of the same documents share their cuts, and the tensors of the main attention may be the indexer's own."""
    gen = torch.Generator().manual_seed(3)
    q, k, w, lse = (torch.randn(shape, generator=gen) for shape in ((6, 2, 8), (6, 8), (6, 2), (6, 2)))
    cu, indices = torch.tensor([0, 2, 2, 6], dtype=torch.int32), torch.tensor([0, -1, 2], dtype=torch.int32).expand(6, 3)

    def run(q, k, w):
        options = {"cmp_ratio": 1, "cu_seqlens_q": cu, "cu_seqlens_k": cu}
        if op == "loss":
            return indexer_kl_loss(q, k, w, indices, q=q, cmp_kv=k, lse=lse, **options)
        scores = lightning_indexer(q, k, w, 2, **options)[1]
        return torch.where(scores.isinf(), 0.0, scores).sin().sum()

    results = []
    for fn in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        tensors = [x.clone().requires_grad_() for x in (q, k, w)]
        value = fn(*tensors)
        value.backward()
        results.append([value, *(x.grad for x in tensors)])
    for want, got in zip(*results, strict=True):
        assert want.abs().sum() > 0
        torch.testing.assert_close(got, want)
