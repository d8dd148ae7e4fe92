"""Machine code of the Gluon kernels, compiled for sm_90 without a device: shared memory fits, and products run on.

ptxas waits after every product of the whole kernel as soon as one warpgroup has too few registers for its own: slower, and no result nor a
spill shows it (sparse_attn/NOTES_hopper.md).
"""

import importlib
import os
import re
import subprocess

import pytest
import torch

from kernel_runtime import interpreting

BF16 = torch.bfloat16
FORMS = {
    "forward": ("sparse_attn.shared_kv.hopper.fwd", "forward_spec", (BF16, 64, 512, 2, True, 1)),
    "forward with maxima": ("sparse_attn.shared_kv.hopper.fwd", "forward_spec", (BF16, 64, 512, 2, True, 2)),
    "forward, all entries": ("sparse_attn.shared_kv.hopper.fwd", "forward_spec", (BF16, 64, 512, 1, True, 1)),
    "forward with maxima, all entries": ("sparse_attn.shared_kv.hopper.fwd", "forward_spec", (BF16, 64, 512, 1, True, 2)),
    "dense forward": ("sparse_attn.shared_kv.hopper.dense_fwd", "dense_forward_spec", (BF16, 64, 512, False, True)),
    "dense forward, entries": ("sparse_attn.shared_kv.hopper.dense_fwd", "dense_forward_spec", (BF16, 64, 512, True, True)),
    "probabilities": ("sparse_attn.shared_kv.hopper.probs", "probs_spec", (BF16, 64, 512)),
    "dense backward, P, dZ and dq": ("sparse_attn.shared_kv.hopper.dense_pdz", "dense_pdz_spec", (BF16, 64, 512, 0)),
    "dense backward, P, dZ and dq, entries": ("sparse_attn.shared_kv.hopper.dense_pdz", "dense_pdz_spec", (BF16, 64, 512, 32)),
    "dense backward, P, dZ and dq, 64 entries": ("sparse_attn.shared_kv.hopper.dense_pdz_streamed", "streamed_pdz_spec", (BF16, 64, 512, 64)),
    "dense backward, P, dZ and dq, 128 entries": ("sparse_attn.shared_kv.hopper.dense_pdz_streamed", "streamed_pdz_spec", (BF16, 64, 512, 128)),
    "dense backward, keys": ("sparse_attn.shared_kv.hopper.dense_dkv", "dense_dkv_spec", (BF16, 64, 512, 0, 0)),
    "dense backward, keys, entries": ("sparse_attn.shared_kv.hopper.dense_dkv", "dense_dkv_spec", (BF16, 64, 512, 32, 32)),
    "dense backward, keys, 128 entries": ("sparse_attn.shared_kv.hopper.dense_dkv", "dense_dkv_spec", (BF16, 64, 512, 128, 128)),
    "backward": ("sparse_attn.shared_kv.hopper.bwd", "backward_spec", (BF16, 64, 512, 2, False)),
    "backward, partial rows": ("sparse_attn.shared_kv.hopper.bwd", "backward_spec", (BF16, 64, 512, 2, True)),
    "scores of the indexer": ("indexer.hopper.scores", "hopper_scores_spec", (BF16, torch.float32, 64, 128, 4, False)),
    "boundary of hyper-connections, forward": ("mhc_ops.hopper.fwd", "expand_project_spec", (4096, False)),
    "boundary of hyper-connections, single pass": ("mhc_ops.hopper.fwd", "expand_project_spec", (4096, True)),
    "boundary of hyper-connections, backward": ("mhc_ops.hopper.bwd", "boundary_bwd_spec", (4096,)),
    "boundary of hyper-connections, backward, barriers": ("mhc_ops.hopper.bwd", "boundary_bwd_spec", (5120,)),
}
pytestmark = pytest.mark.skipif(interpreting(), reason="under TRITON_INTERPRET=1 kernels are Python functions; nothing can be compiled")


def spec_of(module, maker, arguments):
    return getattr(importlib.import_module(module), maker)(*arguments)


@pytest.mark.parametrize("form", FORMS)
def test_products_run_on(form, tmp_path):
    """As many products and waits in the machine code as the kernel asks for."""
    import triton
    from triton.backends.compiler import GPUTarget

    from kernel_runtime.launch import CUDA_SMEM_LIMIT

    kernel = spec_of(*FORMS[form]).compile(GPUTarget("cuda", 90, 32))
    assert kernel.metadata.shared <= CUDA_SMEM_LIMIT[90]
    (tmp_path / "kernel.cubin").write_bytes(kernel.asm["cubin"])
    disassembler = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    code = subprocess.run([disassembler, "-sass", tmp_path / "kernel.cubin"], capture_output=True, text=True, check=True).stdout
    found = [len(re.findall(pattern, code)) for pattern in (r"HGMMA", r"WARPGROUP\.DEPBAR")]
    asked = [len(re.findall(pattern, kernel.asm["ptx"])) for pattern in (r"wgmma\.mma_async", r"wgmma\.wait_group")]
    assert found == asked and asked[0] > asked[1] > 0


def test_every_gluon_kernel_is_among_them():
    from kernel_runtime.plan import plan_for

    kernels = {spec.name for preset in ("flash", "pro") for _, spec in plan_for(preset) if spec.gluon}
    assert kernels == {spec_of(*form).name for form in FORMS.values()}
