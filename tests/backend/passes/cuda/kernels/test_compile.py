"""Kernels compile without spills, fit on every architecture, and lose none of the figures of kernels-sm_90a.tsv.

Needs NVRTC, and nvdisasm for the figures, but no GPU. Only what changed is compiled: see compiled_figures.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from penstock.backend.passes.cuda import kernel_manifest
from penstock.backend.passes.cuda.device import nvrtc
from penstock.backend.passes.cuda.device.launcher import KERNELS_DIR, Kernel, KernelFailed
from tests.backend.passes.cuda.kernels import compiled_figures, kernel_rows
from tests.backend.passes.cuda.kernels.compiled_figures import (
    HELD,
    Case,
    Compilations,
    cases,
    compile_case,
    read_unchanged,
)
from tests.backend.passes.cuda.kernels.kernel_rows import KernelRow
from tests.tallies import COMPILED

REGISTERS_OF_A_MULTIPROCESSOR = 65536


@pytest.fixture(scope="module")
def compilations(request: pytest.FixtureRequest) -> Iterator[Compilations]:
    used = [
        cast(Case, item.callspec.params["case"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path and "compilations" in item.fixturenames
    ]
    compilations = Compilations(used)
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


@pytest.mark.parametrize("arch", nvrtc.ARCHITECTURES)
def test_figures_that_are_not_compiled_again_are_those_of_a_compilation(arch: str) -> None:
    case = next(case for case in cases() if case.arch == arch and case.kernels[0].source == "rows/norms.cu")
    figures = read_unchanged().get(case.digest)
    assert figures is not None, "norms.cu, its headers or the compiler changed: compiled_figures.py writes them"
    assert figures == compile_case(case)


def test_a_changed_input_of_a_compilation_changes_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header that the source includes through another counts; one that it does not include does not."""
    kernels = shutil.copytree(KERNELS_DIR, tmp_path / "kernels")
    monkeypatch.setattr(compiled_figures, "KERNELS_DIR", kernels)
    case = next(case for case in cases() if case.kernels[0].source == "prefill/prefill_attention.cu")
    before = case.digest
    assert '"common/ptx.cuh"' not in (kernels / "prefill/prefill_attention.cu").read_text()
    for name, changes in (("common/hopper.cuh", False), ("common/ptx.cuh", True)):
        (kernels / name).write_text("\n" + (kernels / name).read_text())
        compiled_figures._included.cache_clear()
        assert (case.digest != before) == changes, name
    compiled_figures._included.cache_clear()
    assert Case(case.kernels[:1], "sm_80").digest != Case(case.kernels[:1], "sm_89").digest


def test_table_lists_the_held_kernels_and_no_others() -> None:
    assert list(kernel_rows.read_table()) == [str(kernel) for group in HELD for kernel in group]


def test_every_instantiation_is_listed_once() -> None:
    listed = list(kernel_manifest.kernels())
    assert len(listed) == len(set(listed))


def test_every_source_is_used_by_the_manifest() -> None:
    sources = {str(path.relative_to(KERNELS_DIR)) for path in KERNELS_DIR.rglob("*.cu")}
    assert {kernel.source for kernel in kernel_manifest.kernels()} == sources


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
