"""The paths of the native kernels: the instruction sets that they are compiled for, and what a CPU needs to run them.

The best path of an architecture comes first. To add one: an entry here, its vector layer in kernels/vectors/, and how
tests run it on CPUs without it (tests/backend/passes/cpu/path_libraries.py).
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class KernelBuild:
    """A shared object: kernels/cpu.cpp compiled with these flags. Several paths may use it."""

    name: str
    compiler_flags: tuple[str, ...]
    source: Path | None = None
    """Another source than kernels/cpu.cpp."""


@dataclass(frozen=True, slots=True)
class CpuPath:
    name: str
    build: KernelBuild
    cpu_flags: frozenset[str]
    """Features that the CPU must have, in the names of /proc/cpuinfo."""
    uses_tiles: bool = False
    """bf16 products run on AMX tiles. The build must have been granted them by `request_tiles`."""
    rival: str | None = None
    """A path that is faster on some CPUs that support both. A measurement at start decides."""


@dataclass(frozen=True, slots=True)
class CpuInfo:
    model: str
    flags: frozenset[str]


_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512cd")
_AVX512_VNNI = (*_AVX512, "-mavx512vnni")
# The compiler writes no tile instructions by itself, so this code runs on CPUs without AMX too.
_AVX512_BF16 = (*_AVX512_VNNI, "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8")

_AVX2_CPU = frozenset({"avx2", "fma", "f16c"})
_AVX512_CPU = _AVX2_CPU | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"}
_AVX512_VNNI_CPU = _AVX512_CPU | {"avx512_vnni"}
_AVX512_BF16_CPU = _AVX512_VNNI_CPU | {"avx512_bf16"}
_AMX_CPU = _AVX512_BF16_CPU | {"amx_tile", "amx_bf16", "amx_int8"}

_BF16_BUILD = KernelBuild("avx512_bf16", (*_AVX512_BF16, "-mtune=icelake-server"))

# g++ otherwise moves loads so far ahead that sums leave their registers.
_ARM = ("-fno-schedule-insns",)

PATHS: dict[str, tuple[CpuPath, ...]] = {
    "x86_64": (
        # Sapphire Rapids and later Xeons
        CpuPath("amx", _BF16_BUILD, _AMX_CPU, uses_tiles=True, rival="avx512_bf16"),
        # Zen 4, Zen 5, Cooper Lake
        CpuPath("avx512_bf16", _BF16_BUILD, _AVX512_BF16_CPU),
        # Cascade Lake, Ice Lake
        CpuPath(
            "avx512_vnni",
            KernelBuild("avx512_vnni", (*_AVX512_VNNI, "-mtune=icelake-server")),
            _AVX512_VNNI_CPU,
            rival="avx2",
        ),
        # Skylake-X
        CpuPath("avx512", KernelBuild("avx512", (*_AVX512, "-mtune=skylake-avx512")), _AVX512_CPU, rival="avx2"),
        # Haswell and later, Zen 1 to 3
        CpuPath("avx2", KernelBuild("avx2", (*_AVX2, "-mtune=haswell")), _AVX2_CPU),
    ),
    "aarch64": (
        # Graviton3 and later, Neoverse V1 and N2, Apple M2 and later
        CpuPath(
            "neon_bf16",
            KernelBuild("neon_bf16", ("-march=armv8.2-a+dotprod+bf16", *_ARM)),
            frozenset({"asimd", "asimddp", "bf16"}),
        ),
        # Graviton2, Ampere Altra, Apple M1
        CpuPath(
            "neon_dotprod",
            KernelBuild("neon_dotprod", ("-march=armv8.2-a+dotprod", *_ARM)),
            frozenset({"asimd", "asimddp"}),
        ),
        # All others
        CpuPath("neon", KernelBuild("neon", ("-march=armv8-a", *_ARM)), frozenset({"asimd"})),
    ),
}
"""By `platform.machine()`, best first."""


def machine_paths() -> tuple[CpuPath, ...]:
    """All paths of this machine's architecture, best first; none for an architecture without kernels."""
    return PATHS.get(platform.machine(), ())


def machine_builds() -> tuple[KernelBuild, ...]:
    """All shared objects of this machine's architecture."""
    return tuple(dict.fromkeys(path.build for path in machine_paths()))


def supported_paths(cpu: CpuInfo) -> tuple[CpuPath, ...]:
    """The paths of this machine's architecture that the CPU can run, best first."""
    return tuple(path for path in machine_paths() if path.cpu_flags <= cpu.flags)


def read_cpu_info(file: Path = Path("/proc/cpuinfo")) -> CpuInfo:
    """The CPU's model, and the flags that all its cores have; empty if the system does not report them."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    fields = [(name.strip(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    flags = [frozenset(value.split()) for name, value in fields if name in ("flags", "Features")]
    # ARM has no model name, but numbers of its designer and part.
    models = {f"{name} {value}" for name, value in fields if name.startswith(("model", "cpu family", "CPU "))}
    return CpuInfo(", ".join(sorted(models)), frozenset.intersection(*flags) if flags else frozenset())
