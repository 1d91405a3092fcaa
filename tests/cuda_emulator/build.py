"""Compile a kernel's source with g++ and binutils to a library for the emulator, and cache the library.

Libraries are in the user's cache directory, named by a hash of all their inputs. They are renamed into place; of
several processes that need the same one, one builds it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from penstock.backend.passes.cuda.device.launcher import KERNELS_DIR, KernelFailed
from penstock.process.cache_directory import cache_directory

RUNTIME_DIR = Path(__file__).parent / "runtime"

_CPU_FLAGS = (
    "-march=native",
    "-std=c++17",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fno-gnu-unique",  # libraries must not share their definitions
    "-fno-exceptions",
    "-w",
)
_KERNEL_FLAGS = {
    "fast": ("-O1",),
    "device": ("-O1", "-fexpensive-optimizations", "-ffp-contract=fast", "-DCUSIM_AS_DEVICE"),
    # The sanitizers are not linked: the emulator's runtime defines the functions that instrumented code calls. They
    # take the time of a launch, so optimisation would only make the compilation three times as long.
    "check": (
        "-O0",
        "-g1",
        "-gdwarf-4",  # all versions of addr2line read it
        "-fsanitize=thread,bounds,alignment,shift,signed-integer-overflow,integer-divide-by-zero,null",
        "-fno-sanitize-recover=all",
    ),
}
_COMPILE_TIMEOUT_S = 300.0
_UNUSED_AFTER_S = 14 * 24 * 3600.0

_DYNAMIC_SHARED = re.compile(
    r"extern\s+__shared__\s+(?:__align__\s*\(\s*\d+\s*\)\s*)?(?P<type>\w[\w:\s]*?)\s+(?P<name>\w+)\s*\[\s*\]\s*;"
)
_BOUNDS = r"(?:__launch_bounds__\s*\((?P<{}>(?:[^()]|\([^()]*\))*)\)\s*)?"
_ENTRY = re.compile(
    r'extern\s+"C"\s+__global__\s+' + _BOUNDS.format("before") + r"void\s+" + _BOUNDS.format("after")
    + r"(?P<name>\w+)\s*\((?P<parameters>[^()]*)\)"
)  # fmt: skip


# Only static __shared__ variables are in .bss. They are moved to their own section, so that the runtime can poison them
# for each block, and described in another. The guard bytes between them belong to no variable.
_SHARED_VARIABLE = re.compile(r"\.local\t(?P<name>\S+)\n\s*\.comm\t\S+,(?P<bytes>\d+),(?P<alignment>\d+)\n")
_IN_SHARED_SECTION = """\
.pushsection cusim_shared,"aw"
.balign {alignment}
{name}:
.zero {bytes}
.zero 256
.popsection
.pushsection .rodata
9: .asciz "{plain_name}"
.popsection
.pushsection cusim_variables,"aw"
.quad 9b, {name}, {bytes}
.popsection
"""


def build_kernels(directory: Path, name: str, macros: tuple[tuple[str, int], ...], mode: str) -> Path:
    """Return the library with all kernels of a source, built for one of the launcher's modes. Raises KernelFailed.

    Headers of the directory come before the project's.
    """
    source = directory / name
    flags = (*_CPU_FLAGS, *_KERNEL_FLAGS[mode])
    defines = ("-DCUSIM", *(f"-D{name}={value}" for name, value in macros))
    directories = dict.fromkeys((directory, KERNELS_DIR))
    headers = (path for root in directories for path in sorted(root.rglob("*.cuh")))
    key = _hash_of(source, *headers, texts=(_runtime_key(), *flags, *defines))
    path = cached_directory("cuda-emulator") / f"{source.stem}-{mode}-{key}.so"
    with _alone(path):
        if not _in_use(path):
            _build(path, source, directories, mode, defines)
    return path


def _build(path: Path, source: Path, directories: Iterable[Path], mode: str, defines: tuple[str, ...]) -> None:
    runtime = build_runtime()
    with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
        text = _run(("g++", "-E", *defines, *(f"-I{directory}" for directory in directories), "-xc++", str(source)))
        kernels, assembly, library = (Path(temporary, name) for name in ("kernels.cpp", "kernels.s", path.name))
        kernels.write_text(_as_cpp(text, source))
        flags = (*_CPU_FLAGS, *_KERNEL_FLAGS[mode], "-DCUSIM", f"-I{RUNTIME_DIR}")
        _run(("g++", "-S", *flags, str(kernels), "-o", str(assembly)))
        code = _SHARED_VARIABLE.sub(_in_shared_section, assembly.read_text())
        if ".bss" in code:
            raise KernelFailed(
                f"{source.name}: g++ lays out a __shared__ variable in a way that the emulator cannot use"
            )
        assembly.write_text(code)
        _run(("g++", "-shared", str(assembly), str(runtime), "-o", str(library)))
        library.rename(path)


@cache
def build_runtime() -> Path:
    """Return the library that all kernel libraries link to. Raises KernelFailed."""
    path = cached_directory("cuda-emulator") / f"runtime-{_runtime_key()}.so"
    with _alone(path):
        if _in_use(path):
            return path
        with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
            library, whole = Path(temporary, path.name), Path(temporary, "runtime.cpp")
            # Compiled as one, the standard library's headers are read once.
            whole.write_text("".join(f'#include "{source}"\n' for source in sorted(RUNTIME_DIR.glob("*.cpp"))))
            _run(("g++", "-shared", "-O2", "-fvisibility=protected", *_CPU_FLAGS, str(whole), "-o", str(library)))
            library.rename(path)
    return path


def _in_shared_section(variable: re.Match[str]) -> str:
    return _IN_SHARED_SECTION.format(**variable.groupdict(), plain_name=_plain_name(variable["name"]))


def _plain_name(symbol: str) -> str:
    """Return the variable's name from a mangled name, which ends in the name's length, the name, and maybe a number."""
    for match in re.finditer(r"\d+", symbol):
        name = symbol[match.end() : match.end() + int(match[0])]
        if re.fullmatch(r"(_\d+|E?_\d+)?(\.\d+)?", symbol[match.end() + len(name) :]) and re.fullmatch(
            r"[a-zA-Z_]\w*", name
        ):
            return name
    return symbol.split(".")[0]


def source_lines(library: Path, offsets: list[str]) -> list[str]:
    """Return the source lines of a library's instructions, for example "inner.cuh:7 in kernel.cu:12"."""
    found = []
    for offset in offsets:
        frames = _run(("addr2line", "-i", "-e", str(library), offset)).split("\n")
        places = [Path(frame.split(" ")[0]) for frame in frames if frame and not frame.startswith("??")]
        names = [place.name for place in places if place.parent != RUNTIME_DIR]
        found.append(" in ".join(names) or f"byte {offset} of the library")
    return found


