"""The sm_90 kernels of the attention against the reference in fp64, through their launchers: nothing here can run another kernel."""

from dataclasses import replace

import pytest
import torch

from reference.cases.sparse_attn import AttentionCase, attention_inputs
from reference.sparse_attn import sparse_attn_shared_kv as reference_attention
from sparse_attn.shared_kv import hopper
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
    # short ranges, where the dense forward takes over: tiles that cut queries apart, steps that documents break, padded heads
    case("cfa_64_dense", "cfa", 64, 512, S=301, B=2, cmp_ratio=10, window=128),
    case("cfa_20_dense", "cfa", 20, 512, S=203, B=2, cmp_ratio=7, window=100, sinks="none"),
    case("cfa_128_dense_fp16", "cfa", 128, 512, FP16, S=99, S2=201, q_offset=(80,), cmp_ratio=7, window=128),
    case("swa_20_dense_pack", "swa", 20, 512, docs_q=(37, 0, 131, 2, 1), docs_ori=(240, 3, 131, 77, 0), window=33, sinks="extreme"),
    case("cfa_3_dense_pack", "cfa", 3, 512, docs_q=(97, 0, 131, 2), cmp_ratio=8, window=128, sinks="extreme"),
    case("cfa_16_dense_d256", "cfa", 16, 256, FP16, docs_q=(30, 0, 70), docs_ori=(90, 20, 171), cmp_ratio=10, window=50),
    case("swa_16_dense_d256", "swa", 16, 256, S=141, q_offset=-9, B=2, window=128),
    case("swa_64_dense_steps", "swa", 64, 256, S=1403, window=31, sinks="none"),  # programs of two steps and more
    case("swa_128_dense", "swa", 128, 512, S=133, window=100),
    # up to 128 entries, which stream: all of a tile's rows see 64 at most, or more; a sequence that passes from the one to the other
    case("cfa_64_streamed", "cfa", 64, 512, S=333, cmp_ratio=3, window=128),
    case("cfa_128_streamed_fp16", "cfa", 128, 512, FP16, S=161, B=2, cmp_ratio=3, window=90),
    case("cfa_20_streamed", "cfa", 20, 512, S=97, B=3, cmp_ratio=1, window=128, sinks="extreme"),
    case("cfa_3_streamed_d256", "cfa", 3, 256, S=301, S2=340, q_offset=(60,), cmp_ratio=3, window=37, sinks="none"),
    case("cfa_3_streamed_apart", "cfa", 3, 512, S=5, S2=71, B=3, cmp_ratio=1, window=64),  # keys of batches are not one run
    case("scfa_64_no_slots", "scfa", 64, 512, S=77, K=0, cmp_ratio=7, window=40),  # entries that no list names
    case("cfa_20_negative_scale", "cfa", 20, 512, S=77, cmp_ratio=7, window=40, softmax_scale=-0.05),  # left to the general kernel
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
    forward = {name: r.detach() for name, r in zip(("out", "lse", "probs"), results) if name != "probs" or r.numel()}
    return {**forward, **{names[n]: g for n, g in zip(leaves, grads)}}


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


def make(case, dtype, seed=0, device="cuda"):
    inputs = attention_inputs(case, seed=seed, dtype=dtype, device=device)
    dout = torch.randn(inputs["q"].shape, generator=torch.Generator().manual_seed(seed + 1)).to(device, dtype)
    return inputs, dout


def limits_of(want, dtype, factor=1.0):
    limits = {name: factor * TOLERANCE[dtype][name] for name in want}
    if "dsinks" in want and int(want["dsinks"].count_nonzero()) == 1:
        # one sum of terms that cancel, each from a delta of the rounded out: in a model of those roundings (swa_3_none, fp64) the
        # standard deviation is 5.0e-3 of the gradient, where several heads average it out
        limits["dsinks"] *= 3
    return limits


