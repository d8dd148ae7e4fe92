"""Names and sizes of `transformers`' DeepseekV4 model against this one's, both ways.

The tensors have the same shapes on both sides, so a map of names is all there is; it serves weights, buffers and gradients alike.
`transformers` itself is not imported: the functions take its objects.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from train_example.config import ModelConfig
from train_example.model import DeepSeekV4

_TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "hc_head.fn": "model.hc_head.hc_fn",
    "hc_head.base": "model.hc_head.hc_base",
    "hc_head.scale": "model.hc_head.hc_scale",
}

# within a layer: "layers.{i}." here, "model.layers.{i}." there
_LAYER = {
    "attn_hc.fn": "attn_hc.fn",
    "attn_hc.base": "attn_hc.base",
    "attn_hc.scale": "attn_hc.scale",
    "attn_norm.weight": "input_layernorm.weight",
    "attn.q_a.weight": "self_attn.q_a_proj.weight",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.q_b.weight": "self_attn.q_b_proj.weight",
    "attn.kv.weight": "self_attn.kv_proj.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.o_a.weight": "self_attn.o_a_proj.weight",
    "attn.o_b.weight": "self_attn.o_b_proj.weight",
    "attn.core.sinks": "self_attn.sinks",
    "attn.indexer.q_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "attn.indexer.weights.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    "moe_hc.fn": "ffn_hc.fn",
    "moe_hc.base": "ffn_hc.base",
    "moe_hc.scale": "ffn_hc.scale",
    "moe_norm.weight": "post_attention_layernorm.weight",
    "moe.router.weight": "mlp.gate.weight",
    "moe.router.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
    "moe.router.tid2eid": "mlp.gate.tid2eid",
    "moe.experts.w_gate_up": "mlp.experts.gate_up_proj",
    "moe.experts.w_down": "mlp.experts.down_proj",
    "moe.shared.gate.weight": "mlp.shared_experts.gate_proj.weight",
    "moe.shared.up.weight": "mlp.shared_experts.up_proj.weight",
    "moe.shared.down.weight": "mlp.shared_experts.down_proj.weight",
}
for _ours, _theirs in (("attn.compressor.", "self_attn.compressor."), ("attn.indexer.compressor.", "self_attn.compressor.indexer.")):
    _LAYER[_ours + "kv.weight"] = _theirs + "kv_proj.weight"
    _LAYER[_ours + "gate.weight"] = _theirs + "gate_proj.weight"
    _LAYER[_ours + "norm.weight"] = _theirs + "kv_norm.weight"
    _LAYER[_ours + "pool.position_bias"] = _theirs + "position_bias"

Named = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


def _translate(named: Named, top: dict[str, str], layer: dict[str, str], old_prefix: str, new_prefix: str) -> dict[str, Tensor]:
    pattern = re.compile(re.escape(old_prefix) + r"(\d+)\.(.+)")
    result = {}
    for name, tensor in named.items() if isinstance(named, Mapping) else named:
        match = pattern.fullmatch(name)
        if name.startswith("mtp."):  # transformers has no such block; it skips these names in a checkpoint, as here they are kept
            result[name] = tensor
        elif name in top:
            result[top[name]] = tensor
        elif match and match[2] in layer:
            result[f"{new_prefix}{match[1]}.{layer[match[2]]}"] = tensor
        else:
            raise ValueError(f"no counterpart is known for {name!r}")
    return result


def from_hf(named_tensors: Named) -> dict[str, Tensor]:
    """Tensors of DeepseekV4ForCausalLM, (name, tensor) pairs or a mapping, under this model's names. An unknown name is a ValueError."""
    return _translate(named_tensors, {v: k for k, v in _TOP.items()}, {v: k for k, v in _LAYER.items()}, "model.layers.", "layers.")


def to_hf(named_tensors: Named) -> dict[str, Tensor]:
    """The inverse of from_hf. Names of the MTP block, which transformers lacks, stay as they are; it ignores them when it loads."""
    return _translate(named_tensors, _TOP, _LAYER, "layers.", "model.layers.")


