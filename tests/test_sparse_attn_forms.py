"""Forms of the portable attention for devices with less shared memory, asked for where they are not needed: in the interpreter and on a GPU.

Which device takes which is a table (sparse_attn/shared_kv/tiles.py); that each fits is seen by compiling for it, in test_compile_ahead.py.
"""

from dataclasses import replace

import pytest
import torch

from kernel_runtime import interpreting
from kernel_runtime.launch import CUDA_SMEM_LIMIT, Spec
from reference.cases.sparse_attn import ATTENTION_CASES, AttentionCase
from sparse_attn.shared_kv.tiles import FORMS, HOPPER, OLDER, SMALL, form_of
from tests.op_checks import poison_empty
from tests.test_sparse_attn_kernels import check, forms, take  # noqa: F401 (take is a fixture)


@pytest.fixture(params=[OLDER, SMALL], ids=["older", "small"])
def form(request, monkeypatch):
    """The form that launchers take whatever the device; fails where a call takes another one."""
    from sparse_attn.shared_kv import bwd, fwd

    poison_empty(monkeypatch)
    for module in (fwd, bwd):
        monkeypatch.setattr(module, "form_of", lambda device: request.param)
    seen = []
    monkeypatch.setattr("kernel_runtime.launch.LAUNCH_OBSERVERS", [lambda spec, arguments: seen.append(spec)])
    yield request.param
    assert {s.shared for s in seen if s.shared} == {request.param.shared} and any(s.name == "attention_dq_kernel" for s in seen)


@pytest.mark.parametrize("D", [144, 272])
def test_small_cases(kernel_device, form, take, D):  # noqa: F811 (the fixture)
    """Two blocks of heads, three tiles of keys, tails in heads, keys and channels."""
    case = AttentionCase("", "scfa", B=1, S=2, S2=75, N=34, D=D, window=37, cmp_ratio=2, K=35)
    for how in forms(case) if D == 272 else ("atomic",):
        check(case, kernel_device, torch.bfloat16, **take(how))


@pytest.mark.gpu
@pytest.mark.parametrize(("mode", "N"), [("swa", 64), ("cfa", 64), ("scfa", 64), ("scfa", 16), ("scfa", 128)])
def test_heads_of_512_channels(form, take, mode, N):  # noqa: F811 (the fixture)
    case = AttentionCase("", mode, B=2, S=70, N=N, D=512, window=41, cmp_ratio=2, K=25)
    for how in forms(case):
        check(case, "cuda", torch.bfloat16, **take(how))


@pytest.mark.gpu
@pytest.mark.parametrize(("D", "dtype"), [(256, torch.float16), (512, torch.float16), (512, torch.float32)])
def test_packed_documents(form, take, D, dtype):  # noqa: F811 (the fixture)
    check(replace(next(c for c in ATTENTION_CASES if c.name == "scfa_pack"), N=64, D=D), "cuda", dtype, **take("atomic"))


def test_each_architecture_has_one_form():
    """Those in the table, and those that are not: what is unknown is taken to have the least."""
    taken = {arch: [form for form in FORMS if form.takes(arch)] for arch in (*CUDA_SMEM_LIMIT, 75, 88, 101, 130)}
    assert all(len(found) == 1 for found in taken.values())
    assert [taken[arch][0] for arch in (75, 80, 86, 89, 90, 120, 130)] == [SMALL, OLDER, SMALL, SMALL, HOPPER, SMALL, SMALL]


@pytest.mark.skipif(interpreting(), reason="under TRITON_INTERPRET=1 kernels are Python functions; a plan cannot name them")
def test_a_plan_has_the_form_of_its_target():
    """After a round trip through JSON as well."""
    from kernel_runtime.plan import Plan, plan_for
    from kernel_runtime.targets import parse_target

    plan = Plan.from_json(plan_for("pro").by_name().to_json())
    tiles = {
        target: {(s.consts["BH"], s.consts["BN"]) for _, s in plan.for_target(parse_target(target)) if s.name == "attention_dq_kernel"}
        for target in ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
    }
    assert tiles["sm_80"] == {(32, 64)} and tiles["sm_90"] == tiles["sm_100"] == {(64, 64)}
    assert tiles["sm_86"] == tiles["sm_89"] == tiles["sm_120"] == tiles["gfx942"] == {(32, 32)}


@pytest.mark.gpu
def test_a_device_takes_the_form_that_is_compiled_for_it():
    import triton

    arch = triton.runtime.driver.active.get_current_target().arch
    assert form_of(torch.device("cuda", 0)).takes(arch)
    assert torch.cuda.get_device_properties(0).shared_memory_per_block_optin == CUDA_SMEM_LIMIT[arch]


@pytest.mark.gpu
def test_a_tile_that_does_not_fit_is_named(monkeypatch):
    from sparse_attn import sparse_attn_shared_kv
    from sparse_attn.shared_kv import fwd

    def make(*args, **kwargs):
        spec = made(*args, **kwargs)
        return replace(spec, consts={**spec.consts, "BN": 256})

    made = fwd.forward_spec
    monkeypatch.setattr(fwd, "forward_spec", make)
    q, kv = torch.randn(1, 2, 64, 512, device="cuda").bfloat16(), torch.randn(1, 2, 512, device="cuda").bfloat16()
    with pytest.raises(ValueError, match=r"attention_fwd_kernel needs \d+ of shared memory, .*N = 64, D = 512, .*q bf16.*impl='eager'"):
        sparse_attn_shared_kv(q, kv, impl="portable")


def test_error_of_a_kernel_that_does_not_fit(monkeypatch):
    """The same without a device: what Triton raises names neither the case nor the way out."""
    from triton.runtime.errors import OutOfResources

    from sparse_attn.shared_kv.fwd import forward_spec

    class Kernel:
        __name__ = "attention_fwd_kernel"

        def __getitem__(self, grid):
            def launch(*args, **keywords):
                raise OutOfResources(289 * 1024, 227 * 1024, "shared memory")

            return launch

    spec = forward_spec(torch.bfloat16, 64, 512, 0, True)
    fake = object.__new__(Spec)
    fake.__dict__.update(spec.__dict__ | {"kernel": Kernel(), "direct": None})
    with pytest.raises(ValueError, match=r"attention_fwd_kernel needs 295936 of shared memory, of which this device has 232448 .*N = 64, D = 512"):
        fake.launch((1,))
