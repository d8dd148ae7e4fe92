"""What every public op is checked for, whatever it computes."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from kernel_runtime import replay
from reference.cases import relative_error

Outputs = torch.Tensor | Sequence[torch.Tensor]


def as_tuple(outputs: Outputs) -> tuple[torch.Tensor, ...]:
    return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)


def gradients(
    fn: Callable[..., Outputs], inputs: Sequence[Any], seed: int = 7
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor | None, ...]]:
    """Outputs of fn(*inputs) and the gradients of its floating inputs, for random cotangents (the same for one seed and shape)."""
    leaves = [t.detach().requires_grad_() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in inputs]
    outputs = as_tuple(fn(*leaves))
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for o in outputs:
        cotangent = torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.device, o.dtype)
        if o.requires_grad:
            pairs.append((o, cotangent))
    wanted = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
    grads = torch.autograd.grad([o for o, _ in pairs], wanted, [c for _, c in pairs], allow_unused=True) if pairs else (None,) * len(wanted)
    return tuple(o.detach() for o in outputs), grads


def assert_close(got: Sequence[torch.Tensor | None], want: Sequence[torch.Tensor | None], limit: float, what: str) -> None:
    """Same None-ness, shape, and relative error (norm) at most `limit`, tensor by tensor."""
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert (g is None) == (w is None), f"{what} {i}: one is None"
        if g is not None:
            assert g.shape == w.shape, f"{what} {i}: shape {tuple(g.shape)} against {tuple(w.shape)}"
            error = relative_error(g, w)
            assert error <= limit, f"{what} {i}: relative error {error:.2e}, allowed {limit:.1e}"


def check_opcheck(op: Callable[..., Any], args: Sequence[Any]) -> None:
    """torch.library.opcheck of a registered op on detached arguments: schema, fake, functionalisation under AOT, dynamic shapes."""
    args = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in args)
    result = torch.library.opcheck(op, args)
    assert set(result.values()) == {"SUCCESS"}, result


class FakesAgree(TorchDispatchMode):
    """Inside, every op of `namespaces` gives what its fake says, in shape, strides, dtype and device, in memory of its own; `seen` lists them."""

    def __init__(self, *namespaces: str) -> None:
        super().__init__()
        self.namespaces, self.seen = namespaces, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in self.namespaces:
            self.seen.append((func.name(), args[-1]))
            with FakeTensorMode() as mode:
                wanted = func(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args))
            taken = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
            for i, (got, want) in enumerate(zip(as_tuple(result), as_tuple(wanted), strict=True)):
                name = f"{func.name()}, output {i}"
                assert (got.shape, got.dtype, got.device) == (want.shape, want.dtype, want.device), name
                if got.numel():
                    assert got.stride() == want.stride() and got.untyped_storage().data_ptr() not in taken, name
                    taken.add(got.untyped_storage().data_ptr())
        return result


def check_fullgraph(fn: Callable[..., Outputs], inputs: Sequence[Any], limit: float = 1e-6) -> None:
    """torch.compile(fullgraph=True) traces forward and backward, from the first call on, and gives the eager results.

    Traced through AOTAutograd without Inductor: what is checked is the op's schema, fake and autograd.Function, not a code generator.
    """
    torch._dynamo.reset()
    want_out, want_grad = gradients(fn, inputs)
    got_out, got_grad = gradients(torch.compile(fn, fullgraph=True, backend="aot_eager"), inputs)
    assert_close(got_out, want_out, limit, "compiled output")
    assert_close(got_grad, want_grad, limit, "compiled gradient")


def check_checkpoint(fn: Callable[..., Outputs], inputs: Sequence[Any]) -> None:
    """Activation checkpointing gives the very same outputs and gradients."""
    want_out, want_grad = gradients(fn, inputs)
    got_out, got_grad = gradients(lambda *a: checkpoint(fn, *a, use_reentrant=False), inputs)
    assert_close(got_out, want_out, 0.0, "checkpointed output")
    assert_close(got_grad, want_grad, 0.0, "checkpointed gradient")


def strided_variants(t: torch.Tensor) -> list[torch.Tensor]:
    """The values of `t` in other memory layouts: dimensions permuted in memory, a slice of a larger tensor, an offset start."""
    variants = []
    if t.dim() > 1:
        variants.append(t.transpose(0, -1).contiguous().transpose(0, -1))
    wide = torch.full((*t.shape[:-1], 2 * t.shape[-1] + 3), float("nan"), dtype=t.dtype, device=t.device)
    wide[..., 1 : 1 + 2 * t.shape[-1] : 2] = t
    variants.append(wide[..., 1 : 1 + 2 * t.shape[-1] : 2])
    return variants


def poison_empty(monkeypatch: Any) -> None:
    """torch.empty and torch.empty_like give NaN (or a large integer), so that an element which a kernel leaves unwritten shows."""

    def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def inner(*args: Any, **kwargs: Any) -> torch.Tensor:
            t = make(*args, **kwargs)
            return t.fill_(float("nan") if t.is_floating_point() else 2**30 if t.dtype in (torch.int32, torch.int64) else 1)

        return inner

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    for device, make in replay.ALLOCATE.items():
        monkeypatch.setitem(replay.ALLOCATE, device, poisoned(make))
