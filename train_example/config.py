"""Sizes of the model: one frozen dataclass, checked when it is made, and three presets.

    TINY    trains on a CPU in minutes; has every layer kind, both routers, and a top-k that really selects from 36 tokens on
    FLASH   the published DeepSeek-V4-Flash sizes
    PRO     the published DeepSeek-V4-Pro sizes

A field's help text is its metadata["help"]; a command line can be made from `dataclasses.fields(ModelConfig)`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

LayerKind = Literal["window", "csa", "hca"]
KL_TARGETS = ("joint", "compressed", "marginal")


def _size(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class ModelConfig:
    """Every size and constant of the model. A combination that cannot work is a ValueError that names the field."""

    vocab_size: int = _size(264, "rows of the embedding and of the head: 256 bytes and 8 specials by default")
    hidden_size: int = _size(64, "D, channels of a residual stream")
    num_layers: int = _size(4, "layers, without the MTP block")

    num_heads: int = _size(4, "N, query heads; they share one key/value head")
    head_dim: int = _size(32, "channels of a head, of keys and of values (one tensor is both)")
    rope_head_dim: int = _size(16, "the last channels of a head, and of an indexer head, that are rotated")
    q_lora_rank: int = _size(32, "width of the query bottleneck, which the indexer reads too")
    o_groups: int = _size(2, "groups of heads that the output projection treats apart")
    o_lora_rank: int = _size(16, "width of each group's output bottleneck")
    window: int = _size(16, "tokens a query sees uncompressed, itself included")
    compress_ratios: tuple[int, ...] = _size((0, 4, 16, 4), "tokens a compressed entry, one number a layer: 0 or 1 = window only")
    csa_ratio: int = _size(
        4, "the ratio of the layers with overlapping compressor, indexer and top-k; other ratios above 1 see all entries"
    )

    index_heads: int = _size(4, "heads of the indexer")
    index_head_dim: int = _size(32, "channels of an indexer head")
    index_topk: int = _size(8, "compressed entries a query attends to")
    kl_coefficient: float = _size(1.0, "weight of the indexer's KL loss; at 0 the indexer never trains")
    kl_target: str = _size("joint", "what the indexer learns to predict: joint, compressed or marginal (the indexer package explains)")

    rope_theta: float = _size(10000.0, "base wavelength of window-only layers")
    compress_rope_theta: float = _size(160000.0, "base wavelength of layers with a compressor, for all that they rotate")
    yarn_factor: float = _size(16.0, "YaRN stretch of layers with a compressor; 1 = none")
    yarn_original_length: int = _size(65536, "YaRN: the length, in tokens, before stretching")
    yarn_beta_fast: float = _size(32.0, "YaRN: pairs that turn more often than this within that length are kept")
    yarn_beta_slow: float = _size(1.0, "YaRN: pairs that turn less often than this are stretched in full")

    hc_mult: int = _size(4, "residual streams of mHC, 2 to 8")
    hc_iters: int = _size(20, "Sinkhorn iterations of mHC")
    hc_eps: float = _size(1e-6, "epsilon of mHC's gates and Sinkhorn sums")
    norm_eps: float = _size(1e-6, "epsilon of every RMS norm")

    num_experts: int = _size(8, "routed experts of a layer; one shared expert comes on top")
    experts_per_token: int = _size(2, "routed experts a token goes to")
    expert_dim: int = _size(64, "hidden width of an expert, routed or shared")
    num_hash_layers: int = _size(1, "first layers, whose router picks experts by token id")
    hash_seed: int = _size(0, "seed of the token-to-expert tables of those layers")
    routed_scale: float = _size(1.5, "factor on the normalised weights of a token's experts")
    swiglu_limit: float = _size(10.0, "the gate is clipped above at this, the linear half on both sides; needs > 0")

    mtp_layers: int = _size(1, "multi-token-prediction blocks, 0 or 1; the block predicts the token after the next")
    mtp_weight: float = _size(0.3, "weight of the MTP loss")
    mtp_compress_ratio: int = _size(0, "compress ratio of the MTP block, as in compress_ratios")

    init_std: float = _size(0.02, "standard deviation of freshly made weights")

    def __post_init__(self) -> None:
        if isinstance(self.compress_ratios, list):
            object.__setattr__(self, "compress_ratios", tuple(self.compress_ratios))  # from a config file
        for item in fields(self):
            value = getattr(self, item.name)
            if item.type == "int":
                self._need(type(value) is int and abs(value) < 2**31, item.name, "an integer below 2^31")
            elif item.type == "float":
                self._need(type(value) in (int, float) and abs(value) < 1e300, item.name, "a finite number")
        ratios = self.compress_ratios
        self._need(isinstance(ratios, tuple) and all(type(r) is int for r in ratios), "compress_ratios", "a list of integers")
        positive = (
            "vocab_size hidden_size num_layers num_heads head_dim rope_head_dim q_lora_rank o_groups o_lora_rank window index_heads "
            "index_head_dim index_topk rope_theta compress_rope_theta yarn_original_length hc_iters norm_eps num_experts experts_per_token "
            "expert_dim routed_scale swiglu_limit init_std"
        )
        for name in positive.split():
            self._need(getattr(self, name) > 0, name, "a number above 0")
        for name in ("kl_coefficient", "hc_eps", "num_hash_layers", "mtp_weight", "mtp_compress_ratio"):
            self._need(getattr(self, name) >= 0, name, "0 or more")
        self._need(
            len(self.compress_ratios) == self.num_layers, "compress_ratios", f"one ratio for each of num_layers = {self.num_layers} layers"
        )
        self._need(all(0 <= r < 2**31 for r in ratios), "compress_ratios", "integers of 0 or more, below 2^31")
        self._need(self.csa_ratio >= 2, "csa_ratio", "2 or more")
        self._need(self.rope_head_dim % 2 == 0, "rope_head_dim", "an even number")
        smallest = min(self.head_dim, self.index_head_dim)
        self._need(self.rope_head_dim <= smallest, "rope_head_dim", f"at most head_dim and index_head_dim, here {smallest}")
        self._need(self.num_heads % self.o_groups == 0, "o_groups", f"a divisor of num_heads = {self.num_heads}")
        self._need(self.kl_target in KL_TARGETS, "kl_target", f"one of {', '.join(KL_TARGETS)}")
        self._need(self.yarn_factor >= 1, "yarn_factor", "1 or more")
        self._need(2 <= self.hc_mult <= 8, "hc_mult", "2 to 8")
        self._need(self.experts_per_token <= self.num_experts, "experts_per_token", f"at most num_experts = {self.num_experts}")
        self._need(self.num_hash_layers <= self.num_layers, "num_hash_layers", f"at most num_layers = {self.num_layers}")
        rows = self.num_experts // self.experts_per_token + 1
        self._need(
            self.num_hash_layers == 0 or self.vocab_size >= rows,
            "vocab_size",
            f"at least {rows}, so that the hash router reaches every expert",
        )
        self._need(self.mtp_layers in (0, 1), "mtp_layers", "0 or 1")

    def _need(self, holds: bool, name: str, wanted: str) -> None:
        if not holds:
            raise ValueError(f"ModelConfig.{name} must be {wanted}, got {getattr(self, name)!r}")

    def kind(self, ratio: int) -> LayerKind:
        """What a compress ratio makes of a layer."""
        return "window" if ratio <= 1 else "csa" if ratio == self.csa_ratio else "hca"

    @property
    def shortest_selecting_length(self) -> int:
        """Tokens of the shortest sequence in which some query has more entries than index_topk to choose from."""
        return (self.index_topk + 1) * self.csa_ratio


TINY = ModelConfig()

FLASH = ModelConfig(
    vocab_size=129280,
    hidden_size=4096,
    num_layers=43,
    num_heads=64,
    head_dim=512,
    rope_head_dim=64,
    q_lora_rank=1024,
    o_groups=8,
    o_lora_rank=1024,
    window=128,
    compress_ratios=(0, 0, *(4, 128) * 20, 4),
    index_heads=64,
    index_head_dim=128,
    index_topk=512,
    num_experts=256,
    experts_per_token=6,
    expert_dim=2048,
    num_hash_layers=3,
)

PRO = ModelConfig(
    vocab_size=129280,
    hidden_size=7168,
    num_layers=61,
    num_heads=128,
    head_dim=512,
    rope_head_dim=64,
    q_lora_rank=1536,
    o_groups=16,
    o_lora_rank=1024,
    window=128,
    compress_ratios=(128, 128, *(4, 128) * 29, 4),
    index_heads=64,
    index_head_dim=128,
    index_topk=1024,
    num_experts=384,
    experts_per_token=6,
    expert_dim=3072,
    num_hash_layers=3,
    routed_scale=2.5,
)

PRESETS: dict[str, ModelConfig] = {"tiny": TINY, "flash": FLASH, "pro": PRO}
