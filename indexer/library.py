"""The registered ops of this package (torch.ops.indexer.*) and the checks that its public functions share."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from kernel_runtime import OpLibrary, check_dtype, check_int, check_same, check_shape
from kernel_runtime.checks import FLOATS, check_offset

OPS = OpLibrary("indexer")

# what the kernels cover
MAX_DIM = 128  # channels of an index head; fewer are padded to a power of two of at least 16
MAX_TOPK = 4096
MAX_ATTENTION_HEADS = 128  # of the main attention, where the KL loss computes the teacher
MAX_ATTENTION_DIM = 512  # its channels, a multiple of 16


class Layout(NamedTuple):
    """The arguments of both ops that say which blocks a query sees, in the order of their schemas, whose tensors come first (replays)."""

    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    q_offsets: Tensor | None  # one a batch entry or document
    cmp_ratio: int
    q_offset: int  # 0 with q_offsets

    @property
    def tensors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.cu_seqlens_q, self.cu_seqlens_k, self.q_offsets

    @property
    def numbers(self) -> tuple[int, int]:
        return self.cmp_ratio, self.q_offset


LAYOUT_TENSORS, LAYOUT_NUMBERS = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? q_offsets", "SymInt cmp_ratio, SymInt q_offset"


def offset_of(q_offset: int, q_offsets: Tensor | None) -> int | Tensor:
    return q_offset if q_offsets is None else q_offsets


def check_indexer(
    op: str,
    names: tuple[str, str],
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    cmp_ratio: int,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    q_offset: int | Tensor | None,
) -> Layout:
    """Checks queries, keys, weights and their layout; ``names`` are the names of q and k in the public function."""
    q_name, k_name = names
    check_dtype(op, q_name, q, FLOATS)
    if cu_seqlens_q is None and cu_seqlens_k is not None:
        raise ValueError(f"{op}: cu_seqlens_k without cu_seqlens_q; packed documents (TND) need both, BSND takes neither")
    if cu_seqlens_q is not None and cu_seqlens_k is None:
        raise ValueError(f"{op}: cu_seqlens_q without cu_seqlens_k; packed documents (TND) need both")
    lead = ["T"] if cu_seqlens_q is not None else ["B", "S"]
    check_shape(op, q_name, q, [*lead, "H", "Di"])
    heads, dim = q.shape[-2:]
    if heads < 1 or dim < 1:
        raise ValueError(f"{op}: {q_name} has shape {list(q.shape)}, wanted at least one head and one channel")
    check_shape(op, k_name, k, ["T3", dim] if cu_seqlens_q is not None else [q.shape[0], "S3", dim])
    check_same(op, k_name, k, q_name, q)
    check_shape(op, "weights", weights, q.shape[:-1])
    check_dtype(op, "weights", weights, (torch.float32, q.dtype))
    check_same(op, "weights", weights, q_name, q, dtype=False)
    check_int(op, "cmp_ratio", cmp_ratio, minimum=1, maximum=2**31 - 1)  # the kernels' int32
    for name, lengths in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if lengths is not None:
            check_dtype(op, name, lengths, (torch.int32,))
            check_shape(op, name, lengths, ["documents + 1"])
            check_same(op, name, lengths, q_name, q, dtype=False)
            if lengths.shape[0] < 1:
                raise ValueError(f"{op}: {name} is empty, wanted [documents + 1] entries that start with 0")
    if cu_seqlens_q is not None and cu_seqlens_k is not None and cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"{op}: cu_seqlens_q has {cu_seqlens_q.shape[0]} entries but cu_seqlens_k has {cu_seqlens_k.shape[0]}; "
            "they must describe the same documents"
        )
    if not isinstance(q_offset, Tensor):
        if q_offset is not None:
            check_offset(op, "q_offset", q_offset, q.shape[-3])
        return Layout(cu_seqlens_q, cu_seqlens_k, None, cmp_ratio, 0 if q_offset is None else q_offset)
    check_dtype(op, "q_offset", q_offset, (torch.int32,))
    check_shape(op, "q_offset", q_offset, [q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1])
    check_same(op, "q_offset", q_offset, q_name, q, dtype=False)
    return Layout(cu_seqlens_q, cu_seqlens_k, q_offset, cmp_ratio, 0)


def check_bool(op: str, name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be a bool, got {type(value).__name__}")


def resolve_deterministic(op: str, deterministic: bool | None) -> bool:
    """The switch of both ops: None follows torch.are_deterministic_algorithms_enabled()."""
    if deterministic is None:
        return torch.are_deterministic_algorithms_enabled()
    check_bool(op, "deterministic", deterministic)
    return deterministic


@contextmanager
def eager_deterministic(wanted: bool) -> Iterator[None]:
    """PyTorch's own switch while an op's eager body runs: its gathers add their gradients in no fixed order otherwise."""
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if wanted and not before:
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        if wanted and not before:
            torch.use_deterministic_algorithms(before, warn_only=warns)
