"""Sharded training against one process, on two gloo processes: gradients, clipping, accumulation, and the mistakes seen in other trainers.

The checks themselves are in parallel_checks.py; all run in one spawn (`checks` fixture), and a test here reads the result of one.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.dist_util import run_distributed
from tests.parallel_checks import ep_checks
from tests.trainer_util import SMALL, plain_model, run_config, tokens, worst
from train_example.gradients import SumGradients
from train_example.moe import hash_table
from train_example.parallel import gradient_sumsq
from train_example.step import check_finite


@pytest.fixture(scope="module")
def checks() -> dict[str, list[Any]]:
    by_rank = run_distributed(ep_checks, 2)
    return {name: [found[name] for found in by_rank] for name in by_rank[0]}


@pytest.mark.parametrize("mesh", ["gradients_ep2", "gradients_fsdp"])
def test_gradients_equal_one_process(checks, mesh):
    found = checks[mesh][0]
    assert found["experts"] == pytest.approx(1, abs=1e-5)
    assert found["dense"] == pytest.approx(1, abs=1e-5)
    assert found["worst"][0] < 1e-5, found["worst"]


def test_default_division_leaves_expert_gradients_ep_times_too_large(checks):
    """The mistake that `sum_gradients` is there for: the comparison above must be able to see it."""
    experts, dense = checks["default_division"][0]
    assert experts / dense == pytest.approx(2, abs=1e-4)


def test_weights_are_kept_for_the_backward_pass_where_no_other_process_has_them(checks):
    """Of a projection and an island, which two processes share, and of the experts, which ep alone divides."""
    for found in checks["reshard"]:
        assert found["kept"] == {"auto": [False, True, False], "always": [False] * 3, "never": [True] * 3}
        assert found["equal"] and all(found["masters"])


def test_ep_group_is_its_own(checks):
    for found in checks["groups"]:
        assert found["own"]
        assert "needs a group of its own" in found["refused"]


def test_rank_with_less_than_a_window_takes_part(checks):
    assert checks["short_rank"][0]["worst"][0] < 1e-5, checks["short_rank"][0]


def test_expert_without_tokens(checks):
    for rank, found in enumerate(checks["idle_expert"]):
        assert found["finite"]
        assert found["idle"] == 0
        assert found["busy"] > 0
        for site in found["counts"]:
            assert site == ([96, 96, 0, 0] if rank == 0 else [0, 96, 96, 0])


def test_clipping_across_meshes(checks):
    found = checks["clipping"][0]
    assert found["torch_raises"], "torch clips mixed meshes by itself now: gradient_sumsq could go"
    assert found["norm"] == pytest.approx(found["want"], rel=1e-5)
    assert found["worst"][0] < 1e-5, found["worst"]


def test_parameters_smaller_than_the_mesh(checks):
    rank0, rank1 = checks["tiny_parameters"]
    assert "hc_head.scale" in rank1["empty"]
    assert rank0["finite"]
    assert rank1["finite"]
    assert rank0["worst"][0] < 1e-5, rank0["worst"]


def test_accumulation_1x24_equals_2x12(checks):
    found = checks["accumulation"][0]
    assert max(found["metrics"].values()) < 1e-6, found["metrics"]
    assert found["load"]
    assert found["worst"][0] < 1e-6, found["worst"]  # 4.8e-7 measured, the order of sums in fp32: see the next test


def test_accumulation_differs_by_rounding_alone():
    """In fp64 nothing is left of the difference (1.6e-15 measured), so none of it is a wrong factor. Relative to a tensor's own norm, fp32
    reaches 3.6e-5, in mtp.0.hc_head.base; that gradient cancels to 8e-7 and is 1e-4 away from fp64 with either accumulation, which is why
    `worst` has a floor."""
    found = []
    ids, labels = tokens(24, 24, seed=3)
    valid = int((labels != -100).sum())
    for parts in (1, 2):
        model = plain_model(run_config()).double()
        for part in zip(ids.chunk(parts), labels.chunk(parts)):
            model(*part, num_valid_tokens=valid).loss.backward()
        found.append({name: param.grad for name, param in model.named_parameters()})
    assert worst(found[1], found[0])[0] < 1e-13


def test_recompute_gives_the_same_bits_and_counts_tokens_once(checks):
    found = checks["recompute"][0]
    for name, result in found.items():
        assert result["equal"], name
        assert result["total"] == [4 * 24 * SMALL.experts_per_token] * 7, name
        assert result["blocks"] == {"mhc": [1] * 6, "cross-layer": [2] * 3}.get(name.split()[1], []), name
    for dtype in ("fp32", "bf16"):
        saved = {name.split()[1]: result["saved"] for name, result in found.items() if name.startswith(dtype)}
        # streams of N*D a token: one a layer less (six layers and the MTP block), then one a layer inside a block
        streams = 4 * 24 * SMALL.hc_mult * SMALL.hidden_size * {"fp32": 4, "bf16": 2}[dtype]
        assert saved["none"] - saved["mhc"] >= 7 * streams
        assert saved["mhc"] - saved["cross-layer"] == 3 * streams


def test_hash_table_is_the_same_everywhere_and_a_difference_is_found(checks):
    for found in checks["buffers"]:
        assert found["good"]
        assert "tid2eid is not the same on every rank" in found["refused"]
    assert hash_table(SMALL, 0).unique().tolist() == list(range(SMALL.num_experts)), "every expert, not only the first top_k"


def test_not_finite_stops_every_rank_before_the_step(checks):
    for found in checks["not_finite"]:
        assert "step 7" in found["message"]
        assert "lm_loss of rank 1 is nan" in found["message"]
        assert "lm_loss of rank 0" not in found["message"]
        assert not found["moved"]


def test_bf16_policy_spares_the_islands(checks):
    found = checks["bf16"][0]
    assert found["seen"]["island"] == {"torch.float32"}
    assert found["seen"]["other"] == {"torch.bfloat16"}
    assert found["streams"] == "torch.bfloat16"
    assert found["finite"]
    assert found["grad_dtypes"] == found["master"] == {"torch.float32"}


def test_evaluation_weighs_tokens(checks):
    for found in checks["evaluation"]:
        assert found["got"] == pytest.approx(found["want"], rel=1e-6)
        assert abs(found["got"] - found["mean_of_means"]) > 1e-3


def test_timeout_is_long_for_the_first_step_and_short_after_it(checks):
    assert "Timed out waiting 1000ms" in checks["timeouts"][0]["stalled"], checks["timeouts"]


def test_check_finite_passes_finite_rows_and_names_gradients():
    check_finite(torch.ones(2, 6, dtype=torch.float64), 3)
    rows = torch.ones(2, 6, dtype=torch.float64)
    rows[0, 5] = math.inf
    with pytest.raises(FloatingPointError, match=r"step 3: squared gradient norm \(expert shard\) of rank 0 is inf"):
        check_finite(rows, 3)


def test_norm_refuses_gradients_that_are_not_sharded():
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match="not sharded"):
        gradient_sumsq([param])
    assert not isinstance(param.grad, DTensor)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_gradients_are_copied_as_fsdp_would(processes):
    """Rows that the processes do not divide, fewer rows than processes, a gradient with other strides; every element of the buffer is written."""
    g = torch.Generator().manual_seed(5)
    grads = [torch.randn(shape, generator=g) for shape in ((6, 2), (5, 3), (1,), (2, 2, 2), (7,))] + [torch.randn(4, 5, generator=g).t()]
    padded = sum(-(-grad.shape[0] // processes) * processes * (grad.numel() // grad.shape[0]) for grad in grads)
    want = torch._chunk_cat([grad.contiguous() for grad in grads], 0, processes)
    reduce = SumGradients(processes)
    buffer = reduce.allocate((padded,), dtype=torch.float32, device=torch.device("cpu"))
    assert isinstance(buffer, torch.Tensor)
    buffer.fill_(torch.nan)
    torch.ops.fsdp.chunk_cat(grads, dim=0, num_chunks=processes, out=buffer.view(processes, -1))
    assert torch.equal(buffer.as_subclass(torch.Tensor).view(processes, -1), want)
    out = reduce.allocate((padded // processes,), dtype=torch.float32, device=torch.device("cpu"))
    assert type(out) is torch.Tensor and (out.data_ptr() == buffer.data_ptr()) == (processes == 1)
    assert reduce.allocate((padded,), dtype=torch.float32, device=torch.device("cpu")).data_ptr() != buffer.data_ptr(), "the next backward pass"
