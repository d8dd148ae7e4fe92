"""The kernels for sm_90 on the CPU (tests/emulator), against the reference in fp64: small cases, in more than one order of the warpgroups.

First that the emulator finds what it is for: a kernel that streams tiles through shared memory into products, right and with one mistake at a
time.
"""

from dataclasses import replace

import pytest
import torch

import kernel_runtime.impl
from indexer import hopper as indexer_hopper
from kernel_runtime import interpreting
from kernel_runtime.gluon import has_gluon
from kernel_runtime.launch import Spec
from mhc_ops import hopper as mhc_hopper
from reference.cases.mhc import MhcShape
from reference.cases.sparse_attn import AttentionCase
from tests import test_indexer_hopper, test_mhc_kernels, test_sparse_attn_hopper
from tests.emulator import EmulationError, emulated
from tests.op_checks import poison_empty

if interpreting() or not has_gluon():
    pytest.skip("the emulator reads compiled Triton's kernels: not under TRITON_INTERPRET=1, and Gluon as they need it", allow_module_level=True)

from tests.gluon_stream import stream_kernel

BF16, FP16 = torch.bfloat16, torch.float16
# The ring of keys of the dense attention is written while slots of keys that a step does not see are read with a weight of 0 (dense.py)
UNORDERED = ("new_ring",)


def stream(mistake, seed, tiles=5):
    """Products of `tiles` tiles [64, 64] with a matrix, by tests.gluon_stream with a mistake; gives them and the right ones."""
    generator = torch.Generator().manual_seed(tiles)
    x, w = (torch.randn(n, 64, generator=generator).to(BF16) for n in (64 * tiles, 64))
    out = torch.full((64 * tiles, 64), float("nan"))
    types = {"x": "*bf16", "w": "*bf16", "out": "*fp32", "tiles": "i32"}
    spec = Spec(stream_kernel, types=types, consts={"MISTAKE": mistake}, targets=("cuda",), arch=90)
    with emulated(seed):
        spec.launch((1,), x, w, out, tiles)
    return out, x.float() @ w.float()


@pytest.mark.parametrize("seed", range(4))
def test_streamed_products(seed):
    out, want = stream("none", seed)
    assert torch.allclose(out, want, atol=1e-4)


@pytest.mark.parametrize(
    "mistake, found",
    [
        ("no fence", "multiplies without a fence what the copies of partition 1 wrote"),
        ("no wait for the copies", "multiplies what the copies of partition 1 wrote, unordered"),
        ("no wait for a free slot", "overwrites what the (products of partition 0 may still|copies of partition 1 wrote)"),
        ("freed before the product is done", "overwrites what the products of partition 0 may still be reading"),
        ("never freed", r"hangs: .*partition 1 waits for phase 0 of .*, 1 of 1 arrivals missing"),
        ("freed twice", "hangs|overwrites"),  # the phase after the next begins too early
        ("too many arrivals", "2 arrivals where 1 of 1 are missing"),
        ("wrong parity", "multiplies what the copies of partition 1 wrote, unordered|hangs"),
        ("used before the wait", "used before it was waited for"),
        ("copies unheard of", "hangs|no barrier hears of"),
        ("read past the end", "element 20480 of a tensor of 20480"),
        ("written past the end", "element 20480 of a tensor of 20480"),
        ("shared memory not written", None),
    ],
)
def test_mistakes_are_found(mistake, found):
    """In one of a few orders at least; what no rule forbids shows as NaN."""
    for seed in range(8):
        try:
            out, want = stream(mistake, seed)
        except EmulationError as error:
            assert found is not None, error
            with pytest.raises(EmulationError, match=found):
                raise
            return
        if found is None:
            assert out.isnan().any() and not want.isnan().any()
            return
    raise AssertionError("found in no order")


def attention(name, mode, N, D, dtype=BF16, **more):
    return pytest.param(AttentionCase(name, mode, N=N, D=D, **{"B": 1, **more}), dtype, id=name)