def check(got, want, dtype, factor=1.0):
    errors = {name: error(got[name], x) for name, x in want.items()}
    print(errors)
    limits = limits_of(want, dtype, factor)
    wrong = {name: e for name, e in errors.items() if not e <= limits[name]}
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
    one = AttentionCase("unseen", mode, N=64, D=512, B=1, S=70, S2=150, q_offset=3, K=40, cmp_ratio=5, window=40)
    inputs, dout = make(one, BF16)
    want = expected(inputs, dout, mode)
    inputs["ori_kv"][:, 73:] = torch.nan
    if mode != "swa":
        inputs["cmp_kv"][:, 73 // 5 :] = torch.nan
    for deterministic in (False, True):
        check(run(inputs, one, dout, deterministic), want, BF16)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [20, 64])
@pytest.mark.parametrize("mode", ["swa", "cfa", "scfa"])
def test_rows_after_the_last_document(mode, heads, poisoned):
    """Whatever is in their q and in the gradient of their output (NaN here) counts for nothing."""
    one = AttentionCase("after", mode, N=heads, D=512, docs_q=(37, 0, 61), K=40, cmp_ratio=5, window=33)
    inputs, dout = make(one, BF16)
    inputs["cu_seqlens_q"] = torch.tensor([0, 37, 37, 70], dtype=torch.int32, device="cuda")
    want = expected(inputs, dout, mode)
    inputs["q"][70:], dout[70:] = torch.nan, torch.nan
    for deterministic in (False, True):
        got = run(inputs, one, dout, deterministic)
        check(got, want, BF16)
        assert not got["out"][70:].any() and not got["dq"][70:].any() and not got["dori"][70:].any()


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


def partial_rows(groups, rows, slots, D, device):
    return torch.randn((groups, rows, slots, D), generator=torch.Generator().manual_seed(3)).to(device)


