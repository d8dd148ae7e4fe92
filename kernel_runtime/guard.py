"""record(): which kernels a piece of code launches. forbid_compile(): says so, or fails, when one is compiled after warmup.

Both work by hooks (of `Spec.launch` and of Triton) and cost nothing between compilations.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kernel_runtime.impl import triton_installed
from kernel_runtime.registry import OP_PACKAGES

_ALLOWED = threading.local()
_OWN = ("/triton/", "/kernel_runtime/", "/torch/autograd/", "/torch/_ops.py", "/torch/utils/_contextlib.py", "/torch/library.py")


class CompileForbidden(RuntimeError):
    """A kernel was compiled while forbid_compile("error") was in force."""


@dataclass
class Recording:
    """What was launched, each specialisation once and in order; `mismatches` are arguments that differ from what a spec declares."""

    specs: list[Any] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    _seen: set[Any] = field(default_factory=set)

    def plan(self) -> Any:
        """A Plan that `warmup` takes and `Plan.to_json` writes."""
        from kernel_runtime.plan import Plan

        return Plan.of((spec.kernel.__module__.rpartition(".")[0], spec) for spec in self.specs)

    def _add(self, spec: Any, args: tuple[Any, ...]) -> None:
        if spec.identity not in self._seen:
            self._seen.add(spec.identity)
            self.specs.append(spec)
        self.mismatches.extend(m for m in argument_mismatches(spec, args) if m not in self.mismatches)


@contextlib.contextmanager
def record() -> Iterator[Recording]:
    """Lists the kernels launched inside the block, in Triton's interpreter too."""
    from kernel_runtime.launch import LAUNCH_OBSERVERS

    recording = Recording()
    LAUNCH_OBSERVERS.append(recording._add)
    try:
        yield recording
    finally:
        LAUNCH_OBSERVERS.remove(recording._add)


def argument_mismatches(spec: Any, args: tuple[Any, ...]) -> Iterator[str]:
    """Where a launch would pick another specialisation than `spec` states, and so compile: type, 64-bit integer, misaligned tensor."""
    from kernel_runtime.launch import TRITON_DTYPE

    if len(args) != len(spec.types):
        yield f"{spec.name}: {len(args)} arguments for {len(spec.types)} declared"
    for (name, kind), value in zip(spec.types.items(), args):
        if hasattr(value, "data_ptr"):
            actual = f"*{TRITON_DTYPE.get(value.dtype, value.dtype)}"
            if value.data_ptr() % 16:
                yield f"{spec.name}: {name} is not aligned to 16 bytes"
        elif isinstance(value, bool):
            actual = "i1"
        elif isinstance(value, int):
            actual = "i32" if -(2**31) <= value < 2**31 else "i64"
        else:
            actual = "fp32" if isinstance(value, float) else type(value).__name__
        if actual != kind and not (kind == "*i1" and actual == "*torch.bool"):
            yield f"{spec.name}: {name} is declared {kind} and passed as {actual}"


@contextlib.contextmanager
def compiling_allowed() -> Iterator[None]:
    """Inside, forbid_compile is silent on this thread: warmup itself compiles."""
    before = getattr(_ALLOWED, "now", False)
    _ALLOWED.now = True
    try:
        yield
    finally:
        _ALLOWED.now = before


def call_site() -> str:
    """file:line of the launcher, and of the innermost frame that is neither an op's nor torch's: the line to look at."""
    frames = [f for f in traceback.extract_stack() if not any(part in f.filename for part in _OWN)]
    if not frames:
        return "unknown"
    outside = [f for f in frames if not any(part in f.filename for part in (*(f"/{p}/" for p in OP_PACKAGES), "/torch/"))]
    places = [frames[-1], *([outside[-1]] if outside and outside[-1] is not frames[-1] else [])]
    return ", called from ".join(f"{f.filename}:{f.lineno}" for f in places)


class Guard:
    """forbid_compile in force; `close()` or the end of a `with` block lifts it. `seen` lists the messages."""

    def __init__(self, action: str | Callable[[str], None]) -> None:
        if not callable(action) and action not in ("warn", "error"):
            raise ValueError(f"forbid_compile: action must be 'warn', 'error' or a function, got {action!r}")
        self.action = action
        self.seen: list[str] = []
        self._restore: Callable[[], None] = lambda: None

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._restore()
        self._restore = lambda: None

    def tell(self, kernel: str, key: str, why: str) -> None:
        if getattr(_ALLOWED, "now", False):
            return
        message = f"kernel {kernel} was compiled after warmup (key {key}) for {call_site()}{why}; a job of many processes may stall on it"
        self.seen.append(message)
        if callable(self.action):
            self.action(message)
        elif self.action == "error":
            raise CompileForbidden(message)
        else:
            warnings.warn(message, RuntimeWarning, stacklevel=2)


def forbid_compile(action: str | Callable[[str], None] = "warn") -> Guard:
    """From now on, and until the result's close(), a JIT compilation is a warning, an error, or a call of `action` with the message.

    A kernel that is merely loaded from the cache folder is no compilation. Where Triton is not installed nothing can compile, and the
    guard does nothing. ValueError for an unknown action.
    """
    guard = Guard(action)
    if not triton_installed():
        return guard
    import triton

    if not hasattr(triton, "knobs"):
        return _forbid_before_knobs(guard)
    knobs: Any = triton.knobs.compilation
    before = knobs.listener

    def listener(*, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        if before is not None:
            before(src=src, metadata=metadata, metadata_group=metadata_group, times=times, cache_hit=cache_hit)
        if not cache_hit:
            guard.tell(src.name, str(metadata["hash"])[:16], _why(src))

    knobs.listener = listener

    def restore() -> None:
        # another listener put on top meanwhile keeps calling this one, which then only passes on
        if knobs.listener is listener:
            knobs.listener = before
        guard.action = lambda message: None

    guard._restore = restore
    return guard


def _why(src: Any) -> str:
    """The likely reason, from what the specialisation lacks."""
    fn = getattr(src, "fn", None)
    if fn is None:
        return ""
    aligned = {path[0] for path, marks in src.attrs.items() if marks}
    names = [n for i, n in enumerate(fn.arg_names) if str(src.signature.get(n, "")).startswith("*") and i not in aligned]
    wide = [n for n in fn.arg_names if src.signature.get(n) == "i64"]
    reasons = [f"{', '.join(names)} not aligned to 16 bytes"] if names else []
    reasons += [f"{', '.join(wide)} beyond 32 bits"] if wide else []
    return f" ({'; '.join(reasons)})" if reasons else ""


def _forbid_before_knobs(guard: Guard) -> Guard:
    """Triton 3.2 (Ascend): the hook runs before a compilation or a load from the cache folder; it cannot tell them apart."""
    from triton.runtime.jit import JITFunction

    before = JITFunction.cache_hook

    def hook(*, key: str, fn: Any, **others: Any) -> bool:
        guard.tell(fn.name, str(key)[:80], "")
        return bool(before(key=key, fn=fn, **others)) if before is not None else False

    JITFunction.cache_hook = hook

    def restore() -> None:
        JITFunction.cache_hook = before

    guard._restore = restore
    return guard
