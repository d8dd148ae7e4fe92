"""Sharded training against one process, on two gloo processes: gradients, clipping, accumulation, and the mistakes seen in other trainers.

Every worker below runs in both processes of one spawn (`checks` fixture); a test then reads its result.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from bench.recompute import saved_bytes
from tests.dist_util import run_distributed
from tests.trainer_util import SMALL, gradients, parameters, plain_model, ratio, run_config, sharded, tokens, worst
from train_example import parallel as parallel_module
from train_example.gradients import SumGradients
from train_example.moe import hash_table
from train_example.optim import make_optimizer
from train_example.parallel import check_buffers_equal, check_groups_differ, gradient_sumsq, init_parallel, moe_modules, set_timeouts
from train_example.step import check_finite, evaluate, train_step

VALID = 2 * 4 * 24 - 2 * 3


def whole_batch(length: int = 24) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One batch a rank."""
    return [tokens(4, length, seed=1), tokens(4, length, seed=2)]


def plain_gradients(config, batches, valid: int):
    """Gradients of one process that sees the batches of all ranks."""
    model = plain_model(config)
    loss = sum(model(ids, labels, num_valid_tokens=valid).loss for ids, labels in batches)
    loss.backward()
    return {name: param.grad for name, param in model.named_parameters()}, float(loss)


def experts_and_dense(names) -> tuple[list[str], list[str]]:
    experts = [name for name in names if ".experts." in name]
    return experts, [name for name in names if name not in experts]


def check_gradients(rank: int, ep: int) -> dict[str, Any]:
    config = run_config(ep=ep)
    model, _ = sharded(config)
    model(*whole_batch()[rank], num_valid_tokens=VALID).loss.backward()
    got, (want, _) = gradients(model), plain_gradients(config, whole_batch(), VALID)
    experts, dense = experts_and_dense(want)
    return {"experts": ratio(got, want, experts), "dense": ratio(got, want, dense), "worst": worst(got, want)}


def check_default_division(rank: int) -> tuple[float, float]:
    """What the factors would be without `sum_gradients`."""
    kept, parallel_module.sum_gradients = parallel_module.sum_gradients, lambda unit, mesh: None
    try:
        found = check_gradients(rank, ep=2)
    finally:
        parallel_module.sum_gradients = kept
    return found["experts"], found["dense"]


def check_short_rank(rank: int) -> dict[str, Any]:
    """Rank 1 has 3 tokens: no window of 4 or of 16 is ever complete there."""
    config = run_config(ep=2)
    batches = [tokens(2, 24, seed=1), tokens(1, 3, seed=2)]
    batches[1] = (batches[1][0], batches[1][0].roll(-1, 1))
    model, _ = sharded(config, timeout_s=20)
    model(*batches[rank], num_valid_tokens=48).loss.backward()
    want, _ = plain_gradients(config, batches, 48)
    return {"worst": worst(gradients(model), want)}


def check_idle_expert(rank: int) -> dict[str, Any]:
    """No token of any rank goes to expert 3 (which rank 1 holds), and none of rank 0's own to rank 1 at all."""
    config = run_config(ep=2)
    model, _ = sharded(config, timeout_s=20)
    for moe in moe_modules(model):
        if hasattr(moe.router, "tid2eid"):
            moe.router.tid2eid[:] = torch.tensor([0, 1]) if rank == 0 else torch.tensor([1, 2])
        else:
            moe.router.e_score_correction_bias += torch.tensor([1e4, 1e4, 0, 0]) if rank == 0 else torch.tensor([0, 1e4, 1e4, 0])
    out = model(*whole_batch()[rank], num_valid_tokens=VALID)
    out.loss.backward()
    got = gradients(model)
    idle = [float(got[name][3].abs().max()) for name in got if ".experts." in name]
    busy = [float(got[name][1].abs().max()) for name in got if ".experts." in name]
    finite = all(g.isfinite().all() for g in got.values())
    return {"counts": out.expert_counts.tolist(), "idle": max(idle), "busy": min(busy), "finite": finite}


def check_clipping(rank: int) -> dict[str, Any]:
    """The norm over both meshes, and gradients scaled to it, against torch's clipping of the plain model."""
    config = run_config(ep=2, clip=0.05, lr=1.0, warmup_steps=0, weight_decay=0.0)
    model, _ = sharded(config)
    optimizer = make_optimizer(model, config)
    kept: dict[str, torch.Tensor] = {}
    optimizer.register_step_post_hook(lambda *_: kept.update(gradients(model)))  # the optimizer divides them
    result = train_step(model, optimizer, config, [whole_batch()[rank]], step=1)
    plain = plain_model(config)
    for ids, labels in whole_batch():
        plain(ids, labels, num_valid_tokens=VALID).loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), config.clip)
    want = {name: param.grad for name, param in plain.named_parameters()}
    try:
        model(*whole_batch()[rank], num_valid_tokens=VALID).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        torch_raises = False
    except (RuntimeError, ValueError):
        torch_raises = True
    return {"norm": result["grad_norm"], "want": float(norm), "worst": worst(kept, want), "torch_raises": torch_raises}