@pytest.mark.parametrize("groups", [1, 2])
def test_sums_of_partial_rows(kernel_device, groups, monkeypatch):
    """Windows by bisection and lists by a sort, over two lists of two chunks each, against index_add; rows that count for nothing are NaN."""
    from reference.cases.sparse_attn import mixed_indices
    from sparse_attn.shared_kv.hopper import owner_sum
    from sparse_attn.shared_kv.places import places_of
    from tests.op_checks import poison_empty

    device, chunk, listed, K, window, D, ratio = kernel_device, 4, 8, 9, 5, 128, 2
    cu_q, cu_cmp = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 6, 6, 13], [0, 3, 3, 6]))
    q, ori, cmp = torch.zeros(14, 3, D, device=device), torch.zeros(13, D, device=device), torch.zeros(6, D, device=device)
    places = places_of(q, ori, cmp, cu_q, None, cu_cmp, None, None, ratio, window)  # row 13 is after the last document
    t = torch.tensor([*range(6), *range(7), 0])
    indices = mixed_indices(t, torch.tensor([3] * 6 + [3] * 8), K, ratio, torch.Generator().manual_seed(0)).to(device)
    poison_empty(monkeypatch)
    bounds = owner_sum.range_bounds(places, 13, 0)
    dori, dcmp = (torch.zeros(n, D, device=device) for n in (13, 6))
    want_ori, want_cmp = torch.zeros_like(dori), torch.zeros_like(dcmp)
    rows = places.tolist()
    for row0 in range(0, 14, chunk):
        count = min(chunk, 14 - row0)
        part_ori, part_cmp = (partial_rows(groups, count, n, D, device) for n in (window, K))
        for r in range(count):
            begin, end, first, last = rows[row0 + r]
            want_ori[begin:end] += part_ori[:, r, : end - begin].sum(0)
            part_ori[:, r, end - begin :] = torch.nan
            for k, entry in enumerate(indices[row0 + r].tolist()):
                if 0 <= entry < last - first:
                    want_cmp[first + entry] += part_cmp[:, r, k].sum(0)
                else:
                    part_cmp[:, r, k] = torch.nan
        if row0 % listed == 0:
            starts, order = owner_sum.owner_lists(indices, places, row0, min(listed, 14 - row0), chunk, K, 6)
        owner_sum.range_sum(part_ori, places, bounds, dori, row0, 0)
        owner_sum.list_sum(part_cmp, starts, order, dcmp, row0 % listed // chunk, row0 % listed * K)
    torch.testing.assert_close(dori, want_ori, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(dcmp, want_cmp, rtol=1e-6, atol=1e-5)


def test_gradient_of_sinks(kernel_device):
    from sparse_attn.shared_kv.sinks import sink_gradient

    generator = torch.Generator().manual_seed(0)
    lse, delta = (torch.randn((135, 3), generator=generator).to(kernel_device) for _ in range(2))
    sinks = torch.tensor([0.3, torch.inf, -torch.inf], device=kernel_device)
    lse[7] = sinks.where(sinks.isfinite(), -torch.inf)  # a query that sees nothing
    share = torch.where(sinks.isfinite(), torch.exp(sinks.double() - lse.double()), 0.0)
    torch.testing.assert_close(sink_gradient(sinks, lse, delta).double(), -(share * delta.double()).sum(0), rtol=1e-5, atol=1e-5)


class FusedInTorch:
    """Stands in for the fused kernel, with its arguments, where there is no sm_90: the launcher around it is what is tested."""

    def __init__(self, *_):
        pass

    def launch(self, grid, q, ori_kv, cmp_kv, indices, places, used, dout, out, lse, delta, dq, dori, dcmp, row0, count, tasks, K, *rest):
        N, D = q.shape[-2:]
        scale = rest[-1]
        q, dout, out, dq = (x.view(-1, N, D) for x in (q, dout, out, dq))
        ori_kv, cmp_kv, lse, delta = ori_kv.view(-1, D), cmp_kv.reshape(-1, D), lse.view(-1, N), delta.view(-1, N)
        partial = dori.dim() == 4
        assert tasks == count and grid[0] <= tasks
        group = 8 if partial else 4  # the order of the kernel's lanes: channel (r, j, lane, e) at (r, lane, j, e)
        order = torch.arange(D).view(-1, group // 2, 4, 2).transpose(1, 2).reshape(-1)
        for local in range(count):
            row = row0 + local
            delta[row] = (out[row].float() * dout[row].float()).sum(-1)
            begin, end, first, last = places[row].tolist()
            slots = list(range(last - first)) if indices is places else indices.view(-1, K)[row].tolist() if K else []
            slots = [] if cmp_kv.shape[0] == q.shape[0] * N else slots  # q stands in for cmp_kv where there is none
            chosen = [k for k, entry in enumerate(slots) if 0 <= entry < last - first]
            assert not K or (chosen[-1] + 1 if chosen else 0) == used[row]
            total = torch.zeros(N, D)
            for keys, sums, at in (
                (list(range(begin, end)), dori, list(range(end - begin))),
                ([first + slots[k] for k in chosen], dcmp, chosen),
            ):
                if not keys:
                    continue
                kv = (ori_kv if sums is dori else cmp_kv)[keys].float()
                p = torch.exp(q[row].float() @ kv.T * scale - lse[row, :, None])
                dz = p * (dout[row].float() @ kv.T - delta[row, :, None]) * scale
                total += dz @ kv
                rows = (dz.T @ q[row].float() + p.T @ dout[row].float())[:, order]
                if partial:
                    sums[0, local, at] = rows.to(sums.dtype)
                else:
                    sums.view(-1, D).index_add_(0, torch.tensor(keys), rows)
            dq[row] = total.to(dq.dtype)


@pytest.mark.interpret
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("mode", "more"),
    [("swa", {}), ("cfa", {}), ("scfa", {}), ("scfa", {"K": 0}), ("cfa", {"S2": 0, "q_offset": 3}), ("scfa", {"S": 0}), ("scfa", {"B": 0})],
    ids=["swa", "cfa", "scfa", "no slots", "no keys", "no queries", "no batch"],
)
def test_launcher_of_the_backward(mode, more, deterministic, monkeypatch):
    """Everything around the fused kernel: chunks of 4 queries, two of them to a list, delta, sums, sinks, dtypes."""
    from sparse_attn.shared_kv.hopper import bwd
    from tests.op_checks import poison_empty

    one = replace(AttentionCase("launcher", mode, N=3, D=128, B=2, S=7, S2=12, K=5, cmp_ratio=2, window=4), **more)
    inputs = attention_inputs(one, dtype=FP16)
    dout = torch.randn(inputs["q"].shape, generator=torch.Generator().manual_seed(1)).to(FP16)
    want = expected(inputs, dout, mode)
    monkeypatch.setattr(bwd, "backward_spec", FusedInTorch)
    monkeypatch.setattr(bwd, "chunk_of", lambda *_: 4)
    monkeypatch.setattr(bwd, "LIST_SLOTS", 2 * 4 * 5)
    poison_empty(monkeypatch)
    tensors, options = arguments(inputs, one)
    grads = bwd.attention_bwd(dout, *tensors, want["out"].to(FP16), want["lse"].float(), *options, deterministic)
    got = {name: x for name, x in zip(("dq", "dori", "dcmp", "dsinks"), grads) if x.numel()}
    check(got, {name: want[name] for name in got}, FP16, factor=3.0)  # few keys a query: delta of the rounded out weighs more
    assert set(got) == {name for name, x in want.items() if x.numel() and name.startswith("d")}
    assert all(x.dtype == FP16 for x in grads[:3]) and [x.shape for x in grads[:2]] == [inputs[name].shape for name in ("q", "ori_kv")]


class Launched(Exception):
    pass


@pytest.mark.interpret
@pytest.mark.parametrize(
    "mode,window,ratio,scale,K,kernel",
    [
        ("swa", 128, 0, 0.1, 0, "dense, no entries"),
        ("swa", 129, 0, 0.1, 0, "general 0"),
        ("swa", None, 0, 0.1, 0, "general 0"),
        ("swa", 128, 0, -0.1, 0, "general 0"),
        ("swa", 128, 0, 0.0, 0, "general 0"),
        ("cfa", 5, 2, 0.1, 0, "dense, 32 entries"),  # the most that stay in shared memory
        ("cfa", 5, 1, 0.1, 0, "general 1"),
        ("cfa", 5, 66, 0.1, 0, "dense, no entries"),
        ("scfa", 5, 3, 0.1, 4, "general 2"),
        ("scfa", 5, 3, 0.1, 0, "dense, no entries"),  # of the 21 that there are: no list names any
        ("scfa", 5, 1, -0.1, 0, "general 0"),
    ],
)
def test_which_forward_runs(mode, window, ratio, scale, K, kernel, monkeypatch):
    """The dense kernel where every query's ranges are short, the general one elsewhere. Neither runs here: their names are what is tested."""
    from sparse_attn.shared_kv.hopper import dense_fwd, fwd

    def dense(q, ori_kv, cmp_kv, *_):
        raise Launched(f"dense, {'no' if cmp_kv is None else cmp_kv.shape[1]} entries")

    def general(dtype, N, D, compressed, sinks, form):
        raise Launched(f"general {compressed}")

    monkeypatch.setattr(dense_fwd, "dense_forward", dense)
    monkeypatch.setattr(fwd, "forward_spec", general)
    one = AttentionCase("which", mode, N=2, D=256, B=1, S=65, K=K, cmp_ratio=max(ratio, 1), window=window, softmax_scale=scale)
    tensors, options = arguments(attention_inputs(one, dtype=FP16), one)
    with pytest.raises(Launched, match=f"^{kernel}$"):
        fwd.attention_fwd(*tensors, *options, False)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [96, 48])
def test_other_head_dims_are_left_to_the_plain_kernels(D):
    assert f"D = {D}" in hopper_supports(torch.empty(1, 4, 8, D, device="cuda", dtype=BF16))


def test_what_is_not_supported_says_why(monkeypatch):
    assert hopper_supports(torch.empty(1, 4, 8, 512, dtype=BF16)) == "the tensors are on cpu"
    assert 512 in HEAD_DIMS
    monkeypatch.setattr(hopper, "triton_installed", lambda: False)
    assert hopper._device_reason.__wrapped__(0) == "triton is not installed"
