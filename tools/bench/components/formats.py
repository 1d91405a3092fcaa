"""`penstock bench formats`: memory and speed of quantised checkpoints of other programs, on the CPU.

A model of random weights is written in each format and loaded in its own process.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter, Token

from penstock.process.options import format_size
from penstock.tools.bench.components.format_checkpoints import FORMATS, write_in_format
from penstock.tools.bench.harness.load_profile import LoadProfile, profile_load
from penstock.tools.bench.harness.report import make_table
from penstock.tools.bench.harness.run import measurement_run
from penstock.tools.bench.load_generator.stats import Aim
from penstock.tools.bench.options import MEASUREMENT, AtLeastOne, Counts, ReportOptions
from penstock.tools.random_model import ModelDims, write_random_model

if TYPE_CHECKING:
    from rich.table import Table

MODEL = ModelDims(hidden_size=1024, layers=12, heads=16, kv_heads=4, intermediate_size=2816)
"""168M parameters. Blocks of 256 inputs fit its linears."""
MOST_PEAK = 1.15
"""Peak memory of loading / weights as served."""


def _convert_formats(_type: Any, tokens: Sequence[Token]) -> tuple[str, ...]:
    names = tuple(tokens[0].value.split(","))
    unknown = [name for name in names if name not in FORMATS]
    if unknown:
        raise ValueError(f'"{unknown[0]}" is no format; choose from {", ".join(FORMATS)}')
    return names


@MEASUREMENT
@dataclass(frozen=True)
class FormatsOptions:
    formats: Annotated[
        tuple[str, ...],
        Parameter(converter=_convert_formats, n_tokens=1, negative="", metavar="NAMES", show_default=",".join),
    ] = tuple(FORMATS)
    """Formats to measure."""

    rows: Counts = (1, 16)
    """Sequences that decode together."""

    steps: AtLeastOne = 20
    """Measured steps of each number of rows."""


@dataclass(frozen=True, slots=True)
class FormatFigures:
    format: str
    stored_bytes: int
    """Size of the weights in the checkpoint."""
    profile: LoadProfile


def formats(*, options: FormatsOptions = FormatsOptions(), report: ReportOptions = ReportOptions()) -> int:
    with measurement_run(report.json) as run, tempfile.TemporaryDirectory(prefix="penstock-formats-") as directory:
        plain = Path(directory) / "plain"
        write_random_model(plain, MODEL)
        found = []
        for name in options.formats:
            with run.status(f"{name} weights"), tempfile.TemporaryDirectory(dir=directory) as parent:
                model_dir = Path(parent) / "model"
                write_in_format(plain, name, model_dir)
                stored_bytes = sum(file.stat().st_size for file in model_dir.glob("*.safetensors"))
                found.append(FormatFigures(name, stored_bytes, profile_load(model_dir, options.steps, options.rows)))
        run.add("formats", found, formats_table(found), [worst_peak(found)])
    return run.exit_status


def worst_peak(found: Sequence[FormatFigures]) -> Aim:
    worst = max(found, key=lambda each: each.profile.peak_ratio)
    name = f"peak memory of loading / weights as served, largest: {worst.format}"
    return Aim(name, worst.profile.peak_ratio, "at most", MOST_PEAK)


def formats_table(found: Sequence[FormatFigures]) -> Table:
    rows = list(found[0].profile.tokens_per_s)
    table = make_table(
        "Formats of checkpoints, bf16 activations",
        *("format", "stored", "kernels of the layers", "served", "peak", "peak /\nserved", "load s"),
        *(f"tok/s at\n{count} rows" for count in rows),
    )
    for each in found:
        profile = each.profile
        table.add_row(
            each.format,
            format_size(each.stored_bytes),
            "; ".join(profile.kernels),
            format_size(profile.weight_bytes),
            format_size(profile.peak_bytes),
            f"{profile.peak_ratio:.2f} ×",
            f"{profile.load_s:.2f}",
            *(f"{profile.tokens_per_s[count]:,.0f}" for count in rows),
        )
    return table
