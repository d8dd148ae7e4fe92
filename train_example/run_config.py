"""Settings of a run: one frozen dataclass, the command line made from it, and config files.

Precedence: defaults < `--config FILE` (JSON or TOML) < command line. Unknown keys are refused, never ignored.
Sizes of the model are settings too: `--model tiny --model.hidden_size 128`, or in a file a table `model` with `preset` and overrides.
"""

import argparse
import dataclasses
import difflib
import math
import os
import re
import sys
import tomllib
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from train_example.config import PRESETS, ModelConfig
from train_example.files import parse_json, table
from train_example.hf_config import config_from_folder, config_to_hf

IMPLS = ("auto", "eager", "triton")
RESHARD = ("auto", "always", "never")
MHC_RECOMPUTE = ("mhc", "cross-layer")
RECOMPUTE = ("none", "layer", *MHC_RECOMPUTE)
LONGEST_TIMEOUT = 31536000.0  # seconds; torch counts them in another unit, in which much more would not fit


class ConfigError(ValueError):
    """A setting that cannot work; the message is meant for the person who typed it and needs no traceback."""


def _setting(default: Any, text: str, choices: tuple[str, ...] | None = None) -> Any:
    return field(default=default, metadata={"help": text, "choices": choices})


@dataclass(frozen=True)
class RunConfig:
    """Every setting of a run; `metadata["help"]` of a field is its line in `--help`."""

    out: str = _setting("", "folder of the run: log, metrics, curves, checkpoints; empty = runs/DATE-TIME")
    overwrite: bool = _setting(False, "delete an earlier run in that folder first")
    preset: str = _setting("tiny", "sizes of the model before single ones are changed", tuple(PRESETS))
    model: ModelConfig = field(default=PRESETS["tiny"], metadata={"help": "sizes of the model", "choices": None})

    load_hf: str = _setting("", "checkpoint folder of transformers to start from; its config.json gives the sizes, in place of --model")
    save_hf: str = _setting("", "folder to write at the end, a checkpoint that transformers loads, in fp32; empty = none")

    data: str = _setting("", "text file or folder of files, read as bytes; empty = the language reference that ships with Python")
    eval_fraction: float = _setting(0.1, "share of the text, taken from its end, that is held out; 0 to 0.5")
    seq_len: int = _setting(128, "tokens of a sequence (1 token = 1 byte)")
    batch: int = _setting(16, "sequences a process takes in one forward pass")
    accumulate: int = _setting(1, "forward and backward passes a step; a step sees processes x accumulate x batch sequences")

    steps: int = _setting(100, "optimizer steps of the whole run, those before a resume included")
    lr: float = _setting(4e-3, "peak learning rate of AdamW")
    min_lr: float = _setting(0.1, "learning rate of the last step, as a share of the peak (cosine in between)")
    warmup_steps: int = _setting(20, "steps of linear warmup of the learning rate")
    weight_decay: float = _setting(0.1, "AdamW's decoupled weight decay, on matrices alone")
    beta1: float = _setting(0.9, "AdamW's decay of the first moment, per step")
    beta2: float = _setting(0.95, "AdamW's decay of the second moment, per step")
    adam_eps: float = _setting(1e-8, "AdamW's epsilon")
    clip: float = _setting(1.0, "largest global gradient norm; -1 = no clipping (the norm is still logged)")
    balance: float = _setting(1e-2, "step by which a router's selection bias moves towards experts with little load; 0 = never")
    seed: int = _setting(0, "seed of the weights and of the order of the data")

    device: str = _setting("auto", "auto = the accelerator torch finds, else the CPU", ("auto", "cpu", "cuda", "npu"))
    ep: int = _setting(-1, "processes that share a layer's experts; must divide processes and experts; -1 = all of them")
    ep_group: str = _setting("own", "process group of the experts' all-to-all; shared = FSDP's, only to compare traces", ("own", "shared"))
    prefetch: int = _setting(1, "layers whose weights are gathered ahead of the layer that runs; 0 = as FSDP does on its own")
    reshard: str = _setting(
        "auto",
        "weights gathered for the forward pass: always = gathered again for the backward pass; never = kept for it, 2 bytes a parameter in bf16; "
        "auto = kept where one process holds them all",
        RESHARD,
    )
    tp: int = _setting(1, "tensor parallelism: not supported, must stay 1")
    pp: int = _setting(1, "pipeline parallelism: not supported, must stay 1")
    dtype: str = _setting("fp32", "of the forward's parameters; master weights, gradient sums and islands are fp32", ("fp32", "bf16"))
    impl: str = _setting("auto", "of the ops: Triton kernels, the eager reference, or kernels where there are some", IMPLS)
    deterministic: bool = _setting(False, "torch.use_deterministic_algorithms: same seed, same bits on an accelerator too")
    compile: bool = _setting(False, "torch.compile for what is no kernel: routers and loss; in plain PyTorch also norms, RoPE, SwiGLU, mHC")
    recompute: str = _setting(
        "none",
        "what the backward pass computes again: layer = all of a layer; mhc = mHC's streams inside a layer; cross-layer = those of several",
        RECOMPUTE,
    )
    swap_optimizer: bool = _setting(False, "keep AdamW's moments in host memory: 8 bytes a parameter on the device, not 16; refused on a CPU")

    eval_every: int = _setting(50, "steps between evaluations on the held-out text; -1 = after the last step alone; 0 = never")
    eval_sequences: int = _setting(-1, "held-out sequences an evaluation reads; -1 = all")
    save_every: int = _setting(-1, "steps between checkpoints; -1 = after the last step alone; 0 = never")
    keep: int = _setting(2, "checkpoints to keep, the newest ones; -1 = all")
    resume: str = _setting("", "checkpoint folder to go on from; 'latest' = the newest of this run; empty = start afresh")
    new_data: bool = _setting(False, "resume with another text, seed, seq_len or eval_fraction than the checkpoint's, from its beginning")
    log_every: int = _setting(10, "steps between printed lines (metrics.jsonl has every step)")
    nudge: int = _setting(0, "units in the last place added to one weight at the start, or at a resume: how far rounding carries two runs apart")
    profile: str = _setting("", "START:END, steps to trace with torch.profiler, START included and END not; empty = none")
    startup_timeout: float = _setting(1800.0, "seconds a collective may take until the first step is done (kernels compile)")
    step_timeout: float = _setting(300.0, "seconds a collective may take after that")
    peak_tflops: float = _setting(-1.0, "peak of one device in TFLOP/s; MFU = tokens/s x FLOPs a token / peak; -1 = look the device up")

    def __post_init__(self) -> None:
        reasons = {
            "tp": "the indexer sums scores over all heads, so heads cannot be split over processes",
            "pp": "stages would be uneven: the layer kinds differ in cost, and the MTP block reads the embedding and the head",
        }
        for name, reason in reasons.items():
            if getattr(self, name) != 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: not supported ({reason}); use more processes, or ep, instead")
        if self.recompute in MHC_RECOMPUTE and self.impl == "eager":
            raise ConfigError(f"recompute = {self.recompute} replays mHC's ops, which impl = eager bypasses: use another impl, or recompute = layer")
        if self.save_hf:
            try:
                config_to_hf(self.model)
            except ValueError as error:
                raise ConfigError(f"save_hf: {error}") from error
        if self.new_data and not self.resume:
            raise ConfigError("new_data says how to resume: name a checkpoint with --resume")
        if not self.out and (self.resume == "latest" or self.overwrite):
            raise ConfigError("resume = latest and overwrite need the run's folder: name it with --out")
        if self.resume == "latest" and self.overwrite:
            raise ConfigError("overwrite would delete the run that resume = latest is to go on with; leave one of them out")
        for item in dataclasses.fields(self):
            self._need(not isinstance(value := getattr(self, item.name), float) or math.isfinite(value), item.name, "a finite number")
            self._need(type(value) is not int or abs(value) < 2**63, item.name, "below 2^63")
            self._need(not isinstance(value, str) or "\0" not in value, item.name, "without a character 0")
        for name in ("seq_len", "batch", "accumulate", "steps", "log_every", "lr", "startup_timeout", "step_timeout", "adam_eps"):
            self._need(getattr(self, name) > 0, name, "a number above 0")
        for name in ("startup_timeout", "step_timeout"):
            self._need(getattr(self, name) <= LONGEST_TIMEOUT, name, f"at most {LONGEST_TIMEOUT:g} s, a year")
        self._need(abs(self.nudge) < 2**31, "nudge", "below 2^31, or the sign of the weight would turn")
        self._need(self.batch * self.seq_len < 2**31, "batch", f"fewer than 2^31 / seq_len = {2**31 // self.seq_len} sequences")
        for name in ("warmup_steps", "weight_decay", "min_lr", "balance", "seed", "prefetch"):
            self._need(getattr(self, name) >= 0, name, "0 or more")
        for name in ("beta1", "beta2"):
            self._need(0 <= getattr(self, name) < 1, name, "in [0, 1)")
        for name in ("ep", "keep", "eval_sequences"):
            self._need(getattr(self, name) >= 1 or getattr(self, name) == -1, name, "1 or more, or -1")
        for name in ("eval_every", "save_every"):
            self._need(getattr(self, name) >= -1, name, "1 or more, 0 (never) or -1 (after the last step)")
        self._need(self.clip > 0 or self.clip == -1, "clip", "above 0, or -1 for no clipping")
        self._need(self.peak_tflops > 0 or self.peak_tflops == -1, "peak_tflops", "above 0, or -1 to look the device up")
        self._need(0 <= self.eval_fraction <= 0.5, "eval_fraction", "0 to 0.5")
        self._need(self.model.vocab_size >= 257, "model.vocab_size", "257 or more: 256 bytes and the end-of-file token")
        for item in dataclasses.fields(self):
            choices = item.metadata["choices"]
            self._need(choices is None or getattr(self, item.name) in choices, item.name, f"one of {', '.join(choices or ())}")
        traced = self.profile_range()
        self._need(traced.start <= self.steps, "profile", f"START:END with START up to the last step, {self.steps}")

    def _need(self, holds: bool, name: str, wanted: str) -> None:
        if not holds:
            value = self.model.vocab_size if name == "model.vocab_size" else getattr(self, name)
            raise ConfigError(f"{name} must be {wanted}, got {value!r}")

    def profile_range(self) -> range:
        """The steps to trace, empty for none."""
        if not self.profile:
            return range(0)
        start, colon, end = self.profile.partition(":")
        if not (colon and re.fullmatch("[0-9]{1,15}", start) and re.fullmatch("[0-9]{1,15}", end) and int(start) < int(end)):
            raise ConfigError(f"profile must be START:END with START < END, for example 5:8, got {self.profile!r}")
        return range(int(start), int(end))

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` and `--config` read back."""
        plain = dataclasses.asdict(self)
        plain["model"] = {"preset": plain.pop("preset"), **plain["model"]}
        return plain


def from_dict(settings: dict[str, Any], source: str) -> RunConfig:
    """Build a RunConfig; `source` names the file or command line in error messages."""
    settings, model = _split(settings, source)
    preset = model.pop("preset", settings.pop("preset", "tiny"))
    if not isinstance(preset, str) or preset not in PRESETS:
        raise ConfigError(f"{source}: model preset must be one of {', '.join(PRESETS)}, got {preset!r}")
    kwargs = _checked(RunConfig, settings, source, "")
    overrides = _checked(ModelConfig, model, source, "model.")
    try:
        base = PRESETS[preset]
        # the settings of a run have all sizes: its folder can be resumed when the checkpoint that it began with is gone
        if kwargs.get("load_hf") and overrides.keys() < _types(ModelConfig).keys():
            base = config_from_folder(Path(kwargs["load_hf"]))
        return RunConfig(preset=preset, model=dataclasses.replace(base, **overrides), **kwargs)
    except ConfigError:
        raise
    except ValueError as error:  # ModelConfig's own checks
        raise ConfigError(str(error)) from error


def _split(settings: Any, source: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Copies of the settings without `model`, and of those of the model."""
    try:
        settings = dict(table(settings, source))
        model = settings.pop("model", {})
        return settings, {"preset": model} if isinstance(model, str) else dict(table(model, f"{source}: model"))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _types(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {item.name: hints[item.name] for item in dataclasses.fields(cls) if item.name not in ("model", "preset")}


def _checked(cls: type, settings: dict[str, Any], source: str, prefix: str) -> dict[str, Any]:
    """Refuse unknown keys and wrong types; give ints where a float is wanted, tuples for lists."""
    types, out = _types(cls), {}
    for key, value in settings.items():
        if key not in types:
            near = difflib.get_close_matches(key, types, n=1)
            raise ConfigError(f"{source}: unknown setting {prefix}{key}" + (f"; did you mean {prefix}{near[0]}?" if near else ""))
        want = types[key]
        if type(value) is int and abs(value) >= 2**63:
            raise ConfigError(f"{source}: {prefix}{key} must be below 2^63, got a number of {value.bit_length()} bits")
        if want is float and type(value) is int:
            value = float(value)
        if typing.get_origin(want) is tuple:
            if not isinstance(value, (list, tuple)) or any(type(v) is not int for v in value):
                raise ConfigError(f"{source}: {prefix}{key} must be a list of integers, got {value!r}")
            value = tuple(value)
        elif type(value) is not want:
            raise ConfigError(f"{source}: {prefix}{key} must be of type {want.__name__}, got {value!r}")
        out[key] = value
    return out


def read_file(path: str) -> dict[str, Any]:
    """Settings from a JSON or TOML file."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"config file {path} does not exist")
    try:
        if file.suffix == ".toml":
            return tomllib.loads(file.read_text(encoding="utf-8"))
        if file.suffix == ".json":
            return parse_json(file.read_bytes(), "what it holds")
    except (ValueError, OSError, RecursionError) as error:
        raise ConfigError(f"config file {path}: {error}") from error
    raise ConfigError(f"config file {path} must end in .json or .toml")


def integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _add_options(parser: argparse._ArgumentGroup, cls: type, prefix: str) -> None:
    types = _types(cls)
    for item in dataclasses.fields(cls):
        if item.name not in types:
            continue
        name = f"--{prefix}{item.name}".replace("_", "-")
        kind, default = types[item.name], item.default
        text = f"{item.metadata['help']} (default: {default!r})".replace("%", "%%")
        options: dict[str, Any] = {"dest": f"{prefix}{item.name}", "default": argparse.SUPPRESS, "help": text}
        if kind is bool:
            parser.add_argument(name, action=argparse.BooleanOptionalAction, **options)
        elif typing.get_origin(kind) is tuple:
            parser.add_argument(name, type=integers, metavar="N,N,...", **options)
        else:
            choices = item.metadata.get("choices")
            parser.add_argument(name, type=kind, choices=choices, metavar=None if choices else kind.__name__.upper(), **options)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        """One line that says what is wrong; the usage of 60 options would bury it."""
        raise ConfigError(f"{message}; see --help")

    def print_help(self, file: Any = None) -> None:
        """Once a host, not once a process."""
        if os.environ.get("LOCAL_RANK", "0") == "0":
            super().print_help(file)


def parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    prog = "python -m train_example.train"
    out = _Parser(prog=prog, usage=f"{prog} [--config FILE] [--SETTING VALUE ...]", description=__doc__, allow_abbrev=False, formatter_class=raw)
    out.add_argument("--config", metavar="FILE", help="JSON or TOML file of settings; the config.json of a run folder is one")
    run = out.add_argument_group("run")
    preset = {"dest": "preset", "choices": tuple(PRESETS), "default": argparse.SUPPRESS}
    run.add_argument("--model", "--preset", help="sizes of the model before single ones are changed (default: 'tiny')", **preset)
    _add_options(run, RunConfig, "")
    _add_options(out.add_argument_group("model (defaults are those of tiny)"), ModelConfig, "model.")
    return out


def parse(argv: list[str] | None = None) -> RunConfig:
    """RunConfig from a command line (without the program's name); ConfigError for anything that cannot work.

    `--seq_len` means `--seq-len`: names in config files have underscores, and either may be typed.
    """
    argv = sys.argv[1:] if argv is None else argv
    argv = [re.sub(r"^--[\w.-]+", lambda name: name[0].replace("_", "-"), arg) for arg in argv]
    options = vars(parser().parse_args(argv))
    path = options.pop("config", None)
    settings = read_file(path) if path else {}
    from_dict(settings, f"config file {path}")  # names the file in its own mistakes
    settings, model = _split(settings, f"config file {path}")
    if "preset" in options:
        model["preset"] = options.pop("preset")
    for key in [key for key in options if key.startswith("model.")]:
        model[key.removeprefix("model.")] = options.pop(key)
    return from_dict({**settings, **options, "model": model}, "command line")
