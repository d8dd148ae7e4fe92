"""Expert-parallel token dispatch: send every token to the ranks that hold its experts, run them, bring the results back, sum.

Shape letters: T tokens of this rank, k experts a token, D hidden size, E all experts, P ranks of the expert-parallel group,
L = E / P experts of one rank, M rows (token, expert) that land on this rank.

    ids [T, k] --stable sort by expert--> T*k rows --all-to-all--> M rows by (source rank, local expert)
    --regroup--> M rows by (local expert, source rank) --experts--> M rows --undo regroup--> all-to-all back
    --undo sort--> [T, k, D] --fp32 weighted sum over k--> [T, D]

Every reordering is a permutation whose backward is the inverse permutation, so gradients never need a scatter-add: the result is
deterministic on every device.

Counts cross the ranks once and reach the host once. The backward pass exchanges rows alone, and so does a second forward pass of a
layer that is recomputed: it reads what the first one left on its RoutingTape. Where one GPU holds every expert there is nothing to exchange,
and the counts stay there: the host, which would wait for them with nothing launched behind, goes on.

While rows travel the device has something else to do, which the caller names (`meanwhile`): the shared expert. Each exchange has a node of
its own in the graph where it starts and one where it ends. What the forward pass computes between the two, autograd computes between them
in the backward pass as well, for it takes the nodes that are ready in the reverse of the order in which they were made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from train_example.fused import combine, copy_rows, permute_rows

Sizes = Callable[[], list[int]]
ExpertsFn = Callable[[Tensor, Tensor, Sizes], Tensor]


class Routing(NamedTuple):
    """Who sends how much: rows to each rank and from each rank, and rows from each rank for each local expert [P, L], here and on the host."""

    send_splits: list[int]
    recv_splits: list[int]
    recv: Tensor
    host_recv: list[list[int]]

    def expert_sizes(self) -> list[int]:
        """Rows of each local expert."""
        return [sum(column) for column in zip(*self.host_recv)]


class RoutingTape:
    """The routings of one forward pass of a layer that is recomputed, read back by the second pass in the same order."""

    def __init__(self) -> None:
        self._routings: list[Routing] = []
        self._unread: Iterator[Routing] | None = None

    @contextmanager
    def record(self) -> Iterator[None]:
        self._routings, self._unread = [], None
        with self._current():
            yield

    @contextmanager
    def replay(self) -> Iterator[None]:
        self._unread = iter(self._routings)
        with self._current():
            yield

    @contextmanager
    def _current(self) -> Iterator[None]:
        token = _TAPE.set(self)
        try:
            yield
        finally:
            _TAPE.reset(token)

    def routing(self, make: Callable[[], Routing]) -> Routing:
        if self._unread is not None:
            return next(self._unread)
        self._routings.append(make())
        return self._routings[-1]


_TAPE: ContextVar[RoutingTape | None] = ContextVar("routing_tape", default=None)


class _Exchange:
    """One exchange of rows [rows, D] with uneven splits, and, with the splits swapped, that of their gradients.

    Functions without a condition, whatever the row counts are, because a collective needs every rank: a rank that sends or receives zero
    rows must still take part in the backward exchange, or the others wait for it for ever.
    """

    def __init__(self, send_splits: list[int], recv_splits: list[int], group: dist.ProcessGroup) -> None:
        self.send_splits, self.recv_splits, self.group = send_splits, recv_splits, group
        self.work: dist.Work | None = None
        self.arriving: Tensor | None = None

    def start(self, rows: Tensor, send_splits: list[int], recv_splits: list[int]) -> Tensor:
        out = rows.new_empty((sum(recv_splits), rows.shape[1]))
        splits = {"output_split_sizes": recv_splits, "input_split_sizes": send_splits}
        self.work = dist.all_to_all_single(out, rows.contiguous(), **splits, group=self.group, async_op=True)
        return out

    def end(self) -> None:
        if self.work is not None:
            self.work.wait()
        self.work = None

    def __call__(self, rows: Tensor, meanwhile: Callable[[], None] | None) -> Tensor:
        coming = _Start.apply(rows, self)
        if meanwhile is not None:
            meanwhile()
        return _End.apply(coming, self)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.start(rows, exchange.send_splits, exchange.recv_splits)

    @staticmethod
    @once_differentiable
    def backward(ctx, _: Tensor):
        ctx.exchange.end()
        grad, ctx.exchange.arriving = ctx.exchange.arriving, None
        return grad, None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx, coming: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.end()
        return coming.view_as(coming)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        exchange = ctx.exchange
        exchange.arriving = exchange.start(grad, exchange.recv_splits, exchange.send_splits)
        return grad, None  # _Start waits for the gradients that arrive; this one says that they are on the way


def _inverse(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return inverse


def _exchange_counts(counts: Tensor, ranks: int, group: dist.ProcessGroup | None) -> Routing:
    """counts [E]: this rank's rows for every expert. One small all-to-all, and one host sync."""
    send = counts.view(ranks, -1)
    if ranks == 1:
        host = send.tolist()
        return Routing([sum(host[0])], [sum(host[0])], send, host)
    recv = torch.empty_like(send)
    dist.all_to_all_single(recv, send.contiguous(), group=group)
    host_send, host_recv = torch.stack((send, recv)).tolist()
    return Routing([sum(row) for row in host_send], [sum(row) for row in host_recv], recv, host_recv)


