"""The forms for Ascend of the kernels of attention, indexer and mHC gates, in the interpreter or on a GPU: the cases and limits of the forms
for GPUs. This shows their arithmetic; docs/ascend.md says what is checked with Ascend's own compiler. Nothing here runs on an NPU.
"""

import importlib
from dataclasses import replace

import pytest
import torch

from indexer import lightning_indexer
from reference.cases import indexer as indexer_cases
from reference.cases import relative_error
from reference.cases.mhc import MhcShape
from reference.cases.sparse_attn import ATTENTION_CASES, AttentionCase
from tests import kl_util as kl
from tests import test_mhc_gates_kernels as gates
from tests import test_mhc_kernels as mhc
from tests.op_checks import poison_empty
from tests.test_indexer_kernels import KINDS, check_gradients, check_selection, long_case, scores_of_kind, whole
from tests.test_mhc_sinkhorn import check_kernel as check_sinkhorn
from tests.test_sparse_attn_kernels import check


@pytest.fixture
def launched(monkeypatch):
    """Makes the launchers take the forms for Ascend; the specs that were launched."""
    from kernel_runtime import launch

    indexers = ("indexer.lightning.fwd", "indexer.gradients", "indexer.kl_loss.fwd", "indexer.kl_loss.bwd")
    gates = ("mhc_ops.sinkhorn.fwd", "mhc_ops.sinkhorn.bwd", "mhc_ops.gates.fwd", "mhc_ops.gates.bwd")
    for name in ("sparse_attn.shared_kv.fwd", "sparse_attn.shared_kv.bwd", *indexers, *gates):
        monkeypatch.setattr(importlib.import_module(name), "on_npu", lambda device, npu: True)  # mhc_ops.sinkhorn by name is the function
    seen = []
    monkeypatch.setattr(launch, "LAUNCH_OBSERVERS", [lambda spec, arguments: seen.append(spec)])
    poison_empty(monkeypatch)
    yield seen
    assert seen and all("ascend" in spec.targets for spec in seen)


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=lambda case: case.name)
def test_attention(kernel_device, launched, case):
    check(case, kernel_device, torch.float32, deterministic=False)


@pytest.mark.parametrize("mode", ["cfa", "scfa"])
def test_attention_in_bf16(kernel_device, launched, mode):
    """Tiles of 32 heads and 32 keys, two halves of channels, tails in all three."""
    case = AttentionCase("", mode, B=1, S=3, S2=75, N=34, D=272, window=37, cmp_ratio=2, K=35)
    check(case, kernel_device, torch.bfloat16)
    assert any(spec.name == "attention_dq_kernel" and spec.consts["BN"] == 32 for spec in launched)


def test_gradients_of_the_indexer_in_pieces(kernel_device, launched, monkeypatch):
    """Rows of dk of several pieces of queries give the same sums as those of one."""
    import indexer.gradients as module
    from tests.test_indexer_fixed_point import SLOTS, make

    inputs = make(kernel_device)
    whole = module.slot_gradients(*inputs, None, False)[1]
    monkeypatch.setattr(module, "PARTIAL_BYTES", 4 * SLOTS * 20 * 5)
    assert relative_error(module.slot_gradients(*inputs, None, False)[1], whole) < 1e-6


def test_attention_in_chunks_of_queries(kernel_device, launched, monkeypatch):
    from sparse_attn.shared_kv import bwd

    monkeypatch.setattr(bwd, "CHUNK_BYTES", 3000)
    for name in ("cfa", "scfa"):
        check(replace(next(c for c in ATTENTION_CASES if c.name == name), K=19), kernel_device, torch.float32)


@pytest.mark.parametrize("case", indexer_cases.SMALL, ids=lambda c: c.name)
def test_selection(kernel_device, launched, case):
    inputs = whole(indexer_cases.make_indexer(case, device=kernel_device))
    check_selection(case, kernel_device, inputs)
    check_selection(case, kernel_device, inputs, query_chunk=5, sorted=False)


