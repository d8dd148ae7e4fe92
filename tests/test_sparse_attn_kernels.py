"""Attention kernels against the fp64 reference: all modes and layouts, every gradient, unwritten elements poisoned.

On `kernel_device`: Triton's interpreter on the CPU, or a GPU.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from reference.cases import relative_error
from reference.cases.sparse_attn import ATTENTION_CASES, AttentionCase, attention_inputs
from reference.sparse_attn import sparse_attn_shared_kv as reference
from sparse_attn import sparse_attn_shared_kv
from tests.op_checks import poison_empty, strided_variants
from tests.sparse_attn_util import EMPTY, MODES, empty_case

DIFFERENTIABLE = ("q", "ori_kv", "cmp_kv", "sinks")
RESULTS = ("out", "lse", "cmp_probs")
# A kernel may be this many times further from fp64 than the reference in the inputs' own dtype: the kernel rounds P and dZ to it for the
# products, and delta comes from the rounded output; the reference computes in fp32 and rounds inputs and results alone.
BUDGET = {torch.float32: 8.0, torch.float16: 4.0, torch.bfloat16: 4.0}
# Errors smaller than a few rounding steps of the dtype are noise, not a yardstick.
FLOOR = {torch.float32: 2e-7, torch.float16: 2.5e-4, torch.bfloat16: 2e-3}


def cotangent_of(out):
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16).to(out.device)


def sinks_condition(sinks, out, lse, dsinks):
    """How much larger the terms of the sinks' gradient are than their sum, as norms over the heads: roundings grow by that much."""
    terms = (out * cotangent_of(out).double()).abs().sum(-1) * torch.exp(sinks.double() - lse)
    return float(terms.nan_to_num(0.0).flatten(0, -2).sum(0).norm() / dsinks.norm())


def run(fn, inputs, dtype, **more):
    """All results and gradients by name; cotangents are the same numbers in every dtype."""
    inputs = {name: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() and name != "sinks" else x for name, x in inputs.items()}
    if "sinks" in inputs:
        inputs["sinks"] = inputs["sinks"].to(torch.float64 if dtype == torch.float64 else torch.float32)
    names = [name for name in DIFFERENTIABLE if name in inputs]
    for name in names:
        inputs[name] = inputs[name].detach().requires_grad_()
    results = fn(**inputs, return_lse=True, return_cmp_probs="cmp_indices" in inputs, **more)
    out = results[0]
    cotangent = cotangent_of(out).to(dtype)
    grads = torch.autograd.grad(out, [inputs[name] for name in names], cotangent)
    return dict(zip((*RESULTS[: len(results)], *(f"d{name}" for name in names)), (*(x.detach() for x in results), *grads)))


def _finite(x):
    """Infinities as numbers of their own (a mismatch shows), NaN as it is."""
    x = x.double()
    return torch.where(x == torch.inf, 1e3, torch.where(x == -torch.inf, -1e3, x))


def check(case, device, dtype, seed=1, change=None, impl="portable", **more):
    inputs = attention_inputs(case, seed=seed, dtype=dtype, device=device)
    if change is not None:
        inputs = change(inputs)
    want = run(reference, inputs, torch.float64)
    same = run(reference, inputs, dtype)
    got = run(sparse_attn_shared_kv, inputs, dtype, impl=impl, **more)
    assert got.keys() == want.keys()
    for name, w in want.items():
        assert got[name].shape == w.shape and got[name].dtype == same[name].dtype, name
        error = relative_error(_finite(got[name]), _finite(w))
        limit = BUDGET[dtype] * max(relative_error(_finite(same[name]), _finite(w)), FLOOR[dtype])
        if name == "dsinks" and case.N == 1 and dtype != torch.float32:
            limit *= 2  # a single sum of terms that cancel, each from a delta of the rounded output: 4.3 roundings off in a model in fp64
        if name == "dsinks" and dtype == torch.float32 and w.norm() > 0:
            # D = 272: terms 77 times their sum, so that one rounding of each may make 4.6e-6; measured 1.7e-6 on a GPU
            limit = max(limit, 2.0**-24 * sinks_condition(inputs["sinks"], want["out"], want["lse"], w))
        assert error <= limit, f"{name}: {error:.1e}, allowed {limit:.1e}"
    return got


