"""Parallelism of the trainer: FSDP2 over all ranks for the dense parameters, expert parallelism x FSDP2 for the experts.

    mesh "fsdp"            all W ranks                     dense parameters, sharded on dim 0
    mesh "efsdp" x "ep"    W = efsdp * ep, ep innermost    experts [E, ...]: dim 0 (the expert) over ep, dim 1 over efsdp (dim 0 again
                                                          where efsdp does not divide dim 1: FSDP splits unevenly along dim 0 alone)

Every parameter is thus sharded over all W ranks, exactly once. The rules that keep the numbers right:

- Gradients are SUMMED, never averaged: every loss is a local sum divided by the global number of valid tokens, so the sum over ranks
  is the gradient of the global mean. FSDP's default division (by the size of its own mesh) would leave expert gradients ep times too
  large.
- `ep` has a process group of its own. By default a mesh axis as large as the world shares the WORLD group with FSDP, and the experts'
  all-to-all would queue behind FSDP's all-gathers. (`--ep-group shared` has it so, for a trace that shows the difference.)
- A layer asks for the next layers' weights before it runs (`prefetch_layers`): a MoE waits for its counts on the host, so the host is
  never ahead by more than a part of a layer, and all-gathers that are asked for when a layer begins would lie bare.
- Where a group is one process there is nothing to gather or to reduce, and FSDP is left with its casts: bf16 weights are kept from the
  forward to the backward pass (`--reshard`), and gradients are cast in place.
- The fp32 islands are FSDP units of their own with an fp32 policy, so that a bf16 policy on the layers does not cast them. No unit casts
  its inputs: a layer also gets the fp32 rope tables, and the model casts where it means to.
"""

import datetime
import math
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Replicate

from train_example.dispatch import RoutingTape
from train_example.gradients import SumGradients
from train_example.run_config import ConfigError

T = TypeVar("T")
BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


@dataclass(frozen=True)
class Parallel:
    """Where this process stands: its device and the meshes. Make it with `init_parallel`, end it with `shutdown`."""

    device: torch.device
    rank: int
    world: int
    fsdp: DeviceMesh
    sparse: DeviceMesh

    @property
    def ep_group(self) -> dist.ProcessGroup:
        return self.sparse.get_group("ep")

    def groups(self) -> list[dist.ProcessGroup]:
        """The distinct process groups in use, the world's first."""
        found = [dist.group.WORLD, self.fsdp.get_group(), self.sparse.get_group("efsdp"), self.ep_group]
        return list({group.group_name: group for group in found}.values())


def pick_device(name: str) -> torch.device:
    """`auto` is the accelerator torch finds, else the CPU; with several processes a host each takes the one of its LOCAL_RANK."""
    if name == "npu" or (name == "auto" and not torch.cuda.is_available()):
        try:
            import torch_npu  # noqa: F401  (registers the "npu" device with torch)
        except ImportError as error:
            if name == "npu":
                raise ConfigError("device = npu needs the torch_npu package, which is not installed here") from error
    kind = name
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator()
        kind = accelerator.type if accelerator is not None and accelerator.type in BACKENDS else "cpu"
    if kind not in BACKENDS:
        raise ConfigError(f"device must be auto, cpu, cuda or npu, got {name!r}")
    if kind == "cpu":
        return torch.device("cpu")
    if not getattr(torch, kind).is_available():
        raise ConfigError(f"device = {kind} was asked for, but torch finds none here")
    found, wanted = torch.accelerator.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if wanted > found:
        raise ConfigError(f"{wanted} processes on this host, but torch finds {found} {kind} devices here; each process needs one of its own")
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
    torch.accelerator.set_device_index(device.index)
    return device


