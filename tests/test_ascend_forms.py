"""The forms for Ascend of the attention's and the indexer's kernels, in the interpreter or on a GPU: the cases and limits of the forms for
GPUs. This shows their arithmetic; docs/ascend.md says what is checked with Ascend's own compiler. Nothing here runs on an NPU.
"""

from dataclasses import replace

import pytest
import torch

from reference.cases.sparse_attn import ATTENTION_CASES, AttentionCase
from tests.op_checks import poison_empty
from tests.test_sparse_attn_kernels import check


@pytest.fixture
def launched(monkeypatch):
    """Makes the launchers take the forms for Ascend; the specs that were launched."""
    from kernel_runtime import launch

    for name in ("sparse_attn.shared_kv.fwd", "sparse_attn.shared_kv.bwd"):
        monkeypatch.setattr(f"{name}.on_npu", lambda device, npu: True)
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


def test_attention_in_chunks_of_queries(kernel_device, launched, monkeypatch):
    from sparse_attn.shared_kv import bwd

    monkeypatch.setattr(bwd, "CHUNK_BYTES", 3000)
    for name in ("cfa", "scfa"):
        check(replace(next(c for c in ATTENTION_CASES if c.name == name), K=19), kernel_device, torch.float32)