def _as_cpp(text: str, source: Path) -> str:
    """Turn preprocessed CUDA source into C++ that exports its kernels."""
    text = _DYNAMIC_SHARED.sub(r"\g<type>* const \g<name> = cusim::dynamic_shared<\g<type>>();", text)
    # Inlined without optimisation too: a report names the line that called.
    text = re.sub(r"^inline\b", "__forceinline__", text, flags=re.MULTILINE)
    if "extern __shared__" in text:
        raise KernelFailed(f"{source.name}: the emulator does not support this form of `extern __shared__`")
    entries = []
    for entry in _ENTRY.finditer(text):
        names = [re.sub(r".*\W", "", parameter.strip()) for parameter in entry["parameters"].split(",")]
        bounds = entry["before"] or entry["after"] or "0"
        entries.append(f'CUSIM_KERNEL({entry["name"]}, "{",".join(names)}", {bounds})')
    if not entries:
        raise KernelFailed(f'{source.name} has no extern "C" __global__ function')
    return "\n".join(('#include "cusim.h"', "namespace {", text, "}", *entries, ""))


def _run(command: tuple[str, ...]) -> str:
    if shutil.which(command[0]) is None:
        raise KernelFailed(f"the emulator needs {command[0]}, which is not installed")
    result = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False)
    if result.returncode != 0:
        errors = [line for line in result.stderr.splitlines() if "error" in line or "undefined" in line]
        raise KernelFailed(f"{command[0]} failed for the emulator: " + "\n".join(errors[:5] or [result.stderr[-500:]]))
    return result.stdout


@cache
def _runtime_key() -> str:
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")]
    texts = (*_CPU_FLAGS, *sorted(set(cpu)), _run(("g++", "--version")), Path(__file__).read_text())
    return _hash_of(*sorted(RUNTIME_DIR.iterdir()), texts=texts)


def _hash_of(*files: Path, texts: tuple[str, ...]) -> str:
    parts = [part for path in files for part in (path.name.encode(), path.read_bytes())]
    parts += [text.encode() for text in texts]
    return hashlib.sha256(b"".join(len(part).to_bytes(8) + part for part in parts)).hexdigest()[:20]


@cache
def cached_directory(name: str) -> Path:
    """Return a directory in the user's cache, after deleting files that have not been used for two weeks."""
    directory = cache_directory() / name
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    oldest = time.time() - _UNUSED_AFTER_S
    for path in directory.glob("*.*"):
        try:
            if path.stat().st_mtime < oldest:
                path.unlink()
        except FileNotFoundError:  # another process deleted it first
            continue
    return directory


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep other processes from building the same library."""
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _in_use(path: Path) -> bool:
    """Return whether path exists, and mark it as used now."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    return True
