"""The general forward for sm_90 takes no maximum from the scores where the sums of their exponentials show that none was needed (fwd_kernel.py)."""

from dataclasses import replace

import pytest
import torch

from kernel_runtime import interpreting
from reference.cases.sparse_attn import AttentionCase
from tests.test_sparse_attn_hopper import BF16, arguments, check, expected, make, poisoned  # noqa: F401  (a fixture)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(interpreting(), reason="Gluon kernels do not run under TRITON_INTERPRET=1")]
CASES = {
    "scfa": AttentionCase("sums", "scfa", N=64, D=512, B=2, S=301, K=90, cmp_ratio=4, window=128, sinks="none"),
    "cfa": AttentionCase("sums", "cfa", N=20, D=256, docs_q=(130, 0, 201), cmp_ratio=2, window=70),
    "swa": AttentionCase("sums", "swa", N=3, D=128, B=1, S=150, window=None),
}


def forward(inputs, case):
    """out and LSE, and the programs that asked for maxima; None where none could."""
    from kernel_runtime.launch import LAUNCH_OBSERVERS
    from sparse_attn.shared_kv.hopper.fwd import attention_fwd

    seen = []
    LAUNCH_OBSERVERS.append(lambda spec, args: seen.append(dict(zip(spec.types, args)).get("anew")) if spec.name == "hopper_fwd_kernel" else None)
    try:
        tensors, options = arguments(inputs, case)
        out, lse, _ = attention_fwd(*tensors, *options, False)
    finally:
        LAUNCH_OBSERVERS.pop()
    assert len(seen) == 2 and seen[0] is seen[1]
    return {"out": out, "lse": lse}, int(seen[0].count_nonzero())


def wanted(inputs, dout, case):
    return {name: x for name, x in expected(inputs, dout, case.mode).items() if name in ("out", "lse")}


@pytest.mark.parametrize("mode", CASES)
def test_no_maximum_is_asked_for(mode, poisoned):  # noqa: F811
    """Nor by queries after the last document, which see nothing."""
    case = CASES[mode]
    inputs, dout = make(case, BF16)
    if case.packed:
        inputs["cu_seqlens_q"] = torch.tensor([0, 130, 130, 290], dtype=torch.int32, device="cuda")
    got, asked = forward(inputs, case)
    check(got, wanted(inputs, dout, case), BF16)
    assert not asked


@pytest.mark.parametrize("mode", CASES)
@pytest.mark.parametrize("how", ["one query too high", "one query too low", "one head too low", "all too high"])
def test_rows_that_need_their_maximum(mode, how, poisoned):  # noqa: F811
    """Scores beyond what exp2 can hold, which only a maximum brings back; every other row stays right as well."""
    case = CASES[mode]
    inputs, dout = make(case, BF16)
    keys = inputs["ori_kv"].view(-1, case.D)
    direction = torch.randn(case.D, device="cuda", generator=torch.Generator("cuda").manual_seed(5)).sign()
    keys += 3.0 * direction.to(BF16)
    if "cmp_kv" in inputs:
        inputs["cmp_kv"].add_(3.0 * direction.to(BF16))
    q = inputs["q"].view(-1, case.N, case.D)
    far = 100.0 / (3.0 * case.D * case.D**-0.5)  # scores of about +-100, +-144 in base 2
    row = q.shape[0] // 2 + 1
    if how == "all too high":
        q += far * direction.to(BF16)
    elif how == "one head too low":
        q[row, 1] = -far * direction.to(BF16)
    else:
        q[row] = (far if how.endswith("high") else -far) * direction.to(BF16)
    got, asked = forward(inputs, case)
    check(got, wanted(inputs, dout, case), BF16, factor=2.0)
    assert asked
    again, _ = forward(inputs, case)
    assert all(x.equal(again[name]) for name, x in got.items())


def test_float16_keeps_its_maxima(poisoned):  # noqa: F811
    from sparse_attn.shared_kv.hopper.fwd import forms_of
    from sparse_attn.shared_kv.hopper.fwd_kernel import ANEW, MAXIMUM, NOTHING

    assert forms_of(torch.float16) == (MAXIMUM.value,) and forms_of(BF16) == (NOTHING.value, ANEW.value)
    case = replace(CASES["scfa"], softmax_scale=0.5)
    inputs, dout = make(case, torch.float16)
    from sparse_attn.shared_kv.hopper.fwd import attention_fwd

    tensors, options = arguments(inputs, case)
    out, lse, _ = attention_fwd(*tensors, *options, False)
    check({"out": out, "lse": lse}, wanted(inputs, dout, case), torch.float16, factor=2.0)
