"""AdamW whose moments live in host memory and visit the device a bucket at a time, during `step` alone.

    stream "load"      host -> slot      bucket i + 2    bucket i + 3
    current stream     update in slot    bucket i        bucket i + 1     adamw.update, on views of the slot
    stream "store"     slot -> host      bucket i - 1    bucket i

Resident bytes a parameter: 16 with torch.optim.AdamW in fp32 (weight, gradient, two moments), 8 here, and the slots. What crosses the bus
a step is 8 bytes a parameter each way, both at the same time. The arithmetic is the same on the same numbers, element by element, so the
result is bit-equal to the resident optimizer. `step` does not wait for the last copies; `synchronize` does.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from train_example.adamw import local, scalar, update

ALIGN = 1024  # elements at which a parameter may be cut, and at which each begins: whole vectors of every kernel
BUCKET_BYTES = 16 * 2**20  # on an H200 as fast as 64 and 256 MiB (bench.swap)
SLOTS = 3  # one being loaded, one updated, one stored


@dataclass(frozen=True)
class _Piece:
    """Elements first .. first + count of a parameter's local shard, at `offset` of its bucket."""

    param: nn.Parameter
    first: int
    count: int
    offset: int
    step: Tensor  # the parameter's own, or a copy of it: the kernel adds 1 to each one it is given


@dataclass(frozen=True)
class _Bucket:
    """Elements start .. end of a parameter group's host memory, at most a slot."""

    group: dict[str, Any]
    host: Tensor
    start: int
    end: int
    pieces: list[_Piece]


