"""The public functions of sparse_attn as ops: registration, one graph, checkpointing, strides, empty inputs.

Numbers are the reference's, tested in test_reference_sparse_attn.py and test_reference_compress.py; refusals: test_sparse_attn_refusals.py.
"""

import warnings
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from reference.cases.sparse_attn import CompressCase, attention_inputs, compress_inputs, cu_seqlens_of
from reference.compress import compress_kv as reference_compress
from reference.sparse_attn import sparse_attn_shared_kv as reference_attention
from sparse_attn import compress_kv, compressed_cu_seqlens, lse_with_sink, lse_without_sink, sparse_attn_shared_kv
from sparse_attn.compress import op as compress_op
from sparse_attn.shared_kv import op as attention_op
from tests.sparse_attn_util import ATTENTION, COMPRESS, EMPTY, MODES, empty_case

DIFFERENTIABLE = ("q", "ori_kv", "cmp_kv", "sinks", "kv", "gate", "position_bias")
LOW = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
SOME_ATTENTION = pytest.mark.parametrize("name", ["swa", "swa_pack", "cfa", "cfa_pack_longer_keys", "scfa", "scfa_pack_offset"])
SOME_COMPRESS = pytest.mark.parametrize("name", ["plain", "plain_pack", "overlap", "overlap_pack"])


@pytest.fixture(autouse=True)
def _forget_compiled_code():
    yield
    torch.compiler.reset()


def leaves(inputs):
    return [inputs[name].requires_grad_() for name in DIFFERENTIABLE if name in inputs]


def cotangent(like, seed=99):
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)).to(like.dtype)


def fresh(maker, case, dtype=torch.float32, seed=1):
    inputs = maker(case, seed=seed, dtype=dtype)
    return inputs, leaves(inputs)


def gradients(fn, inputs, tensors, **more):
    out = fn(**inputs, **more)
    out = out[0] if isinstance(out, tuple) else out
    return out.detach(), torch.autograd.grad(out, tensors, cotangent(out))


def assert_equal(got, want):
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype
        torch.testing.assert_close(g, w, rtol=0, atol=0)


def assert_same_run(a, b):
    assert_equal([a[0], *a[1]], [b[0], *b[1]])


# --- the op equals the reference ---------------------------------------------------------------------------------------------
@LOW
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_equals_reference(name, dtype):
    inputs, tensors = fresh(attention_inputs, ATTENTION[name], dtype)
    assert_same_run(gradients(sparse_attn_shared_kv, inputs, tensors), gradients(reference_attention, inputs, tensors))
    flags = {"return_lse": True, "return_cmp_probs": ATTENTION[name].mode == "scfa"}
    got, want = sparse_attn_shared_kv(**inputs, **flags), reference_attention(**inputs, **flags)
    assert_equal(got, want)
    assert got[0].requires_grad and not any(x.requires_grad for x in got[1:])
    eager = gradients(sparse_attn_shared_kv, inputs, tensors, impl="eager")
    assert_same_run(eager, gradients(sparse_attn_shared_kv, inputs, tensors, deterministic=True))


@LOW
@pytest.mark.parametrize("name", COMPRESS)
def test_compress_equals_reference(name, dtype):
    inputs, tensors = fresh(compress_inputs, COMPRESS[name], dtype)
    assert_same_run(gradients(compress_kv, inputs, tensors), gradients(reference_compress, inputs, tensors))
    assert_same_run(gradients(compress_kv, inputs, tensors), gradients(compress_kv, inputs, tensors, impl="eager"))


def test_results_asked_for():
    inputs = attention_inputs(ATTENTION["scfa"])
    assert isinstance(sparse_attn_shared_kv(**inputs), torch.Tensor)
    assert [len(sparse_attn_shared_kv(**inputs, return_lse=a, return_cmp_probs=b)) for a, b in ((True, False), (True, True))] == [2, 3]
    out, probs = sparse_attn_shared_kv(**inputs, return_cmp_probs=True)
    assert probs.shape == inputs["cmp_indices"].shape and out.shape == inputs["q"].shape


