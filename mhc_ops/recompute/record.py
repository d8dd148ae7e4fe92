"""The mechanism of a region: saved-tensor hooks that know which tensors mHC can make again.

Inside a region every tensor that autograd saves passes through `Recorder.pack`. A tensor that an mHC op has made, streams or y, is
saved as the recipe that makes it: the op and its inputs, each packed in the same way. Whatever else comes is kept. Recipes start from
kept tensors: the streams that enter the region, the outputs of the sublayers, the coefficients.

- A tensor is recognised by its storage and its version, so a view of y (a linear layer saves one) is replayed too, and a y that was
  written in place is kept. Nothing hangs on the tensors themselves.
- A kept tensor goes through the hooks that were in force outside (torch.utils.checkpoint, save_on_cpu), once, however many save it.
- What is packed belongs to autograd alone: a replayed tensor lives from its first use in the backward pass until the last node that
  saved it, or a tensor made from it, has run. With retain_graph=True it lives as long as the graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mhc_ops.bmm.op import CALLS
from mhc_ops.post.op import run_forward as run_post_forward

run_pre_forward, _ = CALLS["pre"]
Key = tuple[Any, ...]


def replay_streams(f: Tensor, x: Tensor, post: Tensor, comb: Tensor, how: str) -> Tensor:
    """The new streams of hc_post and of hc_post_pre, bit for bit. how: "triton" or "eager", as the first pass."""
    return run_post_forward(f, x, post, comb, how)


def replay_collapse(pre: Tensor, x: Tensor, how: str) -> Tensor:
    """The y of hc_pre and of hc_post_pre, bit for bit, from the pre that made it (pre_mix where there was one)."""
    return run_pre_forward(pre, x, how)


class Value:
    """A saved tensor: not decided yet (`tensor`), kept, or a recipe with, once it was replayed, its result."""

    __slots__ = ("how", "inputs", "kept", "make", "result", "stream", "tensor")

    def __init__(self) -> None:
        self.tensor: Tensor | None = None
        self.kept: Callable[[], Tensor] | None = None
        self.make: Callable[..., Tensor] | None = None
        self.inputs: Sequence[View] = ()
        self.how = ""
        self.result: Tensor | None = None
        self.stream: object = None

    def get(self) -> Tensor:
        if self.make is None:
            if self.kept is None:
                assert self.tensor is not None
                return self.tensor
            return self.kept()
        stack = [self]  # a chain over many layers would be too deep for recursion
        while stack:
            value = stack[-1]
            missing = [view.value for view in value.inputs if not view.value.ready()]
            if missing and not value.ready():
                stack += missing
                continue
            stack.pop()
            if not value.ready():
                assert value.make is not None
                with torch.no_grad():
                    value.result = value.make(*(view.get() for view in value.inputs), value.how)
                value.stream = _current_stream(value.result)
        assert self.result is not None
        return self.result

    def ready(self) -> bool:
        """A result that another stream makes may not be there yet: this one then makes its own."""
        return self.make is None or (self.result is not None and self.stream == _current_stream(self.result))


class View:
    """What autograd holds in place of a replayed tensor, or of a view of one: the value and where in its storage the tensor lies."""

    __slots__ = ("offset", "size", "stride", "value")

    def __init__(self, value: Value, tensor: Tensor) -> None:
        self.value, self.size, self.stride, self.offset = value, tensor.size(), tensor.stride(), tensor.storage_offset()

    def get(self) -> Tensor:
        tensor = self.value.get()
        if self.value.make is None or (tensor.size() == self.size and tensor.stride() == self.stride):
            return tensor
        return tensor.as_strided(self.size, self.stride, self.offset)


def _current_stream(tensor: Tensor) -> object:
    return None if tensor.device.type == "cpu" else torch.accelerator.current_stream(tensor.device)


def unpack(packed: View | Value) -> Tensor:
    return packed.get()


def _uncompiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo would trace a hook that is called while compiled code runs. Where it was never imported there is none, and we import none."""
    return torch.compiler.disable(hook) if "torch._dynamo" in sys.modules else hook


