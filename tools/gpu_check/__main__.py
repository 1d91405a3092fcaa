"""The command line of `penstock gpu-check`."""

from __future__ import annotations

from penstock.process.garbage_collection import pause_collection, resume_collection, spare_imports

if __name__ == "__main__":
    pause_collection()

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.backend.passes.decoder.cuda.device.kernel_choices import DIRECTORY, ChoicesRefused, read_choices
from penstock.process.children import exit_on_sigterm
from penstock.tools.gpu_check.kept_findings import KeptFindings, OtherRun
from penstock.tools.gpu_check.reporting.baseline import BaselineRefused, load_baseline, require_device
from penstock.tools.gpu_check.reporting.choices import adopt
from penstock.tools.gpu_check.reporting.environment import describe_environment
from penstock.tools.gpu_check.runner import (
    COMPILE_ONLY_S,
    PART_S,
    PARTS,
    QUICK_S,
    QUICK_SECTIONS,
    SECTIONS,
    TOTAL_S,
    Run,
    Section,
    choose_sections,
    run_all,
    run_section,
)

if TYPE_CHECKING:
    from penstock.tools.gpu_check.reporting.baseline import Baseline

BASELINE = Path(__file__).parents[3] / "docs" / "gpu" / "baseline.json"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "gpu-check", description="Checks and measures the CUDA decoder on this machine's GPU."
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="directory for report.json and report.md")
    parser.add_argument(
        "--budget",
        type=float,
        help=f"seconds for the whole run, shared among sections; default {TOTAL_S:g}, with --quick {QUICK_S:g}",
    )
    parser.add_argument("--only", default="", help="sections to run, separated by commas; default: all")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--quick", action="store_true", help="compile, then check and time only what the 8B model runs")
    what.add_argument(
        "--compile-only", action="store_true", help="compile every kernel for every architecture; needs no GPU"
    )
    what.add_argument(
        "--part",
        choices=PARTS,
        help=f"one of four commands of at most nine minutes; default budget {PART_S:g} s; goes on after a kill",
    )
    what.add_argument(
        "--adopt", type=Path, metavar="DIR", help="take the choices of the report in DIR as defaults on its GPU model"
    )
    what.add_argument("--ncu", metavar="NAME", help="profile one case of the section kernels with Nsight Compute")
    parser.add_argument(
        "--cubins",
        type=Path,
        help="directory of compiled kernels, which --compile-only writes and other runs load; default: OUT/cubins",
    )
    parser.add_argument("--peers", type=Path, help="directory of installed packages to measure beside ours")
    parser.add_argument("--commit", default="", help="name of the commit for the report, if git cannot tell")
    parser.add_argument(
        "--baseline",
        type=Path,
        help="figures to compare with; default: docs/gpu/baseline.json if it is from this GPU model",
    )
    parser.add_argument(
        "--save-baseline", type=Path, metavar="FILE", help="save this run's figures as a baseline if its checks pass"
    )
    parser.add_argument("--findings", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--section", choices=[section.name for section in SECTIONS], help=argparse.SUPPRESS)
    return parser


def main(argv: list[str]) -> int:
    spare_imports()
    resume_collection()
    parser = make_parser()
    options = parser.parse_args(argv)
    sections: tuple[Section, ...] = QUICK_SECTIONS if options.quick else SECTIONS
    if options.part is not None:
        sections = tuple(section for section in SECTIONS if section.part == options.part)
    only = frozenset(filter(None, options.only.split(",")))
    if unknown := only - {section.name for section in sections}:
        parser.error(f"--only names {', '.join(sorted(unknown))}; choose from {', '.join(s.name for s in sections)}")
    usual_s = QUICK_S if options.quick else PART_S if options.part else TOTAL_S
    budget_s = usual_s if options.budget is None else options.budget
    if not 10 <= budget_s <= 86_400:
        parser.error(f"--budget is {budget_s:g}; it must be from 10 to 86,400 s")
    if options.peers is not None and not options.peers.is_dir():
        parser.error(f"--peers is {options.peers}, which is not a directory")
    if options.adopt is not None:
        return _adopt(parser, options.adopt)
    options.out.mkdir(parents=True, exist_ok=True)
    cubins = (options.cubins or options.out / "cubins").absolute()
    if options.section is not None:
        section = next(section for section in sections if section.name == options.section)
        findings = options.findings or options.out / f"{section.name}.jsonl"
        return run_section(section, findings, budget_s, options.peers)
    exit_on_sigterm()  # the running section is killed too
    if options.ncu is not None:
        return _profile(parser, options.out, options.ncu, budget_s, options.commit)
    if options.compile_only:
        chosen = choose_sections(SECTIONS, frozenset({"compile"}), None)
        return run_all(Run(options.out, COMPILE_ONLY_S, chosen, cubins, None, options.commit))
    before = _baseline(parser, options.baseline)
    chosen = choose_sections(sections, only, options.peers)
    run = Run(options.out, budget_s, chosen, cubins, options.peers, options.commit, before, options.save_baseline)
    if options.part is not None:
        try:
            run = replace(run, kept=KeptFindings(options.out, describe_environment(options.commit)))
        except (OtherRun, OSError) as error:
            parser.error(str(error))
    return run_all(run)


def _profile(parser: argparse.ArgumentParser, out: Path, case: str, budget_s: float, commit: str) -> int:
    # Nothing else in this process needs torch.
    from penstock.tools.gpu_check.kernel_speed.ncu import profile_case
    from penstock.tools.gpu_check.kernel_speed.ncu_child import case_names

    if case not in (names := case_names()):
        parser.error(f"--ncu is {case}, which is not a case; choose from {', '.join(names)}")
    return profile_case(out, case, budget_s, commit)


def _adopt(parser: argparse.ArgumentParser, report: Path) -> int:
    try:
        path = adopt(report, DIRECTORY)
    except ChoicesRefused as refusal:
        parser.error(f"--adopt: {refusal}")
    print(f"{path}: {read_choices(path)}")
    return 0


def _baseline(parser: argparse.ArgumentParser, path_given: Path | None) -> Baseline | None:
    """The baseline to compare with, or None. Exits with an error if `--baseline` names one that cannot be used."""
    path = path_given or BASELINE
    if path_given is None and not path.exists():
        return None
    try:
        before = load_baseline(path)
        require_device(before, describe_environment()["gpu"])
    except BaselineRefused as refusal:
        if path_given is not None:
            parser.error(f"--baseline is {path}: {refusal}")
        print(f"no comparison with {path}: {refusal}", flush=True)
        return None
    return before


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
