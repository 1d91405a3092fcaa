"""The command line of `penstock gpu-check`."""

from __future__ import annotations

from penstock.process.garbage_collection import pause_collection, resume_collection, spare_imports

if __name__ == "__main__":
    pause_collection()

import argparse
import sys
from glob import escape, glob
from pathlib import Path

from penstock.tools.gpu import items
from penstock.tools.gpu.items import Item, UnknownName
from penstock.tools.gpu.runner import Run, run_all, run_items
from penstock.tools.processes import exit_on_sigterm


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "gpu-check", description="Checks and measures the CUDA pass on this machine's GPU."
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("gpu-check"), help="directory for report.json and report.md")
    add(
        "--seconds",
        type=float,
        help="run what fits, the first names first; default: enough for the first names alone, or for all",
    )
    add(
        "--first", default="", help="names, or their beginnings, separated by commas; NAME+SETTING=VALUE with a setting"
    )
    add("--list", action="store_true", help="print the names and their seconds in the order of the run, and end")
    add("--ab", type=Path, metavar="DIR", help="another checkout, whose kernels are timed in turns with this one's")
    add("--checkpoint", default="", metavar="PREFIX", help="GGUF file, or what the names of its parts begin with")
    add("--compile-only", action="store_true", help="compile every kernel for every architecture; needs no GPU")
    add("--cubins", type=Path, help="directory of compiled kernels: written by --compile-only; default: OUT/cubins")
    add("--commit", default="", help="name of the commit for the report, if git cannot tell")
    add("--findings", type=Path, help=argparse.SUPPRESS)
    add("--items", help=argparse.SUPPRESS)
    return parser


def main(argv: list[str]) -> int:
    spare_imports()
    resume_collection()
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.items is not None:
        return run_items(items.choose(options.items.split(",")), options.findings)
    chosen = _chosen(parser, options)
    if options.list:
        print("\n".join(f"{item.seconds:6.1f} s  {item.name}" for item in chosen))
        print(f"{items.wall_seconds(chosen):6.1f} s in all")
        return 0
    if options.ab is not None and not (options.ab / "penstock").is_dir():
        parser.error(f"--ab is {options.ab}, which is no checkout")
    if options.checkpoint and not glob(f"{escape(options.checkpoint)}*"):
        parser.error(f"--checkpoint is {options.checkpoint}; no file's name begins so")
    seconds = 2 * items.wall_seconds(chosen) + 30 if options.seconds is None else options.seconds
    if not 10 <= seconds <= 86_400:
        parser.error(f"--seconds is {seconds:g}; it must be from 10 to 86,400")
    options.out.mkdir(parents=True, exist_ok=True)
    cubins, tree = (options.cubins or options.out / "cubins").absolute(), options.ab and options.ab.absolute()
    exit_on_sigterm()  # the running items are killed too
    return run_all(Run(options.out, seconds, chosen, cubins, options.commit, tree, options.checkpoint))


def _chosen(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[Item]:
    first = [items.CUBINS.name] if options.compile_only else list(filter(None, options.first.split(",")))
    try:
        return items.order(first, has_others=options.seconds is not None)
    except UnknownName as error:
        parser.error(f"--first: {error}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
