"""How many layers a region should span, and what that keeps.

Letters: L layers of a pipeline stage, N streams, D hidden size, T tokens, each layer two sublayers.
A block keeps the streams that enter it, N*D a token, and replays those of its layers at once, in the backward pass of one block at a time.
The published trade-off (arXiv 2512.24880, section 4.3) counts N*D a block and (N + 2)*D for each layer of the block being replayed:
    N * ceil(L / L_r) + (N + 2) * L_r,   least at   L_r* = sqrt(N*L / (N + 2))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kernel_runtime import check_int
from mhc_ops.library import check_streams, mix_columns

SUBLAYERS = 2  # of a layer


@dataclass(frozen=True)
class RecomputeStage:
    """The layers of one pipeline stage. Bytes are those of a device that holds all `tokens` of the plan, one forward pass of them."""

    blocks: tuple[range, ...]  # layers of each region, in order
    kept_bytes: int  # kept from forward to backward: streams that enter each block, outputs of the sublayers, coefficients (pre, too,
    # which is dropped where no sublayer saves its y)
    replayed_bytes: int  # most that the backward pass adds at a time: the streams inside the largest block, and one y

    @property
    def peak_bytes(self) -> int:
        return self.kept_bytes + self.replayed_bytes


@dataclass(frozen=True)
class RecomputePlan:
    """What `plan` returns. `stored_bytes` and `in_layer_bytes` are the same sum without regions and with a region around each layer."""

    stages: tuple[RecomputeStage, ...]
    layers_per_block: float  # L_r* of the largest stage, before rounding
    stored_bytes: int
    in_layer_bytes: int

    @property
    def blocks(self) -> tuple[range, ...]:
        """Layers of each region, in order, those of all stages."""
        return tuple(block for stage in self.stages for block in stage.blocks)

    @property
    def kept_bytes(self) -> int:
        """Of all stages together."""
        return sum(stage.kept_bytes for stage in self.stages)

    @property
    def replayed_bytes(self) -> int:
        """Of the worst stage: each has its own device."""
        return max(stage.replayed_bytes for stage in self.stages)


def plan(
    num_layers: int,
    hc_mult: int,
    hidden: int,
    tokens: int,
    itemsize: int,
    boundaries: Sequence[int] = (),
    *,
    layers_per_block: int | None = None,
) -> RecomputePlan:
    """Blocks of layers for hc_recompute, of about L_r* = sqrt(N*L / (N + 2)) layers, as even as they go, and the bytes they keep.

    num_layers        layers of the model, each an attention and an MLP or MoE sublayer.
    hc_mult, hidden   N in 2..8 and D.
    tokens            of a forward pass on one device: batch times sequence length.
    itemsize          bytes of an element of the streams: 2 for bf16 and fp16, 4 for fp32.
    boundaries        first layer of each pipeline stage but the first, ascending, each in 1..num_layers - 1. No block crosses one, and L is
                      that of the stage.
    layers_per_block  a size in place of L_r*; 1 is a region a layer.

    Of the two whole sizes around L_r* the one with the least N * ceil(L / L_r) + (N + 2) * L_r is taken.
    TypeError or ValueError for an argument that is no integer or out of range.
    """
    op = "plan"
    for name, value in (("num_layers", num_layers), ("hidden", hidden), ("tokens", tokens), ("itemsize", itemsize)):
        check_int(op, name, value, minimum=1)
    check_int(op, "hc_mult", hc_mult, minimum=1)
    check_streams(op, "hc_mult", hc_mult)
    if layers_per_block is not None:
        check_int(op, "layers_per_block", layers_per_block, minimum=1)
    if isinstance(boundaries, str) or not isinstance(boundaries, Sequence):
        raise TypeError(f"{op}: boundaries must be a sequence of ints, got {type(boundaries).__name__}")
    edges = [0, *boundaries, num_layers]
    for edge in boundaries:
        check_int(op, "boundaries", edge, minimum=1)
    if any(a >= b for a, b in pairwise(edges)):
        raise ValueError(f"{op}: boundaries are {list(boundaries)}, wanted ascending layers in 1..{num_layers - 1}")

    streams = hc_mult * hidden * tokens * itemsize
    output = hidden * tokens * itemsize
    coefficients = 4 * tokens * (mix_columns(hc_mult) * 2 + 1)  # mixes and rstd; pre, post and comb are as many as the mixes
    pre = 4 * tokens * hc_mult  # which the ops by themselves do not save
    layer = SUBLAYERS * (output + coefficients)

    def stage(first: int, end: int) -> RecomputeStage:
        count = end - first
        blocks = _even(first, end, math.ceil(count / (layers_per_block or _block_size(count, hc_mult))))
        inside = SUBLAYERS * max(len(block) for block in blocks) - 1
        return RecomputeStage(blocks, count * layer + len(blocks) * streams, inside * streams + output)

    return RecomputePlan(
        tuple(stage(a, b) for a, b in pairwise(edges)),
        _ideal(max(b - a for a, b in pairwise(edges)), hc_mult),
        num_layers * (layer + SUBLAYERS * (streams - pre)),
        num_layers * (layer + streams),
    )


def _ideal(layers: int, n: int) -> float:
    return math.sqrt(n * layers / (n + 2))


def _block_size(layers: int, n: int) -> int:
    low = max(1, math.floor(_ideal(layers, n)))
    return min((low, low + 1), key=lambda size: n * math.ceil(layers / size) + (n + 2) * size)


def _even(first: int, end: int, blocks: int) -> tuple[range, ...]:
    edges = [first + (end - first) * i // blocks for i in range(blocks + 1)]
    return tuple(range(a, b) for a, b in pairwise(edges))
