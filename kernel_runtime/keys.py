"""Makes the keys of Triton's cache independent of the order in which kernels are first used.

The key of a function contains the module's constants (`tl.constexpr`) that it or a function it calls uses. Triton 3.6 asks a called function
for those before it has computed that function's own key, and so finds none if this is the first time: a kernel whose helper uses a constant
has one key where the helper was used before, and another where it was not. A folder filled ahead of time would then miss it. `settle`
computes the keys of called functions before those of their callers. No device function may call itself: Triton 3.2, which Triton-Ascend
is, would look for its key without end.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any

import triton.runtime.jit

from kernel_runtime.impl import interpreting

FUNCTIONS = getattr(triton.runtime.jit, "JITCallable", triton.runtime.jit.JITFunction)  # the latter where Triton is 3.2
_settled: dict[int, Any] = {}  # by address, as a hash of a function is one of its key; held, so that no other gets the address
_underway: set[int] = set()
_lock = threading.RLock()


def settle(kernel: Any) -> None:
    """Computes the key of `kernel` and, before it, those of all functions it calls. In the interpreter nothing is compiled, and a function
    of Gluon could not have a key: it calls functions of Triton's that the interpreter has replaced."""
    if id(kernel) in _settled or interpreting() or not isinstance(kernel, FUNCTIONS):
        return
    with _lock:
        if id(kernel) in _settled or id(kernel) in _underway:  # the latter: `called` goes by names, which may lead back
            return
        _underway.add(id(kernel))
        try:
            for function in called(kernel):
                settle(function)
            kernel.cache_key  # noqa: B018 - computed and kept by Triton
            _settled[id(kernel)] = kernel  # other threads pass from here on
        finally:
            _underway.discard(id(kernel))


def called(kernel: Any) -> Iterator[Any]:
    """The device functions whose names stand in the kernel, by themselves or behind a module's"""
    names = list(_names(kernel.fn.__code__))
    known = {**kernel.fn.__globals__, **inspect.getclosurevars(kernel.fn).nonlocals}
    values = [known[name] for name in names if name in known]
    values += [getattr(module, name) for module in values if isinstance(module, ModuleType) for name in names if hasattr(module, name)]
    for value in values:
        if isinstance(value, FUNCTIONS):
            yield value


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    yield from code.co_freevars
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)
