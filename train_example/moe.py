"""Mixture of experts of DeepSeek-V4: two routers, stacked routed experts, one shared expert.

Shape letters: T tokens, D hidden size, E experts, L experts held by this rank, k experts a token, I hidden width of an expert,
M rows (token, expert) that land on this rank's experts.

    score   = sqrt(softplus(x @ gate^T)) [T, E], fp32
    chosen  = top-k of score + bias (the bias balances the load and enters nothing else), or, in the first layers, table[token id]
    weight  = routed_scale * score[chosen] / sum of score[chosen]
    y       = sum over chosen of weight * expert(x) + shared(x)
    expert(x) = down(silu(min(gate(x), limit)) * clip(up(x), -limit, limit))
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from train_example import fused
from train_example.config import ModelConfig
from train_example.dispatch import Sizes, dispatch_experts
from train_example.fused import swiglu


class Router(nn.Module):
    """Scores and weights; a subclass chooses the experts. Everything in the gate's dtype, fp32."""

    fp32_island = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.config = config

    def init_weights(self, std: float) -> None:
        nn.init.normal_(self.weight, std=std)

    def choose(self, scores: Tensor, token_ids: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, D], token_ids [T] -> expert ids [T, k] int64, weights [T, k] fp32."""
        # The floor keeps the square root's slope finite where softplus underflows; it is far below any score that matters.
        scores = F.softplus(F.linear(x.to(self.weight.dtype), self.weight)).clamp_min(1e-30).sqrt()
        chosen = self.choose(scores.detach(), token_ids)
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.config.routed_scale
        return chosen, weights


class TopKRouter(Router):
    """The k best of score + e_score_correction_bias. The bias is a buffer [E] fp32: no gradient, saved with the weights."""

    e_score_correction_bias: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.register_buffer("e_score_correction_bias", torch.empty(config.num_experts))

    def init_weights(self, std: float) -> None:
        super().init_weights(std)
        nn.init.zeros_(self.e_score_correction_bias)

    def choose(self, scores: Tensor, token_ids: Tensor) -> Tensor:
        return (scores + self.e_score_correction_bias).topk(self.config.experts_per_token, sorted=False).indices


class HashRouter(Router):
    """Experts by token id, from a fixed table tid2eid [vocabulary, k] int64 (a non-persistent buffer, made from the config alone)."""

    tid2eid: Tensor

    def __init__(self, config: ModelConfig, layer_index: int) -> None:
        super().__init__(config)
        self.layer_index = layer_index
        self.register_buffer("tid2eid", torch.empty(config.vocab_size, config.experts_per_token, dtype=torch.int64), persistent=False)

    def init_buffers(self, device: torch.device | None) -> None:
        self.tid2eid = hash_table(self.config, self.layer_index).to(device)

    def choose(self, scores: Tensor, token_ids: Tensor) -> Tensor:
        return self.tid2eid[token_ids]


def hash_table(config: ModelConfig, layer_index: int) -> Tensor:
    """[vocabulary, k] int64 on the CPU: k distinct experts for every token id, every expert used, the same in every process.

    Random permutations of the experts are cut into rows of k. Each second permutation is the one before it reversed, so the
    remainder that a cut leaves over comes first in the next.
    """
    V, E, k = config.vocab_size, config.num_experts, config.experts_per_token
    rows = E // k
    pairs = -(-V // (2 * rows))
    generator = torch.Generator().manual_seed(config.hash_seed * 1_000_003 + layer_index)
    permutation = torch.rand(pairs, E, generator=generator, device="cpu").argsort(1)
    both = torch.stack((permutation, permutation.flip(1)), 1)
    return both[..., : rows * k].reshape(-1, k)[:V].contiguous()


class Experts(nn.Module):
    """Stacked routed experts: w_gate_up [E, 2I, D] (gate first), w_down [E, D, I].

    The trainer may shard dim 0 over the expert-parallel mesh; then a rank holds L of the E experts.
    """

    def __init__(self, config: ModelConfig, impl: str = "auto") -> None:
        super().__init__()
        E, D, width = config.num_experts, config.hidden_size, config.expert_dim
        self.w_gate_up = nn.Parameter(torch.empty(E, 2 * width, D))
        self.w_down = nn.Parameter(torch.empty(E, D, width))
        self.limit, self.impl = config.swiglu_limit, impl

    def init_weights(self, std: float) -> None:
        nn.init.normal_(self.w_gate_up, std=std)
        nn.init.normal_(self.w_down, std=std)

    def forward(self, x: Tensor, counts: Tensor, sizes: Sizes) -> Tensor:
        """x [M, D], rows of local expert 0 first; counts [L] int64, rows of each; sizes() the same as a list -> [M, D] in the same order.

        An expert with no row still takes part, so its gradient is zero and not missing.
        """
        gate_up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w_gate_up, self.w_down))
        if counts.shape[0] != gate_up.shape[0]:
            raise ValueError(f"counts has {counts.shape[0]} entries, want one for each of the {gate_up.shape[0]} experts held here")
        if fits_grouped_mm(x, gate_up, down):
            return _grouped(x, gate_up, down, counts, self.activate)
        return _one_by_one(x, gate_up, down, sizes(), self.limit, self.impl)

    def activate(self, gate_up: Tensor) -> Tensor:
        """[M, 2I] -> [M, I]"""
        return swiglu(gate_up, self.limit, self.impl)


def fits_grouped_mm(x: Tensor, gate_up: Tensor, down: Tensor) -> bool:
    """Whether `torch.nn.functional.grouped_mm` takes these: bf16 on a CUDA device, rows that start at multiples of 16 bytes, and some row."""
    bf16 = all(tensor.dtype == torch.bfloat16 for tensor in (x, gate_up, down))
    return x.is_cuda and bf16 and x.shape[0] > 0 and gate_up.shape[2] % 8 == 0 and down.shape[2] % 8 == 0


def _grouped(x: Tensor, gate_up: Tensor, down: Tensor, counts: Tensor, activate: Callable[[Tensor], Tensor]) -> Tensor:
    """All experts in two grouped products. The last offset is M: grouped_mm leaves rows behind it unwritten."""
    ends = counts.cumsum(0).to(torch.int32)
    hidden = activate(F.grouped_mm(x, gate_up.transpose(1, 2), offs=ends))
    return F.grouped_mm(hidden, down.transpose(1, 2), offs=ends)


def _one_by_one(x: Tensor, gate_up: Tensor, down: Tensor, sizes: list[int], limit: float, impl: str) -> Tensor:
    out = []
    # unbind has one backward for all experts; indexing would make a gradient of the whole stack for each.
    for rows, w_in, w_out in zip(x.split(sizes), gate_up.unbind(), down.unbind()):
        out.append(F.linear(swiglu(F.linear(rows, w_in), limit, impl), w_out))
    return torch.cat(out)


class SharedExpert(nn.Module):
    """The expert every token goes to."""

    def __init__(self, config: ModelConfig, impl: str = "auto") -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.expert_dim, bias=False)
        self.up = nn.Linear(config.hidden_size, config.expert_dim, bias=False)
        self.down = nn.Linear(config.expert_dim, config.hidden_size, bias=False)
        self.limit, self.impl = config.swiglu_limit, impl

    def hidden(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., I]"""
        gate_up = torch.cat((self.gate(x), self.up(x)), -1)
        return swiglu(gate_up.flatten(0, -2), self.limit, self.impl).view(*x.shape[:-1], -1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.hidden(x))


