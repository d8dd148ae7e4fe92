"""Every registered specialisation compiles ahead of time with no device, and what it uses fits the target.

sm_90 is the target that is tuned for; the portable kernels must compile for sm_100 and gfx942 too. Specialisations that models share are
compiled once: the smaller presets come first. Of devices with less shared memory, sm_80, 89 and 120, only those kernels are compiled here that
have a form for them; `python -m kernel_runtime.warmup --config pro --target sm_89 --by-name` compiles all and lists what each uses.
"""

import re

import pytest
import torch

from kernel_runtime import interpreting
from kernel_runtime.registry import PRESETS

pytestmark = pytest.mark.skipif(interpreting(), reason="under TRITON_INTERPRET=1 kernels are Python functions; nothing can be compiled")
SPILL_LIMIT = 1024  # bytes a thread on NVIDIA; more means a kernel that should be tiled smaller
# Known misfits; they must still compile: tiles made for NVIDIA's 99 KiB and more exceed AMD's 64 KiB (running on AMD is out of scope).
TOO_LARGE = {"gfx942": {"range_dkv_kernel"}}
CASES = [("sm_90", name) for name in PRESETS] + [(target, name) for target in ("sm_100", "gfx942") for name in ("tiny", "flash")]
CASES += [(target, "pro") for target in ("sm_80", "sm_89", "sm_120")]


def own_entries(name, target):
    """The plan of a model for a target, without what an earlier preset has."""
    from kernel_runtime.plan import plan_for

    seen = set()
    for other in PRESETS:
        plan = plan_for(other).by_name().for_target(target)
        if other == name:
            return [(op, spec) for op, spec in plan if spec.identity not in seen]
        seen |= {spec.identity for _, spec in plan}
    raise ValueError(name)


@pytest.mark.parametrize(("target", "name"), CASES)
def test_compiles_and_fits(target, name, record_property):
    from kernel_runtime.targets import parse_target, resources

    gpu = parse_target(target)
    entries = own_entries(name, gpu)
    if target == "sm_100":
        entries = [(op, spec) for op, spec in entries if spec.portable or spec.arch]
    if target in ("sm_80", "sm_89", "sm_120"):
        entries = [(op, spec) for op, spec in entries if spec.shared]
        assert len(entries) == 10
    assert name != "tiny" or entries
    failures, lines = [], []
    for op, spec in entries:
        try:
            used = resources(spec.compile(gpu))
        except Exception as error:
            failures.append(f"{op} {spec.name} {dict(spec.consts)}: {type(error).__name__}: {error}")
            continue
        lines.append(f"{op} {spec.name}: {used.registers} registers, {used.spills} spilled, {used.shared} bytes shared")
        if (excess := used.excess(gpu)) and spec.name not in TOO_LARGE.get(target, ()):
            failures.append(f"{op} {spec.name} {dict(spec.consts)}: {excess}")
        if gpu.backend == "cuda" and (used.spills or 0) > SPILL_LIMIT:
            failures.append(f"{op} {spec.name} {dict(spec.consts)}: {used.spills} spilled a thread, limit {SPILL_LIMIT}")
    record_property("resources", "\n".join(lines))
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("form", ["forward", "dq"])
def test_warpgroups_share_the_rows_of_attention(form):
    """sm_90: of 64 rows each of two warpgroups makes half the columns, in every product (fwd.attend says what Triton does otherwise)."""
    from kernel_runtime.targets import parse_target
    from sparse_attn.shared_kv.bwd import dq_spec
    from sparse_attn.shared_kv.fwd import SELECTED, forward_spec
    from sparse_attn.shared_kv.tiles import HOPPER

    make = forward_spec if form == "forward" else dq_spec
    code = make(torch.bfloat16, 64, 512, SELECTED, True, form=HOPPER).compile(parse_target("sm_90")).asm["ttgir"]
    assert set(re.findall(r"nvidia_mma<.*warpsPerCTA = \[(\d, \d)\]", code)) == {"4, 2"}


def test_what_a_target_lacks_is_named():
    """Shared memory, and sm_100's tensor memory: a kernel beyond either compiles."""
    from kernel_runtime.targets import Resources, parse_target

    sm_89, sm_100 = parse_target("sm_89"), parse_target("sm_100")
    assert "131584 bytes of shared memory, the target has 101376" in Resources(255, 0, 131584).excess(sm_89)
    assert "544 columns of tensor memory, the target has 512" in Resources(255, 0, 131584, 544).excess(sm_100)
    assert not Resources(255, 0, 131584, 512).excess(sm_100)
