"""Replays of the indexer's forwards: the third call of a kind starts the same launches with its own addresses, and new zeros."""

import re

import pytest
import torch

from kernel_runtime import interpreting, replay
from reference.cases import indexer as cases
from tests.direct_tools import Calls, forget
from tests.kl_util import make

pytestmark = pytest.mark.skipif(interpreting(), reason="under TRITON_INTERPRET=1 kernels are Python functions; nothing is launched")

FILES = ("core", "gradients", "fixed_point", "kl_loss.fused", "kl_loss.fwd", "kl_loss.slots", "kl_loss.dense", "lightning.fwd", "lightning.topk")
MODULES = tuple(f"indexer.{name}" for name in FILES)
SIZES = dict(q_offset=9, heads=2, head_dim=16, topk=4, attn_heads=2, attn_dim=16)
CASES = {"BSND": cases.IndexerCase("BSND", batch=2, seq=3, **SIZES), "TND": cases.IndexerCase("TND", documents=(3, 2), **SIZES)}


@pytest.fixture
def calls(driver, monkeypatch):
    """Calls of launchers with a driver that records in place of starting; specs are made anew, as they know whether launches are direct."""
    forget(MODULES)
    yield Calls(driver, monkeypatch)
    forget(MODULES)


def loss_arguments(case, form, deterministic=False, gradients=True):
    leaves, options = make(case, form, ties=False)
    tensors = [options.get(name) for name in ("indices", "teacher", "q", "cmp_kv", "lse", "scores", "cu_seqlens_q", "cu_seqlens_k")]
    return (*leaves, *tensors, None, 0.2, 0.7, options["target"], case.cmp_ratio, case.q_offset, gradients, deterministic, "triton")


def selection_arguments(case):
    leaves, options = make(case, "given/joint", ties=False)
    documents = options.get("cu_seqlens_q"), options.get("cu_seqlens_k")
    return (*leaves, *documents, None, case.topk, case.cmp_ratio, case.q_offset, True, 0, "triton")


def without_scratch(launches):
    """Launches without the places of scratch memory, which the allocator chooses."""
    return [(*rest, [a if not isinstance(a, tuple) or a[0] != "scratch" else "scratch" for a in arguments]) for *rest, arguments in launches]


@pytest.mark.parametrize(
    "kind, layout", [("given/joint", "BSND"), ("given/marginal, deterministic", "TND"), ("sparse/joint", "TND"), ("selection", "BSND")]
)
def test_a_forward_that_comes_again_is_replayed(calls, kind, layout):
    from indexer.kl_loss.fwd import indexer_kl_loss_fwd
    from indexer.lightning.fwd import lightning_indexer_fwd

    launcher = lightning_indexer_fwd if kind == "selection" else indexer_kl_loss_fwd
    form, _, deterministic = kind.partition(", ")

    def arguments():
        return selection_arguments(CASES[layout]) if kind == "selection" else loss_arguments(CASES[layout], form, bool(deterministic))

    replays = replay.Replays(6 if kind == "selection" else 12)
    _, want, *others = [calls(replays, launcher, arguments()) for _ in range(4)]
    assert not want[2] and len(want[0]) >= 2
    for launches, shapes, again in others:
        assert again and shapes == want[1] and without_scratch(launches) == without_scratch(want[0])


def test_a_replay_makes_zeros(calls):
    """dk is added to by the kernels, which do not run here: a replay's is zero although new memory holds NaN."""
    from indexer.kl_loss.fwd import indexer_kl_loss_fwd

    replays = replay.Replays(12)
    for _ in range(2):
        replays.call(indexer_kl_loss_fwd, loss_arguments(CASES["BSND"], "given/joint"))
    torch.use_deterministic_algorithms(True)
    try:
        arguments = loss_arguments(CASES["BSND"], "given/joint")
        found, tensors = replays.find(arguments[:12], arguments[12:])
        total, _, dq, dk, _ = found(tensors)
    finally:
        torch.use_deterministic_algorithms(False)
    assert total.isnan() and dq.isnan().all() and (dk == 0).all()


@pytest.mark.parametrize("kind, reason", [("dense/joint", "it calls aten.sum"), ("given/joint", "came from elsewhere|empty")])
def test_what_is_not_replayed(calls, kind, reason):
    """The dense form, whose partial sums torch adds; and a value alone, whose gradients are empty tensors."""
    from indexer.kl_loss.fwd import indexer_kl_loss_fwd

    arguments = loss_arguments(CASES["BSND"], kind, gradients=kind == "dense/joint")[:-1]
    indexer_kl_loss_fwd(*arguments)
    _, why = replay.record(indexer_kl_loss_fwd, arguments)
    assert isinstance(why, str) and re.search(reason, why)
