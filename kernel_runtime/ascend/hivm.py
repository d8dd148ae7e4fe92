"""Reads the final HIVM of a kernel: planned memory, scalar loops, and a static estimate of what it moves and issues.

Text in, numbers out; no compiler is needed. In that form every operation is a call of the runtime library, or an op of the hivm
dialect that becomes one, on memrefs whose address space says where they live: gm (global memory), ub (unified buffer), cbuf (L1),
ca / cb / cc (L0A / L0B / L0C).

The estimate counts one pass of every loop whose trip count is not constant (the loops over tokens or groups), so it is the work of one
such pass; a tile with a masked tail counts whole. `Report.groups` keeps the passes of different loops apart.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

SPACES = {"ub": "UB", "cbuf": "L1", "ca": "L0A", "cb": "L0B", "cc": "L0C"}
ELEMENT_BITS = {"i1": 1, "i8": 8, "i16": 16, "f16": 16, "bf16": 16, "i32": 32, "f32": 32, "i64": 64, "f64": 64, "index": 64}
WIDE_BYTES = 256  # what one vector instruction takes; a call on less than this in a loop leaves most lanes idle
SHORT_ITERATIONS = 256  # a loop over single elements that runs no more often a pass (the rows of a mask, say) costs next to nothing
FIRST_KERNEL_ARGUMENT = 3  # before it: sync base address, lock, workspace

_MEMREF = re.compile(r"memref<((?:[\d?]+x)*)(\w+)(?:, strided<[^>]*>)?(?:, #hivm\.address_space<(\w+)>)?>")
_TYPE = re.compile(r"memref<(?:[^<>]|<[^<>]*>)*>|[\w.]+")
_RESULT = re.compile(r"^\s*(%[\w]+)(?::\d+)? = ")
_CALL = re.compile(r"\bcall @(\w+)\(([^)]*)\) : \((.*)\) -> ")
_OP = re.compile(r"hivm\.hir\.(\w+)\b.*?\b(?:ins|outs)\(")  # an op that ascendnpu-ir 1.0.0 leaves as it is, where 1.2.0 has a call
_GROUP = re.compile(r"\b(?:ins|outs)\(([^:()]*) : ((?:[^()]|\([^()]*\))*)\)")
_FOR = re.compile(r"scf\.for %\w+ = (%[\w-]+) to (%[\w-]+) step (%[\w-]+)")
_VIEWS = ("memref.cast", "memref.subview", "memref.collapse_shape", "memref.expand_shape", "memref.reinterpret_cast", "memref.view",
          "memref.memory_space_cast", "memref.reshape", "arith.select")  # fmt: skip


@dataclass
class MemRef:
    shape: tuple[int, ...]  # upper bounds; 0 where nothing is known
    element: str
    space: str
    base: str = ""  # the function argument it is a view of, "" for a buffer on the chip

    @property
    def bytes(self) -> float:
        count = 1
        for size in self.shape:
            count *= size
        return count * ELEMENT_BITS.get(self.element, 32) / 8


@dataclass
class Call:
    name: str
    operands: list[MemRef]

    @property
    def bytes(self) -> float:
        return max((o.bytes for o in self.operands), default=0.0)

    @property
    def moves_global(self) -> bool:
        spaces = {o.space for o in self.operands}
        return "gm" in spaces and len(spaces) > 1


@dataclass
class Block:
    """A function, loop or branch. trips is None for a loop whose count is no constant."""

    kind: str
    trips: int | None = 1
    likely: bool = True
    one_core: bool = False  # guarded: the second vector core beside a matrix core does not take part
    calls: list[Call] = field(default_factory=list)
    scalar_accesses: list[MemRef] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)

    def walk(self, times: int = 1) -> Iterator[tuple[Block, int]]:
        times *= self.trips or 1
        yield self, times
        for block in self.blocks:
            if block.likely:
                yield from block.walk(times)


@dataclass
class Group:
    """One pass of a loop whose trip count is no constant, without such loops in it; or what no such loop holds, once a program."""

    loads: Counter[str] = field(default_factory=Counter)
    stores: Counter[str] = field(default_factory=Counter)
    workspace: int = 0
    dma: int = 0
    scalar_loads: int = 0
    vector: int = 0
    cube: int = 0

    @property
    def arguments(self) -> set[str]:
        return set(self.loads) | set(self.stores)

    @property
    def global_bytes(self) -> int:
        return sum(self.loads.values()) + sum(self.stores.values()) + self.workspace


@dataclass
class Report(Group):
    """What the HIVM of one kernel says. Memory in bytes; the counts belong to one pass of the loops with unknown trip count."""

    planned: dict[str, int] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    # loops that touch single elements of UB or global memory, and neither issue a wide vector, cube or DMA call nor hold a loop that does
    scalar_loops: int = 0
    short_scalar_loops: int = 0  # such loops of at most SHORT_ITERATIONS iterations a pass, not counted above
    narrow_loops: int = 0  # loops of calls on less than one vector register: correct, and slow if they run often
    externals: set[str] = field(default_factory=set)
    inline_asm: bool = False
    groups: list[Group] = field(default_factory=list)  # the first is what no loop holds; they add up to the counts above


def per_token(report: Report, tokens: float | Mapping[str, float]) -> dict[str, float]:
    """Traffic and instructions a token: "bytes", "workspace", "dma", "scalar_loads", "vector", "cube"; empty where nothing is stated.

    tokens is what a Spec states: tokens of a pass of everything, or argument -> tokens of a pass of the loop that touches it, the first in
    this order where a loop touches several. A loop that touches none of them is left out: weights and what is made of them.
    """
    if not isinstance(tokens, Mapping):
        parts: list[tuple[Group, float]] = [(report, tokens)] if tokens else []
    else:
        found = ((group, next((n for name, n in tokens.items() if name in group.arguments), 0.0)) for group in report.groups)
        parts = [(group, n) for group, n in found if n]
    if not parts:
        return {}
    total = {"bytes": sum(group.global_bytes / n for group, n in parts)}
    for name in ("workspace", "dma", "scalar_loads", "vector", "cube"):
        total[name] = sum(getattr(group, name) / n for group, n in parts)
    return total


def _memref(text: str) -> MemRef | None:
    found = _MEMREF.search(text)
    if not found:
        return None
    dims = tuple(0 if d == "?" else int(d) for d in found[1].split("x")[:-1])
    return MemRef(dims, found[2], found[3] or "")


def _bounded(own: MemRef, source: MemRef | None) -> MemRef:
    """`own` with unknown sizes taken from what it is a view of, as an upper bound."""
    shape = own.shape
    if source is not None and 0 in shape:
        if len(shape) == len(source.shape):
            shape = tuple(a or b for a, b in zip(shape, source.shape))
        else:  # collapsed or expanded: the total is what counts
            known = 1
            for size in shape:
                known *= size or 1
            total = source.bytes * 8 / ELEMENT_BITS.get(source.element, 32)
            unknown = [i for i, size in enumerate(shape) if size == 0]
            shape = tuple((max(1, int(total / known)) if i == unknown[0] else (size or 1)) for i, size in enumerate(shape))
    base = source.base if source is not None else own.base
    return MemRef(shape, own.element, own.space or (source.space if source else ""), base)


class _Reader:
    def __init__(self) -> None:
        self.functions: list[Block] = []
        self.constants: dict[str, int] = {}
        self.values: dict[str, MemRef] = {}
        self.planned: Counter[str] = Counter()
        self.stack: list[tuple[int, Block]] = []
        self.guards: list[int] = [0]  # a function: guards by the number of the vector core, and questions for it
        self.asked: list[int] = [0]

    def line(self, text: str) -> None:
        indent = len(text) - len(text.lstrip())
        body = text.strip()
        if body.startswith("}") and self.stack and indent <= self.stack[-1][0]:
            _, block = self.stack.pop()
            if unroll := re.search(r"multibuffer_unroll_factor = (\d+)", body):
                block.trips = block.trips or int(unroll[1])
            if "hivm.unlikely_condition" in body:
                block.likely = False
            if "limit_sub_block_id0" in body:
                block.one_core = True
                self.guards[-1] += 1
            if not body.endswith("{"):
                return
            self._open(indent, Block("else"))
            return
        if body.startswith("func.func"):
            self._function(indent, body)
        elif self.stack:
            self._operation(indent, body)

    def _open(self, indent: int, block: Block) -> None:
        self.stack[-1][1].blocks.append(block)
        self.stack.append((indent, block))

    def _function(self, indent: int, body: str) -> None:
        if not body.endswith("{"):
            return
        block = Block("function")
        self.constants, self.values = {}, {}
        if "HOST" not in body:
            self.functions.append(block)
            self.guards.append(0)
            self.asked.append(0)
        for name, text in re.findall(r"(%arg\d+): (memref<(?:[^<>]|<[^<>]*>)*>)", body):
            if (made := _memref(text)) is not None:
                made.base = name
                self.values[name] = made
        self.stack = [(indent, block)]

    def _operation(self, indent: int, body: str) -> None:
        result = _RESULT.match(body)
        self.asked[-1] += "get_sub_block_idx" in body
        if result and body.endswith("{"):  # results of a loop or a branch: what it yields
            yielded = [_memref(t) for t in _TYPE.findall(body.partition(" -> (")[2].rpartition(")")[0])]
            for i, m in enumerate(yielded):
                if m is not None:
                    self.values[result[1] if len(yielded) == 1 else f"{result[1]}#{i}"] = m
        if constant := re.match(r"(%[\w-]+) = arith\.constant (-?\d+) : ", body):
            self.constants[constant[1]] = int(constant[2])
        if loop := _FOR.search(body):
            low, high, step = (self.constants.get(v) for v in loop.groups())
            trips = None if low is None or high is None or not step else max(0, -(-(high - low) // step))
            for carried, start in re.findall(r"(%arg\d+) = (%\w+(?:#\d+)?)[,)]", body.partition("iter_args")[2]):
                if start in self.values:
                    self.values[carried] = self.values[start]
            self._open(indent, Block("for", trips))
        elif "scf.while" in body or body.startswith("scf.if") or " = scf.if" in body:
            self._open(indent, Block("while" if "scf.while" in body else "if", None if "scf.while" in body else 1))
        elif call := _CALL.search(body):
            types = _TYPE.findall(call[3])
            names = [n.strip() for n in call[2].split(",")]
            operands = [self._use(n, t) for n, t in zip(names, types) if t.startswith("memref")]
            self.stack[-1][1].calls.append(Call(call[1], operands))
        elif op := _OP.search(body):
            operands = []
            for names_text, types_text in _GROUP.findall(body):
                pairs = zip(re.findall(r"%[\w-]+(?:#\d+)?", names_text), _TYPE.findall(types_text))
                operands += [self._use(n, t) for n, t in pairs if t.startswith("memref")]
            self.stack[-1][1].calls.append(Call(op[1], operands))
        elif access := re.search(r"memref\.(?:load|store) (?:%[\w-]+, )?(%\w+(?:#\d+)?)\[", body):
            self.stack[-1][1].scalar_accesses.append(self._use(access[1], body.rpartition(" : ")[2]))
        if result and "pointer_cast(" in body:
            made = _memref(body.rpartition(" : ")[2])
            if made is not None:
                self.values[result[1]] = made
                for offset in re.findall(r"%[\w-]+", body.partition("pointer_cast(")[2].partition(")")[0]):
                    end = self.constants.get(offset, 0) + int(-(-made.bytes // 1))
                    self.planned[made.space] = max(self.planned[made.space], end)
        elif result and any(view in body for view in _VIEWS):
            made = _memref(body.rpartition(" to ")[2] if " to " in body else body.rpartition(" into ")[2] or body.rpartition(" : ")[2])
            operand = re.search(r"(?:memref|arith)\.\w+ (?:%[\w-]+, )?(%\w+(?:#\d+)?)", body)
            if made is not None and operand:
                self.values[result[1]] = _bounded(made, self.values.get(operand[1]))

    def _use(self, name: str, text: str) -> MemRef:
        own = _memref(text) or MemRef((), "f32", "")
        return _bounded(own, self.values.get(name))


def _limits(text: str) -> dict[str, int]:
    """Bytes of each memory, as the module itself states them (in bits)."""
    found = {name: int(bits) // 8 for name, bits in re.findall(r'"(UB|L1|L0A|L0B|L0C)_SIZE", (\d+)', text)}
    return found


def read(text: str, argument_names: list[str]) -> Report:
    """Report of a final HIVM module; `argument_names` are the kernel's run-time arguments in order."""
    reader = _Reader()
    for line in text.splitlines():
        if line.strip():
            reader.line(line)
    report = Report(
        planned={SPACES[s]: n for s, n in reader.planned.items() if s in SPACES}, limits=_limits(text), groups=[Group()],
        externals=set(re.findall(r"func\.func private @(\w+)\(", text)), inline_asm="llvm.inline_asm" in text,
    )  # fmt: skip
    for function, guards, asked in zip(reader.functions, reader.guards[1:], reader.asked[1:]):
        # a function that asks for its number other than for a guard works on half of each tile, and the other vector core on the other half
        _visit(report, function, 1, 2 if asked > guards else 1, report.groups[0], argument_names)
    for group in report.groups:
        for name in ("loads", "stores"):
            getattr(report, name).update(getattr(group, name))
        for name in ("workspace", "dma", "scalar_loads", "vector", "cube"):
            setattr(report, name, getattr(report, name) + getattr(group, name))
    return report