def init_parallel(device: torch.device, ep: int, timeout_s: float, own_ep_group: bool = True) -> Parallel:
    """Join the process group (the launcher's, or one of a single process) and build the meshes.

    Args:
        device: of this process; decides the backend (gloo, NCCL, HCCL).
        ep: expert-parallel size; must divide the number of processes. -1 = all of them.
        timeout_s: seconds a collective may take before the process gives up; see `set_timeouts`.
        own_ep_group: False leaves the ep axis whatever group the mesh has for it, which may be FSDP's.
    """
    backend, timeout = BACKENDS[device.type], datetime.timedelta(seconds=timeout_s)
    # behind a timeout NCCL's watchdog waits four times this before it ends the process, a minute by default
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1000")
    if not dist.is_initialized():
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        else:  # started alone: a group of one process
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    world = dist.get_world_size()
    ep = world if ep == -1 else ep
    if ep < 1 or world % ep:
        raise ConfigError(f"ep = {ep} does not divide the {world} processes; expert parallelism needs processes = efsdp * ep")
    fsdp = init_device_mesh(device.type, (world,), mesh_dim_names=("fsdp",))
    override = {"backend_override": {"ep": backend}} if own_ep_group else {}
    sparse = init_device_mesh(device.type, (world // ep, ep), mesh_dim_names=("efsdp", "ep"), **override)
    parallel = Parallel(device, dist.get_rank(), world, fsdp, sparse)
    if own_ep_group:
        check_groups_differ(parallel)
    return parallel


def check_groups_differ(parallel: Parallel) -> None:
    """Raise if the expert-parallel group is one of FSDP's: its all-to-all would wait behind FSDP's all-gathers."""
    ep = parallel.ep_group.group_name
    for name, group in (("fsdp", parallel.fsdp.get_group()), ("efsdp", parallel.sparse.get_group("efsdp"))):
        if group.group_name == ep:
            raise RuntimeError(f"the ep group is the {name} group {ep!r}; the experts' all-to-all needs a group of its own")


def set_timeouts(parallel: Parallel, seconds: float) -> None:
    """Set how long a collective may take. Long before the first step (kernels compile, maybe on one rank alone), short after it."""
    for group in parallel.groups():
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds), group)


def barrier() -> None:
    """Wait for every rank. NCCL and HCCL do it on this process's device, which they would otherwise guess, and warn."""
    on_cpu = dist.get_backend() == BACKENDS["cpu"]
    dist.barrier(device_ids=None if on_cpu else [torch.accelerator.current_device_index()])


def shutdown() -> None:
    """Wait for every rank, then take the groups down (a rank that leaves early makes the others' last collective fail)."""
    if dist.is_initialized():
        barrier()
        dist.destroy_process_group()


def check_experts(num_experts: int, parallel: Parallel) -> None:
    ep = parallel.sparse.size(1)
    if num_experts % ep:
        fits = math.gcd(num_experts, parallel.sparse.size(0) * ep)
        possible = ", ".join(str(n) for n in range(1, fits + 1) if fits % n == 0)
        raise ConfigError(
            f"ep = {ep} does not divide the {num_experts} experts; every rank must hold the same number of them. Possible here: --ep {possible}"
        )


def together(action: Callable[[], T]) -> T:
    """action() on every rank. If it cannot work on one of them, all of them raise the same ConfigError, which names the rank. Collective.

    For whatever may differ between hosts, such as files: a rank that gave up alone would leave the others waiting for it.
    """
    result, reason = None, None
    try:
        result = action()
    except (ConfigError, OSError) as error:
        reason = str(error)
    reasons: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    failed = {rank: text for rank, text in enumerate(reasons) if text is not None}
    if failed:
        first = min(failed)
        everywhere = set(reasons) == {failed[first]}
        raise ConfigError(failed[first] if everywhere else f"rank {first}: {failed[first]}")
    return result  # type: ignore[return-value]  # None only where T is None


