"""Compressor kernels against the fp64 reference: layouts, ratios, tails, every gradient, unwritten elements poisoned.

On `kernel_device`: Triton's interpreter on the CPU, or a GPU.
"""

from dataclasses import replace

import pytest
import torch

from reference.cases import relative_error
from reference.cases.sparse_attn import COMPRESS_CASES, CompressCase, compress_inputs
from reference.compress import compress_kv as reference
from sparse_attn import compress_kv, compressed_cu_seqlens
from sparse_attn.compress import bwd
from tests.op_checks import poison_empty, strided_variants

CASES = {case.name: case for case in COMPRESS_CASES}
TENSORS = ("kv", "gate", "position_bias")
# A kernel may be this many times further from fp64 than the reference in the inputs' own dtype: both compute in fp32 and round once (the
# interpreter cuts bf16 off instead of rounding, which doubles the error).
BUDGET = {torch.float32: 8.0, torch.float16: 2.0, torch.bfloat16: 3.0}
# Errors smaller than a rounding step of the dtype are noise, not a yardstick.
FLOOR = {torch.float32: 1e-7, torch.float16: 2e-4, torch.bfloat16: 1.5e-3}


def run(fn, inputs, dtype, nan_from=None, **more):
    """Result and gradients by name; cotangents are the same numbers in every dtype, NaN from row `nan_from` on."""
    bias = inputs["position_bias"].dtype if dtype != torch.float64 else dtype
    kinds = {"kv": dtype, "gate": dtype, "position_bias": bias}
    inputs = {**inputs, **{name: inputs[name].detach().to(kind).requires_grad_() for name, kind in kinds.items()}}
    out = fn(**inputs, **more)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16).to(out.device, dtype)
    cotangent[len(cotangent) if nan_from is None else nan_from :] = float("nan")
    grads = torch.autograd.grad(out, [inputs[name] for name in TENSORS], cotangent)
    return {"out": out.detach(), **{f"d{name}": grad for name, grad in zip(TENSORS, grads)}}


def check(case, device, dtype=torch.float32, seed=1, **change):
    inputs = {**compress_inputs(case, seed=seed, dtype=dtype, device=device), **change}
    want = run(reference, inputs, torch.float64)
    same = run(reference, inputs, dtype)
    got = run(compress_kv, inputs, dtype, impl="triton")
    for name, w in want.items():
        assert got[name].shape == w.shape and got[name].dtype == same[name].dtype, name
        error = relative_error(got[name], w)
        limit = BUDGET[dtype] * max(relative_error(same[name], w), FLOOR[dtype])
        assert error <= limit, f"{name}: {error:.1e}, allowed {limit:.1e}"
        assert torch.equal(got[name][w == 0], torch.zeros_like(got[name][w == 0])), f"{name}: what is exactly zero is not"
    return got


def cuts(*offsets, device):
    return torch.tensor(offsets, dtype=torch.int32, device=device)


@pytest.mark.parametrize("case", COMPRESS_CASES, ids=lambda case: case.name)
def test_every_case_in_fp32(kernel_device, monkeypatch, case):
    poison_empty(monkeypatch)
    check(case, kernel_device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["plain", "overlap", "overlap_pack"])
def test_low_precision(kernel_device, monkeypatch, name, dtype):
    poison_empty(monkeypatch)
    case = replace(CASES[name], D=24)
    got = check(case, kernel_device, dtype)
    assert got["dposition_bias"].dtype == torch.float32
    if name != "overlap":
        return
    low = compress_inputs(case, dtype=dtype, device=kernel_device)["position_bias"].to(dtype)
    assert check(case, kernel_device, dtype, position_bias=low)["dposition_bias"].dtype == dtype


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("ratio", [1, 3, 4, 16, 33, 128])
def test_ratios(kernel_device, monkeypatch, ratio, overlap):
    """Two windows and a tail (one token short of a third where there is room for one) of each of two sequences."""
    poison_empty(monkeypatch)
    check(CompressCase("", ratio, overlap, D=3, S=3 * ratio - 1), kernel_device)


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("D", [1, 16, 65, 150])
def test_channels(kernel_device, monkeypatch, D, overlap):
    """One tile, one with a tail past D, more than one with a tail in the last."""
    poison_empty(monkeypatch)
    check(CompressCase("", 4, overlap, D=D, B=1, S=10), kernel_device)
    check(CompressCase("", 16, overlap, D=D, B=1, S=33), kernel_device)


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_windows_longer_than_a_tile(kernel_device, monkeypatch, overlap):
    poison_empty(monkeypatch)
    check(CompressCase("", 300, overlap, D=5, B=1, S=650), kernel_device)
    check(CompressCase("", 129, overlap, D=5, docs=(130, 0, 400, 3)), kernel_device)


