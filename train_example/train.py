"""Train a DeepSeek-V4-style model: FSDP2 + expert parallelism, on CPU (gloo), CUDA (NCCL) or NPU (HCCL) by the same code.

    python -m train_example.train --steps 100                                       one process
    torchrun --standalone --nproc-per-node 2 -m train_example.train --steps 100     two processes, experts split between them

Here: the model's making, the run folder, the loop. A step is in step.py, sharding in parallel.py, settings in run_config.py.
"""

import json
import os
import platform
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from kernel_runtime import forbid_compile, interpreting
from kernel_runtime.warmup import warmup
from mhc_ops import RecomputePlan, plan
from train_example import checkpoint, hf_checkpoint, metrics
from train_example.compiled import compile_parts
from train_example.data import Dataset, Text, find_files, write_default_text
from train_example.model import DeepSeekV4, fp32_islands
from train_example.optim import make_optimizer
from train_example.parallel import (
    Parallel,
    broadcast_parameters,
    check_buffers_equal,
    check_experts,
    init_parallel,
    parallelize,
    pick_device,
    set_timeouts,
    shutdown,
    together,
)
from train_example.run_config import MHC_RECOMPUTE, ConfigError, RunConfig, parse
from train_example.step import evaluate, train_step
from train_example.trace import STEP, annotate_parts

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PRODUCTS = ("config.json", "environment.json", "train.log", "metrics.jsonl", "curves.png", "text", "checkpoints", "traces")


def warm_kernels(config: RunConfig, device: torch.device) -> bool:
    """Compile and load every kernel of the model, once a host, before the first collective can time out; whether it was done."""
    if device.type == "cpu" or config.impl == "eager":
        return False
    # every process would print the same lines
    log = print if os.environ.get("LOCAL_RANK", "0") == "0" else None
    warmup(config.model, device, dtype=config.dtype, barrier=False, log=log)
    return True


def recompute_plan(config: RunConfig) -> RecomputePlan:
    """The blocks of layers of recompute = mhc (one layer each) and cross-layer, and what they keep of one forward pass."""
    sizes, one = config.model, 1 if config.recompute == "mhc" else None
    tokens, itemsize = config.batch * config.seq_len, DTYPES[config.dtype].itemsize
    return plan(sizes.num_layers, sizes.hc_mult, sizes.hidden_size, tokens, itemsize, layers_per_block=one)


def build_model(config: RunConfig, parallel: Parallel, fill: bool = True) -> nn.Module:
    """The sharded model. Rank 0 makes the weights (from the seed, whatever the number of processes), the others get their shards.

    fill = False leaves the weights undefined, for a checkpoint to be loaded.
    """
    try:
        with torch.device("meta"):
            model = DeepSeekV4(config.model, impl=config.impl)
    except (RuntimeError, OverflowError) as error:  # more elements than a tensor can have
        raise ConfigError(f"no tensor has room for these sizes of the model: {str(error).splitlines()[0]}") from error
    full_state = None
    if fill and parallel.rank == 0:
        torch.manual_seed(config.seed)
        full_state = DeepSeekV4(config.model, impl=config.impl).state_dict()
    if config.recompute in MHC_RECOMPUTE:
        model.recompute_blocks = recompute_plan(config).blocks
    if config.compile:
        compile_parts(model, config.impl, parallel.device)
    parallelize(model, fp32_islands(model), parallel, DTYPES[config.dtype], config.recompute, config.prefetch, config.reshard)
    model.to_empty(device=parallel.device)
    model.init_buffers(parallel.device)
    if fill:
        broadcast_parameters(model, full_state, parallel)
        check_buffers_equal(model)
    return model


@torch.no_grad()
def nudge(weight: DTensor, ulps: int) -> None:
    """Move the largest element of `weight` (fp32) away from zero by `ulps` units in the last place, in place. Collective."""
    full = weight.full_tensor()
    bits = full.view(-1)[full.abs().argmax()].view(torch.int32)
    bits += ulps
    weight.copy_(distribute_tensor(full, weight.device_mesh, weight.placements, src_data_rank=None))


