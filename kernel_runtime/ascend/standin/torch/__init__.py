"""A stand-in for torch, so that kernel modules load in an environment that has triton-ascend and no torch (`make ascend-check`).

This folder is on the path of that command alone; it is not installed.

Kernel modules and the files that register them import torch for dtypes, annotations, base classes and registrations; none of that runs
when a kernel is compiled. Dtypes are real enough for a table of specialisations (identity, itemsize); every other attribute is a class
that can be subclassed, called, used as a decorator or in an annotation. Arithmetic on it, or a truth value, is a TypeError that names
it: a table of specialisations must not depend on a device or on a tensor.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class DType:
    """A dtype: compares by identity, prints as torch's."""

    def __init__(self, name: str, itemsize: int, is_floating_point: bool) -> None:
        self.name, self.itemsize, self.is_floating_point = name, itemsize, is_floating_point

    def __repr__(self) -> str:
        return f"torch.{self.name}"


_FLOATS = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1}
_INTEGERS = {"bool": 1, "int8": 1, "uint8": 1, "int16": 2, "int32": 4, "int64": 8}
DTYPES = {n: DType(n, size, True) for n, size in _FLOATS.items()} | {n: DType(n, size, False) for n, size in _INTEGERS.items()}


class _Meta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _make(f"{cls.__qualname__}.{name}")
        setattr(cls, name, made)
        return made

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if not cls.__dict__.get("_standin"):
            return super().__call__(*args, **kwargs)  # a subclass that the project defines
        if len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType | type | staticmethod):
            return args[0]  # used as a decorator
        return cls

    def __bool__(cls) -> bool:
        if cls.__dict__.get("_standin"):
            raise TypeError(f"{cls.__qualname__} was asked for a truth value, but torch is not here: it is a stand-in")
        return True

    def __enter__(cls) -> Any:
        return cls

    def __exit__(cls, *exc: object) -> None:
        return None

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __getitem__(cls, item: Any) -> Any:
        return cls


def _make(qualname: str) -> type:
    return _Meta(qualname.rpartition(".")[2], (), {"__qualname__": qualname, "_standin": True, "__module__": "torch"})


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    made = DTYPES.get(name) or _make(f"torch.{name}")
    globals()[name] = made
    return made


class _Submodule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _make(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module under `torch`."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if fullname.startswith("torch.") else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Submodule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _check_alone() -> None:
    """A real torch must never be hidden behind this folder."""
    others = [p for p in sys.path if (Path(p or ".") / "torch").resolve() != Path(__file__).resolve().parent]
    if importlib.machinery.PathFinder.find_spec("torch", others) is not None:
        raise RuntimeError("torch is installed in this environment; the stand-in is for the Ascend compiler's own environment alone")


_check_alone()
sys.meta_path.insert(0, _Finder())
