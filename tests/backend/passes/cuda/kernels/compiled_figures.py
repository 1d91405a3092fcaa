"""Figures of compiled kernels: of cases whose inputs are unchanged from a file beside this one, of others compiled.

`python3 -m tests.backend.passes.cuda.kernels.compiled_figures` compiles what has changed, and writes the file.
Without that the tests compile it in each run.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypedDict, cast

from penstock.backend.passes.cuda import kernel_manifest
from penstock.backend.passes.cuda.device import nvrtc
from penstock.backend.passes.cuda.device.launcher import KERNELS_DIR, Kernel, group_by_module
from penstock.backend.passes.cuda.memory.cache_layout import KV_MACRO
from tests.backend.passes.cuda.kernels import kernel_rows, kernel_table, sass
from tests.cuda_emulator.build import cached_directory

UNCHANGED = Path(__file__).with_name("compiled_figures.jsonl")
"""A line for each case: a digest of all inputs of its compilation, and what came out."""

_INCLUDE = re.compile(r'^\s*#include "([\w./]+)"', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Case:
    """Kernels of one source with the same macros, which are compiled together."""

    kernels: tuple[Kernel, ...]
    arch: str

    def __str__(self) -> str:
        macros = ",".join(f"{name}={value}" for name, value in self.kernels[0].macros)
        return f"{self.arch}-{Path(self.kernels[0].source).stem}-{macros}"

    @property
    def has_rows(self) -> bool:
        """Whether the static table has the kernels."""
        return self.arch == kernel_rows.HELD_ARCH and self.kernels in HELD

    @property
    def digest(self) -> str:
        """A digest of all inputs of the compilation, and of the code that reads its figures."""
        modules = (nvrtc, kernel_rows, kernel_table, sass) if self.has_rows else (nvrtc,)
        paths = [Path(str(module.__file__)) for module in modules]
        paths += sorted(_included(KERNELS_DIR / self.kernels[0].source))
        texts = (repr(self), *_programs(), *(path.read_text() for path in paths))
        return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:24]


@cache
def _included(path: Path) -> frozenset[Path]:
    """The file and all that it includes."""
    named = (KERNELS_DIR / name for name in _INCLUDE.findall(path.read_text()))
    return frozenset((path,)).union(*map(_included, named))


@cache
def _programs() -> tuple[str, ...]:
    """The compiler and the disassembler, by their sizes: their paths are the checkout's."""
    paths = [Path(name) for name in (nvrtc._library()._name, sass.find_nvdisasm() or "")]
    return nvrtc.version(), *(f"{path.stat().st_size} bytes" if path.is_file() else path.name for path in paths)


def cases() -> list[Case]:
    """For the newest architecture, the kernels of the table, and others until each value of each macro has been in one;
    for the other architectures, one variant of each source.

    `penstock gpu-check --compile-only` compiles all kernels for all architectures.
    """
    *older, newest = nvrtc.ARCHITECTURES
    groups = [tuple(group) for group in group_by_module(kernel_manifest.kernels())]
    first_of_source = {group[0].source: group for group in reversed(groups)}.values()
    launched = [group for group in groups if kernel_table.is_launched(group[0], newest)]
    return [Case(group, newest) for group in covering(launched)] + [
        Case(group, arch) for group in first_of_source for arch in older if nvrtc.compiles_for(group[0], arch)
    ]


HELD = [tuple(group) for group in kernel_table.held_groups()]


def covering(groups: list[tuple[Kernel, ...]]) -> list[tuple[Kernel, ...]]:
    """The groups of the table, and further ones, each with a macro's value that no earlier group of its source has.

    The largest heads come first, and with them q8_0: they need the most registers.
    """

    def rank(group: tuple[Kernel, ...]) -> tuple[bool, int, bool]:
        macros = dict(group[0].macros)
        return group not in HELD, -macros.get("HEAD_DIM", 0), macros.get("KV_DTYPE") != KV_MACRO["q8_0"]

    seen: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)
    chosen = []
    for group in sorted(groups, key=rank):
        macros = {macro for macro in group[0].macros if macro[0] != "RING_TILES"}  # it follows from the others
        if group in HELD or not macros or macros - seen[group[0].source]:
            chosen.append(group)
            seen[group[0].source] |= macros
    return chosen


class Resources(TypedDict):
    """Figures of kernels that were compiled together."""

    compiled: list[list[int]]
    """Per kernel: registers, bytes spilled, bytes of static shared memory."""
    rows: list[list[Any]]
    """Fields of the rows of kernels in the table; empty without nvdisasm."""


def compile_case(case: Case) -> Resources:
    reports = nvrtc.compile_kernels(case.kernels, case.arch)
    rows = kernel_table.make_rows(reports) if case.has_rows and sass.find_nvdisasm() else []
    compiled = [[report.registers, report.spill_bytes, report.shared_bytes] for report in reports]
    return {"compiled": compiled, "rows": [list(astuple(row)) for row in rows]}


def read_unchanged(path: Path = UNCHANGED) -> dict[str, Resources]:
    """Figures by digest."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {line["digest"]: {"compiled": line["compiled"], "rows": line["rows"]} for line in map(json.loads, lines)}


class Compilations:
    """Figures of cases. Those that changed are compiled on all cores, from the first request for any, and kept in the
    user's cache directory."""

    def __init__(self, selected: Iterable[Case]) -> None:
        self._pool = ThreadPoolExecutor(os.cpu_count())
        self._unchanged = read_unchanged()
        self._directory = cached_directory("nvrtc-figures")
        self._futures: dict[Case, Future[Resources]] = {
            case: self._pool.submit(self._figures_of, case) for case in dict.fromkeys(selected)
        }

    def of(self, case: Case) -> Resources:
        return self._futures[case].result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _figures_of(self, case: Case) -> Resources:
        digest = case.digest
        if digest in self._unchanged:
            return self._unchanged[digest]
        path = self._directory / f"{digest}.json"
        try:
            os.utime(path)
        except FileNotFoundError:
            figures = compile_case(case)
            with tempfile.NamedTemporaryFile("w", dir=self._directory, delete=False) as file:
                json.dump(figures, file)
            os.replace(file.name, path)
            return figures
        return cast(Resources, json.loads(path.read_text()))


def _lines(cases: list[Case]) -> Iterator[str]:
    compilations = Compilations(cases)
    try:
        for case in cases:
            yield json.dumps({"case": str(case), "digest": case.digest, **compilations.of(case)}) + "\n"
    finally:
        compilations.close()


if __name__ == "__main__":
    UNCHANGED.write_text("".join(list(_lines(cases()))))
