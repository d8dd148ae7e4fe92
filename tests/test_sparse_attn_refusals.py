"""What the public functions of sparse_attn refuse, with which error; and what they export."""

from dataclasses import replace

import pytest
import torch

import sparse_attn
from reference.cases.sparse_attn import attention_inputs, compress_inputs, cu_seqlens_of
from sparse_attn import compress_kv, compressed_cu_seqlens, lse_with_sink, lse_without_sink, sparse_attn_shared_kv
from tests.sparse_attn_util import ATTENTION, COMPRESS

i32 = torch.int32
ATTENTION_ERRORS = {
    "q is no tensor": ({"q": [1.0]}, TypeError, r"q must be a torch.Tensor, got list"),
    "q int": ({"q": torch.zeros(2, 13, 3, 16, dtype=i32)}, TypeError, r"q has dtype int32, wanted bfloat16, float16, float32"),
    "q rank": ({"q": torch.zeros(13, 3, 16)}, ValueError, r"q has shape \[13, 3, 16\], wanted \[B, S, N, D\]"),
    "too many heads": ({"q": torch.zeros(2, 13, 129, 16)}, ValueError, r"N = 129 heads, wanted 1 to 128"),
    "no head": ({"q": torch.zeros(2, 13, 0, 16)}, ValueError, r"N = 0 heads"),
    "no channel": ({"q": torch.zeros(2, 13, 3, 0), "ori_kv": torch.zeros(2, 13, 0)}, ValueError, r"D = 0 channels"),
    "kv dtype": ({"ori_kv": torch.zeros(2, 13, 16, dtype=torch.bfloat16)}, TypeError, r"ori_kv has dtype bfloat16 but q has float32"),
    "kv device": ({"ori_kv": torch.zeros(2, 13, 16, device="meta")}, ValueError, r"ori_kv is on meta but q is on cpu"),
    "kv channels": ({"ori_kv": torch.zeros(2, 13, 8)}, ValueError, r"ori_kv has shape \[2, 13, 8\], wanted \[2, S2, 16\]"),
    "kv batch": ({"ori_kv": torch.zeros(1, 13, 16)}, ValueError, r"ori_kv has shape \[1, 13, 16\], wanted \[2, S2, 16\]"),
    "cmp dtype": ({"cmp_kv": torch.zeros(2, 3, 16, dtype=torch.float16)}, TypeError, r"cmp_kv has dtype float16 but q has float32"),
    "cmp length": ({"cmp_kv": torch.zeros(2, 4, 16)}, ValueError, r"S3 = 4 entries, wanted S2 // cmp_ratio = 13 // 4 = 3"),
    "indices int64": ({"cmp_indices": torch.zeros(2, 13, 5, dtype=torch.int64)}, TypeError, r"cmp_indices has dtype int64, wanted int32"),
    "indices shape": ({"cmp_indices": torch.zeros(2, 12, 5, dtype=i32)}, ValueError, r"cmp_indices has shape .* wanted \[2, 13, K\]"),
    "indices alone": ({"cmp_kv": None}, ValueError, r"cmp_indices without cmp_kv"),
    "indices device": ({"cmp_indices": torch.zeros(2, 13, 5, dtype=i32, device="meta")}, ValueError, r"cmp_indices is on meta"),
    "indices sparse": ({"cmp_indices": torch.zeros(2, 13, 5, dtype=i32).to_sparse()}, TypeError, r"cmp_indices must be a strided tensor"),
    "scale nan": ({"softmax_scale": float("nan")}, ValueError, r"softmax_scale must be finite, got nan"),
    "offset beyond int32": ({"q_offset": -(2**31) - 1}, ValueError, r"q_offset must be at least -2147483648, got -2147483649"),
    "no ratio": ({"cmp_ratio": None}, ValueError, r"cmp_kv needs cmp_ratio"),
    "ratio 0": ({"cmp_ratio": 0}, ValueError, r"cmp_ratio must be at least 1, got 0"),
    "ratio negative": ({"cmp_ratio": -4}, ValueError, r"cmp_ratio must be at least 1, got -4"),
    "ratio negative, nothing compressed": (
        {"cmp_kv": None, "cmp_indices": None, "cmp_ratio": -1}, ValueError, r"cmp_ratio must be at least 0, got -1",
    ),
    "ratio float": ({"cmp_ratio": 4.0}, TypeError, r"cmp_ratio must be an int, got float"),
    "window 0": ({"window": 0}, ValueError, r"window must be at least 1, got 0"),
    "window negative": ({"window": -1}, ValueError, r"window must be at least 1, got -1"),
    "window float": ({"window": 2.5}, TypeError, r"window must be an int, got float"),
    "scale": ({"softmax_scale": "1"}, TypeError, r"softmax_scale must be a number, got str"),
    "sinks dtype": ({"sinks": torch.zeros(3, dtype=torch.bfloat16)}, TypeError, r"sinks has dtype bfloat16, wanted float32"),
    "sinks shape": ({"sinks": torch.zeros(4)}, ValueError, r"sinks has shape \[4\], wanted \[3\]"),
    "offset float": ({"q_offset": 1.0}, TypeError, r"q_offset must be an int, an int32 tensor or None, got float"),
    "offset int64": ({"q_offset": torch.zeros(2, dtype=torch.int64)}, TypeError, r"q_offset has dtype int64, wanted int32"),
    "offset shape": ({"q_offset": torch.zeros(3, dtype=i32)}, ValueError, r"q_offset has shape \[3\], wanted \[2\]"),
    "probs without indices": ({"cmp_indices": None, "return_cmp_probs": True}, ValueError, r"return_cmp_probs=True needs cmp_indices"),
    "ori cuts alone": ({"cu_seqlens_ori": torch.tensor([0, 13], dtype=i32)}, ValueError, r"cu_seqlens_ori without cu_seqlens_q"),
    "cmp cuts alone": ({"cu_seqlens_cmp": torch.tensor([0, 3], dtype=i32)}, ValueError, r"cu_seqlens_cmp without cu_seqlens_q"),
    "deterministic": ({"deterministic": 1}, TypeError, r"deterministic must be True or False, got int"),
    "return_lse": ({"return_lse": None}, TypeError, r"return_lse must be True or False, got NoneType"),
    "impl": ({"impl": "cuda"}, ValueError, r"impl must be one of 'auto', 'triton', 'eager', 'portable', 'hopper', got 'cuda'"),
}  # fmt: skip
PACK_ERRORS = {
    "rank": ({"q": torch.zeros(1, 25, 3, 16)}, ValueError, r"q has shape .* wanted \[T, N, D\]"),
    "cuts int64": ({"cu_seqlens_q": torch.tensor([0, 25])}, TypeError, r"cu_seqlens_q has dtype int64, wanted int32"),
    "cuts list": ({"cu_seqlens_q": [0, 25]}, TypeError, r"cu_seqlens_q must be a torch.Tensor, got list"),
    "cuts rank": ({"cu_seqlens_q": torch.zeros(2, 2, dtype=i32)}, ValueError, r"cu_seqlens_q has shape \[2, 2\], wanted \[doc"),
    "cuts device": ({"cu_seqlens_q": torch.zeros(5, dtype=i32, device="meta")}, ValueError, r"cu_seqlens_q is on meta but q is on cpu"),
    "other documents": ({"cu_seqlens_ori": torch.zeros(3, dtype=i32)}, ValueError, r"cu_seqlens_ori has 3 elements but cu_seqlens_q has 5"),
    "other cmp documents": ({"cu_seqlens_cmp": torch.zeros(4, dtype=i32)}, ValueError, r"cu_seqlens_cmp has 4 elements"),
    "cmp cuts without cmp": (
        {"cmp_kv": None, "cmp_indices": None, "cu_seqlens_cmp": torch.zeros(5, dtype=i32)}, ValueError, r"cu_seqlens_cmp without cmp_kv",
    ),
    "rows": ({"ori_kv": torch.zeros(30, 16)}, ValueError, r"ori_kv has 30 rows but q has 25; without cu_seqlens_ori"),
    "offset length": ({"q_offset": torch.zeros(5, dtype=i32)}, ValueError, r"q_offset has shape \[5\], wanted \[4\]"),
}  # fmt: skip
COMPRESS_ERRORS = {
    "kv int": ({"kv": torch.zeros(2, 13, 12, dtype=i32)}, TypeError, r"kv has dtype int32"),
    "kv rank": ({"kv": torch.zeros(13, 12)}, ValueError, r"kv has shape \[13, 12\], wanted \[B, S, C \* D\]"),
    "gate dtype": ({"gate": torch.zeros(2, 13, 12, dtype=torch.bfloat16)}, TypeError, r"gate has dtype bfloat16 but kv has float32"),
    "gate shape": ({"gate": torch.zeros(2, 12, 12)}, ValueError, r"gate has shape \[2, 12, 12\], wanted \[2, 13, 12\]"),
    "bias dtype": ({"position_bias": torch.zeros(4, 12, dtype=torch.float64)}, TypeError, r"position_bias has dtype float64"),
    "bias shape": ({"position_bias": torch.zeros(4, 6)}, ValueError, r"position_bias has shape \[4, 6\], wanted \[4, 12\]"),
    "odd channels": ({"kv": torch.zeros(2, 13, 11)}, ValueError, r"kv has 11 channels, wanted an even number"),
    "no channel": ({"kv": torch.zeros(2, 13, 0)}, ValueError, r"kv has 0 channels"),
    "ratio 0": ({"ratio": 0}, ValueError, r"ratio must be at least 1, got 0"),
    "ratio bool": ({"ratio": True}, TypeError, r"ratio must be an int, got bool"),
    "overlap": ({"overlap": 1}, TypeError, r"overlap must be True or False, got int"),
    "cuts and batch": ({"cu_seqlens": torch.tensor([0, 13], dtype=i32)}, ValueError, r"kv has shape .* wanted \[T, C \* D\]"),
    "impl": ({"impl": "fast"}, ValueError, r"impl must be one of"),
}