# --- registration ------------------------------------------------------------------------------------------------------------
def attention_op_args(case, dtype=torch.float32):
    inputs = attention_inputs(case, seed=2, dtype=dtype)
    tensors = [inputs.get(name) for name in ("q", "ori_kv", "cmp_kv", "cmp_indices", "sinks")]
    cu_q = inputs.get("cu_seqlens_q")
    cu_ori = inputs.get("cu_seqlens_ori", cu_q)
    cu_cmp = None if cu_q is None or case.mode == "swa" else compressed_cu_seqlens(cu_ori, case.cmp_ratio)
    offset = inputs.get("q_offset")
    offsets = (offset, None) if torch.is_tensor(offset) else (None, offset)
    options = [cu_q, cu_ori, cu_cmp, *offsets, 0.25, inputs.get("cmp_ratio", 0), case.window]
    return tensors, options


@pytest.mark.parametrize("name", [
    "swa", "swa_none_window", "cfa", "cfa_offset_tensor", "cfa_pack", "scfa", "scfa_no_sinks", "scfa_pack_offset"
])  # fmt: skip
def test_opcheck_attention(name):
    tensors, options = attention_op_args(ATTENTION[name])
    args = (*tensors, *options, ATTENTION[name].mode == "scfa", "eager")
    torch.library.opcheck(attention_op.FORWARD, args)
    out, lse, _ = attention_op.FORWARD(*args)
    torch.library.opcheck(attention_op.BACKWARD, (cotangent(out), *tensors, out, lse, *options, False, "eager"))


@SOME_COMPRESS
def test_opcheck_compress(name):
    inputs = compress_inputs(COMPRESS[name], seed=2)
    tensors = [inputs[n] for n in ("kv", "gate", "position_bias")]
    options = (inputs["ratio"], inputs["overlap"], inputs.get("cu_seqlens"), "eager")
    torch.library.opcheck(compress_op.FORWARD, (*tensors, *options))
    out = compress_op.FORWARD(*tensors, *options)
    torch.library.opcheck(compress_op.BACKWARD, (cotangent(out), *tensors, *options))


# --- torch.compile and checkpointing -----------------------------------------------------------------------------------------
@LOW
@SOME_ATTENTION
def test_attention_in_one_graph(name, dtype):
    inputs, tensors = fresh(attention_inputs, ATTENTION[name], dtype)
    compiled = torch.compile(sparse_attn_shared_kv, fullgraph=True, backend="aot_eager")
    assert_same_run(gradients(compiled, inputs, tensors, return_lse=True), gradients(sparse_attn_shared_kv, inputs, tensors))


@SOME_COMPRESS
def test_compress_in_one_graph(name):
    inputs, tensors = fresh(compress_inputs, COMPRESS[name])
    compiled = torch.compile(compress_kv, fullgraph=True, backend="aot_eager")
    assert_same_run(gradients(compiled, inputs, tensors), gradients(compress_kv, inputs, tensors))


