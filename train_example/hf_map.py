"""Names of tensors against `transformers`' DeepseekV4 model and against checkpoint files.

    ours               layers.0.attn.q_a.weight                   moe.experts.w_gate_up [E, 2I, D]
    module             model.layers.0.self_attn.q_a_proj.weight   mlp.experts.gate_up_proj [E, 2I, D]     transformers, in memory
    published          layers.0.attn.wq_a.weight                  ffn.experts.3.w1.weight, .w3 [I, D]     files of the published models
    as transformers    model.layers.0.attn.wq_a.weight            ffn.experts.3.w1.weight, .w3 [I, D]     files of its save_pretrained

Tensors have the same shapes everywhere, but that files keep each expert apart. The map serves weights, buffers and gradients alike.
`transformers` itself is not imported: the functions take its objects.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from train_example.hf_config import config_from_hf
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

# in files: "layers.{i}." on both sides, and "mtp.0.layer." here for "mtp.0." there
_FILE_TOP = {
    "embed.weight": "embed.weight",
    "norm.weight": "norm.weight",
    "head.weight": "head.weight",
    "hc_head.fn": "hc_head_fn",
    "hc_head.base": "hc_head_base",
    "hc_head.scale": "hc_head_scale",
}
_FILE_MTP = {
    "embed_norm.weight": "enorm.weight",
    "embed_proj.weight": "e_proj.weight",
    "stream_norm.weight": "hnorm.weight",
    "stream_proj.weight": "h_proj.weight",
    "norm.weight": "norm.weight",
    **{f"hc_head.{part}": f"hc_head_{part}" for part in ("fn", "base", "scale")},
}
_FILE_LAYER = {
    **{f"attn_hc.{part}": f"hc_attn_{part}" for part in ("fn", "base", "scale")},
    **{f"moe_hc.{part}": f"hc_ffn_{part}" for part in ("fn", "base", "scale")},
    "attn_norm.weight": "attn_norm.weight",
    "moe_norm.weight": "ffn_norm.weight",
    "attn.q_a.weight": "attn.wq_a.weight",
    "attn.q_norm.weight": "attn.q_norm.weight",
    "attn.q_b.weight": "attn.wq_b.weight",
    "attn.kv.weight": "attn.wkv.weight",
    "attn.kv_norm.weight": "attn.kv_norm.weight",
    "attn.o_a.weight": "attn.wo_a.weight",
    "attn.o_b.weight": "attn.wo_b.weight",
    "attn.core.sinks": "attn.attn_sink",
    "attn.indexer.q_b.weight": "attn.indexer.wq_b.weight",
    "attn.indexer.weights.weight": "attn.indexer.weights_proj.weight",
    "moe.router.weight": "ffn.gate.weight",
    "moe.router.e_score_correction_bias": "ffn.gate.bias",
    "moe.router.tid2eid": "ffn.gate.tid2eid",
    "moe.shared.gate.weight": "ffn.shared_experts.w1.weight",
    "moe.shared.up.weight": "ffn.shared_experts.w3.weight",
    "moe.shared.down.weight": "ffn.shared_experts.w2.weight",
}
for _site in ("attn.compressor.", "attn.indexer.compressor."):
    _FILE_LAYER[_site + "kv.weight"] = _site + "wkv.weight"
    _FILE_LAYER[_site + "gate.weight"] = _site + "wgate.weight"
    _FILE_LAYER[_site + "norm.weight"] = _site + "norm.weight"
    _FILE_LAYER[_site + "pool.position_bias"] = _site + "ape"

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


Region = tuple[tuple[int, int], ...]  # start and end along the first dimensions; the others are whole
Layout = list[tuple[str, Region]]  # tensors of a file, and the part of ours that each of them is


def file_layouts(name: str, shape: torch.Size | tuple[int, ...]) -> list[Layout]:
    """How files may hold our tensor `name` of `shape`: as published (what is written), as save_pretrained does, under module names."""
    experts = re.fullmatch(r"(layers\.\d+|mtp\.0)\.(?:layer\.)?moe\.experts\.(w_gate_up|w_down)", name)
    if experts:
        prefix, halves = f"{experts[1]}.ffn.experts", ("w1", "w3") if experts[2] == "w_gate_up" else ("w2",)
        rows = shape[1] // len(halves)
        parts = [(f"{e}.{half}.weight", ((e, e + 1), (i * rows, (i + 1) * rows))) for e in range(shape[0]) for i, half in enumerate(halves)]
        layouts: list[Layout] = [[(f"{start}{prefix}.{part}", region) for part, region in parts] for start in ("", "model.")]
    else:
        whole = ((0, shape[0]),)
        layouts = [[(file_name, whole)] for file_name in _file_names(name)]
    if not name.startswith("mtp."):
        layouts.append([(next(iter(to_hf({name: torch.empty(0)}))), ((0, shape[0]),))])
    return layouts


def _file_names(name: str) -> tuple[str, ...]:
    match = re.fullmatch(r"(layers\.\d+|mtp\.0)\.(.+)", name)
    if not match:
        return _FILE_TOP[name], "model." + _FILE_TOP[name]
    prefix, rest = match[1], match[2]
    if prefix == "mtp.0" and rest in _FILE_MTP:
        return (f"mtp.0.{_FILE_MTP[rest]}",)
    published = _FILE_LAYER[rest.removeprefix("layer.") if prefix == "mtp.0" else rest]
    # save_pretrained writes the norm of keys and values under a name that is short of "kv_"
    return f"{prefix}.{published}", f"model.{prefix}.{published.replace('attn.kv_norm.', 'attn.norm.')}"


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