def check_tiny_parameters(rank: int) -> dict[str, Any]:
    """hc_head.scale has one element, so rank 1 holds nothing of it; two steps against AdamW on the plain model.

    A large epsilon: the streams of the first layer are copies of each other, its comb has a gradient of rounding noise alone, and AdamW
    would make full steps of that.
    """
    config = run_config(ep=2, clip=-1.0, weight_decay=0.1, balance=0.0, adam_eps=1e-3)
    model, _ = sharded(config)
    optimizer = make_optimizer(model, config)
    empty = [name for name, param in model.named_parameters() if param.to_local().numel() == 0]
    plain = plain_model(config)
    plain_optimizer = make_optimizer(plain, config)
    for step in (1, 2):
        result = train_step(model, optimizer, config, [whole_batch()[rank]], step)
        for ids, labels in whole_batch():
            plain(ids, labels, num_valid_tokens=VALID).loss.backward()
        for group in plain_optimizer.param_groups:
            group["lr"] = result["lr"]
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    got = parameters(model)
    return {"empty": empty, "finite": math.isfinite(result["grad_norm"]), "worst": worst(got, dict(plain.named_parameters()))}


def check_accumulation(rank: int) -> dict[str, Any]:
    """24 sequences a step, as 1 x 12 and as 2 x 6 a rank: the same losses (the indexer's too), counts, and updated parameters."""
    found = []
    ids, labels = tokens(24, 24, seed=3)
    for accumulate in (1, 2):
        config = run_config(ep=2, accumulate=accumulate, batch=12 // accumulate)
        model, _ = sharded(config)
        optimizer = make_optimizer(model, config)
        mine = [(i, t) for i, t in zip(ids.split(config.batch), labels.split(config.batch))][rank::2]
        kept: dict[str, torch.Tensor] = {}
        optimizer.register_step_pre_hook(lambda *_, model=model, kept=kept: kept.update(gradients(model)))
        found.append((train_step(model, optimizer, config, mine, step=1), kept))
    (one, one_grads), (two, two_grads) = found
    names = ("loss", "lm_loss", "kl_loss", "mtp_loss", "grad_norm")
    differences = {name: abs(one[name] / two[name] - 1) for name in names}
    return {"metrics": differences, "load": one["expert_load"] == two["expert_load"], "worst": worst(two_grads, one_grads)}


def check_recompute(rank: int) -> dict[str, Any]:
    """Recomputing gives the same bits, and counts every token once."""
    found, first = {}, ()
    for dtype in ("fp32", "bf16"):
        for recompute in ("none", "layer", "mhc", "cross-layer"):
            config = run_config(ep=2, recompute=recompute, dtype=dtype, model={"num_layers": 6, "compress_ratios": (0, 4, 16) * 2})
            model, _ = sharded(config)
            outputs: list[Any] = []

            def run(model=model, outputs=outputs) -> torch.Tensor:
                outputs.append(model(*whole_batch()[rank], num_valid_tokens=VALID))
                return outputs[0].loss

            saved = saved_bytes(model, run)
            outputs[0].loss.backward()
            grads, counts = gradients(model), outputs[0].expert_counts
            want_counts, want = first = (counts, grads) if recompute == "none" else first
            equal = torch.equal(counts, want_counts) and all(torch.equal(grads[key], want[key]) for key in want)
            blocks = [len(block) for block in model.recompute_blocks]
            found[f"{dtype} {recompute}"] = {"total": counts.sum(1).tolist(), "equal": equal, "saved": saved, "blocks": blocks}
    return found


def check_reshard(rank: int) -> dict[str, Any]:
    """Which weights are still gathered between the passes, the gradients, and whether an evaluation leaves gathered ones behind."""
    found: dict[str, Any] = {}
    for reshard in ("auto", "always", "never"):
        config = run_config(ep=2, reshard=reshard)
        model, _ = sharded(config)
        loss = model(*whole_batch()[rank], num_valid_tokens=VALID).loss
        layer = model.layers[1]
        # gathered, the experts' weights are DTensors of the ep mesh alone
        experts = layer.moe.experts.w_down.device_mesh.ndim == 1
        kept = [not isinstance(layer.attn.q_a.weight, DTensor), experts, not isinstance(layer.attn_norm.weight, DTensor)]
        loss.backward()
        got = gradients(model)
        with torch.no_grad():
            evaluate(model, [whole_batch()[rank]])
        masters = [param for param in model.parameters() if isinstance(param, DTensor)]
        found[reshard] = kept, got, len(masters) == len(list(model.parameters()))
    return {
        "kept": {name: value[0] for name, value in found.items()},
        "equal": all(torch.equal(found[name][1][key], found["auto"][1][key]) for name in found for key in found["auto"][1]),
        "masters": [value[2] for value in found.values()],
    }


def check_groups(rank: int) -> dict[str, Any]:
    """The ep group, and that the check refuses the mesh torch makes by default."""
    parallel = init_parallel(torch.device("cpu"), 2, 60)
    names = {parallel.fsdp.get_group().group_name, parallel.sparse.get_group("efsdp").group_name}
    own = parallel.ep_group.group_name not in names
    default = torch.distributed.device_mesh.init_device_mesh("cpu", (1, 2), mesh_dim_names=("efsdp", "ep"))
    try:
        check_groups_differ(parallel_module.Parallel(parallel.device, rank, 2, parallel.fsdp, default))
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    return {"own": own, "refused": refused}


def check_buffers(rank: int) -> dict[str, Any]:
    config = run_config(ep=2)
    model, _ = sharded(config)
    table = next(moe.router.tid2eid for moe in moe_modules(model) if hasattr(moe.router, "tid2eid"))
    good = torch.equal(table, hash_table(config.model, 0))
    if rank == 1:
        table[5] = table[5].flip(0)
    try:
        check_buffers_equal(model)
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    return {"good": good, "refused": refused}


def check_not_finite(rank: int) -> dict[str, Any]:
    """Rank 1's loss is NaN: both ranks raise, naming it, and no parameter moves."""
    config = run_config(ep=2)
    model, _ = sharded(config)
    optimizer = make_optimizer(model, config)
    before = parameters(model)
    if rank == 1:
        model.register_forward_hook(lambda module, args, out: out._replace(loss=out.loss * math.nan, lm_loss=out.lm_loss * math.nan))
    try:
        train_step(model, optimizer, config, [whole_batch()[rank]], step=7)
        message = ""
    except FloatingPointError as error:
        message = str(error)
    after = parameters(model)
    return {"message": message, "moved": any(not torch.equal(before[name], after[name]) for name in before)}


def check_bf16(rank: int) -> dict[str, Any]:
    """bf16 policy: dtypes that the forward sees, finite gradients in fp32, fp32 master weights."""
    config = run_config(ep=2, dtype="bf16")
    model, _ = sharded(config)
    seen: dict[str, set] = {"island": set(), "other": set()}

    def look(module, args):
        kind = "island" if getattr(module, "fp32_island", False) else "other"
        seen[kind] |= {str(param.dtype) for param in module.parameters(recurse=False)}

    for module in model.modules():
        if not isinstance(module, FSDPModule) or getattr(module, "fp32_island", False):
            module.register_forward_pre_hook(look)
    out = model(*whole_batch()[rank], num_valid_tokens=VALID)
    out.loss.backward()
    grads = gradients(model)
    return {
        "seen": seen,
        "streams": str(out.logits.dtype),
        "finite": all(g.isfinite().all() for g in grads.values()),
        "grad_dtypes": {str(g.dtype) for g in grads.values()},
        "master": {str(p.dtype) for p in model.parameters()},
    }


def check_evaluation(rank: int) -> dict[str, Any]:
    """Rank 0 holds 37 labelled bytes and rank 1 only 5: the mean over bytes, not the mean of the ranks' means."""
    config = run_config(ep=2)
    model, _ = sharded(config)
    batches = whole_batch()
    for (_, labels), keep in zip(batches, (37, 5)):
        labels.view(-1)[keep + 3 :] = -100
    got = evaluate(model, [batches[rank]])
    plain = plain_model(config)
    with torch.no_grad():
        nats = [float(plain(ids, labels, num_valid_tokens=1).lm_loss) for ids, labels in batches]
    means = (nats[0] / 37 + nats[1] / 5) / 2
    return {"got": got, "want": sum(nats) / 42 / math.log(2), "mean_of_means": means / math.log(2)}


def check_timeouts(rank: int) -> dict[str, Any]:
    """A rank that compiles for longer than the short timeout does not end the run before the first step; a stall after it does."""
    parallel = init_parallel(torch.device("cpu"), 2, 60)
    group = parallel.ep_group
    set_timeouts(parallel, 30.0)
    if rank == 1:
        time.sleep(2.5)
    dist.all_reduce(torch.ones(1), group=group)
    set_timeouts(parallel, 1.0)
    dist.all_reduce(torch.ones(1), group=group)
    stalled = ""
    if rank == 0:
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as error:
            stalled = str(error)
    else:
        time.sleep(2.5)
    return {"stalled": stalled}


def _ep_checks(rank: int, world: int) -> dict[str, Any]:
    checks: dict[str, Callable[[int], Any]] = {
        "gradients_ep2": lambda r: check_gradients(r, ep=2),
        "gradients_fsdp": lambda r: check_gradients(r, ep=1),
        "default_division": check_default_division,
        "short_rank": check_short_rank,
        "idle_expert": check_idle_expert,
        "clipping": check_clipping,
        "tiny_parameters": check_tiny_parameters,
        "accumulation": check_accumulation,
        "recompute": check_recompute,
        "reshard": check_reshard,
        "groups": check_groups,
        "buffers": check_buffers,
        "not_finite": check_not_finite,
        "bf16": check_bf16,
        "evaluation": check_evaluation,
        "timeouts": check_timeouts,  # last: it breaks the connection between the processes
    }
    return {name: check(rank) for name, check in checks.items()}


@pytest.fixture(scope="module")
def checks() -> dict[str, list[Any]]:
    by_rank = run_distributed(_ep_checks, 2, timeout_s=60)
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
    assert checks["timeouts"][0]["stalled"]


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
