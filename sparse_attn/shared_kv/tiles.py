"""Tiles of the portable attention kernels: the one place that chooses heads, keys and channels of a program by what the device has.

Launchers ask with the device's architecture (`form_of`), warmup and compilation ahead of time take of every form what runs on their target
(Spec.runs_on); both read the shared memory of an architecture from kernel_runtime.launch.CUDA_SMEM_LIMIT. The bytes here are what
Triton 3.6 plans for the largest tile, 64 heads of 512 channels in bf16; tests/test_compile_ahead.py compiles every form for its devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton

from kernel_runtime.launch import shared_memory


@dataclass(frozen=True)
class Form:
    """Of kernels for GPUs: the NVIDIA architectures that take it, first and last, and bytes of shared memory of a program there, from the
    first to below the last."""

    arch: tuple[int, int]
    shared: tuple[int, int]

    def takes(self, arch: int) -> bool:
        return self.arch[0] <= arch <= self.arch[1] and self.shared[0] <= shared_memory(arch) < self.shared[1]


ROOM = 163 * 1024  # of an A100
ANY = 1 << 30
# SMALL: 99 KiB, as sm_86, 89 and 120 have. HOPPER: products of whole warpgroups, APART in the kernels. BLACKWELL (sm_100): Triton keeps the
# operands of the second product in shared memory, one tile of keys in flight, and accumulators of 64 heads in tensor memory, twice, so that
# those of two halves of D take all 512 columns and leave none for S. AMD's (64 KiB) take SMALL, the interpreter OLDER.
OLDER, SMALL, HOPPER, BLACKWELL = (
    Form((0, 89), (ROOM, ANY)), Form((0, 999), (0, ROOM)), Form((90, 99), (ROOM, ANY)), Form((100, 999), (ROOM, ANY)),
)  # fmt: skip
FORMS = (OLDER, SMALL, HOPPER, BLACKWELL)
GPU, NPU = ("cuda", "hip"), ("ascend",)  # a spec's targets


def targets_of(npu: bool, form: Form) -> tuple[str, ...]:
    return NPU if npu else GPU if form == SMALL else ("cuda",)


def form_of(device: torch.device) -> Form:
    """The form that a launcher takes on a device."""
    if device.type != "cuda":
        return OLDER
    return _form(device) if torch.version.hip is None else SMALL


@cache
def _form(device: torch.device) -> Form:
    major, minor = torch.cuda.get_device_capability(device)
    return next(form for form in FORMS if form.takes(10 * major + minor))


@dataclass(frozen=True)
class Tiles:
    """Heads, keys and channels of a tile, and how a kernel with it is launched."""

    BH: int
    BN: int
    BD: int
    HALVES: int
    num_warps: int
    num_stages: int


def forward_tiles(dtype: torch.dtype, N: int, D: int, form: Form = OLDER) -> Tiles:
    """16-bit types: 64 heads x 64 keys (D = 512: 138 KiB on sm_80, 192 on sm_90), 32 x 32 where that does not fit (67 KiB; halving the keys
    alone takes 101, quartering them scales the accumulator four times as often). fp32 products need small tiles (65 KiB)."""
    HALVES = 2 if D > 256 else 1
    BD = 256 if D > 256 else max(16, triton.next_power_of_2(D))
    BH = min(64, max(16, triton.next_power_of_2(N)))
    if dtype == torch.float32:
        return Tiles(min(BH, 16), 32 if D <= 256 else 16, BD, HALVES, 4 if D <= 256 else 8, 1)
    if form == SMALL and HALVES == 2:
        return Tiles(min(BH, 32), 32, BD, HALVES, 4, 2)  # with 8 warps a third slower on an H200
    num_warps = 8 if BH * BD * HALVES > 64 * 256 else 4
    if form == BLACKWELL and BH == 64:
        BD, HALVES = BD * HALVES, 1
    return Tiles(BH, 64, BD, HALVES, num_warps, 1 if form == BLACKWELL else 2)


def gradient_tiles(dtype: torch.dtype, N: int, D: int, form: Form) -> Tiles:
    """On a GPU: as in the forward, but q and dO both stay in shared memory: at D above 256 just one tile of keys fits beside them on sm_90
    (224 KiB), and elsewhere half as many heads (sm_80: 132 KiB, with 32 keys 98 KiB). Where P and dZ are computed APART (HOPPER, two
    warpgroups), D is in one piece."""
    tiles = forward_tiles(dtype, N, D, form)
    BD, HALVES = tiles.BD, tiles.HALVES
    small_limit = {OLDER: 256, SMALL: 128}.get(form, D)
    if dtype != torch.float32 and small_limit < D:
        return Tiles(min(tiles.BH, 32), tiles.BN, BD, HALVES, 4, 2)
    if form == HOPPER and tiles.BH * BD * HALVES > 64 * 256:
        BD, HALVES = BD * HALVES, 1
    return Tiles(tiles.BH, tiles.BN, BD, HALVES, tiles.num_warps, 1 if D > 128 else tiles.num_stages)


def probs_tiles(dtype: torch.dtype, N: int, D: int, form: Form) -> Tiles:
    """Of the kernel of cmp_probs, whose operands come from registers before sm_90: there 64 heads of 512 channels would spill 2 KiB a thread."""
    tiles = forward_tiles(dtype, N, D, HOPPER if form == BLACKWELL else form)
    return tiles if form in (HOPPER, BLACKWELL) or tiles.HALVES == 1 else Tiles(min(tiles.BH, 32), tiles.BN, tiles.BD, 2, 8, 1)


def selected_keys(N: int, form: Form) -> int:
    """Keys of a tile of selected_dkv_kernel, whose q and dO of all heads stay: with 64 keys 104 KiB for 128 heads, with 32 keys 88."""
    return 32 if form == SMALL and N > 64 else 64


def ascend_tiles(dtype: torch.dtype, N: int, D: int) -> Tiles:
    """32 heads x 32 keys in 16-bit types: at D = 512 their accumulator and its rescaled copy take two thirds of the unified buffer."""
    tiles = forward_tiles(dtype, N, D)
    if dtype == torch.float32:
        return tiles
    return Tiles(min(tiles.BH, 32), 32, tiles.BD, tiles.HALVES, tiles.num_warps, tiles.num_stages)