def _check(x: Tensor, expert_ids: Tensor, weights: Tensor, num_experts: int, ranks: int) -> None:
    if x.dim() != 2:
        raise ValueError(f"x must be [T, D], got shape {tuple(x.shape)}")
    if expert_ids.dim() != 2 or expert_ids.shape[0] != x.shape[0]:
        raise ValueError(f"expert_ids must be [T, k] with T = {x.shape[0]}, got shape {tuple(expert_ids.shape)}")
    if expert_ids.dtype != torch.int64:
        raise TypeError(f"expert_ids must be int64, got {expert_ids.dtype}")
    if weights.shape != expert_ids.shape:
        raise ValueError(f"weights must have the shape of expert_ids {tuple(expert_ids.shape)}, got {tuple(weights.shape)}")
    if weights.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"weights must be float32 (float64 in tests), got {weights.dtype}")
    if num_experts % ranks:
        raise ValueError(f"num_experts = {num_experts} is not divisible by the expert-parallel size {ranks}")


@torch.compiler.disable  # the split sizes are read on the host
def dispatch_experts(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    experts: ExpertsFn,
    num_experts: int,
    group: dist.ProcessGroup | None,
    impl: str = "auto",
    meanwhile: Sequence[Callable[[], None]] = (),
    combine_rows: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Run `experts` on the tokens routed to this rank and return every token's weighted sum over its k experts.

    Args:
        x: [T, D] tokens of this rank; T may differ from rank to rank and may be 0.
        expert_ids: [T, k] int64 in [0, num_experts).
        weights: [T, k] float32 routing weights.
        experts: called as experts(x_sorted [M, D], counts [L] int64, sizes) -> [M, D]; rows are grouped by local expert in ascending
            order, counts[i] rows for local expert i; sizes() is counts as a list of ints, for which the host waits for the device where
            one GPU holds all experts, and nowhere else; called with M = 0 too, so that its weights get a gradient (of zeros) on every rank.
        num_experts: E, over all ranks; rank r holds experts r * L ... (r + 1) * L - 1.
        group: the expert-parallel process group, or None for one process.
        impl: of copying and summing rows, see train_example/fused.py.
        meanwhile: called in turn while rows travel, the first on their way to the experts and the second on their way back; those that are
            left (all of them, where no other process holds experts) at the end.
        combine_rows: called in place of `fused.combine`, with its tensors.

    Returns:
        y [T, D] in x.dtype (the sum over k is done in float32) and counts [E] int64: rows of this rank's own tokens for each expert.

    Raises:
        ValueError: wrong shapes, E not divisible by the group's size, or an expert id out of range. (Ids on the one GPU that holds all
            experts are not looked at by the host: there an assertion of the device fails.)
        TypeError: expert_ids not int64 or weights not float32.
    """
    ranks = 1 if group is None else group.size()
    _check(x, expert_ids, weights, num_experts, ranks)
    local_experts, k, device = num_experts // ranks, expert_ids.shape[1], x.device

    sorted_ids, order = expert_ids.reshape(-1).sort(stable=True)
    inverse = _inverse(order)
    # not bincount: that one reads its maximum on the host
    edges = torch.searchsorted(sorted_ids, torch.arange(num_experts + 1, device=device))
    counts = edges.diff()

    here = ranks == 1 and device.type == "cuda"
    sizes: Sizes = counts.tolist
    if here:
        torch._assert_async(counts.sum() == expert_ids.numel(), f"expert_ids must lie in [0, {num_experts})")
    else:
        tape = _TAPE.get()
        exchange = functools.partial(_exchange_counts, counts, ranks, group)
        routing = exchange() if tape is None else tape.routing(exchange)
        send_splits, recv_splits, recv, sizes = routing.send_splits, routing.recv_splits, routing.recv, routing.expert_sizes
        if sum(send_splits) != expert_ids.numel():
            outside = expert_ids.numel() - sum(send_splits)
            raise ValueError(f"expert_ids must lie in [0, {num_experts}): {outside} of {expert_ids.numel()} do not")

    rows = copy_rows(x, order, inverse, k, impl)
    work = iter(meanwhile)
    if ranks > 1:
        rows = _Exchange(send_splits, recv_splits, group)(rows, next(work, None))
        expert_of_row = torch.arange(local_experts, device=device).repeat(ranks)
        expert_of_row = expert_of_row.repeat_interleave(recv.reshape(-1), output_size=sum(recv_splits))
        regroup = expert_of_row.argsort(stable=True)
        ungroup = _inverse(regroup)
        rows = permute_rows(rows, regroup, ungroup)

    out = experts(rows, counts if here else recv.sum(0), sizes)
    if out.shape != rows.shape:
        raise ValueError(f"experts returned shape {tuple(out.shape)}, want {tuple(rows.shape)}")
    if rows.shape[0] == 0:
        out = out + rows.to(out.dtype)  # nothing to add, but it ties `out` to the exchange, so its backward runs on this rank too

    if ranks > 1:
        out = permute_rows(out, ungroup, regroup)
        out = _Exchange(recv_splits, send_splits, group)(out, next(work, None))
    for left in work:
        left()
    y = combine(out, order, inverse, weights, impl) if combine_rows is None else combine_rows(out, order, inverse, weights)
    return y.to(x.dtype), counts
