"""The table of all settings in README.md, made from the parser.

    python -m train_example.flags            print it
    python -m train_example.flags --write    put it into README.md, between its two markers
"""

import argparse
import re
import sys
from pathlib import Path

from train_example.run_config import parser

README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- flags: python -m train_example.flags --write -->", "<!-- end of flags -->"


def table() -> str:
    """Markdown: a row a flag, in the order of `--help`."""
    lines = []
    for group in parser()._action_groups:
        rows = [_row(action) for action in group._group_actions if not isinstance(action, argparse._HelpAction)]
        if rows:
            lines += ["", "| flag | default | |", "|---|---|---|", *rows]
    return "\n".join(lines[1:])


def _row(action: argparse.Action) -> str:
    text, default = (action.help or "").replace("%%", "%"), ""
    stated = re.search(r" \(default: (.*)\)$", text)
    if stated:
        text, default = text[: stated.start()], stated[1].strip("'")
    value = "" if isinstance(action, argparse.BooleanOptionalAction) else " " + (action.metavar or "\\|".join(action.choices or ()))
    names = [name for name in action.option_strings if not name.startswith("--no-")]
    if isinstance(action, argparse.BooleanOptionalAction):
        default = {"False": "off", "True": "on"}[default]
    return f"| `{', '.join(names)}`{value} | {default} | {text.replace('|', chr(92) + '|')} |"


def main(argv: list[str]) -> None:
    if argv != ["--write"]:
        print(table())
        return
    before, _, rest = README.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")


if __name__ == "__main__":
    main(sys.argv[1:])