def forms(case):
    """Forms of the gradient of selected entries that a case can meet; without entries or lists there is one."""
    return ("atomic", "rows", "dense") if case.mode == "scfa" else ("atomic",)


@pytest.fixture
def take(monkeypatch):
    """take(form) makes the backward sum with atomic additions, with partial rows, or in the dense form; the options of such a call."""
    from sparse_attn.shared_kv import bwd

    def inner(form):
        monkeypatch.setattr(bwd, "DENSE_LIMIT", 1 << 20 if form == "dense" else 0)
        return {"deterministic": form != "atomic"}

    return inner


@pytest.mark.parametrize(
    ("case", "form"), [pytest.param(case, form, id=f"{case.name}-{form}") for case in ATTENTION_CASES for form in forms(case)]
)
def test_every_case_in_fp32(kernel_device, monkeypatch, take, case, form):
    poison_empty(monkeypatch)
    check(case, kernel_device, torch.float32, **take(form))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["swa", "cfa_pack", "scfa", "scfa_pack"])
def test_low_precision(kernel_device, monkeypatch, take, name, dtype):
    poison_empty(monkeypatch)
    case = next(c for c in ATTENTION_CASES if c.name == name)
    for form in forms(case):
        check(case, kernel_device, dtype, **take(form))


@pytest.mark.parametrize("D", [16, 48, 112, 272, 512])
def test_channels(kernel_device, monkeypatch, take, D):
    """One tile, a tail past D, two halves with a tail in the second, two full halves."""
    poison_empty(monkeypatch)
    for form in ("rows", "dense"):
        check(AttentionCase("", "scfa", B=1, S=5, S2=9, D=D, cmp_ratio=2), kernel_device, torch.float32, **take(form))
    check(AttentionCase("", "cfa", B=1, S=5, S2=9, D=D, cmp_ratio=2), kernel_device, torch.float32)


@pytest.mark.parametrize("D", [272, 512])
def test_form_for_two_warpgroups(kernel_device, monkeypatch, take, D):
    """What sm_90 takes for more than 32 heads in 16 bits, in the interpreter as well: S, P and dZ from a branch."""
    from sparse_attn.shared_kv import bwd, fwd, tiles

    poison_empty(monkeypatch)
    launched = []
    monkeypatch.setattr("kernel_runtime.launch.LAUNCH_OBSERVERS", [lambda spec, arguments: launched.append(spec.consts.get("ARCH"))])
    if kernel_device == "cpu":
        monkeypatch.setattr(fwd, "form_of", lambda device: tiles.HOPPER)
        monkeypatch.setattr(bwd, "form_of", lambda device: tiles.HOPPER)
    case = AttentionCase("", "scfa", B=1, S=3, S2=75, N=33, D=D, window=70, cmp_ratio=2, K=9)
    check(case, kernel_device, torch.bfloat16, **take("dense" if D == 512 else "rows"))
    assert kernel_device != "cpu" or (90 in launched and 0 not in launched)


@pytest.mark.parametrize("N", [1, 15, 17, 33, 65, 128])
def test_heads(kernel_device, monkeypatch, N):
    """Less than a block of heads, one more than it, several blocks with a tail."""
    poison_empty(monkeypatch)
    check(AttentionCase("", "scfa", B=1, S=4, S2=9, N=N, cmp_ratio=2, sinks="extreme"), kernel_device, torch.float32)
    if kernel_device == "cuda":
        check(AttentionCase("", "scfa", B=1, S=40, N=N, cmp_ratio=2, sinks="extreme"), kernel_device, torch.bfloat16)