def pinned_zeros(rows: int, count: int, device: torch.device) -> Tensor:
    """[rows, count] fp32 zeros in host memory that `device` copies from and to without waiting; ordinary memory where that is the CPU."""
    if device.type == "cpu":
        return torch.zeros(rows, count)
    if device.type != "cuda":
        return torch.zeros(rows, count, pin_memory=True)
    # pin_memory would round every allocation up to a power of two. A mapping is whole pages, which no other allocation shares, and begins
    # where its storage does, where torch looks whether a tensor is pinned
    if rows * count == 0:
        return torch.zeros(rows, count)
    memory = mmap.mmap(-1, rows * count * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    out = torch.frombuffer(memory, dtype=torch.float32)
    status = torch.cuda.cudart().cudaHostRegister(out.data_ptr(), out.nbytes, 0)
    if int(status) != 0:
        raise RuntimeError(f"the host cannot lock {out.nbytes / 2**30:.1f} GiB of memory for the optimizer (cudaHostRegister: error {int(status)})")
    release = weakref.finalize(out.untyped_storage(), _unpin, out.data_ptr(), device, memory)
    release.atexit = False  # the process takes its memory with it
    return out.view(rows, count)


def _unpin(pointer: int, device: torch.device, memory: mmap.mmap) -> None:
    """Called when the last view is gone; `memory` is held until here."""
    torch.cuda.synchronize(device)  # a copy may still be under way
    torch.cuda.cudart().cudaHostUnregister(pointer)


class SwapAdamW(torch.optim.Optimizer):
    """AdamW over fp32 parameters of one device, plain or DTensor, with its moments in host memory.

    `state[param]` has "step", "exp_avg" and "exp_avg_sq" as torch.optim.AdamW has them, but that the moments are host tensors: read or
    fill them in place, after `synchronize`.

    Args:
        params: parameters or groups of them, as for torch.optim.AdamW.
        lr, betas, eps, weight_decay, fused: of torch.optim.AdamW.
        kernel: as in ShardedAdamW, to which the result is then bit-equal.
        bucket_bytes: size of a slot, both moments together; a larger parameter is cut.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        fused: bool | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        kernel: bool = False,
    ) -> None:
        if bucket_bytes < 8 * ALIGN:
            raise ValueError(f"bucket_bytes must be {8 * ALIGN} or more, got {bucket_bytes}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "fused": fused})
        self.kernel = kernel
        every = [param for group in self.param_groups for param in group["params"]]
        for param in every:
            if param.dtype != torch.float32 or not local(param).is_contiguous():
                raise TypeError(f"parameters must be contiguous fp32, got one of shape {tuple(param.shape)}, {param.dtype}")
        devices = {local(param).device for param in every}
        if len(devices) != 1:
            raise ValueError(f"all parameters must be on one device, got {sorted(map(str, devices))}")
        self.device = devices.pop()
        self.module = torch.get_device_module(self.device)
        limit = bucket_bytes // 8 // ALIGN * ALIGN
        self.buckets = [bucket for group in self.param_groups for bucket in self._make_buckets(group, limit)]
        size = max((bucket.end - bucket.start for bucket in self.buckets), default=0)
        self.slots = [torch.empty(2, size, device=self.device) for _ in range(min(SLOTS, len(self.buckets)))]
        self.loads, self.stores = self.module.Stream(), self.module.Stream()

    def _make_buckets(self, group: dict[str, Any], limit: int) -> list[_Bucket]:
        starts, total = [], 0
        for param in group["params"]:
            starts.append(total)
            total += -(-local(param).numel() // ALIGN) * ALIGN
        host = pinned_zeros(2, total, self.device)
        buckets: list[_Bucket] = [_Bucket(group, host, start, min(start + limit, total), []) for start in range(0, max(1, total), limit)]
        for param, start in zip(group["params"], starts):
            shard = local(param)
            step = torch.zeros((), dtype=torch.float32, device=self.device if group["fused"] else "cpu")
            moments = [row[start : start + shard.numel()].view(shard.shape) for row in host]
            if isinstance(param, DTensor):  # from_local would move them to the mesh's device
                moments = [DTensor(moment, param._spec, requires_grad=False) for moment in moments]
            self.state[param] = {"step": step, "exp_avg": moments[0], "exp_avg_sq": moments[1]}
            first = 0
            while first < shard.numel() or first == 0:  # an empty shard has a piece too: it counts steps
                bucket = buckets[min((start + first) // limit, len(buckets) - 1)]
                count = min(shard.numel() - first, bucket.end - start - first)
                bucket.pieces.append(_Piece(param, first, count, start + first - bucket.start, step if first == 0 else step.clone()))
                first += count or 1
        return buckets

    @torch.no_grad()
    def step(self, closure: None = None, divisor: float | None = None) -> None:  # type: ignore[override]  # no closure: gradients are there
        """One AdamW step on every parameter that has a gradient. divisor: what all gradients are divided by first."""
        if closure is not None:
            raise ValueError("SwapAdamW.step takes no closure")
        active = [bucket for bucket in self.buckets if any(piece.param.grad is not None for piece in bucket.pieces)]
        scale = scalar(divisor, self.device)
        cut = [piece for bucket in active for piece in bucket.pieces if piece.first]
        for piece in cut:
            piece.step.copy_(self.state[piece.param]["step"])
        self.loads.wait_stream(self.stores)  # the last step's moments have reached the host
        loaded: list[Any] = [None] * len(active)
        free: list[Any] = [None] * len(self.slots)  # events behind which a slot may be filled again
        ahead = max(1, len(self.slots) - 1)
        for i in range(-ahead, len(active)):
            if (coming := i + ahead) < len(active):
                number = coming % len(self.slots)
                loaded[coming] = self._load(active[coming], self.slots[number], free[number])
            if i >= 0:
                current, updated = self.module.current_stream(), self.module.Event()
                current.wait_event(loaded[i])
                self._update(active[i], self.slots[i % len(self.slots)], scale)
                updated.record(current)
                free[i % len(self.slots)] = self._store(active[i], self.slots[i % len(self.slots)], updated)

    def _load(self, bucket: _Bucket, slot: Tensor, free: Any) -> Any:
        size, event = bucket.end - bucket.start, self.module.Event()
        if free is not None:
            self.loads.wait_event(free)
        with self.module.stream(self.loads):
            for row in range(2):
                slot[row, :size].copy_(bucket.host[row, bucket.start : bucket.end], non_blocking=True)
            event.record(self.loads)
        return event

    def _store(self, bucket: _Bucket, slot: Tensor, updated: Any) -> Any:
        size, event = bucket.end - bucket.start, self.module.Event()
        self.stores.wait_event(updated)
        with self.module.stream(self.stores):
            for row in range(2):
                bucket.host[row, bucket.start : bucket.end].copy_(slot[row, :size], non_blocking=True)
            event.record(self.stores)
        return event

    def _update(self, bucket: _Bucket, slot: Tensor, divisor: Tensor | None) -> None:
        pieces = [piece for piece in bucket.pieces if piece.param.grad is not None]
        update(
            bucket.group,
            [local(piece.param).view(-1)[piece.first : piece.first + piece.count] for piece in pieces],
            [local(piece.param.grad).view(-1)[piece.first : piece.first + piece.count] for piece in pieces],
            [slot[0, piece.offset : piece.offset + piece.count] for piece in pieces],
            [slot[1, piece.offset : piece.offset + piece.count] for piece in pieces],
            [piece.step for piece in pieces],
            divisor,
            self.kernel,
        )

    def synchronize(self) -> None:
        """Wait until the host holds the moments of the last step."""
        self.module.synchronize() if self.device.type == "cpu" else self.stores.synchronize()

    def resident_bytes(self) -> dict[str, int]:
        """Bytes of the moments on the device (the slots) and on the host."""
        hosts = {bucket.host.data_ptr(): bucket.host.nbytes for bucket in self.buckets}
        return {"device": sum(slot.nbytes for slot in self.slots), "host": sum(hosts.values())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refused: torch's own would move the moments to the device."""
        raise NotImplementedError("fill optimizer.state[param] in place instead, as train_example.checkpoint.load does")
