"""Kernels compile without spills, fit on every architecture, and lose none of the figures in docs/gpu/.

Needs NVRTC, and nvdisasm for the figures, but no GPU. Figures of unchanged kernels are in the user's cache directory.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, TypedDict, cast

import pytest

from penstock.backend.passes.decoder.cuda import kernel_manifest
from penstock.backend.passes.decoder.cuda.device import nvrtc
from penstock.backend.passes.decoder.cuda.device.launcher import KERNELS_DIR, Kernel, KernelFailed, group_by_module
from penstock.backend.passes.decoder.cuda.kv_cache.cache_layout import KV_MACRO
from penstock.tools.gpu_check.machine_code import kernel_rows, kernel_table, occupancy, sass
from penstock.tools.gpu_check.machine_code.kernel_rows import KernelRow
from tests.cuda_emulator.build import kept_directory
from tests.tallies import COMPILED

REGISTERS_OF_A_MULTIPROCESSOR = 65536


@dataclass(frozen=True, slots=True)
class Case:
    """Kernels of one source with the same macros, which are compiled together."""

    kernels: tuple[Kernel, ...]
    arch: str

    def __str__(self) -> str:
        macros = ",".join(f"{name}={value}" for name, value in self.kernels[0].macros)
        return f"{self.arch}-{Path(self.kernels[0].source).stem}-{macros}"

    @property
    def digest(self) -> str:
        """A digest of all inputs of the compilation."""
        modules = (nvrtc, kernel_rows, kernel_table, occupancy, sass)
        paths = [Path(str(module.__file__)) for module in modules]
        paths += [KERNELS_DIR / self.kernels[0].source, *sorted(KERNELS_DIR.glob("*.cuh"))]
        nvdisasm = sass.find_nvdisasm()
        program = "" if nvdisasm is None else f"{Path(nvdisasm).stat().st_size} bytes"  # its path is the checkout's
        texts = (repr(self), nvrtc.version(), program, *(path.read_text() for path in paths))
        return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:24]


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


class Compilations:
    """Compiles all selected cases on all cores, from the first request for any of them. Keeps their figures."""

    def __init__(self, selected: list[Case], directory: Path) -> None:
        self._pool = ThreadPoolExecutor(os.cpu_count())
        self._directory = directory
        self._futures: dict[Case, Future[Resources]] = {
            case: self._pool.submit(self._figures_of, case, directory / f"{case.digest}.json") for case in selected
        }

    def of(self, case: Case) -> Resources:
        return self._futures[case].result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _figures_of(self, case: Case, path: Path) -> Resources:
        try:
            os.utime(path)
        except FileNotFoundError:
            figures = self._compile(case)
            with tempfile.NamedTemporaryFile("w", dir=self._directory, delete=False) as file:
                json.dump(figures, file)
            os.replace(file.name, path)
            return figures
        return cast(Resources, json.loads(path.read_text()))

    def _compile(self, case: Case) -> Resources:
        reports = nvrtc.compile_kernels(case.kernels, case.arch)
        has_rows = case.kernels in HELD and case.arch == kernel_rows.HELD_ARCH and sass.find_nvdisasm()
        rows = kernel_table.make_rows(reports) if has_rows else []
        compiled = [[report.registers, report.spill_bytes, report.shared_bytes] for report in reports]
        return {"compiled": compiled, "rows": [list(astuple(row)) for row in rows]}


@pytest.fixture(scope="module")
def compilations(request: pytest.FixtureRequest) -> Iterator[Compilations]:
    used = [
        cast(Case, item.callspec.params["case"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path and "compilations" in item.fixturenames
    ]
    compilations = Compilations(list(dict.fromkeys(used)), kept_directory("nvrtc-figures"))
    yield compilations
    compilations.close()


@pytest.mark.parametrize("case", cases(), ids=str)
def test_a_kernel_compiles_without_spills_and_fits(
    case: Case, compilations: Compilations, record_property: Callable[[str, object], None]
) -> None:
    resources = compilations.of(case)
    record_property(COMPILED, [(case.arch, str(kernel)) for kernel in case.kernels])
    for kernel, (registers, spill_bytes, shared_bytes) in zip(case.kernels, resources["compiled"], strict=True):
        assert spill_bytes == 0, kernel
        assert registers * kernel.num_threads <= REGISTERS_OF_A_MULTIPROCESSOR, kernel
        limits = nvrtc.SHARED_BYTES_LIMIT
        is_for_one = kernel.entry == "decode_attention" or kernel.needs_wgmma
        limit = limits[case.arch] if is_for_one else min(limits.values())
        assert kernel.shared_bytes + shared_bytes <= limit, kernel


@pytest.mark.parametrize("case", [Case(group, kernel_rows.HELD_ARCH) for group in HELD], ids=str)
def test_machine_code_is_no_worse_than_the_table(case: Case, compilations: Compilations) -> None:
    """After a change that is meant: kernel_table --kernels NAME --save, and say why in docs/decisions."""
    assert nvrtc.version() == "13.0", "the table is of NVRTC 13.0: save it again for another version"
    rows = [KernelRow(*values) for values in compilations.of(case)["rows"]]
    if not rows:
        pytest.skip("nvdisasm is not installed")
    held = kernel_rows.read_table()
    worse = {row.kernel: kernel_rows.worse_in(held[row.kernel], row) for row in rows}
    assert worse == {row.kernel: [] for row in rows}


def test_table_lists_the_held_kernels_and_no_others() -> None:
    assert list(kernel_rows.read_table()) == [str(kernel) for group in HELD for kernel in group]


def test_every_instantiation_is_listed_once() -> None:
    listed = list(kernel_manifest.kernels())
    assert len(listed) == len(set(listed))


def test_every_source_is_used_by_the_manifest() -> None:
    assert {kernel.source for kernel in kernel_manifest.kernels()} == {path.name for path in KERNELS_DIR.glob("*.cu")}


def test_a_compile_error_names_the_kernel_and_quotes_the_compiler(tmp_path: Path) -> None:
    source = str(tmp_path / "broken.cu")
    (tmp_path / "broken.cu").write_text('extern "C" __global__ void broken(float* x) { x[0] = nothing; }\n')
    with pytest.raises(KernelFailed, match=r'broken\[SIZE=3\] of .* for sm_90a: .*identifier "nothing" is undefined'):
        nvrtc.compile_kernel(Kernel(source, "broken", (("SIZE", 3),), 32), "sm_90a")


def test_spills_and_static_shared_memory_are_reported(tmp_path: Path) -> None:
    (tmp_path / "spilling.cu").write_text(
        """
        extern "C" __global__ void __launch_bounds__(1024, 2) spilling(const float* in, float* out, int n) {
            __shared__ float numbers[100];
            float x[100];
            numbers[threadIdx.x % 100] = in[threadIdx.x];
            __syncthreads();
            for (int i = 0; i < 100; ++i) x[i] = in[i] * numbers[i];
            for (int k = 0; k < n; ++k)
            #pragma unroll
                for (int i = 0; i < 100; ++i) x[i] = x[i] * x[(i * 7 + 3) % 100] + in[k];
            float sum = 0;
            for (int i = 0; i < 100; ++i) sum += x[i];
            out[threadIdx.x] = sum;
        }
        """
    )
    source = str(tmp_path / "spilling.cu")
    report = nvrtc.compile_kernel(Kernel(source, "spilling", (), 1024), "sm_80")
    assert report.spill_bytes > 0
    assert report.shared_bytes == 400
    assert 0 < report.registers <= 32