def parallelize(
    model: nn.Module,
    islands: list[nn.Module],
    parallel: Parallel,
    param_dtype: torch.dtype,
    recompute: str = "none",
    prefetch: int = 1,
    reshard: str = "auto",
) -> None:
    """Shard `model` in place: experts over (efsdp, ep), then the fp32 islands, then each layer, then the root.

    Args:
        model: DeepSeekV4, usually on the meta device; `model.layers[i].moe` has `experts` (stacked weights [E, ...]) and `ep_group`.
        islands: modules whose parameters stay fp32 in the forward pass whatever `param_dtype` is.
        param_dtype: of the parameters in the forward pass; master weights and the gradient reduction stay fp32.
        recompute: "layer" to recompute each layer's activations in the backward pass; the model itself sees to "mhc" and "cross-layer".
        prefetch: see `prefetch_layers`.
        reshard: "always" gives gathered weights up after the forward pass and gathers them again in the backward pass; "never" keeps them,
            2 bytes a parameter in bf16; "auto" keeps those that no other process has a part of.
    """
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    fp32 = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False)
    efsdp = parallel.sparse["efsdp"]

    def shard(unit: nn.Module | list[nn.Module], mesh: DeviceMesh, mp_policy: MixedPrecisionPolicy, placement: Any = None) -> None:
        # None: all but the root give them up, which the backward pass begins with
        keep = reshard == "never" or (reshard == "auto" and mesh.size() == 1)
        after_forward = False if keep else True if reshard == "always" else None
        fully_shard(unit, mesh=mesh, mp_policy=mp_policy, shard_placement_fn=placement, reshard_after_forward=after_forward)
        sum_gradients(unit[0] if isinstance(unit, list) else unit, mesh)

    def expert_shard(param: nn.Parameter) -> Shard:
        return Shard(1 if param.shape[1] % efsdp.size() == 0 else 0)

    for moe in moe_modules(model):
        _shard_experts(moe.experts, parallel)
        moe.ep_group = parallel.ep_group
        shard(moe.experts, efsdp, policy, expert_shard)
    # FSDP warns of a view that a unit returns, for one could write into it in place; the model writes nowhere in place
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(.*\) returned a view tensor")
    left, layers = list(islands), []
    for unit in (*layer_modules(model), model):
        inside = set(unit.modules())
        # the islands of a layer make one unit: a unit each would be a dozen tiny all-gathers a layer
        mine, left = [m for m in left if m in inside], [m for m in left if m not in inside]
        if mine:
            shard(mine, parallel.fsdp, fp32)
        if recompute == "layer" and unit is not model:
            recompute_in_backward(unit)
        shard(unit, parallel.fsdp, policy)
        if unit is not model:
            # in the order of use: mHC is the first thing in a layer and the experts are the last
            layers.append([*mine[:1], unit, *(moe.experts for moe in moe_modules(unit))])
    if prefetch and parallel.world > 1:
        prefetch_layers(model, layers, prefetch)


def prefetch_layers(model: nn.Module, layers: list[list[nn.Module]], depth: int) -> None:
    """All-gathers of the next `depth` layers are issued as soon as a layer has its own weights, in forward and backward.

    layers: of each layer the FSDP units, in the order of use; the one that holds the others is the second.
    """
    owners = [model, *(units[1] for units in layers)]
    for i, owner in enumerate(owners):
        owner.set_modules_to_forward_prefetch([unit for units in layers[i : i + depth] for unit in units])
    for i, units in enumerate(layers):
        # the last to be used is the first to be needed
        units[1].set_modules_to_backward_prefetch([unit for before in layers[max(0, i - depth) : i][::-1] for unit in before[::-1]])


def layer_modules(model: nn.Module) -> list[nn.Module]:
    """The units that are sharded and recomputed one by one: the layers and the MTP block."""
    return [*model.layers, *model.mtp]


def moe_modules(model: nn.Module) -> list[nn.Module]:
    """In the order of `expert_counts` in the model's output."""
    return [module for module in model.modules() if hasattr(module, "ep_group")]


def _shard_experts(experts: nn.Module, parallel: Parallel) -> None:
    for name, param in list(experts.named_parameters(recurse=False)):
        if param.dim() < 2:
            raise ValueError(f"expert weight {name} {tuple(param.shape)} must have the experts in dim 0 and at least one dim more")
        sharded = distribute_tensor(param.data, parallel.sparse["ep"], [Shard(0)], src_data_rank=None)
        experts.register_parameter(name, nn.Parameter(sharded, requires_grad=param.requires_grad))


