"""What the tests of sparse_attn share: cases by name, and inputs of which something is empty."""

from dataclasses import replace

import pytest

from reference.cases.sparse_attn import ATTENTION_CASES, COMPRESS_CASES, AttentionCase

ATTENTION = {case.name: case for case in ATTENTION_CASES}
COMPRESS = {case.name: case for case in COMPRESS_CASES}
MODES = pytest.mark.parametrize("mode", ["swa", "cfa", "scfa"])
EMPTY = pytest.mark.parametrize("empty", ["B", "S", "T", "K", "keys"])


def empty_case(mode: str, empty: str) -> AttentionCase:
    """A case without sequences, without tokens (BSND, then TND), without slots, or without keys in front of its queries."""
    case = AttentionCase("", mode)
    if empty == "T":
        return replace(case, docs_q=(0, 0))
    if empty == "keys":
        return replace(case, S=3, S2=0, q_offset=2)
    return replace(case, **{empty: 0})
