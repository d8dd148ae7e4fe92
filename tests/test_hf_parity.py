"""The oracle: transformers' DeepseekV4 with the same weights gives the same logits and gradients, for every kind of layer and router.

Both run in fp32 on the CPU. transformers has no indexer loss and no MTP, so both are off here and indexer parameters get no gradient on
either side. A top-k choice is a step function: the inputs are checked to have no near-tie, else rounding decides which side differs.
"""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from train_example.hf_config import config_from_hf
from train_example.hf_map import from_hf, load_hf, port, to_hf
from train_example.model import DeepSeekV4

transformers = pytest.importorskip("transformers", reason="transformers is the oracle, a dependency of the tests alone")

BATCH, LENGTH = 2, 75  # 18 CSA entries of which 4 are selected, 4 HCA entries, and a remainder of tokens for both
TOLERANCE = 1e-5  # relative, in the 2-norm of a tensor
# These gradients are a few numbers a site, each the sum of one term a token (and stream) that nearly cancel, so fp32 leaves more of a
# difference: up to 2.5e-5 seen over seeds, with either side up to 2.6e-5 from our model run in fp64 (the second test below looks).
SUMMED, SUMMED_TOLERANCE = ("scale", "base", "sinks"), 5e-5

KINDS = {"window": "sliding_attention", "csa": "compressed_sparse_attention", "hca": "heavily_compressed_attention"}
MODELS = {
    "all": (["window", "csa", "hca", "csa", "hca"], 2),
    "window, hash": (["window"], 1),
    "window, top-k": (["window"], 0),
    "csa, top-k": (["csa"], 0),
    "hca, top-k": (["hca"], 0),
    "csa twice, hash then top-k": (["csa", "csa"], 1),
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 32, "beta_slow": 1}


def hf_config(kinds: list[str], hash_layers: int, **changes):
    sizes = {
        "vocab_size": 97,
        "hidden_size": 48,
        "moe_intermediate_size": 40,
        "num_hidden_layers": len(kinds),
        "layer_types": [KINDS[kind] for kind in kinds],
        "mlp_layer_types": ["hash_moe"] * hash_layers + ["moe"] * (len(kinds) - hash_layers),
        "num_attention_heads": 6,
        "head_dim": 32,
        "partial_rotary_factor": 0.5,
        "q_lora_rank": 24,
        "o_groups": 3,
        "o_lora_rank": 10,
        "sliding_window": 8,
        "compress_rates": {KINDS["csa"]: 4, KINDS["hca"]: 16},
        "index_n_heads": 16,
        "index_head_dim": 24,
        "index_topk": 4,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 6,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "swiglu_limit": 1.0,  # low enough to clip
        "max_position_embeddings": 4096,
        "rope_parameters": YARN,
        "attn_implementation": "eager",
        "experts_implementation": "eager",
    }
    return transformers.DeepseekV4Config(**{**sizes, **changes})


def hf_model(config, seed: int):
    """A model in which nothing is at a value that hides a mistake: no zero bias, unit norm, unit scale or symmetric mixing matrix."""
    torch.manual_seed(seed)
    model = transformers.DeepseekV4ForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            leaf = name.rsplit(".", 1)[-1].removeprefix("hc_")
            noise = torch.randn_like(weight)
            if leaf in ("base", "sinks", "position_bias"):
                weight.copy_(noise)
            elif leaf == "scale":
                weight.copy_(0.5 + torch.rand_like(weight))
            elif "norm" in name:
                weight.copy_(1 + 0.3 * noise)
            else:
                weight.copy_(noise * weight.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn_like(buffer))
            elif name.endswith("tid2eid"):
                buffer.copy_(torch.rand(buffer.shape[0], config.n_routed_experts).argsort(1)[:, : buffer.shape[1]])
    return model


def relative(got: Tensor, wanted: Tensor) -> float:
    return ((got - wanted).norm() / wanted.norm()).item()