def test_a_changed_length_recompiles_once_at_most():
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(sparse_attn_shared_kv, fullgraph=True, backend=backend)
    for S in (9, 12, 15, 18, 23):
        inputs = attention_inputs(replace(ATTENTION["scfa"], S=S, S2=S), seed=3)
        torch.testing.assert_close(compiled(**inputs), sparse_attn_shared_kv(**inputs))
    assert len(graphs) <= 2  # the first length, then any


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("name", ["entries", "cuts", "gate"])
def test_one_tensor_in_two_places(name, compiled):
    """The gradient of a tensor given twice is the sum of both; torch.compile refuses an autograd.Function with a repeated input."""
    gen = torch.Generator().manual_seed(11)
    x, q, bias = (torch.randn(shape, generator=gen) for shape in ((2, 6, 8), (2, 6, 3, 8), (2, 8)))
    cu, indices = torch.tensor([0, 2, 2, 6], dtype=torch.int32), torch.tensor([0, 3, -1, 5], dtype=torch.int32).expand(2, 6, 4)
    fn = {
        "entries": lambda x, y: sparse_attn_shared_kv(q, x, y, indices, cmp_ratio=1, window=2),
        "cuts": lambda x, y: sparse_attn_shared_kv(
            q[0], x[0], y[0], indices[0], cmp_ratio=1, window=2, cu_seqlens_q=cu, cu_seqlens_ori=cu, cu_seqlens_cmp=cu
        ),
        "gate": lambda x, y: compress_kv(x, y, bias, 2),
    }[name]
    run = torch.compile(fn, fullgraph=True, backend="aot_eager") if compiled else fn
    one, a, b = (x.clone().requires_grad_() for _ in range(3))
    got, want = run(one, one), fn(a, b)
    assert_equal([got], [want])
    cotangent = torch.randn(got.shape, generator=gen)
    got.backward(cotangent)
    want.backward(cotangent)
    torch.testing.assert_close(one.grad, a.grad + b.grad)


def test_compiling_warns_of_nothing():
    inputs = attention_inputs(ATTENTION["scfa"])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # a DeprecationWarning is torch's own affair
        torch.compile(sparse_attn_shared_kv, fullgraph=True, backend="aot_eager")(**inputs)


def test_helpers_in_one_graph():
    lse = torch.tensor([[1.0, -torch.inf, 2.0], [0.5, 3.0, -1.0]])
    sinks = torch.tensor([0.25, -torch.inf, 2.5])
    cu = cu_seqlens_of((5, 0, 9))

    def all_three(lse, sinks, cu):
        return lse_without_sink(lse, sinks), lse_with_sink(lse, sinks), compressed_cu_seqlens(cu, 4)

    assert_equal(torch.compile(all_three, fullgraph=True, backend="aot_eager")(lse, sinks, cu), all_three(lse, sinks, cu))


@pytest.mark.parametrize("name", ["swa_pack", "cfa", "scfa", "scfa_pack"])
def test_attention_under_checkpointing(name):
    inputs, tensors = fresh(attention_inputs, ATTENTION[name])

    def saved(**kwargs):
        return checkpoint(lambda: sparse_attn_shared_kv(**kwargs, return_lse=True)[0], use_reentrant=False)

    assert_same_run(gradients(saved, inputs, tensors), gradients(sparse_attn_shared_kv, inputs, tensors))


@pytest.mark.parametrize("name", ["plain", "overlap_pack"])
def test_compress_under_checkpointing(name):
    inputs, tensors = fresh(compress_inputs, COMPRESS[name])

    def saved(**kwargs):
        return checkpoint(lambda: compress_kv(**kwargs), use_reentrant=False)

    assert_same_run(gradients(saved, inputs, tensors), gradients(compress_kv, inputs, tensors))


