"""JSON files that a person, another program or a crash may have left in any state: a table, or one error that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def parse_json(content: str | bytes, what: str) -> Any:
    """What the JSON says; ValueError "`what` is damaged: ...", also for bytes that are no UTF-8 and for more levels or digits than Python reads."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is damaged: {error}") from error


def read_table(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ValueError if it cannot be read or holds something else."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return table(parse_json(content, str(path)), str(path))


def table(value: Any, what: str) -> dict[str, Any]:
    """`value`, or a ValueError that names `what` if it is no table."""
    if not isinstance(value, dict):
        raise ValueError(f"{what} must hold a table of names and values, got {type(value).__name__}")
    return value
