"""From a kernel of the library to its emulation: functions get the emulated language for their globals, launches run on CPU tensors."""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from types import FunctionType, ModuleType
from typing import Any

import torch
from triton import language as tl
from triton.experimental.gluon.language.nvidia import ampere, hopper
from triton.language.extra import cuda
from triton.runtime.jit import ConstexprFunction, JITFunction

from kernel_runtime import device as devices
from kernel_runtime.launch import Spec
from tests.emulator import language
from tests.emulator.machine import EmulationError, Machine
from tests.emulator.values import Pointer, as_t

_MODULES: dict[str, dict[str, Any]] = {}
_FUNCTIONS: dict[int, FunctionType] = {}
_STAND_INS: dict[int, Any] = {
    id(hopper.warpgroup_mma): language.warpgroup_mma, id(hopper.warpgroup_mma_wait): language.warpgroup_mma_wait,
    id(hopper.fence_async_shared): lambda: language.here().here.fence(), id(ampere.mma_v2): language.mma_v2,
    id(cuda.gdc_wait): language.nothing, id(cuda.gdc_launch_dependents): language.nothing,
    id(hopper.mbarrier): language.MBARRIER, id(hopper.async_copy): language.ASYNC_COPY,
}  # fmt: skip


class _Variables(ast.NodeTransformer):
    """A number that a name is given is a run-time value (a constant has an annotation): `x = 0` makes a scalar with Triton's rules."""

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        literal = node.value.operand if isinstance(node.value, ast.UnaryOp) else node.value
        if isinstance(literal, ast.Constant) and isinstance(literal.value, (int, float)):
            node.value = ast.copy_location(ast.Call(ast.Name("__scalar__", ast.Load()), [node.value], []), node)
        return node


def _function(original: Any, compiled: bool) -> FunctionType:
    """The Python function behind a decorated one, in the emulated globals of its module."""
    if id(original) in _FUNCTIONS:
        return _FUNCTIONS[id(original)]
    fn = original.fn
    space = _globals(inspect.getmodule(fn))
    code = fn.__code__
    if compiled:
        lines, first = inspect.getsourcelines(fn)
        tree = ast.parse(textwrap.dedent("".join(lines)))
        tree.body[0].decorator_list = []  # type: ignore[attr-defined]  # the one statement is the function
        tree = ast.fix_missing_locations(_Variables().visit(tree))
        ast.increment_lineno(tree, first - 1)
        whole = compile(tree, code.co_filename, "exec", flags=__import__("__future__").annotations.compiler_flag)
        code = next(c for c in whole.co_consts if hasattr(c, "co_name") and c.co_name == fn.__name__)
    made = FunctionType(code, space, fn.__name__, fn.__defaults__, fn.__closure__)
    made.__kwdefaults__ = fn.__kwdefaults__
    _FUNCTIONS[id(original)] = made
    return made


def _globals(module: Any) -> dict[str, Any]:
    if module.__name__ in _MODULES:
        return _MODULES[module.__name__]
    space: dict[str, Any] = {"__builtins__": __builtins__, "__name__": module.__name__}
    _MODULES[module.__name__] = space
    for name, value in vars(module).items():
        if not name.startswith("__"):
            space[name] = _stand_in(value)
    space["range"] = language.run_time_range
    space["__scalar__"] = as_t
    return space


def _stand_in(value: Any) -> Any:
    if id(value) in _STAND_INS:
        return _STAND_INS[id(value)]
    if isinstance(value, JITFunction):
        return _Late(value, True)
    if isinstance(value, ConstexprFunction):
        return _Late(value, False)
    if isinstance(value, tl.constexpr):
        return value.value
    if isinstance(value, ModuleType) and value.__name__ in language.MODULES:
        return language.MODULES[value.__name__]
    return value


class _Late:
    """A function of a kernel, made when it is called: modules import each other."""

    def __init__(self, original: Any, compiled: bool) -> None:
        self.original, self.compiled = original, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _function(self.original, self.compiled)(*args, **kwargs)


def run_kernel(spec: Spec, grid: Sequence[int], args: Sequence[Any], seed: int, order: str, unordered: frozenset[str]) -> None:
    """Runs every program of a launch of `spec` on CPU tensors."""
    values = {}
    for (name, kind), value in zip(spec.types.items(), args, strict=True):
        if kind.startswith("*"):
            if kind[1:] not in _NAMES[value.dtype]:
                raise EmulationError(f"{spec.name}: {name} is {value.dtype}, the spec says {kind}")
            values[name] = Pointer.of(value)
        else:
            values[name] = as_t(value, {"i32": torch.int32, "i64": torch.int64, "fp32": torch.float32}[kind])
    function = _function(spec.kernel, True)
    count = int(grid[0])
    if any(int(n) != 1 for n in grid[1:]):
        raise EmulationError(f"a grid of {tuple(grid)}")
    programs = range(count) if order == "forward" else range(count - 1, -1, -1)
    for program in programs:
        warps = spec.options.get("num_warps", spec.num_warps)
        language.NOW.append(Machine(seed, warps, program, count, unordered))
        try:
            function(**values, **{n: v.value if isinstance(v, tl.constexpr) else v for n, v in spec.consts.items()})
        finally:
            language.NOW.pop()


_NAMES = {
    torch.bfloat16: ("bf16",), torch.float16: ("fp16",), torch.float32: ("fp32",), torch.int32: ("i32",), torch.int64: ("i64",),
    torch.int8: ("i8",), torch.uint8: ("u8",), torch.int16: ("i16",), torch.bool: ("i1",),
}  # fmt: skip


@contextlib.contextmanager
def emulated(seed: int = 0, cores: int = 3, order: str = "forward", unordered: Iterable[str] = ()) -> Iterator[list[str]]:
    """Inside the block every launch runs here, on a device of so many multiprocessors; gives the names of the kernels in order.

    seed: which warpgroup runs when. order of the programs: "forward" or "backward". unordered: functions of kernels that allocate shared memory
    which is read while it is written, see memory.Allocation.
    """
    launched: list[str] = []

    def launch(self: Spec, grid: Sequence[int], *args: Any) -> None:
        launched.append(self.name)
        run_kernel(self, grid, args, seed, order, frozenset(unordered))

    real = Spec.launch, devices._properties
    properties = devices.DeviceProperties("emulated", cores, cores, 227 * 1024)
    try:
        Spec.launch = launch  # type: ignore[method-assign]
        devices._properties = lambda device: properties  # type: ignore[assignment]
        yield launched
    finally:
        Spec.launch, devices._properties = real  # type: ignore[method-assign]


__all__ = ["emulated"]
