"""Plan: the kernel specialisations that a job needs, from a model's configuration, from a recorded step, or from a JSON file.

Imports Triton.
"""

from __future__ import annotations

import importlib
import json
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import triton.language as tl

from kernel_runtime.launch import Spec
from kernel_runtime.registry import import_ops, registered_specs, shape_of

FORMAT = 1


@dataclass(frozen=True)
class Plan:
    """Specialisations, each once, with the op that they belong to."""

    entries: tuple[tuple[str, Spec], ...]

    @classmethod
    def of(cls, entries: Iterable[tuple[str, Spec]]) -> Plan:
        found: dict[Any, tuple[str, Spec]] = {}
        for op, spec in entries:
            place = spec.identity, spec.arch, spec.shared  # one kernel may be the form of several ranges of devices
            first_op, first = found.setdefault(place, (op, spec))
            if first.yields_on != spec.yields_on:  # a kernel that one user leaves and another takes is needed where either takes it
                both = tuple(arch for arch in first.yields_on if arch in spec.yields_on)
                found[place] = first_op, replace(first, yields_on=both)
        return cls(tuple(found.values()))

    def __iter__(self) -> Iterator[tuple[str, Spec]]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, spec: Spec) -> bool:
        return any(spec.identity == own.identity for _, own in self.entries)

    def for_backend(self, backend: str) -> Plan:
        """The entries that run on a Triton backend: "cuda", "hip" or "ascend" ("npu")."""
        if backend == "hip":
            return Plan(tuple((op, s) for op, s in self.entries if "hip" in s.targets or s.portable))
        backend = "ascend" if backend == "npu" else backend
        return Plan(tuple((op, s) for op, s in self.entries if backend in s.targets))

    def for_target(self, target: Any) -> Plan:
        """The entries that run on a Triton GPUTarget: those of its backend, without those for another architecture, and without those in
        whose place impl="auto" takes another kernel there."""
        entries = ((op, s) for op, s in self.for_backend(target.backend) if s.runs_on(target))
        return Plan(tuple((op, s) for op, s in entries if target.backend != "cuda" or target.arch not in s.yields_on))

    def by_name(self) -> Plan:
        """With the kernels that run only where an implementation is asked for by name, on every target."""
        return Plan(tuple((op, replace(s, yields_on=()) if s.yields_on else s) for op, s in self.entries))

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "kernels": [{"op": op, **_encode_spec(spec)} for op, spec in self.entries]}, indent=1)

    @classmethod
    def from_json(cls, text: str, source: str = "plan") -> Plan:
        """ValueError that names `source` where the text is no plan, or names a kernel that does not exist."""
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"{source}: no plan of format {FORMAT}")
        return cls.of((item["op"], _decode_spec(item, source)) for item in data["kernels"])


def plan_for(config: Any, dtype: str | None = None) -> Plan:
    """The plan of a model: `config` is whatever `kernel_runtime.registry.shape_of` takes (a ModelShape, a preset, a trainer's config)."""
    import_ops(trainer=True)
    return Plan.of((op, spec) for op, spec in registered_specs(shape_of(config, dtype)) if isinstance(spec, Spec))


def load_plan(name: str, dtype: str | None = None) -> Plan:
    """The plan that `--config` names: a preset, a JSON plan, or a trainer configuration in JSON or TOML.

    ValueError that names the file, or OSError, where it cannot be read.
    """
    import_ops(trainer=True)
    return Plan.of(named_entries(name, dtype))


def named_entries(name: str, dtype: str | None = None) -> list[tuple[str, Spec]]:
    """What `load_plan` reads, of the ops that have been imported."""
    path = Path(name)
    if not path.suffix and not path.exists():
        return list(registered_specs(shape_of(name, dtype)))
    text = path.read_text()
    try:
        data = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
        if isinstance(data, dict) and "kernels" not in data:
            return list(registered_specs(shape_of(data, dtype)))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return list(Plan.from_json(text, name))


def _encode(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tl.constexpr):
        return {"constexpr": _encode(value.value)}
    if isinstance(value, tl.dtype):
        return {"dtype": value.name}
    if hasattr(value, "arg_names"):
        return {"function": f"{value.__module__}:{value.__name__}"}
    raise TypeError(f"a constant of type {type(value).__name__} has no form in a plan")


def _decode(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "constexpr" in value:
        return tl.constexpr(_decode(value["constexpr"]))
    if "dtype" in value:
        return tl.dtype(value["dtype"])
    return _find(value["function"], "plan")


def _find(path: str, source: str) -> Any:
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{source}: there is no kernel {path}; the plan was made by another version") from error


def _encode_spec(spec: Spec) -> dict[str, Any]:
    return {
        "kernel": f"{spec.kernel.__module__}:{spec.name}", "types": dict(spec.types),
        "consts": {n: _encode(v) for n, v in spec.consts.items()}, "num_warps": spec.num_warps, "num_stages": spec.num_stages,
        "options": {n: _encode(v) for n, v in spec.options.items()}, "hot": spec.hot, "targets": list(spec.targets),
        "arch": spec.arch, "shared": spec.shared, "yields_on": list(spec.yields_on),
    }  # fmt: skip


def _decode_spec(item: dict[str, Any], source: str) -> Spec:
    return Spec(
        _find(item["kernel"], source), item["types"], {n: _decode(v) for n, v in item["consts"].items()}, item["num_warps"],
        item["num_stages"], item["hot"], tuple(item["targets"]), {n: _decode(v) for n, v in item["options"].items()},
        arch=tuple(item["arch"]) if isinstance(item["arch"], list) else item["arch"],
        shared=tuple(item["shared"]) if item.get("shared") else None, yields_on=tuple(item.get("yields_on", ())),
    )  # fmt: skip