def test_double_backward_is_refused():
    inputs, tensors = fresh(attention_inputs, ATTENTION["scfa"])
    (dq,) = torch.autograd.grad(sparse_attn_shared_kv(**inputs).square().sum(), tensors[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()
    inputs, tensors = fresh(compress_inputs, COMPRESS["overlap"])
    (dkv,) = torch.autograd.grad(compress_kv(**inputs).square().sum(), tensors[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dkv.sum().backward()


def test_only_lse_used_and_single_inputs_frozen():
    inputs = attention_inputs(ATTENTION["scfa"], seed=4)
    want, tensors = fresh(attention_inputs, ATTENTION["scfa"], seed=4)
    _, grads = gradients(sparse_attn_shared_kv, want, tensors)
    for name, grad in zip((n for n in DIFFERENTIABLE if n in inputs), grads):
        alone = {**inputs, name: inputs[name].clone().requires_grad_()}
        assert_equal(gradients(sparse_attn_shared_kv, alone, [alone[name]])[1], [grad])
    assert not sparse_attn_shared_kv(**want, return_lse=True)[1].requires_grad


def test_autocast_changes_nothing():
    inputs, tensors = fresh(attention_inputs, ATTENTION["scfa"])
    for impl in ("auto", "eager"):
        want = gradients(sparse_attn_shared_kv, inputs, tensors, impl=impl)
        with torch.autocast("cpu", torch.bfloat16):
            out = sparse_attn_shared_kv(**inputs, impl=impl)
        # autograd runs outside, as PyTorch asks for
        assert_same_run((out.detach(), torch.autograd.grad(out, tensors, cotangent(out))), want)


# --- strides and empty inputs ------------------------------------------------------------------------------------------------
def _permuted(x):
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def _sliced(x):
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), 7, dtype=x.dtype)
    wide[..., 1:-2] = x.detach()
    return wide[..., 1:-2]


@pytest.mark.parametrize("view", [_permuted, _sliced], ids=["permuted", "sliced"])
@pytest.mark.parametrize("maker, fn, case", [
    (attention_inputs, sparse_attn_shared_kv, ATTENTION["scfa"]),
    (attention_inputs, sparse_attn_shared_kv, ATTENTION["cfa_pack"]),
    (compress_inputs, compress_kv, COMPRESS["overlap"]),
    (compress_inputs, compress_kv, COMPRESS["plain_pack"]),
], ids=["scfa", "cfa_pack", "overlap", "plain_pack"])  # fmt: skip
def test_any_strides(maker, fn, case, view):
    inputs, tensors = fresh(maker, case)
    strided = {name: view(x.detach()) if torch.is_tensor(x) else x for name, x in inputs.items()}
    got, want = gradients(fn, strided, leaves(strided)), gradients(fn, inputs, tensors)
    for g, w in zip([got[0], *got[1]], [want[0], *want[1]], strict=True):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-6)  # a product may sum in another order


def test_expanded_inputs():
    inputs, _ = fresh(attention_inputs, replace(ATTENTION["scfa"], B=1))
    batch = {name: x.detach() if torch.is_tensor(x) else x for name, x in inputs.items()}
    expanded = {name: x.expand(2, *x.shape[1:]) if torch.is_tensor(x) and x.dim() > 1 else x for name, x in batch.items()}
    copied = {name: x.clone() if torch.is_tensor(x) else x for name, x in expanded.items()}
    assert_same_run(*(gradients(sparse_attn_shared_kv, x, leaves(x)) for x in (expanded, copied)))
    out = sparse_attn_shared_kv(**copied)
    assert_equal(
        torch.autograd.grad(out, [copied["q"]], cotangent(out)[:, :1, :1, :1].expand_as(out)),
        torch.autograd.grad(out := sparse_attn_shared_kv(**copied), [copied["q"]], cotangent(out)[:, :1, :1, :1].expand_as(out).clone()),
    )


@MODES
@EMPTY
def test_empty_attention(mode, empty):
    case = empty_case(mode, empty)
    inputs, tensors = fresh(attention_inputs, case)
    out, grads = gradients(sparse_attn_shared_kv, inputs, tensors)
    assert out.shape == inputs["q"].shape
    assert all(g.shape == t.shape and g.isfinite().all() for g, t in zip(grads, tensors))
    lse = sparse_attn_shared_kv(**inputs, return_lse=True)[1]
    assert lse.shape == out.shape[:-1]
    if empty == "keys":
        assert (out == 0).all() and torch.equal(lse, inputs["sinks"].detach().expand_as(lse))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("empty", ["B", "S", "T"])
def test_empty_compress(overlap, empty):
    case = CompressCase("", 4, overlap)
    inputs, tensors = fresh(compress_inputs, replace(case, docs=(0,)) if empty == "T" else replace(case, **{empty: 0}))
    out, grads = gradients(compress_kv, inputs, tensors)
    assert out.shape == (*inputs["kv"].shape[:-2], inputs["kv"].shape[-2] // 4, case.D)
    assert all((g == 0).all() for g in grads)
