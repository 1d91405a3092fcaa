"""The command line of `penstock gpu-check`."""

from __future__ import annotations

from penstock.process.garbage_collection import pause_collection, resume_collection, spare_imports

if __name__ == "__main__":
    pause_collection()

import argparse
import re
import sys
from pathlib import Path

from penstock.backend.passes.cuda.device.kernel_choices import ChoicesRefused, read_choices
from penstock.tools.gpu.runner import COMPILE_ONLY_S, SECTIONS, Run, choose_sections, run_all, run_section
from penstock.tools.processes import exit_on_sigterm


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "gpu-check", description="Checks and measures the CUDA decoder on this machine's GPU."
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="directory for report.json and report.md")
    parser.add_argument(
        "--budget",
        type=float,
        help="seconds for the whole run, shared among sections; default: the sum of the sections' own",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--only", default="", help="sections to run, in this order, separated by commas; default: all")
    what.add_argument(
        "--compile-only", action="store_true", help="compile every kernel for every architecture; needs no GPU"
    )
    parser.add_argument(
        "--cubins",
        type=Path,
        help="directory of compiled kernels, which --compile-only writes and other runs load; default: OUT/cubins",
    )
    parser.add_argument("--commit", default="", help="name of the commit for the report, if git cannot tell")
    parser.add_argument(
        "--choices", type=Path, metavar="FILE", help="kernel settings to measure instead of this GPU model's"
    )
    parser.add_argument("--match", default="", help="regular expression for names of kernels' checks and cases to run")
    parser.add_argument("--findings", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--section", choices=[section.name for section in SECTIONS], help=argparse.SUPPRESS)
    return parser


def main(argv: list[str]) -> int:
    spare_imports()
    resume_collection()
    parser = make_parser()
    options = parser.parse_args(argv)
    only = tuple(filter(None, options.only.split(",")))
    if unknown := set(only) - {section.name for section in SECTIONS}:
        known = ", ".join(section.name for section in SECTIONS)
        parser.error(f"--only names {', '.join(sorted(unknown))}; choose from {known}")
    chosen = choose_sections(SECTIONS, ("compile",) if options.compile_only else only)
    usual_s = COMPILE_ONLY_S if options.compile_only else sum(section.budget_s for section in chosen)
    if options.budget is not None and not 10 <= options.budget <= 86_400:
        parser.error(f"--budget is {options.budget:g}; it must be from 10 to 86,400 s")
    budget_s = usual_s if options.budget is None else options.budget
    try:
        re.compile(options.match)
    except re.error as error:
        parser.error(f"--match is {options.match}: {error}")
    if options.choices is not None:
        try:
            read_choices(options.choices)
        except ChoicesRefused as refusal:
            parser.error(f"--choices: {refusal}")
    options.out.mkdir(parents=True, exist_ok=True)
    cubins = (options.cubins or options.out / "cubins").absolute()
    if options.section is not None:
        section = next(section for section in SECTIONS if section.name == options.section)
        return run_section(section, options.findings or options.out / f"{section.name}.jsonl", budget_s)
    exit_on_sigterm()  # the running section is killed too
    choices = options.choices and options.choices.absolute()
    return run_all(Run(options.out, budget_s, chosen, cubins, options.commit, choices, options.match))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
