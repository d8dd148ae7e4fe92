"""What two gloo processes do for test_trainer_parallel.py: each check runs in both, in one spawn, and returns what its test looks at."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from bench.recompute import saved_bytes
from tests.dist_util import COLLECTIVE_LIMIT
from tests.trainer_util import gradients, parameters, plain_model, ratio, run_config, sharded, tokens, worst
from train_example import parallel as parallel_module
from train_example.moe import hash_table
from train_example.optim import make_optimizer
from train_example.parallel import check_buffers_equal, check_groups_differ, init_parallel, moe_modules, set_timeouts
from train_example.step import evaluate, train_step

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
    model, _ = sharded(config)
    model(*batches[rank], num_valid_tokens=48).loss.backward()
    want, _ = plain_gradients(config, batches, 48)
    return {"worst": worst(gradients(model), want)}


def check_idle_expert(rank: int) -> dict[str, Any]:
    """No token of any rank goes to expert 3 (which rank 1 holds), and none of rank 0's own to rank 1 at all."""
    config = run_config(ep=2)
    model, _ = sharded(config)
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
    parallel = init_parallel(torch.device("cpu"), 2, COLLECTIVE_LIMIT)
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
    parallel = init_parallel(torch.device("cpu"), 2, COLLECTIVE_LIMIT)
    group = parallel.ep_group
    if rank == 1:
        time.sleep(2.5)
    dist.all_reduce(torch.ones(1), group=group)
    set_timeouts(parallel, 1.0)
    stalled = ""
    if rank == 0:
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as error:
            stalled = str(error)
    # rank 1 is there until rank 0 has given up: what ended the wait was the limit, not the end of a process
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.set("given_up", "yes")
    else:
        store.wait(["given_up"], datetime.timedelta(seconds=COLLECTIVE_LIMIT))
    return {"stalled": stalled}


def ep_checks(rank: int, world: int) -> dict[str, Any]:
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
