"""Checkpoint folders that `transformers` reads and writes (config.json and safetensors), streamed into and out of a sharded model.

Rank 0 alone touches the files. A tensor crosses in blocks of at most BLOCK_BYTES, of which every rank keeps the part it owns, so no rank
holds more of the model than its shards and one block; when saving, rank 0 also holds one file. Both directions keep every bit of fp32.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from train_example.checkpoint import named_tensors
from train_example.config import ModelConfig
from train_example.data import END_OF_FILE
from train_example.files import read_table, table
from train_example.hf_config import CONFIG_FILE, INDEX, OURS, SINGLE, config_to_hf
from train_example.hf_map import Region, file_layouts
from train_example.run_config import ConfigError

BLOCK_BYTES = 256 * 2**20
FILE_BYTES = 4 * 2**30
FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # each of them fits into fp32 exactly
INTEGERS = {"I64": torch.int64, "I32": torch.int32}


@dataclass(frozen=True)
class Piece:
    """A tensor of a file, and the part of our tensor `target` that it is; `dtype` is the file's."""

    source: str
    target: str
    region: Region
    dtype: torch.dtype


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ConfigError("checkpoints of transformers need the safetensors package, which is not installed here") from error
    return safetensors


def owned(tensor: Tensor) -> Region:
    """The range along every dimension that this rank holds of a sharded tensor."""
    ranges = [(0, size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        coordinate, local = tensor.device_mesh.get_coordinate(), tensor.to_local()
        if coordinate is None:
            raise RuntimeError(f"this rank is not in the mesh {tensor.device_mesh}")
        # FSDP over a dimension that ep has split already is a strided placement: it divides what ep left, so it comes after ep
        order = sorted(range(tensor.device_mesh.ndim), key=lambda axis: hasattr(tensor.placements[axis], "split_factor"))
        for axis in order:
            placement = tensor.placements[axis]
            if placement.is_replicate():
                continue
            start, end = ranges[placement.dim]
            size = -(-(end - start) // tensor.device_mesh.size(axis))
            first = min(start + coordinate[axis] * size, end)
            ranges[placement.dim] = (first, min(first + size, end))
        if [end - start for start, end in ranges] != list(local.shape):
            raise RuntimeError(f"cannot tell which part of {tuple(tensor.shape)} with placements {tensor.placements} is here")
    return tuple(ranges)


def _overlap(part: Region, mine: Region) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Slices of the part and of the local tensor that are the same numbers; None if there are none."""
    in_part, in_local = [], []
    for dim, (start, end) in enumerate(mine):
        first, last = part[dim]
        low, high = max(start, first), min(end, last)
        if low >= high:
            return None
        in_part.append(slice(low - first, high - first))
        in_local.append(slice(low - start, high - start))
    return tuple(in_part), tuple(in_local)


def _blocks(region: Region, shape: torch.Size, itemsize: int) -> Iterator[tuple[int, int, Region]]:
    """Cut a region along its last stated dimension: (start, end) within the region, and the part of the whole tensor, all dimensions."""
    rest = shape[len(region) :].numel()
    start, end = region[-1]
    step = max(1, BLOCK_BYTES // max(1, rest * itemsize))
    for first in range(start, end, step):
        last = min(first + step, end)
        yield first - start, last - start, (*region[:-1], (first, last), *[(0, size) for size in shape[len(region) :]])


class _Folder:
    """The tensors of a checkpoint folder, whichever files they are in."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.open = folder, {}
        if (folder / INDEX).is_file():
            try:
                self.file_of: dict[str, str] = table(read_table(folder / INDEX).get("weight_map"), f"{folder / INDEX} is damaged: weight_map")
                for name, file in self.file_of.items():
                    if not isinstance(file, str) or Path(file).name != file:
                        raise ValueError(f"{folder / INDEX} is damaged: {name} is to be in {file!r}, which is no name of a file beside it")
            except ValueError as error:
                raise ConfigError(str(error)) from error
        elif (folder / SINGLE).is_file():
            self.file_of = dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        else:
            raise ConfigError(f"{folder} holds neither {SINGLE} nor {INDEX}")

    def _file(self, name: str) -> Any:
        if name not in self.open:
            safetensors = _safetensors()
            try:
                self.open[name] = safetensors.safe_open(self.folder / name, framework="pt")
            except (OSError, safetensors.SafetensorError) as error:
                raise ConfigError(f"{self.folder / name} cannot be read: {error}") from error
        return self.open[name]

    def slice(self, name: str) -> Any:
        file = self._file(self.file_of[name])
        try:
            return file.get_slice(name)
        except _safetensors().SafetensorError as error:
            raise ConfigError(f"{self.folder / self.file_of[name]} lacks {name}, which {INDEX} says it has") from error


def _plan(files: _Folder, shapes: dict[str, torch.Size], kinds: dict[str, bool], with_mtp: bool) -> list[Piece]:
    """Where every tensor of the model comes from; ConfigError that names what is missing, of no use, or of the wrong shape or dtype."""
    pieces: list[Piece] = []
    missing: list[str] = []
    used: set[str] = set()
    for target, shape in shapes.items():
        layouts = file_layouts(target, shape)
        layout = max(layouts, key=lambda parts: sum(name in files.file_of for name, _ in parts))  # the first of them if none is there
        absent = [name for name, _ in layout if name not in files.file_of]
        missing += absent
        used |= {name for name, _ in layout}
        pieces += [Piece(name, target, region, torch.float32) for name, region in layout] if not absent else []
    extra = [name for name in files.file_of if name not in used and (with_mtp or not name.startswith("mtp."))]
    problems = []
    if missing:
        hint = "; transformers saves no MTP block: --model.mtp-layers 0" if all(name.startswith("mtp.") for name in missing) else ""
        problems.append(f"missing {_some(missing)}{hint}")
    if extra:
        scaled = any(name.endswith(("scale", "scale_inv")) for name in extra)
        problems.append(f"of no use to this model: {_some(extra)}" + ("; quantised weights are not supported" if scaled else ""))
    checked = []
    for piece in pieces if not problems else []:
        source = files.slice(piece.source)
        wanted = [end - start for start, end in piece.region] + list(shapes[piece.target][len(piece.region) :])
        wanted = wanted[1:] if len(piece.region) > 1 else wanted  # a file has an expert of its own for each index of dim 0
        known = FLOATS if kinds[piece.target] else INTEGERS
        if source.get_shape() != wanted or source.get_dtype() not in known:
            problems.append(f"{piece.source} is {source.get_shape()} {source.get_dtype()}, want {wanted} {' or '.join(known)}")
            continue
        checked.append(Piece(piece.source, piece.target, piece.region, known[source.get_dtype()]))
    if problems:
        raise ConfigError(f"{files.folder} does not fit the model: {_some(problems, '; ', limit=3)}")
    return checked


def _some(names: list[str], separator: str = ", ", limit: int = 4) -> str:
    more = f"{separator}and {len(names) - limit} more" if len(names) > limit else ""
    return separator.join(names[:limit]) + more


def _from_rank_0(action: Any) -> Any:
    """action() of rank 0 for every rank; if it cannot work, a ConfigError on every rank. Collective."""
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = action()
        except Exception as error:  # whatever stops rank 0 has to stop the others, which wait for it below
            box[1] = str(error) if isinstance(error, (ValueError, OSError)) else repr(error)
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise ConfigError(box[1])
    return box[0]


@torch.no_grad()
def load_folder(folder: Path, model: nn.Module) -> str:
    """Fill the sharded `model` from a checkpoint folder; returns a line that says what was read. Collective.

    Files may name tensors as the published checkpoints do, as save_pretrained does, or by transformers' modules. fp32, bf16 and fp16
    become fp32 master weights exactly. Tensors of an MTP block are left out where the model has none. Everything else that does not fit
    one to one is a ConfigError, on every rank, before a weight is touched.
    """
    tensors = named_tensors(model)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    kinds = {name: tensor.is_floating_point() for name, tensor in tensors.items()}
    rank, device = dist.get_rank(), next(iter(tensors.values())).device
    files = None

    def plan() -> list[Piece]:
        nonlocal files
        files = _Folder(folder)
        return _plan(files, shapes, kinds, with_mtp=any(name.startswith("mtp.") for name in shapes))

    pieces: list[Piece] = _from_rank_0(plan)
    mine = {name: owned(tensor) for name, tensor in tensors.items()}
    for piece in pieces:
        target = tensors[piece.target]
        local = target.to_local() if isinstance(target, DTensor) else target
        source = files.slice(piece.source) if files else None
        for first, last, part in _blocks(piece.region, target.shape, piece.dtype.itemsize):
            sizes = [end - start for start, end in part]
            if source is not None:
                block = source[first:last].reshape(sizes).to(device)
            else:
                block = torch.empty(sizes, dtype=piece.dtype, device=device)
            dist.broadcast(block.view(torch.uint8), src=0)  # as bytes: not every backend knows every dtype
            overlap = _overlap(part, mine[piece.target])
            if overlap:
                local[overlap[1]] = block[overlap[0]].to(local.dtype)
    dtypes = sorted({str(piece.dtype).removeprefix("torch.") for piece in pieces})
    left_out = f", its MTP block left out ({skipped} tensors)" if rank == 0 and files and (skipped := len(files.file_of) - len(pieces)) else ""
    return f"weights of {folder}: {len(pieces)} tensors, {', '.join(dtypes)}{left_out}"


def check_target(folder: Path) -> None:
    """Refuse a folder that save_folder would not write to: one with something else in it."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    with contextlib.suppress(OSError, ValueError):
        if OURS in read_table(folder / CONFIG_FILE):
            return  # an earlier export
    raise ConfigError(f"save_hf = {folder} exists and is no checkpoint that this trainer wrote; name another folder")


@torch.no_grad()
def save_folder(folder: Path, model: nn.Module, config: ModelConfig, file_bytes: int = FILE_BYTES) -> list[str]:
    """Write the sharded `model` as a checkpoint that `transformers` loads, under the published names, in fp32. Collective.

    It is written under a temporary name and renamed when it is whole. An MTP block is written too; transformers skips it.

    Args:
        folder: to write, or a link to it; an earlier export there is replaced, see check_target.
        config: sizes of the model; ValueError where transformers has no name for one.
        file_bytes: of the largest file, unless a single tensor is larger.

    Returns the names of the files with weights.
    """
    tensors = named_tensors(model)
    pieces = [
        Piece(source, name, region, tensor.dtype) for name, tensor in tensors.items() for source, region in file_layouts(name, tensor.shape)[0]
    ]
    sizes = {piece.source: _numel(piece, tensors) * piece.dtype.itemsize for piece in pieces}
    groups: list[list[Piece]] = [[]]
    filled = 0
    for piece in pieces:
        if groups[-1] and filled + sizes[piece.source] > file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(piece)
        filled += sizes[piece.source]
    names = [SINGLE] if len(groups) == 1 else [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]

    folder = folder.resolve()  # where the caller's name is a link, what it points to is replaced: renaming would hit the link
    temporary = folder.with_name(f".{folder.name}.tmp")

    def prepare() -> None:
        check_target(folder)
        _safetensors()
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        content = config_to_hf(config, eos_token_id=END_OF_FILE)
        (temporary / CONFIG_FILE).write_text(json.dumps(content, indent=1) + "\n")
        if len(groups) > 1:
            weight_map = {piece.source: name for name, group in zip(names, groups) for piece in group}
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
            (temporary / INDEX).write_text(json.dumps(index, indent=1) + "\n")

    _from_rank_0(prepare)
    mine = {name: owned(tensor) for name, tensor in tensors.items()}
    for name, group in zip(names, groups):
        whole = {piece.source: _collect(piece, tensors[piece.target], mine[piece.target]) for piece in group}

        def write(name: str = name, whole: dict[str, Any] = whole) -> None:
            _safetensors().torch.save_file(whole, temporary / name, metadata={"format": "pt"})

        _from_rank_0(write)

    _from_rank_0(lambda: _publish(temporary, folder))
    return names


def _publish(new: Path, folder: Path) -> None:
    """Rename `new` to `folder`. An earlier one is out of the way before and gone after, so at any time one of the two is whole."""
    earlier = folder.with_name(f".{folder.name}.old")
    if folder.exists():
        shutil.rmtree(earlier, ignore_errors=True)
        os.replace(folder, earlier)
    try:
        os.replace(new, folder)
    except OSError:
        if earlier.exists():
            os.replace(earlier, folder)
        raise
    shutil.rmtree(earlier, ignore_errors=True)


def _numel(piece: Piece, tensors: dict[str, Tensor]) -> int:
    count = tensors[piece.target].shape[len(piece.region) :].numel()
    for start, end in piece.region:
        count *= end - start
    return count


def _collect(piece: Piece, target: Tensor, mine: Region) -> Tensor | None:
    """The piece on the CPU of rank 0, None elsewhere. Collective."""
    local = target.to_local() if isinstance(target, DTensor) else target
    blocks = []
    for _, _, part in _blocks(piece.region, target.shape, piece.dtype.itemsize):
        block = torch.zeros([end - start for start, end in part], dtype=local.dtype, device=local.device)
        overlap = _overlap(part, mine)
        if overlap and (isinstance(target, DTensor) or dist.get_rank() == 0):
            block[overlap[0]] = local[overlap[1]]
        if isinstance(target, DTensor):
            # every number has one owner: a sum with zeros, over integers, for -0.0 + 0.0 would lose its sign
            dist.reduce(block.view(torch.int32), dst=0)
        if dist.get_rank() == 0:
            blocks.append(block.cpu().flatten(0, 1) if len(piece.region) > 1 else block.cpu())
    return torch.cat(blocks) if blocks else None
