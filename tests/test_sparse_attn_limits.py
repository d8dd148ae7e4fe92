"""Arguments at the limits of what an attention kernel takes: positions at the ends of int32, offsets of no document, lists without slots."""

import pytest
import torch

from reference.cases.sparse_attn import AttentionCase
from sparse_attn import compressed_cu_seqlens
from tests.op_checks import poison_empty
from tests.test_sparse_attn_kernels import check


@pytest.mark.parametrize(
    ("q_offset", "window", "sees"),
    [
        (2**31 - 4, None, True),
        (2**31 - 4, 2**40, True),
        (2**31 - 4, 2**31 - 5, True),
        (2**30, 2**30, True),
        (2**31 - 4, 6, False),
        (-(2**31), 6, False),
    ],
)
def test_positions_at_the_ends_of_int32(kernel_device, monkeypatch, q_offset, window, sees):
    poison_empty(monkeypatch)
    case = AttentionCase("", "cfa", B=1, S=3, S2=5, cmp_ratio=2, q_offset=q_offset, window=window)
    assert bool(check(case, kernel_device, torch.float32)["dori_kv"].any()) == sees


def test_ratio_past_int32(kernel_device, monkeypatch):
    """No sequence is long enough for an entry."""
    poison_empty(monkeypatch)
    check(AttentionCase("", "cfa", B=1, S=3, cmp_ratio=2**40), kernel_device, torch.float32)
    for ratio in (2**31, 2**40, 2**63 - 1):
        assert compressed_cu_seqlens(torch.tensor([0, 3, 9], dtype=torch.int32), ratio).tolist() == [0, 0, 0]


def test_offsets_of_no_document(kernel_device, monkeypatch):
    """A pack of rows alone: there is no offset that could be read."""
    poison_empty(monkeypatch)
    cuts = torch.zeros(1, dtype=torch.int32, device=kernel_device)
    got = check(
        AttentionCase("", "scfa", docs_q=(3,), cmp_ratio=2), kernel_device, torch.float32,
        change=lambda inputs: {**inputs, "cu_seqlens_q": cuts, "q_offset": cuts[:0]},
    )  # fmt: skip
    assert (got["out"] == 0).all()


def test_chunks_of_queries_fill_the_device(monkeypatch):
    """All rows where the memory allows, else whole waves of programs, at least one query."""
    from types import SimpleNamespace

    from sparse_attn.shared_kv import bwd

    monkeypatch.setattr(bwd, "device_properties", lambda device: SimpleNamespace(cube_cores=132))
    for rows, affordable, chunk in ((140, 141, 140), (141, 141, 141), (142, 141, 132), (5000, 1000, 924), (5000, 100, 100), (7, 1 << 40, 7)):
        assert bwd.chunk_of(rows, bwd.CHUNK_BYTES // affordable, torch.device("cpu")) == chunk
    assert bwd.chunk_of(7, 2 * bwd.CHUNK_BYTES, torch.device("cpu")) == 1
