"""What the tests of the indexer's two public functions share."""

import pytest
import torch

from indexer import lightning_indexer
from reference.cases import indexer as cases

BSND, TND = cases.SMALL[0], cases.SMALL[7]
LAYOUTS = pytest.mark.parametrize("case", [BSND, TND], ids=["BSND", "TND"])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
FORMS = ("given", "sparse", "dense", "compressed", "marginal")


def layout_of(case):
    """The layout with an offset tensor, one a batch entry or document; and as the schema's tensors and numbers."""
    kwargs = cases.layout(case)
    kwargs["q_offset"] = torch.arange(case.batch if case.documents is None else len(case.documents), dtype=torch.int32) + 3
    return kwargs, (kwargs.get("cu_seqlens_q"), kwargs.get("cu_seqlens_k"), kwargs["q_offset"]), (case.cmp_ratio, 0)


def index_inputs(case, dtype=torch.float32, **options):
    return list(cases.make_indexer(case, dtype, **options).values())


def kl_options(case, form, dtype=torch.float32):
    """indices and the keyword arguments of one form of the loss."""
    options = dict(target=form if form in ("compressed", "marginal") else "joint", **cases.layout(case))
    if form == "given":
        return cases.make_indices(case), options | dict(teacher=cases.make_teacher(case))
    return None if form == "dense" else cases.make_indices(case), options | cases.make_attention(case, dtype)


def finite_topk(q, k, weights, case, **kwargs):
    """The public function with the -inf tail of its scores made 0, so that errors can be measured."""
    indices, scores = lightning_indexer(q, k, weights, case.topk, **cases.layout(case) | kwargs)
    return indices, scores.masked_fill(indices < 0, 0)


EMPTY = (dict(batch=0, seq=5), dict(seq=0), dict(seq=5, keys=0), dict(documents=()), dict(documents=(0, 0)), dict(documents=(3, 2), keys=0))
Q, K, W = torch.zeros(2, 6, 4, 8), torch.zeros(2, 3, 8), torch.zeros(2, 6, 4)
