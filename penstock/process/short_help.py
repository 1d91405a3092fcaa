"""-h: one screen with the options that are used most, and the first sentence about each. --help shows all."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from cyclopts.help.formatters import DefaultFormatter

if TYPE_CHECKING:
    from collections.abc import Collection

    from cyclopts.help import HelpPanel
    from rich.console import Console, ConsoleOptions

SHORT_FLAG = "-h"


class ShortHelp(DefaultFormatter):
    """Shows panels as cyclopts does; with -h only the first sentences of one panel, and not the further ones."""

    def __init__(self, shown: str, further: Collection[str]) -> None:
        super().__init__()
        self._shown = shown
        self._further = further

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        if SHORT_FLAG not in sys.argv or panel.title not in (self._shown, *self._further):
            super().__call__(console, options, panel)
        elif panel.title == self._shown:
            self._show_briefly(console, panel)

    def _show_briefly(self, console: Console, panel: HelpPanel) -> None:
        from rich.table import Table

        # The negative of a flag, and further names, are in the long help.
        rows = [(f"{entry.positive_names[0]} {entry.metavar or ''}", entry.description) for entry in panel.entries]
        table = Table(box=None, show_header=False, pad_edge=False, expand=True)
        table.add_column(no_wrap=True, min_width=max(len(names) for names, _ in rows))
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        for names, description in sorted(rows, key=lambda row: not row[0].startswith("--model ")):
            table.add_row(names, _first_sentence(description))
        console.print(f"{self._shown}:")
        console.print(table, markup=False)
        console.print("--help shows all options.")


def _first_sentence(description: Any) -> str:
    text = " ".join(description.primary_renderable.markup.split())
    return str(text.partition(". ")[0].removesuffix("."))