@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize("name", ["plain", "overlap", "plain_pack", "overlap_pack"])
def test_several_windows_to_a_program(kernel_device, monkeypatch, name, programs):
    poison_empty(monkeypatch)
    monkeypatch.setattr("sparse_attn.compress.fwd.PROGRAMS", programs)
    monkeypatch.setattr(bwd, "PROGRAMS", programs)
    check(replace(CASES[name], S=27), kernel_device)


def test_many_rows_of_partial_sums(kernel_device, monkeypatch):
    """More rows than the second stage takes at once, and more columns than one of its programs."""
    poison_empty(monkeypatch)
    monkeypatch.setattr(bwd, "bias_tile", lambda size: (4, 32))
    check(CompressCase("", 2, True, D=40, B=1, S=21), kernel_device)


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("docs", [
    (0,), (0, 0), (0, 9), (9, 0), (1, 2, 3), (4, 4, 4), (3, 0, 0, 7, 1, 12, 0), (2,) * 9 + (5,),
], ids=str)  # fmt: skip
def test_packs(kernel_device, monkeypatch, docs, overlap):
    poison_empty(monkeypatch)
    got = check(CompressCase("", 4, overlap, D=3, docs=docs), kernel_device)
    entries = sum(n // 4 for n in docs)
    assert got["out"].shape[0] == sum(docs) // 4 and (got["out"][entries:] == 0).all()


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_a_pack_is_its_documents_one_by_one(kernel_device, monkeypatch, overlap):
    """Against the kernel itself, document by document: bit-equal, so nothing leaks over a border."""
    poison_empty(monkeypatch)
    docs = (9, 0, 3, 13)
    inputs = compress_inputs(CompressCase("", 4, overlap, D=7, docs=docs), device=kernel_device)
    cu = inputs.pop("cu_seqlens")
    packed = compress_kv(**inputs, cu_seqlens=cu, impl="triton")
    bounds, rows = cu.tolist(), compressed_cu_seqlens(cu, 4).tolist()
    for g in range(len(docs)):
        alone = {n: inputs[n][None, bounds[g] : bounds[g + 1]] for n in ("kv", "gate")}
        assert torch.equal(compress_kv(**{**inputs, **alone}, impl="triton")[0], packed[rows[g] : rows[g + 1]])


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_tokens_after_the_last_document(kernel_device, monkeypatch, overlap):
    poison_empty(monkeypatch)
    case = CompressCase("", 4, overlap, D=3, docs=(27,))
    for offsets in ((0, 9, 9, 14), (0, 3), (0,)):
        got = check(case, kernel_device, cu_seqlens=cuts(*offsets, device=kernel_device))
        assert (got["dkv"][offsets[-1] :] == 0).all() and (got["dgate"][offsets[-1] :] == 0).all()


def test_unread_tokens_may_hold_anything(kernel_device, monkeypatch):
    """NaN in a remainder, behind the last document, in a first series that no entry takes up and in the gradient of a row that is no entry
    reaches nothing."""
    poison_empty(monkeypatch)
    inputs = compress_inputs(CompressCase("", 4, True, D=3, docs=(9, 6, 7)), device=kernel_device)
    inputs["cu_seqlens"] = cuts(0, 9, 15, device=kernel_device)
    clean = run(compress_kv, inputs, torch.float32, impl="triton")
    dirty = {**inputs, "kv": inputs["kv"].clone(), "gate": inputs["gate"].clone()}
    for x in (dirty["kv"], dirty["gate"]):
        x[8] = x[13:] = float("nan")
        x[4:8, :3] = x[9:13, :3] = float("nan")
    for name, got in run(compress_kv, dirty, torch.float32, nan_from=3, impl="triton").items():
        assert torch.equal(got, clean[name]), name


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("shape", [{"B": 0}, {"S": 0}, {"S": 3}, {"docs": (0,)}], ids=str)
def test_empty(kernel_device, monkeypatch, shape, overlap):
    poison_empty(monkeypatch)
    got = check(replace(CompressCase("", 4, overlap), **shape), kernel_device)
    assert got["out"].numel() == 0 and all((got[f"d{name}"] == 0).all() for name in TENSORS)


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_large_gates(kernel_device, monkeypatch, overlap):
    """Gates of +-1e4 and of -inf (a token that takes no part) give finite results."""
    poison_empty(monkeypatch)
    inputs = compress_inputs(CompressCase("", 4, overlap, D=5), device=kernel_device)
    gate = inputs["gate"] * 1e4
    gate[:, 1] = -torch.inf
    got = check(CompressCase("", 4, overlap, D=5), kernel_device, gate=gate)
    assert all(x.isfinite().all() for x in got.values())


def test_strides(kernel_device, monkeypatch):
    poison_empty(monkeypatch)
    for name in ("overlap", "plain_pack"):
        inputs = compress_inputs(CASES[name], device=kernel_device)
        want = run(compress_kv, inputs, torch.float32, impl="triton")
        views = [strided_variants(inputs[n]) for n in TENSORS]
        for variant in zip(*views):
            got = run(compress_kv, {**inputs, **dict(zip(TENSORS, variant))}, torch.float32, impl="triton")
            assert all(torch.equal(got[n], want[n]) for n in want)


def test_bit_equal_from_run_to_run(kernel_device):
    inputs = compress_inputs(CompressCase("", 4, True, D=20, S=25), device=kernel_device)
    first = run(compress_kv, inputs, torch.float32, impl="triton")
    for _ in range(10 if kernel_device == "cuda" else 1):
        again = run(compress_kv, inputs, torch.float32, impl="triton")
        assert all(torch.equal(again[name], x) for name, x in first.items())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("ratio, overlap", [(4, True), (128, False), (4, False), (16, True), (128, True), (5, False)])
def test_sizes_of_a_model(monkeypatch, ratio, overlap, dtype):
    poison_empty(monkeypatch)
    check(CompressCase("", ratio, overlap, D=512, B=2, S=1027), "cuda", dtype)
    check(CompressCase("", ratio, overlap, D=512, docs=(700, 0, 3, 1500)), "cuda", dtype)


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts():
    """T * C * D beyond 2^31: the entries at both ends, against the reference on a copy of their tokens."""
    T, D = 2**21 + 64, 512
    if torch.cuda.get_device_properties(0).total_memory < 50e9:
        pytest.skip("needs 50 GB of device memory")
    generator = torch.Generator("cuda").manual_seed(1)
    kv, gate = (torch.randn(1, T, 2 * D, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_() for _ in range(2))
    bias = torch.randn(4, 2 * D, device="cuda", generator=generator)
    out = compress_kv(kv, gate, bias, 4, overlap=True, impl="triton")
    dout = torch.randn(out.shape, device="cuda", dtype=torch.bfloat16, generator=generator)
    grads = torch.autograd.grad(out, (kv, gate), dout)
    ends = [x.detach()[:, -64:].double().requires_grad_() for x in (kv, gate)]
    want = reference(*ends, bias.double(), 4, overlap=True)
    want_grads = torch.autograd.grad(want[:, 1:], ends, dout[:, -15:].double())
    assert relative_error(out[:, -15:], want[:, 1:]) < 3e-3
    for got, w in zip(grads, want_grads):
        assert relative_error(got[:, -60:], w[:, 4:]) < 3e-3
