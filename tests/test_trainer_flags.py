"""The trainer's README lists every flag, as the parser has it."""

from __future__ import annotations

import dataclasses
import re

from train_example.config import ModelConfig
from train_example.flags import BEGIN, END, README, main, table
from train_example.run_config import RunConfig, parser


def test_readme_lists_the_flags_of_the_parser():
    listed = README.read_text().partition(BEGIN)[2].partition(END)[0].strip()
    assert listed == table(), "run `python -m train_example.flags --write`"
    flags = re.findall(r"^\| `(--[\w.-]+)(?:, (--[\w.-]+))?`", listed, re.MULTILINE)
    named = {name for pair in flags for name in pair if name}
    options = {name for name in parser()._option_string_actions if name.startswith("--") and "--no-" not in name}
    assert named == options - {"--help"}
    fields = {f"--{item.name}".replace("_", "-") for item in dataclasses.fields(RunConfig)}
    fields |= {f"--model.{item.name}".replace("_", "-") for item in dataclasses.fields(ModelConfig)}
    assert named == fields | {"--config"}
    assert all(line.count("|") - line.count("\\|") == 4 for line in listed.splitlines() if line), "three columns"


def test_writing_changes_the_list_alone(tmp_path, monkeypatch):
    copy = tmp_path / "README.md"
    text = README.read_text()
    copy.write_text(text.replace("| `--steps` INT |", "| `--stepz` INT |"))
    monkeypatch.setattr("train_example.flags.README", copy)
    main(["--write"])
    assert copy.read_text() == text
