"""Attention of DeepSeek-V4: shared-KV attention over a window and compressed entries, the compressors, and the indexer module.

Shape letters: B batch, S sequence, D hidden size, N query heads, C channels of a head, R rotated channels, L query bottleneck,
H indexer heads, Ci channels of an indexer head, E compressed entries (S // ratio), K selected entries, G output groups.

    latent = norm(q_a(x)) [B, S, L];  q = rope(rms(q_b(latent))) [B, S, N, C];  kv = rope(norm(kv(x))) [B, S, C], key and value at once
    window layer   attends to the last `window` tokens
    HCA layer      and to every entry of its compressor that is complete before the query
    CSA layer      and to the K entries its indexer selects among those
    out = o_b(per group o_a(rope^-1(attention)))    the inverse rotation leaves of the values' positions only the distance to the query

Modules with `fp32_island = True` hold parameters that stay fp32 under a bf16 policy, and take their inputs in whatever dtype they come.
(The published indexer also rotates q and k by a Hadamard matrix before rounding to 8 bits; without that rounding it changes no score.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from indexer import indexer_kl_loss, lightning_indexer
from sparse_attn import compress_kv, sparse_attn_shared_kv
from train_example.config import ModelConfig
from train_example.fused import norm_rope, rms_norm, rope


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, in fp32, cast to x's dtype once at the end."""

    fp32_island = True

    def __init__(self, size: int, eps: float, impl: str = "auto") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps, self.impl = eps, impl

    def init_weights(self, std: float) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.impl)


class GatedPool(nn.Module):
    """The pooling of a compressor with its learned position bias [ratio, C] (or [ratio, 2C] with overlap)."""

    fp32_island = True

    def __init__(self, size: int, ratio: int, overlap: bool, impl: str) -> None:
        super().__init__()
        self.position_bias = nn.Parameter(torch.empty(ratio, 2 * size if overlap else size))
        self.ratio, self.overlap, self.impl = ratio, overlap, impl

    def init_weights(self, std: float) -> None:
        nn.init.zeros_(self.position_bias)

    def forward(self, kv: Tensor, gate: Tensor) -> Tensor:
        return compress_kv(kv, gate, self.position_bias, self.ratio, overlap=self.overlap, impl=self.impl)