@pytest.mark.parametrize("heads, dim", [(3, 10), (20, 64), (130, 16)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scores(kernel_device, launched, heads, dim, dtype):
    case = indexer_cases.IndexerCase("shape", batch=2, seq=9, q_offset=14, heads=heads, head_dim=dim, topk=3)
    check_selection(case, kernel_device, whole(indexer_cases.make_indexer(case, device=kernel_device), dtype))


@KINDS
@pytest.mark.parametrize("keys", [70, 300])
def test_search(kernel_device, launched, monkeypatch, keys, kind):
    """A row that is held and one that streams past in tiles, the last one short; many equal scores, none, and nothing else."""
    from indexer.lightning import fwd
    from indexer.lightning.ascend import topk

    topk.select_ascend_spec.cache_clear()
    for module, name, value in ((fwd, "RESIDENT", 128), (topk, "RESIDENT", 128), (topk, "STREAMED", 128), (topk, "LANES", 16)):
        monkeypatch.setattr(module, name, value)
    case = long_case(keys, 50)
    check_selection(case, kernel_device, scores_of_kind(kind, case, kernel_device))
    held = {spec.consts["HELD"] for spec in launched if spec.name == "select_ascend_kernel"}
    assert held == {keys <= 128}
    topk.select_ascend_spec.cache_clear()


def test_infinite_and_signed_zero_scores(kernel_device, launched):
    case = long_case(140, 120)
    inputs = whole(indexer_cases.make_indexer(case, device=kernel_device))
    inputs["q"][:] = 1
    inputs["k"][:] = 1
    inputs["k"][:, ::3] = 0
    inputs["k"][:, 1::7] = torch.inf
    inputs["weights"][:] = -1
    check_selection(case, kernel_device, inputs)


def test_every_slot_is_written_with_nan_scores(kernel_device, launched):
    """An index from uninitialised memory would send a gather anywhere."""
    case = long_case(70, 50)
    inputs = whole(indexer_cases.make_indexer(case, device=kernel_device))
    inputs["k"][:, ::5] = torch.nan
    indices, _ = lightning_indexer(**inputs, topk=50, **indexer_cases.layout(case, kernel_device), impl="triton")
    for row in indices[0].tolist():
        kept = [index for index in row if index >= 0]
        assert len(set(kept)) == len(kept) == 50 and max(kept) < 70
        assert {*range(0, 70, 5)} <= {*kept}


@pytest.mark.parametrize("case", indexer_cases.SMALL, ids=lambda c: c.name)
def test_gradients(kernel_device, launched, case):
    check_gradients(case, kernel_device, torch.float32, False)


@pytest.mark.parametrize("heads, dim", [(1, 10), (70, 64)])
def test_gradients_in_bf16(kernel_device, launched, heads, dim):
    case = indexer_cases.IndexerCase("shape", batch=2, seq=5, q_offset=20, heads=heads, head_dim=dim, topk=5)
    check_gradients(case, kernel_device, torch.bfloat16, False)


@pytest.mark.parametrize("case", [kl.BSND, kl.TND], ids=lambda c: c.name)
@pytest.mark.parametrize("form", kl.FORMS)
def test_kl_loss(kernel_device, launched, case, form):
    leaves, options = kl.make(case, form, device=kernel_device)
    kl.compare(leaves, options, reduction="mean", coefficient=0.7)


@pytest.mark.parametrize("n, tokens, std", [(4, 70, 3.0), (2, 5, 10.0), (3, 5, 1.0)])
def test_sinkhorn_and_gates(kernel_device, launched, monkeypatch, n, tokens, std):
    """Blocks of 64 tokens, turned to have them on the last axis, the last one short; three streams stay as they are."""
    check_sinkhorn(kernel_device, monkeypatch, "v4", n, tokens, std)
    gates.check(gates.inputs_of(n, tokens, std, kernel_device), hc_mult=n, iters=9)
    sizes = {spec.consts["BT"] for spec in launched if "BT" in spec.consts}
    assert (sizes == {64}) == (n != 3), sizes


@pytest.mark.parametrize("eps, iters", [(0.0, 1), (0.03, 4)])
def test_turned_blocks_of_few_iterations(kernel_device, launched, eps, iters):
    gates.check(gates.inputs_of(4, 9, 2.0, kernel_device), hc_mult=4, iters=iters, hc_eps=eps)


@pytest.mark.parametrize("with_pre_mix", [False, True])
def test_sites(kernel_device, monkeypatch, with_pre_mix):
    """hc_pre with the launches that hold the gates in their forms for Ascend: loops over blocks of sites, then over tokens."""
    from mhc_ops.pre import bwd, fwd

    plans, seen = (fwd.gates_plan, bwd.site_plan), []

    def ascend(real):
        def spec(*arguments):
            seen.append(real(*arguments[:-1], True))
            return seen[-1]

        return spec

    for module, name in ((fwd, "gates_collapse_spec"), (bwd, "gates_dpre_spec")):
        monkeypatch.setattr(module, name, ascend(getattr(module, name)))
    for plan in plans:
        plan.cache_clear()
    try:
        mhc.check(kernel_device, monkeypatch, "hc_pre", MhcShape(1, 67, 4, 24), with_pre_mix=with_pre_mix, logit_std=3.0, iters=4)
    finally:
        for plan in plans:
            plan.cache_clear()
    assert [(spec.name, spec.consts["BT"], spec.consts["LOOP"]) for spec in seen] == [
        ("gates_collapse_kernel", 64, True), ("gates_dpre_kernel", 64, True)
    ]  # fmt: skip


def test_grids_are_as_large_as_the_cores(monkeypatch):
    """Far below the 65535 programs that an NPU takes at most."""
    from kernel_runtime import device

    monkeypatch.setattr(device, "device_properties", lambda _: device.DeviceProperties("fake", 48, 24, None))
    npu = torch.device("cpu")
    assert device.grid_size(npu, 1 << 20, True) == 24 and device.grid_size(npu, 1 << 20, True, vector=True) == 48
    assert device.grid_size(npu, 5, True) == 5 and device.grid_size(npu, 1 << 20, False) == 1 << 20
    assert device.on_npu(npu, None) is False and device.on_npu(npu, True) is True