def be_deterministic() -> None:
    """Same input, same bits, in this process from now on."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats its bits only with a fixed workspace
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # one more launch for every tensor; nothing reads what it did not write


def run_folder(config: RunConfig) -> Path:
    """The folder that `out` names, or a new one named after rank 0's clock."""
    name = [config.out or time.strftime("runs/%Y%m%d-%H%M%S")]
    dist.broadcast_object_list(name, src=0)
    return Path(name[0])


def check_run_folder(config: RunConfig, out: Path, resume: Path | None) -> None:
    """Refuse whatever would mix two runs in one folder, or lose one unasked."""
    own = resume is not None and resume.resolve().is_relative_to(out.resolve())
    if own and config.overwrite:
        raise ConfigError(f"overwrite would delete {resume}, which is to be resumed; leave one of them out")
    if resume and own and resume.resolve() != checkpoint.find(str(out), out).resolve():
        raise ConfigError(f"{out} has checkpoints behind {resume}; name another folder with --out, or use --resume latest")
    if (out / "metrics.jsonl").exists() and not (own or config.overwrite):
        raise ConfigError(f"{out} holds a run already; name another folder with --out, or use --resume latest or --overwrite")


def prepare_run_folder(config: RunConfig, out: Path, resume: Path | None, parallel: Parallel) -> tuple[Text, dict[str, Any], bool]:
    """Rank 0 makes the folder and echoes the settings; every rank opens the text.

    Returns the text, what identifies the data, and whether a resume is on the checkpoint's data.
    """
    # every rank has looked before rank 0 changes anything
    together(lambda: check_run_folder(config, out, resume))
    files = together(lambda: find_files(config.data) if config.data else [])
    default = out / "text" / "language_reference.txt"

    def make() -> None:
        if config.overwrite:
            for name in PRODUCTS:
                shutil.rmtree(out / name) if (out / name).is_dir() else (out / name).unlink(missing_ok=True)
        out.mkdir(parents=True, exist_ok=True)
        (out / "config.json").write_text(json.dumps(config.to_dict(), indent=1) + "\n")
        if not files and not default.exists():
            write_default_text(default)

    def read(paths: list[Path]) -> tuple[Text, dict[str, Any], bool]:
        text = together(lambda: Text(paths))
        lengths: list[Any] = [None] * parallel.world
        dist.all_gather_object(lengths, len(text))
        if len(set(lengths)) > 1:
            raise ConfigError(f"the ranks read different texts under {config.data or default}: {lengths} tokens, rank 0 first")
        digest = [text.fingerprint() if parallel.rank == 0 else None]
        dist.broadcast_object_list(digest, src=0)
        data = {"text_sha256": digest[0], "seed": config.seed, "seq_len": config.seq_len, "eval_fraction": config.eval_fraction}
        return text, data, together(lambda: checkpoint.check_data(resume, data, config.new_data) if resume else True)

    found = read(files) if files else None  # before anything of an earlier run is changed
    together(lambda: make() if parallel.rank == 0 else None)
    text, data, same = found or read([default])
    if parallel.rank == 0:
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        where = {"device": str(parallel.device.type), "processes": parallel.world, "ep": parallel.sparse.size(1)}
        record = {**versions, **where, "text_tokens": len(text), "text_sha256": data["text_sha256"]}
        (out / "environment.json").write_text(json.dumps(record, indent=1) + "\n")
    return text, data, same


def due(every: int, step: int, last: int) -> bool:
    """Whether something that happens each `every` steps (-1: after the last one alone; 0: never) happens after this step."""
    return every != 0 and (step == last or (every > 0 and step % every == 0))


