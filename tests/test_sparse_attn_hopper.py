"""The sm_90 kernels of the attention against the reference in fp64, through their launchers: nothing here can run another kernel."""

from dataclasses import replace

import pytest
import torch

from kernel_runtime import interpreting
from reference.cases.sparse_attn import AttentionCase, attention_inputs
from reference.sparse_attn import sparse_attn_shared_kv as reference_attention
from sparse_attn.shared_kv.hopper import HEAD_DIMS, hopper_supports

BF16, FP16 = torch.bfloat16, torch.float16

# Norm of the difference over the norm of the fp64 result on the same 16-bit inputs. out: rounding of P and of the result. Gradients: P goes
# through 16 bits once more for dZ, delta comes from the rounded out, and in the deterministic form the rows that are summed are 16-bit too.
TOLERANCE = {
    BF16: {"out": 3e-3, "lse": 2e-6, "probs": 2e-6, "dq": 6e-3, "dori": 5e-3, "dcmp": 5e-3, "dsinks": 6e-3},
    FP16: {"out": 5e-4, "lse": 2e-6, "probs": 2e-6, "dq": 1e-3, "dori": 8e-4, "dcmp": 8e-4, "dsinks": 1e-3},
}


def case(name, mode, N, D, dtype=BF16, **more):
    return pytest.param(AttentionCase(name, mode, N=N, D=D, **{"B": 1, **more}), dtype, id=name)


# Several tiles of every kind in each; lengths are odd, lists hold every kind of entry in any order (see mixed_indices)
CASES = (
    case("scfa_64", "scfa", 64, 512, S=333, K=150, window=128, indices="topk"),
    case("scfa_64_mixed", "scfa", 64, 512, S=203, K=200, window=70, B=2, sinks="none"),
    case("scfa_128", "scfa", 128, 512, S=141, K=70, window=40),
    case("scfa_20_pack", "scfa", 20, 512, docs_q=(97, 0, 131, 2), K=90, window=33, cmp_ratio=3, sinks="extreme"),
    case("swa_64", "swa", 64, 512, S=301, window=128),
    case("swa_3_none", "swa", 3, 512, S=157, window=None, sinks="extreme"),
    case("swa_1_pack_invisible", "swa", 1, 512, docs_q=(5, 0, 90), docs_ori=(40, 3, 77), window=9, sinks="none"),
    case("cfa_64", "cfa", 64, 512, S=299, cmp_ratio=2, window=128),
    case("cfa_16_pack", "cfa", 16, 512, docs_q=(30, 0, 70), docs_ori=(90, 20, 171), cmp_ratio=2, window=50),
    case("cfa_128_offset", "cfa", 128, 512, FP16, S=77, S2=301, q_offset=(180,), cmp_ratio=1, window=20),
    case("scfa_16_d256", "scfa", 16, 256, FP16, S=131, K=70, window=45),
    case("scfa_64_d256", "scfa", 64, 256, S=131, K=40, window=130, q_offset=-9),
    case("cfa_20_d128", "cfa", 20, 128, S=200, B=2, cmp_ratio=3, window=70),
    case("scfa_128_d128_pack", "scfa", 128, 128, FP16, docs_q=(64, 0, 65), K=66, window=64, cmp_ratio=2, sinks="none"),
)


def error(got, want):
    """NaN where an element is not written; infinities have to agree."""
    got, want = got.double(), want.double()
    infinite = want.isinf()
    assert torch.equal(got[infinite], want[infinite])
    got, want = got[~infinite], want[~infinite]
    return float((got - want).norm() / want.norm().clamp_min(1e-30)) if float(want.norm()) else float(got.abs().sum())


