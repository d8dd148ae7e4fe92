"""A DeepSeek-V4-style language model on the library's public ops.

Shape letters: B batch, S sequence, D hidden size, N residual streams (hc_mult), V vocabulary, E experts, R rotated channels.

    streams = N copies of embed(ids)
    layer:    y, post, comb = hc_pre(streams);          f = attention(norm(y))
              streams, y, post, comb = hc_post_pre(f);  f = moe(norm(y))
              streams = hc_post(f)
    logits  = head(norm(hc_head(streams)))
    MTP:      streams' = e(norm(embed(next id))) + h(norm(each stream)); one more layer; its own hc_head and norm; the shared head

Losses are sums over this process's tokens divided by one number, num_valid_tokens, that the caller gives: the total of all processes
and accumulation steps. Gradients then add up over both with no further factor.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mhc_ops import HyperConnection, HyperHead, hc_expand, hc_post, hc_recompute
from reference.rope import rope_cos_sin, rope_frequencies
from train_example.attention import Attention, RMSNorm
from train_example.config import ModelConfig
from train_example.moe import HashRouter, MoE

IGNORE = -100


class ModelOutput(NamedTuple):
    """Results of a forward. The losses are None without labels; loss is the sum of the other three, each with its coefficient."""

    logits: Tensor  # [B, S, V]
    loss: Tensor | None  # scalar fp32, as are the next three
    lm_loss: Tensor | None
    kl_loss: Tensor | None
    mtp_loss: Tensor | None
    expert_counts: Tensor  # [MoE sites, E] int64: rows this process's tokens sent to each expert; the MTP block's site comes last


class Embedding(nn.Embedding):
    """nn.Embedding whose gradient in bf16 or fp16 is summed in fp32 on a CPU too, as it is on a GPU.

    torch's CPU backward adds up a token's rows in the weight's own dtype: in bf16 the sum of a frequent byte stops growing (at 4096 equal
    rows it is 16 times too small).
    """

    def forward(self, input: Tensor) -> Tensor:
        if self.weight.device.type == "cpu" and self.weight.element_size() == 2:
            return F.embedding(input, self.weight.float()).to(self.weight.dtype)
        return super().forward(input)


class ModelHyperConnection(HyperConnection):
    """mHC at one sublayer, with the config's options."""

    fp32_island = True

    def __init__(self, config: ModelConfig, impl: str) -> None:
        super().__init__(
            config.hidden_size,
            config.hc_mult,
            iters=config.hc_iters,
            hc_eps=config.hc_eps,
            norm_eps=config.norm_eps,
            convention="v4",
            impl=impl,
        )


class ModelHyperHead(HyperHead):
    """The weighted sum of the streams that leaves mHC, with the config's options."""

    fp32_island = True

    def __init__(self, config: ModelConfig, impl: str) -> None:
        super().__init__(config.hidden_size, config.hc_mult, hc_eps=config.hc_eps, norm_eps=config.norm_eps, impl=impl)


