"""Registration of ops: one schema, one fake, one eager and one Triton implementation for CPU, CUDA and PrivateUse1.

An op is called inside an autograd.Function (see mhc_ops/README.md, "Anatomy of an op"), so it carries no autograd formula of its own.
Its schema ends in `str impl`, the result of `select_impl`, and has no default arguments.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from kernel_runtime.impl import run_eager
from kernel_runtime.replay import Replay, Replays, unavailable

DISPATCH_KEYS = ("CPU", "CUDA", "PrivateUse1")


@cache
def _load(path: str) -> Callable[..., Any]:
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)


def _fresh(out: Any, storages: set[int]) -> Any:
    """Outputs of a registered op are contiguous and alias no input; a reference may return a view."""
    if isinstance(out, tuple | list):
        return tuple(_fresh(o, storages) for o in out)
    if not isinstance(out, torch.Tensor):
        return out
    out = out.detach().contiguous()
    return out.clone() if out.untyped_storage()._cdata in storages else out


def _given(out: Any) -> Any:
    """An op's output cannot be None: a launcher's None, for an output that does not exist, is an empty tensor."""
    if isinstance(out, tuple) and any(o is None for o in out):
        like = next(o for o in out if o is not None)
        return tuple(like.new_empty(0) if o is None else o for o in out)
    return out


def _device_guard(args: Sequence[Any]) -> contextlib.AbstractContextManager:
    """Triton launches on the current device; a tensor on another one needs a switch, which costs microseconds, so only then."""
    for a in args:
        if isinstance(a, torch.Tensor) and a.device.type != "cpu":
            module = torch.get_device_module(a.device)
            return module.device(a.device) if module.current_device() != a.device.index else contextlib.nullcontext()
    return contextlib.nullcontext()


_LAUNCHERS: dict[Any, dict[str, str | None]] = {}  # op -> impl -> "module:function"
_TENSORS: dict[Any, int] = {}  # op -> number of its arguments that are tensors or None
_PLAIN = {torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, str, torch.dtype}


def _plain(arguments: Sequence[Any]) -> bool:
    """Whether a call means nothing but its result: nobody traces, records or transforms it, and no argument is a tensor subclass."""
    return (
        not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and not torch.autograd._profiler_enabled()
        and _PLAIN.issuperset(map(type, arguments))
    )


def _on_current_device(arguments: Sequence[Any]) -> bool:
    """Whether the first tensor is on the current CUDA device, where a launch needs no switch of devices."""
    for a in arguments:
        if isinstance(a, torch.Tensor):
            return a.is_cuda and a.get_device() == torch._C._cuda_getDevice()
    return False


def _negated(arguments: Sequence[Any]) -> bool:
    """Whether a tensor is one of the views, such as z.conj().imag, whose minus sign the dispatcher writes to memory before an op runs."""
    return any(isinstance(a, torch.Tensor) and a.is_neg() for a in arguments)


_REPLAYED: list[EagerCall] = []


class EagerCall:
    """What `eager_call` returns."""

    def __init__(self, op: Any, replay: bool) -> None:
        self.op, self.launchers = op, _LAUNCHERS[op]
        self.replays = Replays(_TENSORS[op]) if replay else None
        if replay:
            _REPLAYED.append(self)

    def __call__(self, *arguments: Any) -> Any:
        """The op's result for its arguments, which the Replay that `known` gave may follow"""
        last, replays = arguments[-1], self.replays
        if type(last) is Replay:
            result = last([a for a in arguments[: _TENSORS[self.op]] if a is not None])
            if result is not None:
                return result
            arguments = arguments[:-1]
        elif replays is not None and not torch.compiler.is_compiling():
            found = replays.find(arguments[: replays.tensors], arguments[replays.tensors :])
            if found is not None and (result := found[0](found[1])) is not None:
                return result
        launcher = self.launchers.get(arguments[-1])
        if launcher is not None and _plain(arguments) and _on_current_device(arguments) and not _negated(arguments):
            function = _load(launcher)
            return function(*arguments[:-1]) if replays is None else replays.call(function, arguments)
        return self.op(*arguments)

    def known(self, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Replay | None:
        """The replay of a call with these arguments: they have been checked then. Not for code that is compiled."""
        if self.replays is None or any([t.is_nested for t in tensors if t is not None]):  # whose strides TensorGuards ends the process for
            return None
        found = self.replays.find(tensors, options)
        return None if found is None else found[0]


def eager_call(op: Callable[..., Any], replay: bool = False) -> EagerCall:
    """`op`, which `OpLibrary.register` returned, for calls from the autograd.Function around it.

    In plain eager code on the current device the dispatcher would only look for the launcher, and the op for the device, so the launcher
    is called at once: 10 to 20 us less. Everywhere else, and for impl="eager", this is the op. An output that does not exist is None or an
    empty tensor. replay: the op's tensors come first, and what its launcher does depends on their metadata and the other arguments alone,
    so that calls that come again are replayed (kernel_runtime/replay.py).
    """
    return EagerCall(op, replay)


def replay_report() -> list[str]:
    """Lines for a log: which ops this process replays for how many shapes, and why others are not. Ops that were not called are left out.

    Where nothing can be replayed (another Triton than was tried, Triton-Ascend, no CUDA) the only line says why: the ops are right there
    too, and take more host time. Imports Triton.
    """
    if reason := unavailable():
        return [f"no call is replayed: {reason}"]
    lines = ((call.op.name(), call.replays.summary()) for call in _REPLAYED if call.replays is not None)
    return [f"{name}: {text}" for name, text in lines if text]


class OpLibrary:
    """The registered ops of one package: `OpLibrary("mhc_ops").register(...)` makes torch.ops.mhc_ops.<name>."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self._lib = torch.library.Library(namespace, "FRAGMENT")
        self.names: list[str] = []

    def register(self, schema: str, *, fake: Callable, eager: Callable, triton: str | None = None, **others: str) -> Callable[..., Any]:
        """Registers `name(...)` of `schema` and returns the callable op.

        fake and eager take the schema's arguments without the last (`impl`); triton is "module:function" with the same arguments,
        imported at the first call, or None where no kernel exists; others are further values of `impl`, of the same form.
        """
        launchers = {"triton": triton, **others}
        name = schema.split("(", 1)[0]

        def run(*arguments: Any) -> Any:
            *args, impl = arguments
            if impl != "eager":
                path = launchers.get(impl)
                if path is None:
                    raise ValueError(f"{self.namespace}::{name}: no implementation {impl!r} exists")
                with _device_guard(args):
                    return _given(_load(path)(*args))
            out = run_eager(eager, *args)
            return _fresh(out, {a.untyped_storage()._cdata for a in args if isinstance(a, torch.Tensor)})

        self._lib.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        for key in DISPATCH_KEYS:
            self._lib.impl(name, run, key)
        torch.library.register_fake(f"{self.namespace}::{name}", lambda *args: fake(*args[:-1]), lib=self._lib)
        self.names.append(name)
        op = getattr(getattr(torch.ops, self.namespace), name).default
        _LAUNCHERS[op] = launchers
        _TENSORS[op] = schema.split("->", 1)[0].count("Tensor")
        return op


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply(*args)` where one tensor may come twice, as in compress_kv(x, x, ...): torch.compile refuses that, so it gets views.

    In eager code without functorch this is the base class's apply: Function.apply looks through the arguments for dead functorch wrappers
    before, which takes as long as all the rest.
    """
    if type(args[-1]) is Replay:  # whoever found it has seen to all that
        return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]  # as below
    if torch._C._are_functorch_transforms_active():  # in compiled code too, where the op's gradients would be zero without a word
        raise RuntimeError(f"{function.__name__}: torch.func (grad, vmap, jvp, ...) cannot transform a registered op; use impl='eager'")
    if torch.compiler.is_compiling():
        args = tuple(a.view_as(a) if isinstance(a, torch.Tensor) and any(a is b for b in args[:i]) else a for i, a in enumerate(args))
    elif _PLAIN.issuperset(map(type, args)):
        return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]  # mypy wants an instance there
    return function.apply(*args)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch.autograd.function.once_differentiable, but for two things: it takes less host time where no graph of the backward pass is made,
    as mostly; and it refuses a second derivative for constant cotangents too, those of `out.sum()` say, where PyTorch's gives a gradient
    without a graph, so that a penalty on it would be lost in silence."""
    refusing = torch.autograd.function.once_differentiable(backward)

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Any) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        if not torch.compiler.is_compiling():
            grads = tuple(g.detach().requires_grad_() if isinstance(g, torch.Tensor) and g.is_floating_point() else g for g in grads)
        return refusing(ctx, *grads)

    return wrapper


def eager_vjp(
    fn: Callable[..., Any],
    tensors: Sequence[torch.Tensor | None],
    grads: Sequence[torch.Tensor | None],
    wanted: Sequence[bool] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Gradients of `fn(*tensors)` at `tensors` for the output gradients `grads`, by recomputing the reference under autograd.

    `fn` returns one tensor or a tuple of as many as `grads` has (None = that output has no gradient). An input that is None, not wanted
    or not reached gets zeros of its shape (an empty tensor for None), so that the op's outputs have shapes known without running it.
    """
    wanted = [t is not None and t.is_floating_point() for t in tensors] if wanted is None else wanted
    # An op's implementation runs below autograd (a dispatch mode such as opcheck's excludes it altogether); the recompute needs it back.
    # Where it runs in a forward pass, an activation checkpoint around the op has hooks that would take the inner graph's saved tensors for
    # its own and recompute the whole region when they are read; plain hooks on top keep it out.
    autograd_on = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)
    with torch.enable_grad(), autograd_on, torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        leaves = [None if t is None else t.detach().requires_grad_(w) for t, w in zip(tensors, wanted)]
        outs = fn(*leaves)
        outs = (outs,) if isinstance(outs, torch.Tensor) else outs
        pairs = [(o, g) for o, g in zip(outs, grads) if g is not None and o.requires_grad]
        inputs = [leaf for leaf, w in zip(leaves, wanted) if w and leaf is not None]
        found: Sequence[torch.Tensor | None] = [None] * len(inputs)
        if pairs and inputs:
            found = torch.autograd.grad([o for o, _ in pairs], inputs, [g for _, g in pairs], allow_unused=True)
    got = iter(found)
    result = []
    for tensor, w in zip(tensors, wanted):
        g = next(got) if w and tensor is not None else None
        if tensor is None:
            result.append(torch.empty(0))
        else:
            result.append(torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device) if g is None else g.detach())
    return tuple(result)