def arguments(inputs, case):
    """The launchers' arguments, as sparse_attn.shared_kv.api makes them."""
    from reference.sparse_attn import compressed_cu_seqlens

    cu_q, cu_ori, cu_cmp, offset = (inputs.get(name) for name in ("cu_seqlens_q", "cu_seqlens_ori", "cu_seqlens_cmp", "q_offset"))
    if case.packed and case.mode != "swa" and cu_cmp is None:
        cu_cmp = compressed_cu_seqlens(cu_q if cu_ori is None else cu_ori, case.cmp_ratio)
    offsets, offset = (offset, None) if isinstance(offset, torch.Tensor) else (None, offset)
    tensors = tuple(inputs.get(name) for name in ("q", "ori_kv", "cmp_kv", "cmp_indices", "sinks"))
    scale = inputs.get("softmax_scale", case.D**-0.5)
    return tensors, (cu_q, cu_ori, cu_cmp, offsets, offset, scale, case.cmp_ratio if case.mode != "swa" else 0, case.window)


def expected(inputs, dout, mode):
    wide = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    leaves = {name: wide[name].requires_grad_() for name in ("q", "ori_kv", "cmp_kv", "sinks") if name in wide}
    results = reference_attention(**wide, return_lse=True, return_cmp_probs=mode == "scfa")
    grads = torch.autograd.grad(results[0], list(leaves.values()), dout.double())
    names = {"q": "dq", "ori_kv": "dori", "cmp_kv": "dcmp", "sinks": "dsinks"}
    return {**dict(zip(("out", "lse", "probs"), (r.detach() for r in results))), **{names[n]: g for n, g in zip(leaves, grads)}}