class Layer(nn.Module):
    """Attention and MoE, each between its mHC sides."""

    def __init__(self, config: ModelConfig, layer_index: int, ratio: int, impl: str) -> None:
        super().__init__()
        self.impl = impl
        self.attn_hc = ModelHyperConnection(config, impl)
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps, impl)
        self.attn = Attention(config, ratio, impl)
        self.moe_hc = ModelHyperConnection(config, impl)
        self.moe_norm = RMSNorm(config.hidden_size, config.norm_eps, impl)
        self.moe = MoE(config, layer_index, impl)

    def forward(
        self, streams: Tensor, input_ids: Tensor, cos: Tensor, sin: Tensor, with_kl: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """streams [B, S, N, D] -> new streams, the indexer's KL summed over tokens (None where there is none), expert counts [E]."""
        streams, y, post, comb = self.attn_hc(streams)
        f, kl = self.attn(self.attn_norm(y), cos, sin, with_kl)
        streams, y, post, comb = self.moe_hc(streams, (f, post, comb))
        f, counts = self.moe(self.moe_norm(y), input_ids)
        return self.leave(f, streams, post, comb), kl, counts

    def leave(self, f: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        return hc_post(f, streams, post, comb, impl=self.impl)


class MTPBlock(nn.Module):
    """Streams at token t and the embedding of token t + 1 -> hidden state [B, S, D] that predicts token t + 2."""

    def __init__(self, config: ModelConfig, impl: str) -> None:
        super().__init__()
        D = config.hidden_size
        self.embed_norm = RMSNorm(D, config.norm_eps, impl)
        self.embed_proj = nn.Linear(D, D, bias=False)
        self.stream_norm = RMSNorm(D, config.norm_eps, impl)
        self.stream_proj = nn.Linear(D, D, bias=False)
        self.layer = Layer(config, config.num_layers, config.mtp_compress_ratio, impl)
        self.hc_head = ModelHyperHead(config, impl)
        self.norm = RMSNorm(D, config.norm_eps, impl)

    def forward(
        self, streams: Tensor, next_embedding: Tensor, next_ids: Tensor, cos: Tensor, sin: Tensor, with_kl: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        streams = self.embed_proj(self.embed_norm(next_embedding))[..., None, :] + self.stream_proj(self.stream_norm(streams))
        streams, kl, counts = self.layer(streams, next_ids, cos, sin, with_kl)
        return self.norm(self.hc_head(streams)), kl, counts


class DeepSeekV4(nn.Module):
    """The model, on the default device. Made under `torch.device("meta")` it is empty: materialise it (`to_empty`), then call
    reset_parameters and init_buffers, which otherwise happens here.

    impl goes to every op: "auto", "triton" or "eager".
    """

    def __init__(self, config: ModelConfig, impl: str = "auto") -> None:
        super().__init__()
        self.config, self.impl = config, impl
        self.recompute_blocks: tuple[range, ...] = ()  # layers whose streams are replayed together in the backward pass, see hc_recompute
        device = torch.get_default_device()
        with torch.device("meta"):  # nn.Linear would fill its weight, and draw from the RNG, to have both thrown away
            self.embed = Embedding(config.vocab_size, config.hidden_size)
            self.layers = nn.ModuleList(Layer(config, i, ratio, impl) for i, ratio in enumerate(config.compress_ratios))
            self.hc_head = ModelHyperHead(config, impl)
            self.norm = RMSNorm(config.hidden_size, config.norm_eps, impl)
            self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.mtp = nn.ModuleList(MTPBlock(config, impl) for _ in range(config.mtp_layers))
            for name in ("window_frequencies", "compressed_frequencies"):
                self.register_buffer(name, torch.empty(config.rope_head_dim // 2, dtype=torch.float32), persistent=False)

        ratios = [*config.compress_ratios, *[config.mtp_compress_ratio] * config.mtp_layers]
        if config.kl_coefficient == 0 and any(config.kind(ratio) == "csa" for ratio in ratios):
            warnings.warn("kl_coefficient is 0: the indexer never trains and selects with its initial weights", UserWarning, stacklevel=2)
        if device.type != "meta":
            self.to_empty(device=device)
            self.reset_parameters()
            self.init_buffers()

    def reset_parameters(self) -> None:
        """Fresh weights and persistent buffers, in a fixed order: the same RNG state gives the same model."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=self.config.init_std)
            elif isinstance(module, HyperConnection | HyperHead):
                module.reset_parameters(self.config.init_std)
            elif callable(init_weights := getattr(module, "init_weights", None)):
                init_weights(self.config.init_std)

    def init_buffers(self, device: torch.device | str | None = None) -> None:
        """The buffers no checkpoint holds, from the config alone, on `device` (default: the embedding's): RoPE and hash routing tables."""
        device = self.embed.weight.device if device is None else torch.device(device)
        config, R = self.config, self.config.rope_head_dim
        self.window_frequencies = rope_frequencies(R, config.rope_theta, device=device)
        self.compressed_frequencies = rope_frequencies(
            R,
            config.compress_rope_theta,
            factor=config.yarn_factor,
            original_length=config.yarn_original_length,
            beta_fast=config.yarn_beta_fast,
            beta_slow=config.yarn_beta_slow,
            device=device,
        )
        for module in self.modules():
            if isinstance(module, HashRouter):
                module.init_buffers(device)

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, *, num_valid_tokens: int | float | Tensor | None = None
    ) -> ModelOutput:
        """input_ids [B, S] int64; labels [B, S] int64, labels[:, t] the token after input_ids[:, t], -100 where it does not count.

        num_valid_tokens: what the loss sums are divided by, the same in every process; default: this call's labels that count.
        The indexer's KL is summed over every token, labelled or not; the MTP loss over the tokens whose own label and next label count.
        """
        self._check(input_ids, labels, num_valid_tokens)
        config = self.config
        with_kl = labels is not None and config.kl_coefficient > 0
        position = torch.arange(input_ids.shape[1], device=input_ids.device)
        window_rope = rope_cos_sin(position, self.window_frequencies)
        compressed_rope = rope_cos_sin(position, self.compressed_frequencies)

        streams = hc_expand(self.embed(input_ids), config.hc_mult)
        kls, counts = [], []
        for block in self.recompute_blocks or (range(len(self.layers)),):
            with self._region():
                for i in block:
                    rope = window_rope if config.kind(config.compress_ratios[i]) == "window" else compressed_rope
                    streams, kl, count = self.layers[i](streams, input_ids, *rope, with_kl)
                    kls.append(kl)
                    counts.append(count)
        logits = self.head(self.norm(self.hc_head(streams)))
        if labels is None:
            return ModelOutput(logits, None, None, None, None, torch.stack(counts))

        mtp_sum = logits.new_zeros((), dtype=torch.float32)
        for block in self.mtp:
            next_ids = input_ids.roll(-1, 1)  # the last one is wrong, and has no label
            rope = window_rope if config.kind(config.mtp_compress_ratio) == "window" else compressed_rope
            with self._region():
                hidden, kl, count = block(streams, self.embed(next_ids), next_ids, *rope, with_kl)
            kls.append(kl)
            counts.append(count)
            after_next = F.pad(labels[:, 1:], (0, 1), value=IGNORE).masked_fill(labels == IGNORE, IGNORE)
            mtp_sum = mtp_sum + self.loss_sum(self.head(hidden).flatten(0, 1), after_next.flatten())

        if num_valid_tokens is None:
            num_valid_tokens = (labels != IGNORE).sum().clamp(min=1)
        lm_loss = self.loss_sum(logits.flatten(0, 1), labels.flatten()) / num_valid_tokens
        kl_sum = sum((kl for kl in kls if kl is not None), logits.new_zeros((), dtype=torch.float32))
        kl_loss = config.kl_coefficient * kl_sum / num_valid_tokens
        mtp_loss = config.mtp_weight * mtp_sum / num_valid_tokens
        return ModelOutput(logits, lm_loss + kl_loss + mtp_loss, lm_loss, kl_loss, mtp_loss, torch.stack(counts))

    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """logits [T, V], labels [T] -> nats summed over the labels that count; fp32, 0 where none does."""
        return F.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="sum")

    def _region(self) -> AbstractContextManager[None]:
        return hc_recompute() if self.recompute_blocks else nullcontext()

    def _check(self, input_ids: Tensor, labels: Tensor | None, num_valid_tokens: int | float | Tensor | None) -> None:
        if input_ids.dim() != 2 or 0 in input_ids.shape:
            raise ValueError(f"input_ids must be [B, S] with B and S at least 1, got shape {tuple(input_ids.shape)}")
        if input_ids.dtype != torch.int64:
            raise TypeError(f"input_ids must be int64, got {input_ids.dtype}")
        if labels is None:
            if num_valid_tokens is not None:
                raise ValueError("num_valid_tokens was given without labels: there is no loss to divide")
            return
        if labels.shape != input_ids.shape:
            raise ValueError(f"labels must have the shape of input_ids {tuple(input_ids.shape)}, got {tuple(labels.shape)}")
        if labels.dtype != torch.int64:
            raise TypeError(f"labels must be int64, got {labels.dtype}")


def fp32_islands(module: nn.Module) -> list[nn.Module]:
    """Submodules whose parameters stay fp32 under a low-precision policy: mHC, routers, sinks, position biases, norms.

    Give them a policy with fp32 parameters and `cast_forward_inputs=False`: they take inputs in the model's dtype and cast themselves.
    """
    return [child for child in module.modules() if getattr(child, "fp32_island", False)]
