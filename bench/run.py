"""python -m bench.run NAME: runs the bench bench/NAME.py and writes its table, CSV, JSONL and PNG.

python -m bench.run merge FILE.jsonl ...: one table, CSV, JSONL and PNG of several runs of a bench in one environment; needs no GPU.

A bench module has `add_arguments(parser)` and `run(args) -> list[Row]`.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from bench.common import environment, need_device, print_table, read, write

BENCHES = ("attn", "compress", "indexer", "kl", "mhc")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="bench", required=True)
    modules = {name: importlib.import_module(f"bench.{name}") for name in BENCHES}
    for name, module in modules.items():
        text = module.__doc__
        command = commands.add_parser(name, help=text.splitlines()[0], description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
        command.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder of the files written")
        module.add_arguments(command)
    merge = commands.add_parser("merge", help="several runs of one bench as one")
    merge.add_argument("files", nargs="+", type=Path, help="JSONL files of the runs")
    merge.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder of the files written")
    args = parser.parse_args()
    if args.bench == "merge":
        try:
            versions, rows = read(args.files)
        except (OSError, ValueError) as error:
            merge.error(str(error))
        for shape in dict.fromkeys(r.shape for r in rows):
            print_table(f"{rows[0].bench} {shape}", [r for r in rows if r.shape == shape])
        for file in write(rows, args.out, versions):
            print(f"wrote {file}")
        return
    need_device(parser)
    print(", ".join(f"{name} {value}" for name, value in environment().items()))
    for file in write(modules[args.bench].run(args), args.out):
        print(f"wrote {file}")


if __name__ == "__main__":
    main()
