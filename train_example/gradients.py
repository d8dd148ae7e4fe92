"""How the gradients of an FSDP unit get into the buffer that is reduced.

FSDP does it with `_chunk_cat`, which on a GPU lists every 2 KiB of the buffer in host memory: 4 ms of the host for 200 M parameters, which
the device, done with the backward pass of the layer in 5, waits for. A multi-tensor copy does the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# its name since torch 2.13, which warns of the other one
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def copy_in(grads: Sequence[Tensor], out: Tensor) -> None:
    """What torch._chunk_cat(grads, 0, W, out=out) does: row r of out [W, n] becomes the r-th part along dim 0 of every gradient, one behind
    the other. Dim 0 is padded with zeros to a multiple of W."""
    processes = out.shape[0]
    widths = [-(-grad.shape[0] // processes) * (grad.numel() // grad.shape[0]) for grad in grads]
    targets, sources = [], []
    # few operators, all on the host: the device waits for it
    for grad, width, places in zip(grads, widths, zip(*(row.split(widths) for row in out.unbind()))):
        parts = grad.reshape(-1).split(width)
        for place, part in itertools.zip_longest(places, parts):
            if part is None:
                place.zero_()
                continue
            if part.numel() < width:
                place[part.numel() :].zero_()
                place = place[: part.numel()]
            targets.append(place)
            sources.append(part)
    torch._foreach_copy_(targets, sources)


class Buffer(Tensor):
    """A tensor that FSDP copies gradients into by `copy_in`. Copied to a view of itself, it stays where it is."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.fsdp.chunk_cat, torch.ops.fsdp.chunk_cat.default):
            return copy_in(args[0], kwargs["out"].as_subclass(Tensor))
        if func is Tensor.copy_ and args[0].data_ptr() == args[1].data_ptr():
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)


class SumGradients:
    """The reduce-scatter of one FSDP unit, see FSDPModule.set_custom_reduce_scatter.

    A group of one process reduces nothing: its gradients stay in the buffer that they were copied into, and FSDP's copy to another one is
    left out.
    """

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self.input: Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP asks for the input first and for the output then."""
        if self.input is None:
            self.input = torch.empty(*size, dtype=dtype, device=device)
            return self.input.as_subclass(Buffer)
        first, self.input = self.input, None
        return first if self.processes == 1 else torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False) -> Any:
        return _REDUCE_SCATTER(output_tensor, input_tensor.as_subclass(Tensor), op=op, group=group, async_op=async_op)