class MoE(nn.Module):
    """One MoE site. ep_group: the expert-parallel process group, set by the trainer; None keeps every expert in this process."""

    def __init__(self, config: ModelConfig, layer_index: int, impl: str = "auto") -> None:
        super().__init__()
        self.impl = impl
        self.num_experts = config.num_experts
        self.router = HashRouter(config, layer_index) if layer_index < config.num_hash_layers else TopKRouter(config)
        self.experts = Experts(config, impl)
        self.shared = SharedExpert(config, impl)
        self.ep_group: ProcessGroup | None = None

    def forward(self, x: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, S, D], token_ids [B, S] -> y [B, S, D], counts [E] int64: rows this rank's tokens sent to each expert."""
        tokens = x.flatten(0, -2)
        chosen, weights = self.router(tokens, token_ids.flatten())
        dispatched = (tokens, chosen, weights, self.experts, self.num_experts, self.ep_group, self.impl)
        shared: list[Tensor] = []
        halves = (lambda: shared.append(self.shared.hidden(x)), lambda: shared.append(self.shared.down(shared[0])))
        routed, counts = dispatch_experts(*dispatched, meanwhile=halves, combine_rows=self.combine)
        return routed.view_as(x) + shared[1], counts

    def combine(self, rows: Tensor, order: Tensor, place: Tensor, weights: Tensor) -> Tensor:
        return fused.combine(rows, order, place, weights, self.impl)
