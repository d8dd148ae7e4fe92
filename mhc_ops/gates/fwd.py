"""Gates forward: kernel, table of specialisations, launcher."""

from functools import cache

import torch
import triton
import triton.language as tl

from kernel_runtime.device import on_npu
from kernel_runtime.launch import Spec
from mhc_ops.gates.core import comb_mask, gates_block, load_block, token_mask
from mhc_ops.library import mix_columns
from mhc_ops.project.core import cdiv
from mhc_ops.sinkhorn.core import tokens_last

# [8, 4, 4] on one warp, as in sinkhorn/fwd.py
BLOCK_TOKENS = 8


@triton.jit(do_not_specialize=["T", "eps"])
def gates_fwd_kernel(
    mixes, scale, base, pre, post, comb, T, eps,
    N: tl.constexpr, P: tl.constexpr, ITERS: tl.constexpr, PAPER: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = N * N + 2 * N
    first = tl.program_id(0) * BT
    row = first.to(tl.int64)
    t = tl.arange(0, BT)
    i = tl.arange(0, P)
    live = first + t < T
    m_pre, m_post, m_comb = load_block(mixes + row * M, live, M, N, P, BT)
    v_pre, v_post, v_comb = gates_block(m_pre, m_post, m_comb, live, scale, base, eps, N, P, ITERS, PAPER)
    two = t[:, None] * N + i[None, :]
    tl.store(pre + row * N + two, v_pre, mask=token_mask(live, N, P))
    tl.store(post + row * N + two, v_post, mask=token_mask(live, N, P))
    three = t[:, None, None] * (N * N) + i[None, :, None] * N + i[None, None, :]
    tl.store(comb + row * (N * N) + three, v_comb, mask=comb_mask(live, N, P))


@cache
def forward_spec(n: int, iters: int, convention: str, npu: bool = False) -> Spec:
    block_tokens = tokens_last(n, iters, convention, npu) or BLOCK_TOKENS
    pointers = ("mixes", "scale", "base", "pre", "post", "comb")
    return Spec(
        gates_fwd_kernel,
        types={**dict.fromkeys(pointers, "*fp32"), "T": "i32", "eps": "fp32"},
        consts={"N": n, "P": triton.next_power_of_2(n), "ITERS": iters, "PAPER": convention == "paper", "BT": block_tokens},
        num_warps=1,
        hot=True,
        targets=("ascend",) if npu else ("cuda", "hip"),
        tokens=block_tokens,
        minimal_bytes=4 * 2 * mix_columns(n),
    )


def gates_fwd(
    mixes: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, hc_mult: int, iters: int, hc_eps: float, convention: str,
    npu: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """npu=True launches the form for Ascend on any device (tests run it in the interpreter); None picks it by the device."""
    mixes, scale, base = mixes.contiguous(), scale.contiguous(), base.contiguous()
    lead, n = mixes.shape[:-1], hc_mult
    pre, post, comb = (torch.empty((*lead, *tail), dtype=torch.float32, device=mixes.device) for tail in ((n,), (n,), (n, n)))
    if tokens := mixes.numel() // mixes.shape[-1]:
        spec = forward_spec(n, iters, convention, on_npu(mixes.device, npu))
        spec.launch((cdiv(tokens, spec.consts["BT"]),), mixes, scale, base, pre, post, comb, tokens, hc_eps)
    return pre, post, comb
