"""Attention kernels on a GPU in the sizes they are made for: a sample of modes x layouts x heads x channels, every value twice or more.

test_sparse_attn_kernels.py has the small cases, and the limits of errors that count here as well.
"""

from dataclasses import replace

import pytest
import torch

from reference.cases import relative_error
from reference.cases.sparse_attn import AttentionCase, attention_inputs
from sparse_attn import sparse_attn_shared_kv
from sparse_attn.shared_kv.hopper import HEAD_DIMS
from tests.op_checks import poison_empty
from tests.test_sparse_attn_kernels import check, forms, run, take  # noqa: F401  # take is a fixture

BF16 = torch.bfloat16
PACK = {"docs_q": (33, 0, 50, 2)}
KEYS = {"docs_q": (21, 0, 40), "docs_ori": (64, 7, 133)}  # more keys than queries

# mode, heads, channels, and what else differs from one sequence of odd length with a window of 33
GRID = (
    ("swa", 1, 64, {"S": 77, "window": None}),
    ("cfa", 1, 512, {**PACK, "cmp_ratio": 2}),
    ("scfa", 3, 128, {**KEYS, "K": 40, "sinks": "extreme"}),
    ("swa", 3, 512, PACK),
    ("cfa", 16, 64, {"S": 91, "B": 2, "sinks": "none"}),
    ("scfa", 16, 512, {"S": 101, "K": 70, "indices": "topk"}),
    ("scfa", 20, 64, {**PACK, "K": 21, "sinks": "none"}),
    ("swa", 20, 128, {"S": 65, "S2": 99, "q_offset": 11}),
    ("scfa", 64, 128, {"S": 83, "B": 2, "K": 65, "cmp_ratio": 3}),
    ("cfa", 64, 512, {"S": 71, "S2": 141, "cmp_ratio": 1}),
    ("swa", 128, 64, {**KEYS, "sinks": "extreme"}),
    ("scfa", 128, 512, {"S": 57, "K": 40, "cmp_ratio": 2}),
)
CASES = [AttentionCase(f"{mode}_{N}_{D}", mode, N=N, D=D, **{"B": 1, "window": 33, **more}) for mode, N, D, more in GRID]
CHOICES = [
    pytest.param(case, impl, form, id=f"{case.name}-{impl}-{form}")
    for case in CASES
    for impl in ("portable", "hopper")
    if impl == "portable" or case.D in HEAD_DIMS
    for form in (forms(case) if impl == "portable" else ("atomic", "rows"))
]


def needs(impl):
    if impl == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("these kernels are for sm_90")


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "impl", "form"), CHOICES)
def test_grid(monkeypatch, take, case, impl, form):  # noqa: F811  # the fixture
    needs(impl)
    poison_empty(monkeypatch)
    check(case, "cuda", BF16, impl=impl, **take(form))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["swa", "cfa", "scfa"])
def test_sinks_by_finite_differences(mode):
    """Of the kernel's own output, in fp32; kernels for 16 bits are compared with fp64 alone, their outputs are too coarse for this."""
    inputs = attention_inputs(AttentionCase("", mode, N=3, D=64, B=1, S=301, K=20, window=9), seed=6, device="cuda")
    sinks = inputs.pop("sinks").requires_grad_()
    cotangent = torch.randn(inputs["q"].shape, generator=torch.Generator().manual_seed(7)).to("cuda")
    (got,) = torch.autograd.grad(sparse_attn_shared_kv(**inputs, sinks=sinks, impl="portable"), sinks, cotangent)
    step = 0.02
    with torch.no_grad():

        def value(s):
            return (sparse_attn_shared_kv(**inputs, sinks=s, impl="portable").double() * cotangent).sum()

        want = torch.stack([(value(sinks + e) - value(sinks - e)) / (2 * step) for e in step * torch.eye(3, device="cuda")])
    assert relative_error(got, want) < 1e-3  # the square of the step, and rounding over the step


@pytest.mark.gpu
def test_portable_past_2_31_elements():
    """The last queries of 70000 equal the same queries alone."""
    S, tail = 70_000, 40
    case = AttentionCase("", "swa", N=64, D=512, B=1, S=S, window=128)
    generator = torch.Generator("cuda").manual_seed(0)
    q = torch.empty(1, S, 64, 512, device="cuda", dtype=BF16).normal_(generator=generator)
    ori_kv = torch.randn(1, S, 512, device="cuda", generator=generator).to(BF16)
    sinks = torch.randn(64, device="cuda", generator=generator)

    def results(q):
        leaf = q.requires_grad_()
        out, lse = sparse_attn_shared_kv(leaf, ori_kv, sinks=sinks, window=case.window, return_lse=True, impl="portable")
        (dq,) = torch.autograd.grad(out, leaf, out.detach())  # the output as its own cotangent: no second tensor of this size
        return out.detach()[:, -tail:], lse[:, -tail:], dq[:, -tail:]

    part = results(q[:, -tail:].clone())
    for name, whole, alone in zip(("out", "lse", "dq"), results(q), part):
        assert torch.equal(whole, alone), name


@pytest.mark.gpu
def test_wide_sinks_and_logits():
    """Sinks of +-1e4 and logits past 1e4: finite everywhere, in agreement where a gradient is more than rounding."""
    case = AttentionCase("", "scfa", N=64, D=512, B=1, S=61, K=40, window=40, softmax_scale=30.0)
    inputs = attention_inputs(case, seed=2, dtype=BF16, device="cuda")
    inputs["sinks"] = torch.tensor([1e4, -1e4, 0.0, 60.0], device="cuda").repeat(16)
    got = run(sparse_attn_shared_kv, inputs, BF16, impl="portable")
    want = run(sparse_attn_shared_kv, inputs, torch.float64, impl="eager")
    assert all(x.isfinite().all() for x in got.values())
    assert relative_error(got["out"], want["out"]) < 1e-2 and relative_error(got["lse"], want["lse"]) < 1e-5


def test_every_value_twice():
    for values in ([c.mode for c in CASES], [c.N for c in CASES], [c.D for c in CASES], [c.packed for c in CASES]):
        assert min(values.count(v) for v in set(values)) >= 2
    assert {c.N for c in CASES} == {1, 3, 16, 20, 64, 128} and {c.D for c in CASES} == {64, 128, 512}
    assert all(replace(c).S % 2 for c in CASES if not c.packed)
