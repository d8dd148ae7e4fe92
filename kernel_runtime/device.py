"""Properties of a device behind one function, so that a launcher that sizes its grid asks the same question on every vendor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from kernel_runtime.impl import KERNEL_DEVICES


@dataclass(frozen=True)
class DeviceProperties:
    """vector_cores run vector code and cube_cores matrix code on Ascend; on a GPU both are the number of multiprocessors."""

    name: str
    vector_cores: int
    cube_cores: int
    shared_bytes: int | None  # of one program; None where it is not known or means nothing


def device_properties(device: torch.device | str) -> DeviceProperties:
    """Properties of `device` (None as index: the current one). Touches the device at the first call, then is cached.

    On the CPU, where kernels run in Triton's interpreter, it is one core. RuntimeError for a device type without kernels.
    """
    device = torch.device(device)
    if device.type not in ("cpu", *KERNEL_DEVICES):
        raise RuntimeError(f"there are no kernels for device type {device.type!r}; kernels run on cuda, npu and, interpreted, cpu")
    if device.type != "cpu" and device.index is None:
        device = torch.device(device.type, torch.get_device_module(device).current_device())
    return _properties(device)


@cache
def _properties(device: torch.device) -> DeviceProperties:
    if device.type == "cpu":
        return DeviceProperties("cpu", 1, 1, None)
    module: Any = torch.get_device_module(device)
    if device.type == "cuda":
        found = module.get_device_properties(device)
        shared = getattr(found, "shared_memory_per_block_optin", None)
        return DeviceProperties(found.name, found.multi_processor_count, found.multi_processor_count, shared)
    found = module.get_device_properties(device)
    # newer torch_npu names them so; otherwise Triton-Ascend's own table is the source
    cube, vector = getattr(found, "cube_core_num", None), getattr(found, "vector_core_num", None)
    if cube is None or vector is None:
        import triton

        table = triton.runtime.driver.active.utils.get_device_properties(device.index)
        cube, vector = table["num_aicore"], table["num_vectorcore"]
    return DeviceProperties(found.name, int(vector), int(cube), None)


def on_npu(device: torch.device, npu: bool | None) -> bool:
    """Whether a launcher takes the forms for Ascend. True takes them on any device: tests run them in the interpreter."""
    return device.type == "npu" if npu is None else npu


def grid_size(device: torch.device, tasks: int, npu: bool, vector: bool = False) -> int:
    """Programs of a kernel that loops over its tasks: one each on a GPU, as many as cores on an NPU (65535 at most there).

    vector: the kernel holds no products, so that every vector core takes a program, otherwise every matrix core.
    """
    if not npu:
        return tasks
    properties = device_properties(device)
    return min(tasks, properties.vector_cores if vector else properties.cube_cores)