@pytest.fixture
def poisoned():
    """torch.empty gives NaN, so that an element no kernel writes shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def run(inputs, case, dout, deterministic):
    from sparse_attn.shared_kv.hopper.bwd import attention_bwd
    from sparse_attn.shared_kv.hopper.fwd import attention_fwd

    tensors, options = arguments(inputs, case)
    out, lse, probs = attention_fwd(*tensors, *options, case.mode == "scfa")
    grads = attention_bwd(dout, *tensors, out, lse, *options, deterministic)
    got = {"out": out, "lse": lse, "probs": probs, **dict(zip(("dq", "dori", "dcmp", "dsinks"), grads))}
    return {name: x for name, x in got.items() if x.numel() or name in ("out", "dq")}


def make(case, dtype, seed=0):
    inputs = attention_inputs(case, seed=seed, dtype=dtype, device="cuda")
    dout = torch.randn(inputs["q"].shape, generator=torch.Generator().manual_seed(seed + 1)).to("cuda", dtype)
    return inputs, dout


def check(got, want, dtype, factor=1.0):
    errors = {name: error(got[name], x) for name, x in want.items()}
    print(errors)
    wrong = {name: e for name, e in errors.items() if not e <= factor * TOLERANCE[dtype][name]}
    assert not wrong, f"{wrong} of {errors}"


@pytest.mark.gpu
@pytest.mark.parametrize("case,dtype", CASES)
def test_against_fp64(case, dtype, poisoned):
    inputs, dout = make(case, dtype)
    assert hopper_supports(inputs["q"]) is None
    want = expected(inputs, dout, case.mode)
    fast, fixed, again = (run(inputs, case, dout, deterministic) for deterministic in (False, True, True))
    check(fast, want, dtype)
    check(fixed, want, dtype)
    for name, x in fixed.items():
        assert x.equal(again[name]), f"{name} of the deterministic form differs from run to run"


@pytest.mark.gpu
def test_chunks_of_queries(monkeypatch, poisoned):
    """Chunks of 24 queries, lists made for two chunks at once: the same gradients, still bit-equal."""
    from sparse_attn.shared_kv.hopper import bwd

    one = AttentionCase("chunks", "scfa", N=64, D=512, S=101, B=2, K=40, window=30)
    inputs, dout = make(one, BF16)
    monkeypatch.setattr(bwd, "chunk_of", lambda *_: 24)
    monkeypatch.setattr(bwd, "LIST_SLOTS", 2 * 24 * 40)
    got, again = run(inputs, one, dout, True), run(inputs, one, dout, True)
    check(got, expected(inputs, dout, "scfa"), BF16)
    assert all(x.equal(again[name]) for name, x in got.items())


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["swa", "cfa", "scfa"])
def test_rows_that_no_query_sees_are_not_read(mode, poisoned):
    """NaN in every key after the last query and in every entry that is not visible to any: neither may reach a result."""
    one = AttentionCase("unseen", mode, N=64, D=512, B=1, S=70, S2=150, q_offset=3, K=40, window=40)
    inputs, dout = make(one, BF16)
    want = expected(inputs, dout, mode)
    inputs["ori_kv"][:, 73:] = torch.nan
    if mode != "swa":
        inputs["cmp_kv"][:, 73 // 4 :] = torch.nan
    for deterministic in (False, True):
        check(run(inputs, one, dout, deterministic), want, BF16)


@pytest.mark.gpu
def test_large_logits_and_sinks(poisoned):
    one = AttentionCase("large", "scfa", N=64, D=512, B=1, S=90, K=40, window=40, softmax_scale=2.0)
    inputs, dout = make(one, BF16)
    inputs["sinks"] = torch.tensor([1e4, -1e4, 0.0, 60.0], device="cuda").repeat(16)
    want = expected(inputs, dout, "scfa")
    got = run(inputs, one, dout, True)
    # Rows are nearly one-hot, where dP - delta cancels and the rounding of out remains: dq is rounding alone, dkv twice as far off
    names = ("out", "lse", "probs", "dori", "dcmp")
    check(got, {name: want[name] for name in names}, BF16, factor=2.0)
    assert all(x.isfinite().all() for x in got.values())


@pytest.mark.gpu
def test_more_than_2_31_elements(poisoned):
    """The last queries of 70000 equal the same queries alone."""
    S, tail = 70_000, 40
    one = AttentionCase("long", "swa", N=64, D=512, B=1, S=S, window=128)
    generator = torch.Generator("cuda").manual_seed(0)
    q, dout = (torch.empty(1, S, 64, 512, device="cuda", dtype=BF16).normal_(generator=generator) for _ in range(2))
    ori_kv = torch.randn(1, S, 512, device="cuda", generator=generator).to(BF16)
    sinks = torch.randn(64, device="cuda", generator=generator)
    whole = run({"q": q, "ori_kv": ori_kv, "sinks": sinks}, one, dout, False)
    short = {"q": q[:, -tail:].contiguous(), "ori_kv": ori_kv, "sinks": sinks}
    part = run(short, replace(one, S=tail), dout[:, -tail:].contiguous(), False)
    for name in ("out", "lse", "dq"):
        assert torch.equal(whole[name][:, -tail:], part[name]), name
    assert torch.isfinite(whole["dori"]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("D", [96, 48])
def test_other_head_dims_are_left_to_the_plain_kernels(D):
    assert f"D = {D}" in hopper_supports(torch.empty(1, 4, 8, D, device="cuda", dtype=BF16))


def test_what_is_not_supported_says_why():
    assert hopper_supports(torch.empty(1, 4, 8, 512, dtype=BF16)) == "the tensors are on cpu"
    assert 512 in HEAD_DIMS


@pytest.mark.skipif(interpreting(), reason="under TRITON_INTERPRET=1 kernels are Python functions; nothing can be compiled")
def test_compiles_ahead_of_time():
    """Without a device: shared memory fits, and the forward keeps its accumulators in registers."""
    from triton.backends.compiler import GPUTarget

    from kernel_runtime.launch import CUDA_SMEM_LIMIT
    from sparse_attn.shared_kv.hopper.bwd import backward_spec
    from sparse_attn.shared_kv.hopper.fwd import forward_spec

    for spec in (forward_spec(BF16, 64, 512, 2, True), backward_spec(BF16, 64, 512, 2, False)):
        kernel = spec.compile(GPUTarget("cuda", 90, 32))
        assert kernel.metadata.shared <= CUDA_SMEM_LIMIT[90]