@pytest.mark.parametrize("change, error, message", ATTENTION_ERRORS.values(), ids=ATTENTION_ERRORS)
@pytest.mark.parametrize("impl", ["auto", "eager"])
def test_attention_refuses(change, error, message, impl):
    inputs = {**attention_inputs(ATTENTION["scfa"] if "S2" in change else replace(ATTENTION["scfa"], S=13, S2=13)), "impl": impl}
    with pytest.raises(error, match="sparse_attn_shared_kv: .*" + message):
        sparse_attn_shared_kv(**{**inputs, **change})


@pytest.mark.parametrize("change, error, message", PACK_ERRORS.values(), ids=PACK_ERRORS)
def test_packed_attention_refuses(change, error, message):
    inputs = attention_inputs(ATTENTION["scfa_pack"])  # 4 documents, 25 tokens
    with pytest.raises(error, match="sparse_attn_shared_kv: .*" + message):
        sparse_attn_shared_kv(**{**inputs, **change})


@pytest.mark.parametrize("change, error, message", COMPRESS_ERRORS.values(), ids=COMPRESS_ERRORS)
def test_compress_refuses(change, error, message):
    inputs = compress_inputs(COMPRESS["overlap"])
    with pytest.raises(error, match="compress_kv: .*" + message):
        compress_kv(**{**inputs, **change})