def config_from_hf(hf_config: Any, **changes: Any) -> ModelConfig:
    """ModelConfig of a DeepseekV4Config; `changes` are fields of ModelConfig to set otherwise. What has no counterpart is a ValueError."""
    fixed = {
        "num_key_value_heads": 1,
        "n_shared_experts": 1,
        "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
    }
    for name, wanted in fixed.items():
        if getattr(hf_config, name) != wanted:
            raise ValueError(f"config.{name} must be {wanted!r} for this model, got {getattr(hf_config, name)!r}")
    csa, hca = hf_config.compress_rates["compressed_sparse_attention"], hf_config.compress_rates["heavily_compressed_attention"]
    if min(csa, hca) < 2 or csa == hca:
        raise ValueError(
            f"config.compress_rates must be two different numbers above 1 (a layer's kind follows from its ratio), got {csa}, {hca}"
        )
    ratio_of = {"sliding_attention": 0, "compressed_sparse_attention": csa, "heavily_compressed_attention": hca}
    hashed = [kind == "hash_moe" for kind in hf_config.mlp_layer_types]
    if sorted(hashed, reverse=True) != hashed:
        raise ValueError("config.mlp_layer_types must have its hash_moe layers first")
    window_rope, rope = hf_config.rope_parameters["main"], hf_config.rope_parameters["compress"]
    if window_rope["rope_type"] != "default" or rope["rope_type"] not in ("default", "yarn"):
        raise ValueError(f"config.rope_parameters must be default (main) and default or yarn (compress), got {hf_config.rope_parameters}")
    if rope.get("attention_factor", 1.0) != 1.0:
        raise ValueError(f"config.rope_parameters: attention_factor must be 1, got {rope['attention_factor']}")
    sizes: dict[str, Any] = {
        "vocab_size": hf_config.vocab_size,
        "hidden_size": hf_config.hidden_size,
        "num_layers": hf_config.num_hidden_layers,
        "num_heads": hf_config.num_attention_heads,
        "head_dim": hf_config.head_dim,
        "rope_head_dim": hf_config.qk_rope_head_dim,
        "q_lora_rank": hf_config.q_lora_rank,
        "o_groups": hf_config.o_groups,
        "o_lora_rank": hf_config.o_lora_rank,
        "window": hf_config.sliding_window,
        "compress_ratios": tuple(ratio_of[kind] for kind in hf_config.layer_types),
        "csa_ratio": csa,
        "index_heads": hf_config.index_n_heads,
        "index_head_dim": hf_config.index_head_dim,
        "index_topk": hf_config.index_topk,
        "rope_theta": window_rope["rope_theta"],
        "compress_rope_theta": rope["rope_theta"],
        "yarn_factor": 1.0,
        "hc_mult": hf_config.hc_mult,
        "hc_iters": hf_config.hc_sinkhorn_iters,
        "hc_eps": hf_config.hc_eps,
        "norm_eps": hf_config.rms_norm_eps,
        "num_experts": hf_config.n_routed_experts,
        "experts_per_token": hf_config.num_experts_per_tok,
        "expert_dim": hf_config.moe_intermediate_size,
        "num_hash_layers": sum(hashed),
        "routed_scale": hf_config.routed_scaling_factor,
        "swiglu_limit": hf_config.swiglu_limit,
        "mtp_layers": hf_config.num_nextn_predict_layers,
        "init_std": hf_config.initializer_range,
    }
    if rope["rope_type"] == "yarn":
        sizes["yarn_factor"] = float(rope["factor"])
        sizes["yarn_original_length"] = rope["original_max_position_embeddings"]
        sizes["yarn_beta_fast"] = float(rope.get("beta_fast") or 32.0)
        sizes["yarn_beta_slow"] = float(rope.get("beta_slow") or 1.0)
    return ModelConfig(**{**sizes, **changes})


def load_hf(model: DeepSeekV4, named_tensors: Named) -> None:
    """Copy weights and buffers of DeepseekV4ForCausalLM into `model` in place; each must be there, with the same shape and dtype."""
    tensors = from_hf(named_tensors)
    wanted: dict[str, Tensor] = dict(model.named_parameters())
    wanted |= {name: buffer for name, buffer in model.named_buffers() if name.endswith(("e_score_correction_bias", "tid2eid"))}
    missing, extra = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing or extra:
        raise ValueError(f"the models do not match: missing {missing[:4]}, of no use {extra[:4]}")
    with torch.no_grad():
        for name, target in wanted.items():
            source = tensors[name]
            if source.shape != target.shape or source.dtype != target.dtype:
                raise ValueError(f"{name} is {list(source.shape)} {source.dtype}, want {list(target.shape)} {target.dtype}")
            target.copy_(source)


def port(hf_model: nn.Module, *, impl: str = "auto", **changes: Any) -> DeepSeekV4:
    """A DeepSeekV4 with the weights of a DeepseekV4ForCausalLM. It has no MTP block, since transformers has none; `changes` as above."""
    model = DeepSeekV4(config_from_hf(hf_model.config, **{"mtp_layers": 0, **changes}), impl)
    load_hf(model, hf_model.state_dict())
    return model
