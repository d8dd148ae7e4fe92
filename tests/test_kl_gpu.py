"""The KL loss's kernels on a GPU: sizes of models, repeated runs, memory."""

import pytest
import torch

from indexer import indexer_kl_loss
from reference.cases import indexer as cases
from tests.kl_util import FORMS, compare, evaluate, make


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_model_sizes_on_a_gpu(form):
    """More rows and keys than the interpreter can take, in bf16, against fp64 on the same numbers."""
    for case in (
        cases.IndexerCase("flash", batch=1, seq=1200, heads=64, head_dim=128, topk=512, attn_heads=64, attn_dim=512),
        cases.IndexerCase("packed", documents=(700, 90, 1, 2100), heads=8, head_dim=64, topk=256, attn_heads=128, attn_dim=64),
    ):
        leaves, options = make(case, form, torch.bfloat16, "cuda", ties=False)
        compare(leaves, options, loss_limit=1e-4, reduction="mean")


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["sparse/joint", "dense/joint"])
def test_deterministic_on_a_gpu(form):
    leaves, options = make(cases.IndexerCase("flash", batch=1, seq=3000, **cases.FLASH), form, torch.bfloat16, "cuda")
    first = evaluate(leaves, options, "triton", deterministic=True)
    for _ in range(3):
        again = evaluate(leaves, options, "triton", deterministic=True)
        assert torch.equal(first[0], again[0]) and all(torch.equal(a, b) for a, b in zip(first[1], again[1]))


@pytest.mark.gpu
@pytest.mark.parametrize("form, deterministic", [("given/joint", False), ("given/joint", True), ("sparse/compressed", True), ("dense/joint", False)])
def test_memory_on_a_gpu(form, deterministic):
    """Beyond inputs and gradients: an fp32 number a slot, two with an own teacher; dense two chunks of 128 MiB and partial dk. The sums of dk
    in whole numbers are of k's size."""
    case = cases.IndexerCase("flash", batch=1, seq=16384, **cases.FLASH)
    leaves, options = make(case, form, torch.bfloat16, "cuda")
    leaves = [x.requires_grad_() for x in leaves]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = indexer_kl_loss(*leaves, **options, impl="triton", deterministic=deterministic)
    torch.cuda.synchronize()
    held = leaves[0].nbytes + 2 * leaves[1].nbytes + leaves[2].nbytes
    slots = 2 * 2**27 + 2**26 if form == "dense/joint" else 4 * 16384 * 512 * (1 if form == "given/joint" else 2)
    assert torch.cuda.max_memory_allocated() - before < held + slots + 2**24, loss
