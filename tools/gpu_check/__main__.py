"""`python3 -m tools.gpu_check`: see the package."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.gpu_check.runner import SECTIONS, compile_only, run_all, run_section


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "gpu-check", description="Checks and measures the CUDA decoder on this machine's GPU."
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="directory for report.json and report.md")
    parser.add_argument(
        "--budget", type=float, default=560.0, help="seconds for everything; sections share them in proportion"
    )
    parser.add_argument("--only", default="", help="sections, separated by commas; default: all")
    parser.add_argument(
        "--compile-only", action="store_true", help="compile every kernel for every architecture; no GPU"
    )
    parser.add_argument("--peers", type=Path, help="directory of installed packages to measure beside ours")
    parser.add_argument("--commit", default="", help="what is checked, where git does not tell")
    parser.add_argument("--findings", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--section", choices=[section.name for section in SECTIONS], help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    unknown = set(filter(None, options.only.split(","))) - {section.name for section in SECTIONS}
    if unknown:
        parser.error(f"--only names {', '.join(sorted(unknown))}; there are {', '.join(s.name for s in SECTIONS)}")
    if not 10 <= options.budget <= 86_400:
        parser.error(f"--budget is {options.budget:g}; it must be from 10 to 86,400 s")
    if options.peers is not None and not options.peers.is_dir():
        parser.error(f"--peers is {options.peers}, which is no directory")
    return options


def main(argv: list[str]) -> int:
    options = parse(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.section is not None:
        findings = options.findings or options.out / f"{options.section}.jsonl"
        return run_section(options.section, findings, options.budget, options.peers)
    if options.compile_only:
        return compile_only(options.out, options.commit)
    only = frozenset(filter(None, options.only.split(",")))
    return run_all(options.out, options.budget, only, options.peers, options.commit)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