class Compressor(nn.Module):
    """x [B, S, D] -> entries [B, S // ratio, C]: gated pooling, norm, RoPE at each window's first position."""

    def __init__(self, config: ModelConfig, size: int, ratio: int, impl: str) -> None:
        super().__init__()
        overlap = config.kind(ratio) == "csa"
        width = 2 * size if overlap else size
        self.kv = nn.Linear(config.hidden_size, width, bias=False)
        self.gate = nn.Linear(config.hidden_size, width, bias=False)
        self.pool = GatedPool(size, ratio, overlap, impl)
        self.norm = RMSNorm(size, config.norm_eps, impl)
        self.ratio = ratio

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.rotated(self.norm(self.pool(self.kv(x), self.gate(x))), cos, sin)

    def rotated(self, entries: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first = slice(0, entries.shape[1] * self.ratio, self.ratio)
        return rope(entries, cos[first], sin[first], impl=self.pool.impl)


class Indexer(nn.Module):
    """Scoring side of the lightning indexer: its inputs are cut from the model, its own parameters learn from the KL loss alone."""

    def __init__(self, config: ModelConfig, ratio: int, impl: str) -> None:
        super().__init__()
        self.heads, self.size = config.index_heads, config.index_head_dim
        self.q_b = nn.Linear(config.q_lora_rank, self.heads * self.size, bias=False)
        self.weights = nn.Linear(config.hidden_size, self.heads, bias=False)
        self.compressor = Compressor(config, self.size, ratio, impl)

    def forward(self, x: Tensor, latent: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, S, D], latent [B, S, L] -> q [B, S, H, Ci], k [B, E, Ci], weights [B, S, H] with both scales folded in."""
        x, latent = x.detach(), latent.detach()
        q, weights = self.queries(x, latent, cos, sin)
        return q, self.compressor(x, cos, sin), weights

    def queries(self, x: Tensor, latent: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q = rope(self.q_b(latent).unflatten(-1, (self.heads, self.size)), cos, sin, impl=self.compressor.pool.impl)
        return q, self.weights(x) * (self.size * self.heads) ** -0.5


class GroupedLinear(nn.Linear):
    """A block-diagonal linear map: [..., in_features] -> [..., out_features], output group g of G reads input group g alone.

    weight [out_features, in_features / G].
    """

    def __init__(self, in_features: int, out_features: int, groups: int) -> None:
        super().__init__(in_features // groups, out_features, bias=False)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return torch.einsum("...gi,goi->...go", x.unflatten(-1, (self.groups, -1)), self.weight.unflatten(0, (self.groups, -1))).flatten(-2)
        rows = x.reshape(-1, self.groups, x.shape[-1] // self.groups)
        return _GroupedProduct.apply(rows, self.weight.unflatten(0, (self.groups, -1))).view(*x.shape[:-1], -1)


class _GroupedProduct(torch.autograd.Function):
    """x [T, G, I], weight [G, O, I] -> [T, G, O]. The products write their rows in place, where an einsum would transpose copies."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        out = x.new_empty(x.shape[0], weight.shape[0], weight.shape[1])
        torch.bmm(x.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        dx = torch.empty_like(x)
        torch.bmm(grad.transpose(0, 1), weight, out=dx.transpose(0, 1))
        return dx, torch.bmm(grad.permute(1, 2, 0), x.transpose(0, 1))


class AttentionCore(nn.Module):
    """The attention op with its learned sinks [N]."""

    fp32_island = True

    def __init__(self, config: ModelConfig, ratio: int, impl: str) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.empty(config.num_heads))
        self.window, self.ratio, self.impl = config.window, ratio, impl

    def init_weights(self, std: float) -> None:
        nn.init.zeros_(self.sinks)

    def forward(self, q: Tensor, kv: Tensor, entries: Tensor | None, indices: Tensor | None, return_cmp_probs: bool) -> Any:
        """-> out [B, S, N, C], or (out, cmp_probs [B, S, K])."""
        ratio = None if entries is None else self.ratio
        return sparse_attn_shared_kv(
            q, kv, entries, indices, self.sinks, cmp_ratio=ratio, window=self.window, return_cmp_probs=return_cmp_probs, impl=self.impl
        )


class IndexerState(NamedTuple):
    """What a CSA layer's selection leaves for its loss."""

    q: Tensor
    k: Tensor
    weights: Tensor
    indices: Tensor | None  # None: the sequence has no complete entry
    scores: Tensor | None  # of those indices, for the loss: it need not compute them again


class Attention(nn.Module):
    """One attention site, of the kind that `ratio` makes it (ModelConfig.kind)."""

    def __init__(self, config: ModelConfig, ratio: int, impl: str = "auto") -> None:
        super().__init__()
        self.config, self.impl = config, impl
        self.ratio, self.kind = ratio, config.kind(ratio)
        D, N, C, L = config.hidden_size, config.num_heads, config.head_dim, config.q_lora_rank
        self.q_a = nn.Linear(D, L, bias=False)
        self.q_norm = RMSNorm(L, config.norm_eps, impl)
        self.q_b = nn.Linear(L, N * C, bias=False)
        self.kv = nn.Linear(D, C, bias=False)
        self.kv_norm = RMSNorm(C, config.norm_eps, impl)
        self.compressor = Compressor(config, C, ratio, impl) if self.kind != "window" else None
        self.indexer = Indexer(config, ratio, impl) if self.kind == "csa" else None
        self.core = AttentionCore(config, ratio, impl)
        self.o_a = GroupedLinear(N * C, config.o_groups * config.o_lora_rank, config.o_groups)
        self.o_b = nn.Linear(config.o_groups * config.o_lora_rank, D, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, with_kl: bool = False) -> tuple[Tensor, Tensor | None]:
        """x [B, S, D], cos and sin [S, R / 2] of this kind of layer -> (out [B, S, D], sum over tokens of the indexer's KL or None)."""
        latent = self.q_norm(self.q_a(x))
        q = self.queries(latent, cos, sin)
        kv = self.rotated(self.kv_norm(self.kv(x)), cos, sin)

        entries, state, unused = self._compressed(x, latent, cos, sin, with_kl)
        indices = None if state is None else state.indices
        probs_wanted = with_kl and indices is not None and self.config.kl_target != "compressed"
        out = self.core(q, kv, entries, indices, probs_wanted)
        out, probs = out if probs_wanted else (out, None)

        out = self.projected(out, cos, sin)
        if unused is not None:
            out = out + unused
        return out, None if state is None or not with_kl else self._kl(state, probs, q, entries)

    def queries(self, latent: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = self.q_b(latent).unflatten(-1, (self.config.num_heads, self.config.head_dim))
        return norm_rope(q, cos, sin, eps=self.config.norm_eps, impl=self.impl)

    def rotated(self, kv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rope(kv, cos, sin, impl=self.impl)

    def projected(self, out: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """What the op gave [B, S, N, C] -> [B, S, D]."""
        return self.o_b(self.o_a(rope(out, cos, sin, inverse=True, impl=self.impl).flatten(2)))

    def _compressed(
        self, x: Tensor, latent: Tensor, cos: Tensor, sin: Tensor, with_kl: bool
    ) -> tuple[Tensor | None, IndexerState | None, Tensor | None]:
        """Compressed entries [B, E, C], the indexer's selection, and a zero that ties unused entries to the graph.

        A sequence shorter than one window has no entry. It runs compressor and indexer all the same, on x padded to a window, and
        uses the result with weight 0: under FSDP every rank has to join the collectives of these parameters, in forward and backward.
        """
        if self.compressor is None:
            return None, None, None
        short = x.shape[1] < self.ratio
        if short:
            pad = (0, 0, 0, self.ratio - x.shape[1])
            x, latent = F.pad(x, pad), F.pad(latent, pad)
            cos, sin = F.pad(cos, pad), F.pad(sin, pad)
        entries = self.compressor(x, cos, sin)
        state = None
        if self.indexer is not None:
            with torch.set_grad_enabled(with_kl and torch.is_grad_enabled()):
                q, k, weights = self.indexer(x, latent, cos, sin)
            selected = (None, None) if short else self._select(q, k, weights)
            state = IndexerState(q, k, weights, *selected)
        return (None, state, 0.0 * entries.sum()) if short else (entries, state, None)

    def _select(self, q: Tensor, k: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        # The same number of slots for every length (-1 where there are fewer entries), so that no length needs a kernel of its own
        with torch.no_grad():
            return lightning_indexer(q, k, weights, self.config.index_topk, cmp_ratio=self.ratio, impl=self.impl)

    def _kl(self, state: IndexerState, probs: Tensor | None, q: Tensor, entries: Tensor | None) -> Tensor:
        if state.indices is None or entries is None:
            return 0.0 * (state.q.sum() + state.k.sum() + state.weights.sum()).float()
        target = self.config.kl_target
        # The attention's probabilities serve two targets; "compressed" is a softmax of its own, over the selected entries alone.
        teacher = {"q": q.detach(), "cmp_kv": entries.detach()} if target == "compressed" else {"teacher": probs}
        # fmt: off
        return indexer_kl_loss(
            state.q, state.k, state.weights, state.indices, scores=state.scores, **teacher,
            target=target, cmp_ratio=self.ratio, reduction="sum", impl=self.impl,
        )
        # fmt: on