def test_packed_compress_refuses():
    inputs = compress_inputs(COMPRESS["plain_pack"])
    with pytest.raises(TypeError, match=r"compress_kv: cu_seqlens has dtype int64, wanted int32"):
        compress_kv(**{**inputs, "cu_seqlens": inputs["cu_seqlens"].long()})
    with pytest.raises(ValueError, match=r"compress_kv: cu_seqlens is on meta but kv is on cpu"):
        compress_kv(**{**inputs, "cu_seqlens": inputs["cu_seqlens"].to("meta")})


def test_helpers_refuse():
    lse, sinks = torch.zeros(4, 3), torch.zeros(3)
    for fn in (lse_with_sink, lse_without_sink):
        with pytest.raises(TypeError, match=rf"{fn.__name__}: lse has dtype bfloat16, wanted float32"):
            fn(lse.bfloat16(), sinks)
        with pytest.raises(TypeError, match=rf"{fn.__name__}: sinks has dtype float64 but lse has float32"):
            fn(lse, sinks.double())
        with pytest.raises(ValueError, match=rf"{fn.__name__}: sinks has shape \[2\], wanted \[3\]"):
            fn(lse, sinks[:2])
    with pytest.raises(TypeError, match=r"compressed_cu_seqlens: cu_seqlens has dtype int64"):
        compressed_cu_seqlens(torch.tensor([0, 4]), 4)
    with pytest.raises(ValueError, match=r"compressed_cu_seqlens: ratio must be at least 1, got 0"):
        compressed_cu_seqlens(cu_seqlens_of((4,)), 0)


def test_ratio_0_without_compressed_entries_compresses_nothing():
    inputs = attention_inputs(ATTENTION["swa"])
    assert torch.equal(sparse_attn_shared_kv(**inputs, cmp_ratio=0), sparse_attn_shared_kv(**inputs))


def test_triton_is_refused_where_it_cannot_run():
    wide = attention_inputs(ATTENTION["scfa"], dtype=torch.float64)
    with pytest.raises(ValueError, match=r"sparse_attn_shared_kv: impl='triton' cannot run here: kernels take bf16, fp16 and fp32"):
        sparse_attn_shared_kv(**wide, impl="triton")
    with pytest.raises(ValueError, match=r"compress_kv: impl='triton' cannot run here: kernels take bf16, fp16 and fp32"):
        compress_kv(**compress_inputs(COMPRESS["plain"], dtype=torch.float64), impl="triton")


def test_everything_public_is_exported():
    assert sorted(sparse_attn.__all__) == sorted(
        ["sparse_attn_shared_kv", "compress_kv", "compressed_cu_seqlens", "lse_with_sink", "lse_without_sink"]
    )
    assert all(callable(getattr(sparse_attn, name)) for name in sparse_attn.__all__)