def train(config: RunConfig) -> dict[str, Any]:
    """Run a whole training on all processes; returns the last step's row of metrics.jsonl."""
    device = pick_device(config.device)
    if config.swap_optimizer and device.type == "cpu":
        raise ConfigError("swap_optimizer keeps AdamW's moments in host memory; on a CPU they are there already, so leave it off")
    if config.impl == "triton" and device.type == "cpu" and not interpreting():
        raise ConfigError("impl = triton cannot run on a CPU (but for tests, with TRITON_INTERPRET=1); use eager or auto")
    if config.deterministic:
        be_deterministic()
    warmed = warm_kernels(config, device)
    parallel = init_parallel(device, config.ep, config.startup_timeout, config.ep_group == "own")
    torch.manual_seed(config.seed + parallel.rank)  # for whatever may draw numbers in a forward; the weights have a seed of their own
    out = run_folder(config)
    check_experts(config.model.num_experts, parallel)
    sizes = {name: value for name, value in config.to_dict()["model"].items() if name != "preset"}
    progress: dict[str, Any] = {"step": 0, "tokens": 0, "data_tokens": 0, "loss_ema": None}
    resume = together(lambda: checkpoint.find(config.resume, out / "checkpoints") if config.resume else None)
    if resume:
        progress = together(lambda: checkpoint.read_progress(resume, sizes))

    export = Path(config.save_hf) if config.save_hf else None
    together(lambda: hf_checkpoint.check_target(export) if export else None)

    text, data, same_data = prepare_run_folder(config, out, resume, parallel)
    dataset = Dataset(text, config.seq_len, config.eval_fraction, config.seed)
    if not same_data:
        progress["data_tokens"] = 0
    model = build_model(config, parallel, fill=not (resume or config.load_hf))
    origin = hf_checkpoint.load_folder(Path(config.load_hf), model) if config.load_hf and not resume else ""
    optimizer = make_optimizer(model, config)
    if resume:
        checkpoint.load(resume, model, optimizer)
        check_buffers_equal(model)
    if config.nudge:
        nudge(model.head.weight, config.nudge)

    log = together(lambda: metrics.MetricsLog(out, config.steps, progress["step"]) if parallel.rank == 0 else None)
    if log:
        parameters = sum(param.numel() for param in model.parameters())
        where = f"{parallel.world} x {device.type}, ep {parallel.sparse.size(1)}"
        reading = f"text of {len(text)} tokens, {dataset.train_tokens} to train on"
        log.say(f"{out} | {parameters / 1e6:.2f} M parameters | {where} | {reading}" + (f" | resumed from {resume}" if resume else ""))
        if origin:
            log.say(origin)
        if not same_data:
            log.say("on other data than the checkpoint's, from its beginning; what is held out now may have been trained on")
        if progress["step"] >= config.steps:
            log.say(f"nothing left to do: {progress['step']} steps are done and --steps is {config.steps}")
    flops = metrics.flops_per_token(config.model, config.seq_len)
    peak = metrics.peak_flops(device, config.dtype, config.peak_tflops)
    local_tokens = config.seq_len * config.batch * config.accumulate
    if config.profile:
        annotate_parts(model)
    trace = Trace(config.profile_range(), out / "traces", parallel)
    row: dict[str, Any] = {}

    for step in range(progress["step"] + 1, config.steps + 1):
        trace.before(step)
        started = time.perf_counter()
        first = progress["data_tokens"] // config.seq_len + parallel.rank * config.batch
        starts = [first + micro * parallel.world * config.batch for micro in range(config.accumulate)]
        with torch.profiler.record_function(f"{STEP}{step}"):
            result = train_step(model, optimizer, config, [dataset.batch(start, config.batch) for start in starts], step)
            trace.finish()
        seconds = time.perf_counter() - started
        if not row:
            set_timeouts(parallel, config.step_timeout)  # nothing compiles from now on
            if warmed:
                forbid_compile("warn")
        ema = progress["loss_ema"]
        ema = result["loss"] if ema is None else metrics.EMA_DECAY * ema + (1 - metrics.EMA_DECAY) * result["loss"]
        seen = local_tokens * parallel.world
        progress = {"step": step, "tokens": progress["tokens"] + seen, "data_tokens": progress["data_tokens"] + seen, "loss_ema": ema}
        rate = local_tokens / seconds
        row = {**progress, **result, "ms": seconds * 1000, "tokens_per_s": rate, "mfu": flops * rate / peak if peak else None}
        row["memory_gib"] = metrics.memory_gib(device)
        if log:
            log.row(row)
            if step == 1 or step == config.steps or step % config.log_every == 0:
                log.say(log.line(row))
        if due(config.save_every, step, config.steps):  # before the evaluation: whatever happens there, the step is not lost
            checkpoint.save(out / "checkpoints", model, optimizer, progress, sizes, config.keep, data)
        if due(config.eval_every, step, config.steps) and config.eval_fraction:
            held_out = dataset.held_out(parallel.rank, parallel.world, config.batch, config.eval_sequences)
            row["eval_bpb"] = evaluate(model, held_out)
            if log:
                log.evaluation(row)
    trace.before(config.steps + 1)
    if export:
        files = hf_checkpoint.save_folder(export, model, config.model)
        if log:
            log.say(f"checkpoint for transformers: {export}, {len(files)} file{'s' * (len(files) > 1)} of weights in fp32")
    if log:
        log.close()
    return row


