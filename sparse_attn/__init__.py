"""Sparse attention with one shared key/value head. Importing registers the ops and touches no device."""

from sparse_attn.compress.api import compress_kv
from sparse_attn.shared_kv.api import compressed_cu_seqlens, lse_with_sink, lse_without_sink, sparse_attn_shared_kv

__all__ = ["compress_kv", "compressed_cu_seqlens", "lse_with_sink", "lse_without_sink", "sparse_attn_shared_kv"]
