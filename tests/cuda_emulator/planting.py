"""Copies of the kernels with bugs that a test switches on one at a time, so that one compilation serves many bugs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.backend.passes.cuda.device.launcher import KERNELS_DIR
from tests.cuda_emulator.launcher import EmulatedLauncher

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.backend.passes.cuda.device.launcher import Argument, Grid, Kernel

VARIABLE = "PENSTOCK_PLANTED_BUG"
"""The bug that kernels have, as a number from 0; no bug if it is not set. Kernels read it at each use."""
# The asm label avoids a second declaration of getenv, which the emulator's runtime may include.
_SWITCH = f"""
extern "C" char* planted_value(const char*) __asm__("getenv");
static inline bool is_planted(int bug) {{
    const char* value = planted_value("{VARIABLE}");
    if (value == nullptr) return false;
    int number = 0;
    for (; *value != 0; ++value) number = 10 * number + (*value - '0');
    return number == bug;
}}
"""


@dataclass(frozen=True)
class Bug:
    """A planted bug: in `file`, whichever folder it is in, the expression `right` becomes `wrong`."""

    file: str
    right: str
    wrong: str

    def __str__(self) -> str:
        return f"{self.file}: {self.wrong}"


class PlantedLauncher(EmulatedLauncher):
    """Launches the kernels of `sources` from a copy in `directory` that has the bugs; all others are the project's."""

    def __init__(self, directory: Path, sources: Sequence[str], bugs: Sequence[Bug]) -> None:
        super().__init__(kernels_dir=directory)
        self._sources = frozenset(sources)
        self._sound = EmulatedLauncher()
        paths = {
            path.name: path for path in KERNELS_DIR.rglob("*.cu*") if path.suffix == ".cuh" or path.name in sources
        }
        texts = {name: path.read_text() for name, path in paths.items()}
        expressions = {(bug.file, bug.right): f"({bug.right})" for bug in bugs}
        for number, bug in enumerate(bugs):
            place = bug.file, bug.right
            expressions[place] = f"(is_planted({number}) ? ({bug.wrong}) : {expressions[place]})"
        for (name, right), expression in expressions.items():
            if (count := texts[name].count(right)) != 1:
                raise ValueError(f"{name} has {right!r} {count} times; it must be there once")
            texts[name] = texts[name].replace(right, expression)
        for name, text in texts.items():
            whole = text.replace("#include", f"{_SWITCH}#include", 1) if name in sources else text
            copy = directory / paths[name].relative_to(KERNELS_DIR)
            copy.parent.mkdir(exist_ok=True)
            copy.write_text(whole)

    def prepare(self, kernels: Iterable[Kernel]) -> None:
        super().prepare(kernel for kernel in kernels if self._is_planted(kernel))

    def launch(self, kernel: Kernel, grid: Grid, *arguments: Argument) -> None:
        if self._is_planted(kernel):
            super().launch(kernel, grid, *arguments)
        else:
            self._sound.launch(kernel, grid, *arguments)

    def _is_planted(self, kernel: Kernel) -> bool:
        return Path(kernel.source).name in self._sources