class Trace:
    """torch.profiler over a range of steps; each rank writes one Chrome trace."""

    def __init__(self, steps: range, folder: Path, parallel: Parallel) -> None:
        self.steps, self.path = steps, folder / f"steps_{steps.start}_{steps.stop}_rank{parallel.rank}.json"
        self.profiler: torch.profiler.profile | None = None

    def before(self, step: int) -> None:
        if step in self.steps and self.profiler is None:
            self.profiler = torch.profiler.profile(acc_events=True)
            self.profiler.start()
        elif step not in self.steps and self.profiler is not None:
            self.profiler.stop()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.profiler.export_chrome_trace(str(self.path))
            self.profiler = None

    def finish(self) -> None:
        """To be called at the end of a step: what the device still has to do belongs to the step that is traced."""
        if self.profiler is not None and torch.accelerator.is_available():
            torch.accelerator.synchronize()


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status: 0, 2 for settings that cannot work, 1 for a loss that is not finite, 130 for Ctrl-C.

    Each of these is said in one line, by the first process of a host (all processes of a host end for the same reason). So is the loss of
    another process, with status 1, by each one that notices. Anything else is an exception with its traceback, and status 1.
    """
    try:
        train(parse(argv))
    except (ConfigError, FloatingPointError) as error:
        _complain(f"error: {error}")
        if dist.is_initialized():
            dist.destroy_process_group()
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        _complain("interrupted; --resume latest goes on from the last checkpoint (--save-every says how often there is one)")
        return 130
    except RuntimeError as error:
        if not connection_lost(error):
            raise
        reason = str(error).splitlines()[0]
        # from every process: each may have noticed in another way, and the first of the host may be the one that is gone
        print(
            f"error: rank {dist.get_rank()}: another process died, or did not answer within --step-timeout seconds; "
            f"--resume latest goes on from the last checkpoint ({reason})",
            file=sys.stderr,
            flush=True,
        )
        return 1
    shutdown()
    return 0


def connection_lost(error: RuntimeError) -> bool:
    """Whether a collective failed. NCCL's failures mostly end the process from a thread of torch's; gloo's have no type of their own."""
    return dist.is_initialized() and (isinstance(error, dist.DistError) or "/gloo/" in str(error))


def _complain(message: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    status = main()
    if status == 1 and dist.is_initialized():
        os._exit(status)  # taking down a group whose peer is gone could wait for it
    sys.exit(status)