@pytest.mark.parametrize("mode", ["swa", "cfa", "scfa"])
def test_many_tiles_of_keys(kernel_device, monkeypatch, take, mode):
    """Windows and lists longer than a tile, lengths that no tile divides."""
    poison_empty(monkeypatch)
    case = AttentionCase("", mode, B=1, S=3, S2=205, N=2, window=101, cmp_ratio=2, K=75)
    for form in forms(case):
        check(case, kernel_device, torch.float32, **take(form))
    check(replace(case, window=None, indices="topk"), kernel_device, torch.float32)


@pytest.mark.parametrize("name", ["swa_pack", "cfa", "scfa", "scfa_pack_longer_keys"])
def test_chunks_of_queries(kernel_device, monkeypatch, take, name):
    """The backward in chunks of a few queries, the last one shorter."""
    from sparse_attn.shared_kv import bwd

    poison_empty(monkeypatch)
    monkeypatch.setattr(bwd, "CHUNK_BYTES", 3000)
    case = next(c for c in ATTENTION_CASES if c.name == name)
    for form in forms(case):
        check(case, kernel_device, torch.float32, **take(form))


@pytest.mark.parametrize("name", ["swa_pack", "cfa_pack", "scfa"])
def test_queries_of_a_tile_shared_out(kernel_device, monkeypatch, take, name):
    """Three programs a tile of keys, where a device of this size would start one: their sums are added up."""
    from sparse_attn.shared_kv import bwd

    poison_empty(monkeypatch)
    cores = bwd.device_properties(kernel_device).cube_cores
    monkeypatch.setattr(bwd, "WAVES", {0: 3.5 / cores, 2: 3.5 / cores})
    shared = []
    monkeypatch.setattr("kernel_runtime.launch.LAUNCH_OBSERVERS", [lambda spec, arguments: shared.append(spec.consts.get("SPLIT"))])
    case = next(c for c in ATTENTION_CASES if c.name == name)
    check(case, kernel_device, torch.float32, **take("dense"))
    assert True in shared and False not in shared


def test_list_longer_than_a_block_of_indices(kernel_device, monkeypatch, take):
    poison_empty(monkeypatch)
    for form in ("rows", "dense"):
        check(AttentionCase("", "scfa", B=1, S=2, S2=23, N=2, K=700, cmp_ratio=3), kernel_device, torch.float32, **take(form))


@pytest.mark.parametrize("form", ["rows", "dense"])
def test_rows_after_the_last_document(kernel_device, monkeypatch, take, form):
    """Whatever is in their q and in the gradient of their output (NaN here) counts for nothing."""
    poison_empty(monkeypatch)
    known = cotangent_of
    monkeypatch.setattr(f"{__name__}.cotangent_of", lambda out: known(out).index_fill(0, torch.arange(9, 13, device=kernel_device), torch.nan))
    for mode in ("swa", "cfa", "scfa") if form == "rows" else ("scfa",):

        def cut(inputs):
            inputs["q"][9:] = torch.nan
            return {**inputs, "cu_seqlens_q": torch.tensor([0, 5, 5, 9], dtype=torch.int32, device=kernel_device)}

        got = check(AttentionCase("", mode, docs_q=(5, 0, 8)), kernel_device, torch.float32, change=cut, **take(form))
        assert (got["out"][9:] == 0).all() and (got["dq"][9:] == 0).all() and (got["dori_kv"][9:] == 0).all()


def test_no_document_at_all(kernel_device, monkeypatch):
    poison_empty(monkeypatch)
    for mode in ("swa", "cfa", "scfa"):

        def cut(inputs):
            return {**inputs, "cu_seqlens_q": torch.zeros(1, dtype=torch.int32, device=kernel_device)}

        got = check(AttentionCase("", mode, docs_q=(9,)), kernel_device, torch.float32, change=cut)
        assert (got["out"] == 0).all()


