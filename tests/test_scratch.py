"""mHC kernels stay inside of what they were given: every scratch piece and every output lies between bytes that nobody may touch.

The pieces of a scratch allocation touch each other (kernel_runtime/workspace.py), so a kernel that passes the end of one writes into the
next, inside of one allocation, where no memory checker of a device looks.
"""

import math
from functools import partial

import pytest
import torch

import mhc_ops
from kernel_runtime.workspace import Layout
from reference.cases.mhc import MhcShape, make_inputs
from tests.op_checks import gradients

ZONE = 4096  # bytes before and after
CANARY = 0xFF  # NaN as bf16 and as fp32


class Zones:
    """In place of torch.empty and the rest: uninitialised memory is NaN, between zones"""

    def __init__(self, patch):
        self.buffers, self.pieces = [], 0
        self.make, new_empty = partial(self._make, torch.empty), torch.Tensor.new_empty
        patch.setattr(Layout, "allocate", lambda layout, device: self.allocate(layout))
        patch.setattr(torch, "empty", lambda *size, dtype=torch.float32, device="cpu": self.make(size, dtype))
        patch.setattr(torch, "empty_like", lambda t, dtype=None: self.make(t.shape, dtype or t.dtype))

        def new(t, *size, dtype=None, device=None):
            return self.make(size, dtype or t.dtype) if device is None else new_empty(t, *size, device=device)  # the interpreter's own

        patch.setattr(torch.Tensor, "new_empty", new)

    def _make(self, empty, size, dtype):
        size = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else tuple(size)
        length = math.prod(size) * dtype.itemsize
        buffer = empty(ZONE + length + ZONE, dtype=torch.uint8).fill_(CANARY)
        self.buffers.append((buffer, length))
        return buffer[ZONE : ZONE + length].view(dtype).view(size)

    def allocate(self, layout):
        self.pieces += len(layout.pieces)
        return [self.make((elements,), dtype) for _, elements, dtype in layout.pieces]

    def intact(self):
        return all(bool((b[:ZONE] == CANARY).all() and (b[ZONE + length :] == CANARY).all()) for b, length in self.buffers)


def test_a_write_beyond_the_end_is_seen(monkeypatch):
    with monkeypatch.context() as patch:
        zones = Zones(patch)
        first, second = Layout((3, torch.float32), (5, torch.bfloat16)).allocate(torch.device("cpu"))
    assert zones.intact() and first.isnan().all() and second.isnan().all()
    first.as_strided((1,), (1,), first.storage_offset() + 3).fill_(0)
    assert not zones.intact()


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "name, shape, pre_mix",
    [
        ("hc_project", MhcShape(1, 5, 3, 20), False), ("hc_head", MhcShape(1, 17, 5, 12), False), ("hc_pre", MhcShape(1, 9, 2, 40), False),
        ("hc_pre", MhcShape(1, 1, 4, 8), True), ("hc_post_pre", MhcShape(1, 17, 4, 24), False), ("hc_post_pre", MhcShape(1, 3, 3, 20), True),
    ],
)  # fmt: skip
def test_kernels_stay_inside(name, shape, pre_mix, dtype, monkeypatch):
    inputs = make_inputs(name, shape, dtype=dtype, with_pre_mix=pre_mix)
    options = {"iters": 2} if name in ("hc_pre", "hc_post_pre") else {}
    names = list(inputs)
    function = lambda *t: getattr(mhc_ops, name)(**dict(zip(names, t, strict=True)), **options, impl="triton")  # noqa: E731 - used twice
    want = gradients(function, list(inputs.values()))
    with monkeypatch.context() as patch:
        zones = Zones(patch)
        got = gradients(function, list(inputs.values()))
    assert zones.pieces and zones.intact()
    for g, w in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
        assert torch.equal(g, w)  # and nothing that a zone or uninitialised memory holds has come in