def sum_gradients(unit: nn.Module, mesh: DeviceMesh) -> None:
    """Make an FSDP unit sum its gradients. Factor 1.0 alone asks for PREMUL_SUM, which gloo and HCCL lack: hence forced SUM."""
    unit.set_force_sum_reduction_for_comms(True)
    unit.set_custom_reduce_scatter(SumGradients(mesh.size()))
    if mesh.size() > 1:  # one process has nothing to divide by, and FSDP would divide by 1.0
        unit.set_gradient_divide_factor(1.0)


def recompute_in_backward(layer: nn.Module) -> None:
    """Keep only the layer's inputs and run its forward again in the backward pass. Names in the state dict do not change.

    The second forward knows the routing of the first: it exchanges no counts and waits for nothing on the host.
    """
    inner = layer.forward

    def contexts():
        tape = RoutingTape()
        return tape.record(), tape.replay()

    def forward(*args, **kwargs):
        return torch.utils.checkpoint.checkpoint(inner, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    layer.forward = forward


def broadcast_parameters(model: nn.Module, full_state: dict[str, Tensor] | None, parallel: Parallel) -> None:
    """Fill the sharded parameters and persistent buffers of `model` from rank 0's full state dict (None on the other ranks).

    One tensor at a time, so no rank but 0 ever holds more than one full tensor.
    """
    state = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    if parallel.rank == 0 and set(state) != set(full_state or {}):
        raise ValueError(f"state dict does not fit the model: differing names {sorted(set(state) ^ set(full_state or {}))[:8]}")
    for name, target in state.items():
        if parallel.rank == 0:
            full = full_state[name].detach().to(parallel.device, target.dtype).contiguous()
            if full.shape != target.shape:
                raise ValueError(f"{name}: shape {tuple(full.shape)} in the state dict, {tuple(target.shape)} in the model")
        else:
            full = torch.empty(target.shape, dtype=target.dtype, device=parallel.device)
        dist.broadcast(full, src=0)
        if isinstance(target, DTensor):
            full = distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None).to_local()
            target = target.to_local()
        with torch.no_grad():
            target.copy_(full)


def check_buffers_equal(model: nn.Module) -> None:
    """Raise if a buffer (hash-router table, rope tables) differs from rank 0's: ranks would then route or rotate differently."""
    for name, buffer in model.named_buffers():
        reference = buffer.detach().clone().contiguous()
        dist.broadcast(reference, src=0)
        same = torch.tensor(float(torch.equal(reference, buffer)), device=buffer.device)
        dist.all_reduce(same, op=dist.ReduceOp.MIN)
        if not same.item():
            raise RuntimeError(f"buffer {name} is not the same on every rank")


@torch.no_grad()  # to_local is a plain attribute then
def gradient_sumsq(params: Iterable[nn.Parameter]) -> tuple[Tensor, Tensor]:
    """Squared gradient norm of the dense and of the expert parameters, each summed over this rank's shards: two fp32 scalars.

    Every parameter is sharded over all ranks exactly once (checked), so the sum over all ranks is the squared norm of the whole.
    """
    shards: tuple[list[Tensor], list[Tensor]] = ([], [])
    for param in params:
        if param.grad is None:
            continue
        grad = param.grad
        if isinstance(grad, DTensor):
            sharded = [p for p, n in zip(grad.placements, grad.device_mesh.shape) if n > 1]
            if any(isinstance(p, Replicate) or p.is_partial() for p in sharded):
                raise RuntimeError(f"gradient with placements {grad.placements} is not fully sharded; ranks would count it twice")
            shards[int(grad.device_mesh.ndim > 1)].append(grad.to_local())
        else:
            raise RuntimeError("gradient of a parameter that is not sharded; every rank would count it")
    zero = torch.zeros((), device=next((s.device for group in shards for s in group), None))
    # one pass over the gradients, and no copy of them; an empty shard (a parameter smaller than the mesh) adds 0
    return tuple(torch.nn.utils.get_total_norm(group).square() if group else zero for group in shards)