def check_no_near_ties(model: DeepSeekV4, ids: Tensor) -> None:
    """Every choice in this forward is clear by more than rounding could move it, and the indexers do leave entries out."""
    gaps, left_out = [], []

    def index_gap(module, args, output):
        q, k, weights = output
        scores = (torch.einsum("bshd,bed->bshe", q, k).relu() * weights[..., None]).sum(2)
        entries = torch.arange(k.shape[1])
        seen = entries < ((torch.arange(q.shape[1]) + 1) // module.compressor.ratio)[:, None]
        best = scores.masked_fill(~seen, -torch.inf).sort(-1, descending=True).values
        topk = model.config.index_topk
        gap = (best[..., topk - 1] - best[..., topk])[:, seen.sum(-1) > topk]
        gaps.append(gap.min().item())
        left_out.append(gap.numel())

    def route_gap(module, args, output):
        if hasattr(module, "e_score_correction_bias"):
            scores = torch.nn.functional.softplus(args[0] @ module.weight.T).sqrt() + module.e_score_correction_bias
            best = scores.sort(-1, descending=True).values
            k = model.config.experts_per_token
            gaps.append((best[:, k - 1] - best[:, k]).min().item())

    hooks = []
    for layer in model.layers:
        hooks.append(layer.moe.router.register_forward_hook(route_gap))
        if layer.attn.indexer is not None:
            hooks.append(layer.attn.indexer.register_forward_hook(index_gap))
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    assert all(n > BATCH * LENGTH // 2 for n in left_out), "top-k has to select for most queries"
    assert all(gap > 2e-5 for gap in gaps), f"near-tie in the inputs (gaps {gaps}): take another seed"


@pytest.fixture(params=MODELS, scope="module")
def pair(request):
    """transformers' model, ours with its weights, token ids, a cotangent of the logits."""
    kinds, hash_layers = MODELS[request.param]
    theirs = hf_model(hf_config(kinds, hash_layers), seed=0)
    warned = pytest.warns(UserWarning, match="never trains") if "csa" in kinds else contextlib.nullcontext()
    with warned:
        ours = port(theirs, kl_coefficient=0.0)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 97, (BATCH, LENGTH), generator=generator)
    check_no_near_ties(ours, ids)
    return theirs, ours, ids, torch.randn(BATCH, LENGTH, 97, generator=generator)


def logits_and_gradients(model, ids: Tensor, cotangent: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
    model.zero_grad()
    logits = model(ids).logits
    (logits * cotangent).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return logits.detach(), grads if isinstance(model, DeepSeekV4) else from_hf(grads)


def tolerance(name: str) -> float:
    return SUMMED_TOLERANCE if name.endswith(SUMMED) else TOLERANCE


def test_logits_and_all_gradients(pair):
    theirs, ours, ids, cotangent = pair
    wanted, wanted_grads = logits_and_gradients(theirs, ids, cotangent)
    got, got_grads = logits_and_gradients(ours, ids, cotangent)
    assert relative(got, wanted) < TOLERANCE
    assert wanted_grads.keys() == got_grads.keys()
    for name, grad in got_grads.items():
        if ".indexer." in name:
            assert grad is None and wanted_grads[name] is None, name
        else:
            assert wanted_grads[name].norm() > 0, name
            assert relative(grad, wanted_grads[name]) < tolerance(name), name


def test_both_are_as_far_from_fp64(pair):
    theirs, ours, ids, cotangent = pair
    exact, exact_grads = logits_and_gradients(copy.deepcopy(ours).double(), ids, cotangent)
    for model in (theirs, ours):
        got, got_grads = logits_and_gradients(model, ids, cotangent)
        assert relative(got, exact) < TOLERANCE
        for name, grad in exact_grads.items():
            assert grad is None or relative(got_grads[name], grad) < tolerance(name), name


def test_loss_is_the_same(pair):
    theirs, ours, ids, _ = pair
    wanted = theirs(ids, labels=ids).loss  # transformers shifts the labels itself
    out = ours(ids, F.pad(ids[:, 1:], (0, 1), value=-100))
    torch.testing.assert_close(out.lm_loss, wanted, rtol=1e-6, atol=0)
    assert out.loss == out.lm_loss


@pytest.mark.parametrize("change", ["no YaRN", "two streams", "other ratios", "one group"])
def test_other_sizes(change):
    changes = {
        "no YaRN": {"rope_parameters": {"rope_type": "default"}},
        "two streams": {"hc_mult": 2, "hc_sinkhorn_iters": 1},
        "other ratios": {"compress_rates": {KINDS["csa"]: 6, KINDS["hca"]: 5}, "sliding_window": 3},
        "one group": {"o_groups": 1, "num_experts_per_tok": 1, "routed_scaling_factor": 2.5},
    }[change]
    theirs = hf_model(hf_config(["csa", "hca"], 1, **changes), seed=0)
    ours = port(theirs)
    ids = torch.randint(0, 97, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    check_no_near_ties(ours, ids)
    assert relative(ours(ids).logits, theirs(ids).logits) < TOLERANCE


def test_sequence_shorter_than_a_window():
    theirs = hf_model(hf_config(["csa", "hca"], 1), seed=0)
    ours = port(theirs)
    for length in (1, 3, 4, 15):
        ids = torch.arange(length)[None] + 5
        assert relative(ours(ids).logits, theirs(ids).logits) < TOLERANCE, length


def test_rotary_frequencies():
    config = hf_config(["csa"], 1)
    theirs, ours = transformers.DeepseekV4ForCausalLM(config), DeepSeekV4(config_from_hf(config))
    # transformers computes the power in fp32, we in fp64 with one rounding.
    torch.testing.assert_close(ours.window_frequencies, theirs.model.rotary_emb.main_inv_freq, rtol=1e-6, atol=0)
    torch.testing.assert_close(ours.compressed_frequencies, theirs.model.rotary_emb.compress_inv_freq, rtol=1e-6, atol=0)
    stretch = theirs.model.rotary_emb.compress_inv_freq * 160000 ** (torch.arange(0, 16, 2) / 16)
    assert ((stretch > 0.26) & (stretch < 0.99)).sum() >= 2, "YaRN's ramp has to be inside the rotated channels"


def test_names_map_both_ways():
    config = hf_config(*MODELS["all"])
    theirs = transformers.DeepseekV4ForCausalLM(config)
    names = dict(theirs.named_parameters()) | theirs.state_dict()
    back = to_hf(from_hf(names))
    assert back.keys() == names.keys()
    assert all(back[name] is tensor for name, tensor in names.items())
    block = {"mtp.0.norm.weight": torch.ones(1)}
    assert to_hf(block) == from_hf(block) == block
    with pytest.raises(ValueError, match=r"no counterpart is known for 'model\.layers\.0\.mlp\.gate\.bias'"):
        from_hf({"model.layers.0.mlp.gate.bias": torch.ones(1)})


def test_our_weights_load_into_transformers():
    config = hf_config(*MODELS["all"])
    torch.manual_seed(3)
    ours = DeepSeekV4(config_from_hf(config))  # with its MTP block, which transformers skips
    theirs = transformers.DeepseekV4ForCausalLM(config).eval()
    tensors = to_hf(ours.state_dict() | {name: table for name, table in ours.named_buffers() if name.endswith("tid2eid")})
    ids = torch.arange(40)[None] % 97
    theirs.load_state_dict({name: t for name, t in tensors.items() if not name.startswith("mtp.")})
    assert relative(theirs(ids).logits, ours(ids).logits) < TOLERANCE


def test_load_refuses_what_does_not_match():
    config = hf_config(["window"], 0)
    state = transformers.DeepseekV4ForCausalLM(config).state_dict()
    model = DeepSeekV4(config_from_hf(config, mtp_layers=0))
    with pytest.raises(ValueError, match=r"missing \['head.weight'\]"):
        load_hf(model, {name: t for name, t in state.items() if name != "lm_head.weight"})
    with pytest.raises(ValueError, match=r"head.weight is \[97, 48\] torch.bfloat16, want \[97, 48\] torch.float32"):
        load_hf(model, {**state, "lm_head.weight": state["lm_head.weight"].bfloat16()})
    with pytest.raises(ValueError, match=r"missing \['mtp"):
        load_hf(DeepSeekV4(config_from_hf(config)), state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scoring_func": "sigmoid"}, "scoring_func must be 'sqrtsoftplus'"),
        ({"n_shared_experts": 2}, "n_shared_experts must be 1"),
        ({"compress_rates": {KINDS["csa"]: 4, KINDS["hca"]: 4}}, "compress_rates must be two different numbers"),
        ({"mlp_layer_types": ["moe", "hash_moe"]}, "hash_moe layers first"),
        ({"rope_parameters": {**YARN, "attention_factor": 1.2}}, "attention_factor must be 1"),
    ],
)
def test_config_without_counterpart_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(hf_config(["csa", "hca"], 1, **change))
