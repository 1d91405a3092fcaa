"""Which paths a CPU supports, and that each is compiled for no other instructions than it asks of the CPU."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from penstock.backend.passes.cpu.library.cpu_paths import (
    PATHS,
    CpuInfo,
    KernelBuild,
    machine_builds,
    machine_paths,
    read_cpu_info,
    supported_paths,
)
from penstock.backend.passes.cpu.library.native_library import ABI, SOURCE, find_compiler
from tests.backend.passes.cpu.path_libraries import EMULATED, open_path, require_simde

OPENED = ("avx2", "avx512", "avx512_bf16", "neon", "neon_bf16")
HASWELL = "sse4_2 avx f16c fma avx2 bmi1 bmi2"
SKYLAKE_X = f"{HASWELL} avx512f avx512dq avx512cd avx512bw avx512vl"
ICE_LAKE = f"{SKYLAKE_X} avx512_vnni avx512_vbmi2"
ZEN_4 = f"{ICE_LAKE} avx512_bf16"
SAPPHIRE_RAPIDS = f"{ZEN_4} amx_bf16 amx_tile amx_int8"
RASPBERRY_PI_4 = "fp asimd evtstrm crc32 cpuid"
GRAVITON2 = "fp asimd evtstrm aes crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs"
GRAVITON3 = f"{GRAVITON2} sha512 asimdfhm dit svei8mm svebf16 i8mm bf16"


@pytest.mark.parametrize(
    ("machine", "flags", "expected"),
    [
        ("x86_64", "sse4_2 avx", []),
        ("x86_64", "avx2 f16c", []),
        ("x86_64", HASWELL, ["avx2"]),
        ("x86_64", f"{HASWELL} avx512f", ["avx2"]),
        ("x86_64", SKYLAKE_X, ["avx512", "avx2"]),
        ("x86_64", ICE_LAKE, ["avx512_vnni", "avx512", "avx2"]),
        ("x86_64", ZEN_4, ["avx512_bf16", "avx512_vnni", "avx512", "avx2"]),
        ("x86_64", SAPPHIRE_RAPIDS, ["amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2"]),
        ("aarch64", RASPBERRY_PI_4, ["neon"]),
        ("aarch64", GRAVITON2, ["neon_dotprod", "neon"]),
        ("aarch64", GRAVITON3, ["neon_bf16", "neon_dotprod", "neon"]),
    ],
)
def test_cpu_supports_the_paths_whose_flags_it_has(
    machine: str, flags: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert [path.name for path in supported_paths(CpuInfo("", frozenset(flags.split())))] == expected


def test_architecture_without_kernels_has_no_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert machine_paths() == machine_builds() == supported_paths(CpuInfo("", frozenset({"avx2"}))) == ()


@pytest.mark.parametrize("machine", PATHS)
def test_names_are_unique_and_a_rival_is_supported_wherever_its_path_is(machine: str) -> None:
    paths = {path.name: path for path in PATHS[machine]}
    builds = {path.build for path in paths.values()}
    assert len(paths) == len(PATHS[machine])
    assert len({build.name for build in builds}) == len(builds)
    for path in paths.values():
        if path.rival is not None:
            assert paths[path.rival].cpu_flags <= path.cpu_flags


def test_flags_are_those_that_all_cores_have(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    cores = [
        f"model\t\t: 106\nmodel name\t: Some CPU @ 2 GHz\ncpu MHz\t: {megahertz}\nflags\t\t: fpu {flags}\n"
        for megahertz, flags in ((2000, "avx2 amx_tile"), (3000, "avx2"))
    ]
    file.write_text("\n".join(cores))
    assert read_cpu_info(file) == CpuInfo("model 106, model name Some CPU @ 2 GHz", frozenset({"fpu", "avx2"}))


def test_arm_has_features_and_numbers_for_a_name(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nFeatures\t: fp asimd bf16\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n")
    assert read_cpu_info(file) == CpuInfo("CPU implementer 0x41, CPU part 0xd40", frozenset({"fp", "asimd", "bf16"}))


def test_system_that_does_not_tell_its_cpu_supports_nothing(tmp_path: Path) -> None:
    assert read_cpu_info(tmp_path / "missing") == CpuInfo("", frozenset())


@pytest.mark.parametrize("build", machine_builds(), ids=lambda build: build.name)
def test_kernels_compile_with_the_flags_of_each_path(build: KernelBuild) -> None:
    """The compiler refuses intrinsics that the flags do not cover. Without optimisation it is quick.

    Other tests compile and run those of `OPENED` that this CPU supports.
    """
    if build.name in OPENED and build.name in (path.name for path in supported_paths(read_cpu_info())):
        assert open_path(build.name).ps_abi() == ABI
        return
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("needs a C++ compiler: install g++")
    command = [compiler, "-std=c++17", "-O0", "-w", "-S", "-o", "/dev/null", *build.compiler_flags]
    command += [f"-I{SOURCE.parent}", str(SOURCE)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_avx2_library_has_no_avx512_instructions() -> None:
    """Neither 512 bits wide nor with a mask or one of the registers 16 to 31."""
    objdump = shutil.which("objdump")
    if platform.machine() != "x86_64" or objdump is None:
        pytest.skip("needs an x86-64 machine with objdump: install binutils")
    library = open_path("avx2")._name
    code = subprocess.run([objdump, "-d", library], capture_output=True, text=True, check=True).stdout
    assert code.count("vfmadd") > 100
    assert re.findall(r"%zmm\d+|%k[0-7]\b|%[xy]mm(?:1[6-9]|2\d|3[01])\b", code) == []


def test_every_avx512_instruction_of_the_kernels_is_emulated_on_a_cpu_without_them() -> None:
    """Holds on every CPU, so that a new instruction is noticed on machines that have it too."""
    if platform.machine() != "x86_64":
        pytest.skip("SIMDe's functions stand beside those of an x86-64 compiler")
    require_simde()
    compiler = find_compiler()
    assert compiler
    command = [compiler, "-E", "-dM", "-xc++", *EMULATED["avx512_bf16"].compiler_flags, "-"]
    header = "#include <immintrin.h>\n"
    macros = subprocess.run(command, input=header, capture_output=True, text=True, check=True).stdout
    emulated = set(re.findall(r"^#define (_mm\w+)", macros, re.MULTILINE))
    kernels = (SOURCE.parent / "vectors" / "vectors_avx512.h").read_text()
    used = set(re.findall(r"\b_mm512_\w+|\b_mm256_maskz?_\w+", kernels))
    assert len(used) > 40
    assert used <= emulated