@pytest.mark.parametrize(
    "case, dtype",
    [
        # the general kernels: lists of entries, packed documents, pairs of consumers, ranges; more is different for D = 512
        attention("scfa_d512", "scfa", 16, 512, S=7, S2=150, q_offset=110, K=70, window=70, cmp_ratio=1),
        attention("scfa", "scfa", 16, 128, S=21, K=40, window=20, cmp_ratio=1),
        attention("scfa_pack", "scfa", 20, 128, FP16, docs_q=(9, 0, 14, 2), K=20, window=9, cmp_ratio=3, sinks="extreme"),
        attention("scfa_128", "scfa", 128, 128, S=7, K=20, window=5, cmp_ratio=1, sinks="none"),
        attention("swa", "swa", 16, 128, S=35, window=33),
        attention("cfa_d512", "cfa", 16, 512, S=4, S2=200, q_offset=160, cmp_ratio=1, window=70),
        attention("cfa", "cfa", 64, 128, S=11, S2=90, q_offset=(70,), cmp_ratio=1, window=20),
        # the dense ones
        attention("swa_dense_d512", "swa", 16, 512, S=13, window=20, B=2),
        attention("swa_dense", "swa", 16, 256, S=29, S2=190, window=20, B=2),  # the ring wraps
        attention("swa_dense_pack", "swa", 20, 256, docs_q=(7, 0, 21, 2, 1), docs_ori=(40, 3, 21, 17, 0), window=13, sinks="extreme"),
        attention("cfa_dense", "cfa", 16, 256, S=29, window=20, cmp_ratio=5),
        attention("cfa_dense_64", "cfa", 64, 256, S=13, S2=160, q_offset=(140,), window=128, cmp_ratio=5),
        attention("cfa_dense_d512", "cfa", 16, 512, S=17, window=20, cmp_ratio=5),
        attention("cfa_streamed_d512", "cfa", 16, 512, S=9, S2=150, q_offset=110, window=20, cmp_ratio=2),
        attention("cfa_streamed", "cfa", 16, 256, S=21, S2=150, q_offset=(110,), window=20, cmp_ratio=2),
        attention("cfa_streamed_batches", "cfa", 3, 256, S=5, S2=71, B=3, window=64, cmp_ratio=1),  # keys of batches are apart
        attention("cfa_streamed_fp16", "cfa", 3, 256, FP16, S=29, S2=150, q_offset=(110,), window=20, cmp_ratio=2, sinks="none"),
    ],
)
def test_attention(monkeypatch, case, dtype):
    """Forward and both forms of the backward, each in an order of its own, on poisoned results."""
    poison_empty(monkeypatch)
    inputs, dout = test_sparse_attn_hopper.make(case, dtype, device="cpu")
    want = test_sparse_attn_hopper.expected(inputs, dout, case.mode)
    for seed, order, deterministic in ((0, "forward", False), (1, "backward", True)):
        with emulated(seed, order=order, unordered=UNORDERED):
            got = test_sparse_attn_hopper.run(inputs, case, dout, deterministic)
        test_sparse_attn_hopper.check(got, want, dtype)


FEW = {  # general, dense, streamed
    "scfa": AttentionCase("scfa", "scfa", N=16, D=128, B=1, S=17, S2=40, q_offset=3, K=12, cmp_ratio=2, window=9),
    "cfa_dense": AttentionCase("cfa_dense", "cfa", N=16, D=256, B=1, S=17, S2=40, q_offset=3, cmp_ratio=5, window=9),
    "cfa_streamed": AttentionCase("cfa_streamed", "cfa", N=16, D=256, B=1, S=9, S2=100, q_offset=80, cmp_ratio=2, window=9),
}


@pytest.mark.parametrize("name", FEW)
def test_large_logits_and_sinks(monkeypatch, name):
    """Rows are nearly one-hot: what is left of dq, and half of dkv, are differences of numbers that have been rounded."""
    poison_empty(monkeypatch)
    case = replace(FEW[name], softmax_scale=2.0)
    inputs, dout = test_sparse_attn_hopper.make(case, BF16, device="cpu")
    inputs["sinks"] = torch.tensor([1e4, -1e4, 0.0, 60.0]).repeat(4)
    want = test_sparse_attn_hopper.expected(inputs, dout, case.mode)
    with emulated(3, unordered=UNORDERED):
        got = test_sparse_attn_hopper.run(inputs, case, dout, False)
    test_sparse_attn_hopper.check(got, want, BF16, factor=3.0)


