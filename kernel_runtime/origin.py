"""Where the entries of a cache folder come from, and so why a kernel that seems to be there is not found. Imports Triton.

A key is one hash of many things, so two keys that differ say nothing. Beside each entry that warmup fills stands what went into its key;
of others, such as Triton writes at a launch, Triton's own metadata tell the version and the target.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kernel_runtime import cache
from kernel_runtime.targets import target_name

FILE = "origin.json"
# part of a key -> how it is said, in the order in which one is looked for: a difference explains those after it
PARTS = {
    "triton": "by triton {0} (this is {1})",
    "target": "for {0} (this is for {1})",
    "triton files": "by another build of this version of Triton",
    "assembler": "with the assembler {0} (this is {1})",
    "default options": "with other default options of Triton",
    "environment": "under other settings of Triton: {0} (these are {1})",
    "source": "from other kernel sources, which is another version of this library",
}

UNNOTED = "at a launch or by an earlier version of this library, which note nothing of sources, assembler and settings"


def explain_key(target: Any) -> dict[str, str]:
    """What Triton's cache key depends on besides a kernel's own source, constants and types; equal parts mean equal keys."""
    import triton
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import triton_key

    backend = make_backend(target)
    return {
        "triton": triton.__version__,
        "target": target_name(target),
        "triton files": hashlib.sha256(triton_key().encode()).hexdigest()[:16],
        "assembler": " ".join(str(backend.hash()).split()),
        "default options": str(backend.parse_options({}).hash())[:16],
        "environment": str(sorted(get_cache_invalidating_env_vars().items())),
    }


def write(entry: Path, spec: Any, parts: Mapping[str, str]) -> None:
    """Notes the origin of a fresh entry; `parts` are what `explain_key` gave."""
    cache.write_text(entry / FILE, json.dumps({**parts, "source": spec.kernel.cache_key[:16]}))


def _entries(folder: Path, names: set[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """(kernel, origin) of every whole entry of these kernels"""
    for entry in folder.iterdir() if folder.is_dir() else ():
        if entry.name.startswith(".") or not entry.is_dir():
            continue
        for group in entry.glob("__grp__*.json"):
            name = group.name.removeprefix("__grp__").removesuffix(".json")
            if name not in names:
                continue
            try:
                found = json.loads((entry / FILE).read_text())
            except (OSError, ValueError):
                found = _of_triton(entry / f"{name}.json")
            if isinstance(found, dict):
                yield name, found


def _of_triton(metadata: Path) -> dict[str, str]:
    """What Triton's metadata tell of an entry's origin"""
    try:
        data = json.loads(metadata.read_text())
        backend, arch = data["target"]["backend"], data["target"]["arch"]
        return {"triton": data["triton_version"], "target": f"sm_{arch}" if backend == "cuda" else str(arch)}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def why_missing(specs: Iterable[Any], target: Any, folder: Path) -> list[str]:
    """Lines that say what `folder` holds in place of these kernels, which it lacks under their keys for `target`; empty if nothing like them."""
    missing: dict[str, list[Any]] = {}
    for spec in specs:
        missing.setdefault(spec.name[:150], []).append(spec)
    if not missing:
        return []
    here = explain_key(target)
    nearest: dict[str, tuple[int, str]] = {}
    for name, found in _entries(folder, set(missing)):
        difference = _difference(found, {**here, "source": missing[name][0].kernel.cache_key[:16]})
        nearest[name] = max(difference, nearest.get(name, difference))
    counts = Counter(text for name, (_, text) in nearest.items() for _ in missing[name] if text)
    return [f"{count} of the missing kernels are in {folder}, but compiled {text}" for text, count in counts.most_common()]


def _difference(found: Mapping[str, str], here: Mapping[str, str]) -> tuple[int, str]:
    """How near an entry's origin is to this one, and what parts them; no text where nothing does: it is for other sizes of a model."""
    for nearness, (part, text) in enumerate(PARTS.items()):
        if part in found and found[part] != here[part]:
            return nearness, text.format(found[part], here[part])
    if "source" not in found:
        return list(PARTS).index("target") + 1, UNNOTED
    return len(PARTS), ""
