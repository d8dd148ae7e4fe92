"""`config.json` of a DeepSeek-V4 checkpoint against ModelConfig, both ways.

Two forms are read: the one `transformers` writes (layer_types, mlp_layer_types, nested rope_parameters) and the one the published
checkpoints have (compress_ratios, num_hash_layers, rope_scaling). Written is the first. `transformers` itself is not imported.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from train_example.config import ModelConfig
from train_example.files import read_table, table

CONFIG_FILE, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
OURS = "train_example"  # table in config.json with the settings that transformers has no name for
OUR_FIELDS = ("kl_coefficient", "kl_target", "hash_seed", "mtp_weight", "mtp_compress_ratio")
WINDOW, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
PUBLISHED_RATES = {CSA: 4, HCA: 128}

# what the model is built for; a config that says otherwise is refused
FIXED = {
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

# our field: theirs, where the value is the same
SAME = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "head_dim": "head_dim",
    "rope_head_dim": "qk_rope_head_dim",
    "q_lora_rank": "q_lora_rank",
    "o_groups": "o_groups",
    "o_lora_rank": "o_lora_rank",
    "window": "sliding_window",
    "index_heads": "index_n_heads",
    "index_head_dim": "index_head_dim",
    "index_topk": "index_topk",
    "hc_mult": "hc_mult",
    "hc_iters": "hc_sinkhorn_iters",
    "hc_eps": "hc_eps",
    "norm_eps": "rms_norm_eps",
    "num_experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_dim": "moe_intermediate_size",
    "routed_scale": "routed_scaling_factor",
    "swiglu_limit": "swiglu_limit",
    "mtp_layers": "num_nextn_predict_layers",
    "init_std": "initializer_range",
}


def config_from_hf(hf_config: Any, **changes: Any) -> ModelConfig:
    """ModelConfig of a DeepseekV4Config; `changes` are fields of ModelConfig to set otherwise. What has no counterpart is a ValueError."""
    for name, wanted in FIXED.items():
        if getattr(hf_config, name) != wanted:
            raise ValueError(f"config.{name} must be {wanted!r} for this model, got {getattr(hf_config, name)!r}")
    csa, hca = hf_config.compress_rates[CSA], hf_config.compress_rates[HCA]
    if min(csa, hca) < 2 or csa == hca:
        raise ValueError(
            f"config.compress_rates must be two different numbers above 1 (a layer's kind follows from its ratio), got {csa}, {hca}"
        )
    ratio_of = {WINDOW: 0, CSA: csa, HCA: hca}
    hashed = [kind == "hash_moe" for kind in hf_config.mlp_layer_types]
    if sorted(hashed, reverse=True) != hashed:
        raise ValueError("config.mlp_layer_types must have its hash_moe layers first")
    window_rope, rope = hf_config.rope_parameters["main"], hf_config.rope_parameters["compress"]
    if window_rope["rope_type"] != "default" or rope["rope_type"] not in ("default", "yarn"):
        raise ValueError(f"config.rope_parameters must be default (main) and default or yarn (compress), got {hf_config.rope_parameters}")
    if rope.get("attention_factor", 1.0) != 1.0:
        raise ValueError(f"config.rope_parameters: attention_factor must be 1, got {rope['attention_factor']}")
    sizes: dict[str, Any] = {
        **{ours: getattr(hf_config, theirs) for ours, theirs in SAME.items()},
        "compress_ratios": tuple(ratio_of[kind] for kind in hf_config.layer_types),
        "csa_ratio": csa,
        "rope_theta": window_rope["rope_theta"],
        "compress_rope_theta": rope["rope_theta"],
        "yarn_factor": 1.0,
        "num_hash_layers": sum(hashed),
    }
    if rope["rope_type"] == "yarn":
        sizes["yarn_factor"] = float(rope["factor"])
        sizes["yarn_original_length"] = rope["original_max_position_embeddings"]
        sizes["yarn_beta_fast"] = float(rope.get("beta_fast") or 32.0)
        sizes["yarn_beta_slow"] = float(rope.get("beta_slow") or 1.0)
    return ModelConfig(**{**sizes, **changes})


def config_from_folder(folder: Path, **changes: Any) -> ModelConfig:
    """ModelConfig of the `config.json` in a checkpoint folder, with an MTP block only where its files hold one (transformers writes none).

    `changes` as above. ValueError if it cannot be read or has no counterpart.
    """
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise ValueError(f"{folder} holds no {CONFIG_FILE}")
    raw = read_table(file)
    if raw.get("model_type") != "deepseek_v4":
        raise ValueError(f"{file}: model_type must be 'deepseek_v4', got {raw.get('model_type')!r}")
    try:
        ours = {name: value for name, value in table(raw.get(OURS, {}), OURS).items() if name in OUR_FIELDS}
        ratios = raw.get("compress_ratios") or []
        if len(ratios) > raw.get("num_hidden_layers", len(ratios)):  # the published form lists the MTP block behind the layers
            ours["mtp_compress_ratio"] = ratios[-1]
        if not _has_mtp(folder):
            ours["mtp_layers"] = 0
        return config_from_hf(SimpleNamespace(**_complete(raw)), **{**ours, **changes})
    except (ValueError, TypeError, IndexError, OverflowError) as error:
        raise ValueError(f"{file}: {error}") from error
    except (AttributeError, KeyError) as error:
        raise ValueError(f"{file} lacks {error.name if isinstance(error, AttributeError) else error}") from error


def _has_mtp(folder: Path) -> bool:
    """Whether the index, or else the header of the only file (its length in 8 bytes, then JSON), names a tensor of an MTP block."""
    try:
        if (folder / INDEX).is_file():
            names = json.loads((folder / INDEX).read_text())["weight_map"]
        else:
            with (folder / SINGLE).open("rb") as file:
                names = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return any(name.startswith("mtp.") for name in table(names, "names"))
    except (OSError, ValueError, KeyError, TypeError, MemoryError, OverflowError, RecursionError):
        return False  # whoever reads the weights says what is wrong with the files


def _complete(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of a DeepseekV4Config from either form of config.json."""
    layers = raw["num_hidden_layers"]
    out = {**FIXED, "compress_rates": PUBLISHED_RATES, "initializer_range": 0.02, **raw}
    if "layer_types" not in raw:
        kinds = {0: WINDOW, **{rate: kind for kind, rate in out["compress_rates"].items()}}
        unknown = sorted(set(raw["compress_ratios"][:layers]) - kinds.keys())
        if unknown:
            raise ValueError(f"config.compress_ratios must be of {sorted(kinds)}, got {unknown} among them")
        out["layer_types"] = [kinds[ratio] for ratio in raw["compress_ratios"][:layers]]
    if "mlp_layer_types" not in raw:
        out["mlp_layer_types"] = ["hash_moe"] * raw["num_hash_layers"] + ["moe"] * (layers - raw["num_hash_layers"])
    if "qk_rope_head_dim" not in raw:
        out["qk_rope_head_dim"] = int(raw["head_dim"] * raw["partial_rotary_factor"])
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if "main" not in rope:
        rope = {**rope, "rope_theta": raw["compress_rope_theta"]}
        rope["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
        rope = {"main": {"rope_type": "default", "rope_theta": raw["rope_theta"]}, "compress": rope}
    out["rope_parameters"] = rope
    return out


def config_to_hf(config: ModelConfig, eos_token_id: int | None = None) -> dict[str, Any]:
    """The content of `config.json` that `transformers` reads as the same model. ValueError for what it has no name for."""
    rates = {kind: {ratio for ratio in config.compress_ratios if config.kind(ratio) == kind} for kind in ("window", "csa", "hca")}
    if len(rates["hca"]) > 1:
        raise ValueError(f"model.compress_ratios has {sorted(rates['hca'])} besides csa_ratio; a transformers checkpoint has room for one of them")
    hca = next(iter(rates["hca"]), PUBLISHED_RATES[HCA] if config.csa_ratio != PUBLISHED_RATES[HCA] else 2 * PUBLISHED_RATES[HCA])
    kinds = {"window": WINDOW, "csa": CSA, "hca": HCA}
    factor = config.rope_head_dim / config.head_dim
    if int(config.head_dim * factor) != config.rope_head_dim:
        raise ValueError(f"model.rope_head_dim {config.rope_head_dim} of head_dim {config.head_dim} is no fraction that transformers rounds back")
    compress: dict[str, Any] = {"rope_type": "default", "rope_theta": config.compress_rope_theta, "partial_rotary_factor": factor}
    if config.yarn_factor != 1:
        compress |= {
            "rope_type": "yarn",
            "factor": config.yarn_factor,
            "original_max_position_embeddings": config.yarn_original_length,
            "beta_fast": config.yarn_beta_fast,
            "beta_slow": config.yarn_beta_slow,
            "attention_factor": 1.0,
        }
    main = {"rope_type": "default", "rope_theta": config.rope_theta, "partial_rotary_factor": factor}
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "max_position_embeddings": round(config.yarn_factor * config.yarn_original_length),
        **FIXED,
        **{theirs: getattr(config, ours) for ours, theirs in SAME.items()},
        "partial_rotary_factor": factor,
        "layer_types": [kinds[config.kind(ratio)] for ratio in config.compress_ratios],
        "mlp_layer_types": ["hash_moe"] * config.num_hash_layers + ["moe"] * (config.num_layers - config.num_hash_layers),
        "compress_rates": {CSA: config.csa_ratio, HCA: hca},
        "rope_theta": config.rope_theta,
        "compress_rope_theta": config.compress_rope_theta,
        "rope_parameters": {"main": main, "compress": compress},
        OURS: {name: getattr(config, name) for name in OUR_FIELDS},
    }
