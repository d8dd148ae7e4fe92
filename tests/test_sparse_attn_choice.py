"""Which kernels sparse_attn_shared_kv runs: by device and shape, or by name. On the CPU with stand-ins for device and launchers."""

import pytest
import torch

from kernel_runtime import interpreting
from reference.cases.sparse_attn import AttentionCase, attention_inputs
from reference.sparse_attn import sparse_attn_shared_kv as reference
from sparse_attn import sparse_attn_shared_kv
from sparse_attn.shared_kv import choice
from sparse_attn.shared_kv import op as attention_op

CASE = AttentionCase("", "scfa", N=3, D=128, B=1, S=9, cmp_ratio=2)
HOPPER, PORTABLE = choice.HOPPER, choice.PORTABLE


@pytest.fixture
def device(monkeypatch):
    """device(reason) makes kernels run on the CPU, those for sm_90 if reason is None; the list of what was run."""
    run = []

    def launcher(package, module):
        def launch(*args):
            run.append((package, module))
            return {"fwd": attention_op._forward, "bwd": attention_op._backward}[module](*args)

        return launch

    def load(path):
        module, name = path.split(":")
        if module.endswith(".choice"):
            return getattr(choice, name)
        package, _, short = module.rpartition(".")
        return launcher(package, short)

    def inner(reason):
        monkeypatch.setattr("kernel_runtime.impl._INTERPRETING", True)
        monkeypatch.setattr("kernel_runtime.ops._load", load)
        monkeypatch.setattr(choice, "_launcher", launcher)
        monkeypatch.setattr(choice, "hopper_supports", lambda q: reason)
        return run

    return inner


def forward_and_backward(inputs, **more):
    q = inputs["q"].detach().requires_grad_()
    out = sparse_attn_shared_kv(**{**inputs, "q": q}, **more)
    return out.detach(), torch.autograd.grad(out, q, torch.ones_like(out))[0]


@pytest.mark.parametrize(
    ("impl", "reason", "package"),
    [
        ("auto", None, HOPPER),
        ("auto", "the device is sm_80, not sm_90", PORTABLE),
        ("triton", None, HOPPER),
        ("triton", "the device is sm_80, not sm_90", PORTABLE),
        ("portable", None, PORTABLE),
        ("hopper", None, HOPPER),
    ],
)
def test_device_and_name_choose(device, impl, reason, package):
    run = device(reason)
    inputs = attention_inputs(CASE)
    got = forward_and_backward(inputs, impl=impl)
    assert run == [(package, "fwd"), (package, "bwd")]
    torch.testing.assert_close(got, forward_and_backward(inputs, impl="eager"))
    torch.testing.assert_close(got[0], reference(**inputs))


def test_a_shape_without_portable_kernel_is_eager_unless_named(device):
    run = device("D = 24, wanted one of 128, 256, 512")
    inputs = attention_inputs(AttentionCase("", "swa", N=2, D=24, B=1, S=5))
    sparse_attn_shared_kv(**inputs)
    assert not run
    short = "multiples of 16 up to 512"
    for impl, message in (("triton", short), ("portable", short), ("hopper", "D = 24, wanted one of 128, 256, 512")):
        with pytest.raises(ValueError, match=f"sparse_attn_shared_kv: impl='{impl}' cannot run here: .*{message}"):
            sparse_attn_shared_kv(**inputs, impl=impl)


def test_hopper_by_name_on_a_cpu_says_why_not():
    inputs = attention_inputs(CASE, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="sparse_attn_shared_kv: impl='hopper' cannot run here: the tensors are on cpu"):
        sparse_attn_shared_kv(**inputs, impl="hopper")


def test_choice_under_compile(device):
    """The device is asked for when the op runs: one graph, and the same choice."""
    run = device(None)
    inputs = attention_inputs(CASE)
    torch.testing.assert_close(
        torch.compile(sparse_attn_shared_kv, fullgraph=True, backend="aot_eager")(**inputs), sparse_attn_shared_kv(**inputs)
    )
    torch.compiler.reset()
    assert set(run) == {(HOPPER, "fwd")}


@pytest.mark.skipif(interpreting(), reason="under TRITON_INTERPRET=1 kernels are Python functions; none is a Gluon kernel")
def test_warmup_takes_the_kernels_that_the_device_gets():
    from kernel_runtime.plan import Plan, plan_for
    from kernel_runtime.targets import parse_target

    plan = plan_for("flash")
    plan = Plan.from_json(plan.to_json())
    names = {target: {spec.name for _, spec in plan.for_target(parse_target(target))} for target in ("sm_90", "sm_100")}
    assert {"hopper_fwd_kernel", "hopper_bwd_kernel"} <= names["sm_90"] and "attention_fwd_kernel" not in names["sm_90"]
    assert "attention_fwd_kernel" in names["sm_100"] and not any(name.startswith("hopper") for name in names["sm_100"])


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels that were launched."""
    from kernel_runtime import launch

    names = []
    monkeypatch.setattr(launch, "LAUNCH_OBSERVERS", [lambda spec, arguments: names.append(spec.name)])
    return names


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an sm_90 device")
@pytest.mark.parametrize(
    ("impl", "D", "dtype", "hopper"),
    [
        ("auto", 128, torch.bfloat16, True),
        ("hopper", 128, torch.float16, True),
        ("triton", 128, torch.bfloat16, True),
        ("portable", 128, torch.bfloat16, False),
        ("auto", 64, torch.bfloat16, False),
        ("auto", 128, torch.float32, False),
    ],
)
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_on_sm_90(launched, impl, D, dtype, hopper, compiled):
    inputs = attention_inputs(AttentionCase("", "scfa", N=20, D=D, B=1, S=50, cmp_ratio=2, window=20), dtype=dtype, device="cuda")

    def fn(q):
        return sparse_attn_shared_kv(**{**inputs, "q": q}, impl=impl, deterministic=True)

    q = inputs["q"].requires_grad_()
    out = (torch.compile(fn, fullgraph=True) if compiled else fn)(q)
    (dq,) = torch.autograd.grad(out, q, torch.ones_like(out))
    torch.compiler.reset()
    assert any(name.startswith("hopper_fwd") for name in launched) == hopper == any(name.startswith("hopper_bwd") for name in launched)
    assert ("attention_fwd_kernel" in launched) == (not hopper) == ("attention_dq_kernel" in launched)
    want = sparse_attn_shared_kv(**{k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in inputs.items()})
    limit = 1e-2 if dtype != torch.float32 else 1e-5
    assert float((out.double() - want).norm() / want.norm()) < limit and dq.isfinite().all()


@pytest.mark.gpu
def test_hopper_by_name_where_it_cannot_run():
    inputs = attention_inputs(CASE, dtype=torch.float32, device="cuda")
    with pytest.raises(ValueError, match="impl='hopper' cannot run here: the dtype is float32, wanted bfloat16 or float16"):
        sparse_attn_shared_kv(**inputs, impl="hopper")
