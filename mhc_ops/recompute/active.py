"""The region that this thread is in. The public functions ask here; everything else is in record.py."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from mhc_ops.recompute.record import Recorder

_THREAD = threading.local()  # a backward pass that runs a checkpointed forward again may do so in a thread of its own


def recording() -> Recorder | None:
    """The innermost region of this thread, None outside of one. In compiled code there is none: hooks do not see inside a graph."""
    if torch.compiler.is_compiling():
        return None
    return getattr(_THREAD, "recorder", None)


def set_recording(recorder: Recorder | None) -> None:
    _THREAD.recorder = recorder