@pytest.mark.parametrize("packed", [False, True], ids=["BSND", "TND"])
def test_places_of_queries_far_before_their_keys(kernel_device, packed):
    """Ranges as a loop finds them, empty and not negative for positions below -cmp_ratio; none goes back from one query to the next."""
    from sparse_attn.shared_kv.places import places_of

    lengths, offsets, window, ratio = (6, 9, 5), (0, -9, -4), 3, 2
    rows, keys = (sum(lengths), sum(lengths)) if packed else (3 * 9, 3 * 7)
    cuts = {n: torch.tensor([0, *torch.tensor(x).cumsum(0)], dtype=torch.int32, device=kernel_device)
            for n, x in (("ori", lengths), ("cmp", [n // ratio for n in lengths]))}  # fmt: skip
    shapes = ((rows,), (keys,), (keys // ratio,)) if packed else ((3, 9), (3, 7), (3, 3))
    q, ori, cmp = (torch.zeros(*shape, *tail, device=kernel_device) for shape, tail in zip(shapes, ((2, 16), (16,), (16,))))
    cu = (cuts["ori"], cuts["ori"], cuts["cmp"]) if packed else (None, None, None)
    got = places_of(q, ori, cmp, *cu, torch.tensor(offsets, dtype=torch.int32, device=kernel_device), None, ratio, window).tolist()
    want, first, entry = [], 0, 0
    for length, offset in zip(lengths if packed else (7, 7, 7), offsets):
        for t in range(offset, offset + (length if packed else 9)):
            low, high = (min(max(x, 0), length) for x in (t - window + 1, t + 1))
            want.append([first + low, first + high, entry, entry + min(max(t + 1, 0) // ratio, length // ratio)])
        first, entry = first + length, entry + length // ratio
    assert got == want
    assert all(a <= b for one, two in pairwise(got) for a, b in zip(one, two))


@MODES
@EMPTY
def test_empty(kernel_device, monkeypatch, mode, empty):
    poison_empty(monkeypatch)
    case = empty_case(mode, empty)
    check(case, kernel_device, torch.float32)


def test_strides(kernel_device):
    case = AttentionCase("", "scfa", S=6, S2=12, cmp_ratio=2)
    inputs = attention_inputs(case, seed=2, device=kernel_device)
    want = run(sparse_attn_shared_kv, inputs, torch.float32, impl="portable", deterministic=True)
    for name in ("q", "ori_kv", "cmp_kv", "cmp_indices"):
        variants = strided_variants(inputs[name]) if name != "cmp_indices" else [inputs[name].transpose(0, 2).contiguous().transpose(0, 2)]
        for variant in variants:
            got = run(sparse_attn_shared_kv, {**inputs, name: variant}, torch.float32, impl="portable", deterministic=True)
            assert all(torch.equal(got[key], want[key]) for key in want), name


def test_rows_that_do_not_count_are_never_read(kernel_device, take):
    """NaN in row 0, which a masked slot's address points to, and in every other entry that no query sees."""
    inputs = attention_inputs(AttentionCase("", "scfa", B=1, S=19, cmp_ratio=4), seed=3, device=kernel_device)
    index = torch.full_like(inputs["cmp_indices"], -1)
    index[..., 2] = 3
    index[..., 3] = 1 << 30
    inputs["cmp_indices"] = index
    dirty = inputs["cmp_kv"].clone()
    dirty[:, :3] = torch.nan
    for form in ("atomic", "rows", "dense"):
        options = take(form)
        got = run(sparse_attn_shared_kv, {**inputs, "cmp_kv": dirty}, torch.float32, impl="portable", **options)
        want = run(sparse_attn_shared_kv, inputs, torch.float32, impl="portable", **options)
        for key in want:  # additions come in any order on a GPU
            torch.testing.assert_close(got[key], want[key], **({"rtol": 1e-5, "atol": 1e-5} if form == "atomic" else {"rtol": 0, "atol": 0}))
        assert (got["dcmp_kv"][:, :3] == 0).all() and (got["dcmp_kv"][:, 3] != 0).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
def test_large_logits_and_sinks(kernel_device, monkeypatch, take, dtype):
    """Sinks of +-1e4, and products that neither float16 holds nor exp of float32: finite everywhere, rows as sharp as in fp64."""
    poison_empty(monkeypatch)
    inputs = attention_inputs(AttentionCase("", "scfa", N=4, D=32, B=1, S=13, K=9, cmp_ratio=2, window=7), seed=2, device=kernel_device)
    inputs["q"] *= 100
    inputs["ori_kv"] *= 100
    inputs["cmp_kv"] *= 100
    inputs["sinks"] = torch.tensor([1e4, -1e4, 0.0, 60.0], device=kernel_device)
    low = {name: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() and name != "sinks" else x for name, x in inputs.items()}
    largest = torch.einsum("bsnd,bkd->bsnk", low["q"].double(), low["ori_kv"].double()).abs().max()
    assert largest > 2 * torch.finfo(torch.float16).max
    want = run(reference, low, torch.float64)
    for form in ("atomic", "rows", "dense"):
        got = run(sparse_attn_shared_kv, low, dtype, impl="portable", **take(form))
        assert all(x.isfinite().all() for x in got.values())
        assert relative_error(got["out"], want["out"]) < 2e-3 and relative_error(got["lse"], want["lse"]) < 1e-6
        assert relative_error(got["cmp_probs"], want["cmp_probs"]) < 1e-2


@pytest.mark.parametrize("form", ["rows", "dense"])
def test_deterministic_is_bit_equal(kernel_device, take, form):
    """Ten runs on a GPU."""
    options, gpu = take(form), kernel_device == "cuda"
    case = AttentionCase("", "scfa", B=1, S=300 if gpu else 12, N=20 if gpu else 3, cmp_ratio=2, K=70 if gpu else 9)
    dtype = torch.bfloat16 if gpu else torch.float32
    inputs = attention_inputs(case, seed=4, dtype=dtype, device=kernel_device)
    first, *others = (run(sparse_attn_shared_kv, inputs, dtype, impl="portable", **options) for _ in range(10 if gpu else 2))
    assert all(torch.equal(first[key], other[key]) for other in others for key in first)


def test_deterministic_follows_torch(kernel_device, monkeypatch, take):
    from sparse_attn.shared_kv import bwd

    take("rows")
    used = []
    monkeypatch.setattr(bwd, "owner_lists", lambda *args, original=bwd.owner_lists: used.append(1) or original(*args))
    inputs = attention_inputs(AttentionCase("", "scfa", B=1, S=6, cmp_ratio=2), device=kernel_device)
    for switch, explicit, expected in ((False, None, 0), (True, None, 1), (True, False, 0), (False, True, 1)):
        used.clear()
        torch.use_deterministic_algorithms(switch)
        try:
            run(sparse_attn_shared_kv, inputs, torch.float32, impl="portable", deterministic=explicit)
        finally:
            torch.use_deterministic_algorithms(False)
        assert len(used) == expected


@pytest.mark.parametrize("D", [24, 528])
def test_auto_takes_eager_where_no_kernel_exists(kernel_device, D):
    inputs = attention_inputs(AttentionCase("", "scfa", B=1, S=5, D=D, cmp_ratio=2), device=kernel_device)
    got, want = sparse_attn_shared_kv(**inputs), sparse_attn_shared_kv(**inputs, impl="eager")
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    for impl in ("triton", "portable"):
        with pytest.raises(ValueError, match=rf"impl='{impl}' cannot run here: q has D = {D} channels; kernels take multiples of 16 up to 512"):
            sparse_attn_shared_kv(**inputs, impl=impl)