@pytest.mark.parametrize("name", FEW)
def test_rows_that_no_query_sees_are_not_read(monkeypatch, name):
    """NaN in every key after the last query and in every entry that is not visible to any: neither may reach a result."""
    poison_empty(monkeypatch)
    case = FEW[name]
    inputs, dout = test_sparse_attn_hopper.make(case, BF16, device="cpu")
    want = test_sparse_attn_hopper.expected(inputs, dout, case.mode)
    end = case.S + case.q_offset
    inputs["ori_kv"][:, end:] = torch.nan
    inputs["cmp_kv"][:, end // case.cmp_ratio :] = torch.nan
    with emulated(4, unordered=UNORDERED):
        got = test_sparse_attn_hopper.run(inputs, case, dout, True)
    test_sparse_attn_hopper.check(got, want, BF16)


@pytest.mark.parametrize(
    "case",
    [
        AttentionCase("general", "scfa", N=20, D=128, docs_q=(3, 0, 9), K=12, cmp_ratio=5, window=9),
        AttentionCase("general_cfa", "cfa", N=16, D=256, docs_q=(3, 0, 9), cmp_ratio=5, window=9),
        AttentionCase("dense", "swa", N=16, D=256, docs_q=(7, 0, 21), window=9),
        AttentionCase("dense_heads_share_tiles", "swa", N=5, D=256, docs_q=(7, 0, 21), window=9),
    ],
    ids=lambda case: case.name,
)
def test_rows_after_the_last_document(monkeypatch, case):
    """Whatever is in their q and in the gradient of their output (NaN here) counts for nothing."""
    poison_empty(monkeypatch)
    inputs, dout = test_sparse_attn_hopper.make(case, BF16, device="cpu")
    end = case.docs_q[0] + 4
    inputs["cu_seqlens_q"] = torch.tensor([0, case.docs_q[0], case.docs_q[0], end], dtype=torch.int32)
    want = test_sparse_attn_hopper.expected(inputs, dout, case.mode)
    inputs["q"][end:], dout[end:] = torch.nan, torch.nan
    for deterministic in (False, True):
        with emulated(3, cores=2, unordered=UNORDERED):
            got = test_sparse_attn_hopper.run(inputs, case, dout, deterministic)
        test_sparse_attn_hopper.check(got, want, BF16)
        assert not got["dq"][end:].any()


@pytest.mark.parametrize(
    "tokens, d, options",
    [(21, 256, {}), (9, 512, {"with_pre_mix": True}), (5, 256, {"with_pre_mix": True, "convention": "paper"}), (37, 64, {}), (130, 256, {})],
)
def test_boundary(monkeypatch, tokens, d, options):
    boundary(monkeypatch, tokens, d, options)


def boundary(monkeypatch, tokens, d, options, cores=5):
    """hc_post_pre through its public function, with the kernels in Triton that it launches besides."""
    monkeypatch.setattr(kernel_runtime.impl, "_INTERPRETING", True)  # tensors on the CPU are taken
    monkeypatch.setattr(mhc_hopper, "takes", lambda x, *_, aligned=mhc_hopper.ALIGNED: mhc_hopper.covers(x.dtype, *x.shape[-2:], aligned))
    with emulated(seed=tokens, cores=cores) as names:
        test_mhc_kernels.check("cpu", monkeypatch, "hc_post_pre", MhcShape(1, tokens, 4, d), BF16, iters=4, **options)
    assert "boundary_bwd_kernel" in names and ("expand_project_kernel" in names) == (d % 256 == 0)


def test_boundary_of_warps_that_drift_apart(monkeypatch):
    """The form of the backward for D = 4096, in narrower streams."""
    from mhc_ops.hopper import bwd

    usual = bwd.boundary_bwd_spec(64)
    apart = replace(usual, consts={**usual.consts, "APART": True})
    assert not usual.consts["APART"] and bwd.boundary_bwd_spec(4096).consts["APART"]
    monkeypatch.setattr(bwd, "plan_of", bwd.plan_of.__wrapped__)
    monkeypatch.setattr(bwd, "boundary_bwd_spec", lambda d: apart)
    boundary(monkeypatch, 150, 64, {}, cores=1)  # more tiles a program than its ring holds


SCORES = {  # as test_indexer_hopper.CASES
    "one tile": (1, 5, 64, 128, 3, 0, (0, 1), (0, 5)),
    "more tiles than the ring holds": (1, 3, 32, 64, 700, 2798, (0, 1), (0, 3)),
    "chunk": (3, 61, 32, 64, 15, 5, (1, 2), (3, 55)),
    "nobody sees a block": (1, 9, 64, 128, 9, -50, (0, 1), (0, 9)),
    "128 heads": (1, 21, 128, 128, 75, 280, (0, 1), (0, 21)),
}


@pytest.mark.parametrize("name", SCORES)
def test_scores(monkeypatch, name):
    monkeypatch.setattr(indexer_hopper, "takes", lambda q, *_: indexer_hopper.covers(q.dtype, *q.shape[-2:]))
    for seed in (0, 1):
        with emulated(seed) as names:
            test_indexer_hopper.check(SCORES[name], BF16, torch.float32, device="cpu")
        assert names == ["hopper_scores_kernel"]


def test_scores_of_packed_documents(monkeypatch):
    monkeypatch.setattr(indexer_hopper, "takes", lambda q, *_: indexer_hopper.covers(q.dtype, *q.shape[-2:]))
    with emulated(seed=2) as names:
        packed = ([0, 3, 3, 26, 69], [0, 0, 5, 8, 19])
        test_indexer_hopper.check((1, 70, 32, 64, 19, 0, (0, 1), (13, 33)), FP16, FP16, packed, device="cpu")
    assert "hopper_scores_kernel" in names