class Recorder:
    """One region in one thread."""

    def __init__(self) -> None:
        # read at the start of a region: hooks do not nest by themselves, the innermost pair alone is called
        self.outer: tuple[Callable, Callable] | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self.values: dict[Key, Value] = {}  # kept tensors, by storage, place and version
        self.recipes: dict[int, tuple[Value, torch.dtype, int]] = {}  # made by an mHC op: they own all of their storage
        self.alive: list[StorageWeakRef] = []  # as long as these exist, no other storage gets the same address
        self.pending: list[tuple[Value, Tensor]] | None = None
        self.seen = False
        self.hooks = _uncompiled(self.pack), _uncompiled(unpack)

    def pack(self, tensor: Tensor) -> View | Value:
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
            other = Value()
            self._keep(other, tensor)
            return other
        storage = tensor.untyped_storage()
        recipe = self.recipes.get(storage._cdata)
        if recipe is not None and recipe[1:] == (tensor.dtype, tensor._version):
            return View(recipe[0], tensor)
        key = (storage._cdata, tensor.dtype, tensor._version, tensor.storage_offset(), tensor.size(), tensor.stride())
        value = self.values.get(key)
        if value is None:
            self.values[key] = value = Value()
            if self.outer is not None:
                self.alive.append(StorageWeakRef(storage))  # what is kept without outer hooks is alive itself
            if self.pending is None:
                self._keep(value, tensor)
            else:
                value.tensor = tensor.detach()
                self.pending.append((value, tensor))
        return value

    def _keep(self, value: Value, tensor: Tensor) -> None:
        if self.outer is not None:
            outer_pack, outer_unpack = self.outer
            with torch.no_grad():
                packed = outer_pack(tensor)
            value.kept = _once(lambda: outer_unpack(packed))
        else:
            value.kept = _versioned(tensor.detach())
        value.tensor = None

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Until its end nothing is decided: an op saves its own output before anyone can say how it is made."""
        self.pending = []
        try:
            yield
        finally:
            pending, self.pending = self.pending, None
            for value, tensor in pending:
                if value.make is None:
                    self._keep(value, tensor)

    def post(self, streams: Tensor, f: Tensor, x: Tensor, post: Tensor, comb: Tensor, how: str) -> None:
        """Note that hc_post or hc_post_pre made `streams` from the rest."""
        self._note(streams, replay_streams, (f, x, post, comb), how)

    def pre(self, y: Tensor, pre: Tensor, x: Tensor, how: str) -> None:
        """Note that hc_pre or hc_post_pre made `y` by collapsing x with `pre`."""
        self._note(y, replay_collapse, (pre, x), how)

    def _note(self, made: Tensor, make: Callable[..., Tensor], inputs: tuple[Tensor, ...], how: str) -> None:
        self.seen = True
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if not torch.is_grad_enabled() or top is None or top[0] is not self.hooks[0]:
            return  # nothing is saved, or by other hooks: a checkpoint inside the region recomputes all of its part anyway
        storage = made.untyped_storage()
        key = (storage._cdata, made.dtype, made._version, made.storage_offset(), made.size(), made.stride())
        value = self.values.pop(key, None) or Value()
        value.make, value.inputs, value.how, value.tensor, value.kept = make, [self._view(t) for t in inputs], how, None, None
        self.recipes[storage._cdata] = (value, made.dtype, made._version)
        self.alive.append(StorageWeakRef(storage))

    def _view(self, tensor: Tensor) -> View:
        packed = self.pack(tensor)
        return packed if isinstance(packed, View) else View(packed, tensor)

    def close(self) -> None:
        self.values.clear()
        self.recipes.clear()
        self.alive.clear()
        del self.hooks  # a cycle


def _once(unpack_outer: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A checkpoint hands each of its tensors out once; here several nodes share it."""
    found: list[Tensor] = []

    def get() -> Tensor:
        if not found:
            found.append(unpack_outer())
        return found[0]

    return get


def _versioned(tensor: Tensor) -> Callable[[], Tensor]:
    """autograd checks the version of what it saves, but not under hooks"""
    version = tensor._version

    def get() -> Tensor:
        if tensor._version != version:
            raise RuntimeError(
                f"hc_recompute: a tensor {list(tensor.shape)} saved for backward in this region was modified by an inplace operation: it is "
                f"at version {tensor._version}, saved at version {version}"
            )
        return tensor

    return get
