"""Scratch memory of an op in one allocation.

An allocation takes 2 to 3 us of host time and so does a view of a tensor; a backward pass of mHC has eight scratch buffers. Kernels only
want addresses, so where launches take them (kernel_runtime.direct) the pieces of the allocation are addresses with a dtype.
"""

from __future__ import annotations

import torch

from kernel_runtime.direct import supported

ALIGNMENT = 128  # bytes


class Piece:
    """A part of `buffer`, which it keeps alive, as a kernel's argument: no tensor, but with what Triton asks of a pointer."""

    __slots__ = ("address", "buffer", "dtype")

    def __init__(self, buffer: torch.Tensor, address: int, dtype: torch.dtype) -> None:
        self.buffer, self.address, self.dtype = buffer, address, dtype

    def data_ptr(self) -> int:
        return self.address


Scratch = torch.Tensor | Piece


class Layout:
    """Where the pieces (number of elements, dtype) lie in one allocation."""

    def __init__(self, *pieces: tuple[int, torch.dtype]) -> None:
        self.pieces: list[tuple[int, int, torch.dtype]] = []  # first byte, elements, dtype
        size = 0
        for elements, dtype in pieces:
            self.pieces.append((size, elements, dtype))
            size += -(-elements * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self.size = size // 4

    def allocate(self, device: torch.device) -> list[Scratch]:
        """The pieces, in uninitialised memory; one-dimensional tensors where launches want those."""
        buffer = torch.empty(self.size, dtype=torch.float32, device=device)
        if device.type == "cuda" and supported():
            start = buffer.data_ptr()
            return [Piece(buffer, start + first, dtype) for first, _, dtype in self.pieces]
        return [buffer.view(dtype)[first // dtype.itemsize :][:elements] for first, elements, dtype in self.pieces]