def _visit(report: Report, block: Block, times: int, cores: int, group: Group, names: list[str]) -> None:
    times *= block.trips or 1
    if block.one_core:
        cores = 1
    if block.trips is None:
        group = Group()
        report.groups.append(group)
    _count_loops(report, block, times)
    _count(group, block, times * cores, names)
    for inner in block.blocks:
        if inner.likely:
            _visit(report, inner, times, cores, group, names)


def _count_loops(report: Report, block: Block, times: int) -> None:
    # the calls of loops and branches within count: one that reads a row's range and then loops over it in tiles is no scalar loop
    wide = any(call.bytes >= WIDE_BYTES for inner, _ in block.walk() for call in inner.calls)
    if block.kind in ("for", "while"):
        if block.scalar_accesses and not wide:
            if block.trips is not None and times <= SHORT_ITERATIONS:
                report.short_scalar_loops += 1
            else:
                report.scalar_loops += 1
        elif block.calls and not wide and not block.blocks:
            report.narrow_loops += 1


def _count(group: Group, block: Block, times: int, names: list[str]) -> None:
    group.scalar_loads += times * sum(m.space == "gm" for m in block.scalar_accesses)
    for call in block.calls:
        if call.moves_global:
            group.dma += times
            chip = max(o.bytes for o in call.operands if o.space != "gm")
            outside = [o for o in call.operands if o.space == "gm"]
            moved = int(times * min(chip, max(o.bytes for o in outside) or chip))
            argument = int(outside[0].base[4:] or 0) if outside[0].base else -1
            if argument == FIRST_KERNEL_ARGUMENT - 1:
                group.workspace += moved
                continue
            index = argument - FIRST_KERNEL_ARGUMENT
            name = names[index] if 0 <= index < len(names) else "?"
            # a library call takes its source before its destination
            first = next(o for o in call.operands if o.space)
            (group.loads if first.space == "gm" else group.stores)[name] += moved
        elif call.name.startswith("mma"):
            group.cube += times
        else:
            group.vector += times
