"""Every registered kernel specialisation compiles ahead of time for sm_90 with no device, without spilling into too much shared memory."""

import importlib

import pytest

from kernel_runtime import ModelShape, interpreting, registered_specs

SHAPES = {
    "tiny": ModelShape(64, 4, 4, 32, 16, (4, 8), 4, 64, 8, dtype="fp32"),
    "flash": ModelShape(4096, 4, 64, 512, 128, (4, 128), 64, 128, 512),
    "pro": ModelShape(7168, 4, 128, 512, 128, (4, 128), 64, 128, 1024),
}


def import_ops() -> None:
    """Importing the packages fills the registry."""
    for package in ("mhc_ops", "sparse_attn", "indexer"):
        importlib.import_module(package)


@pytest.mark.skipif(interpreting(), reason="under TRITON_INTERPRET=1 kernels are Python functions; nothing can be compiled")
@pytest.mark.parametrize("name", SHAPES)
def test_sm90(name):
    from triton.backends.compiler import GPUTarget

    from kernel_runtime.launch import CUDA_SMEM_LIMIT

    import_ops()
    compiled = 0
    seen = set()
    for op, spec in registered_specs(SHAPES[name]):
        if "cuda" not in spec.targets or (key := (spec.name, tuple(spec.types.items()), tuple(spec.consts.items()))) in seen:
            continue
        seen.add(key)
        kernel = spec.compile(GPUTarget("cuda", 90, 32))
        assert kernel.metadata.shared <= CUDA_SMEM_LIMIT[90], f"{op} {spec.name}: {kernel.metadata.shared} bytes of shared memory"
        assert "cubin" in kernel.asm
        compiled += 1
    assert compiled > 0
