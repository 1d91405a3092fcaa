"""The path of the native kernels: the best that the CPU supports, the measured one, or the one that was asked for."""

from __future__ import annotations

import errno
import logging
import math
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.backend.errors import StartupError
from penstock.backend.passes.cpu import path_choice
from penstock.backend.passes.cpu.library.cpu_paths import CpuInfo, KernelBuild
from penstock.backend.passes.cpu.library.native_library import LibraryUnavailableError
from penstock.backend.passes.cpu.path_choice import load_kernels
from penstock.backend.passes.cpu.path_timing import TIMED_ROWS, time_products
from tests.backend.passes.cpu.path_libraries import open_emulated_tiles, open_path
from tests.backend.passes.cpu.test_cpu_paths import HASWELL, ICE_LAKE, SAPPHIRE_RAPIDS, ZEN_4


class FakeLibrary:
    def __init__(self, name: str, tiles_error: int) -> None:
        self.name = name
        self.tiles_error = tiles_error

    def ps_request_tiles(self) -> int:
        return self.tiles_error


class Machine:
    """A CPU with given flags, the libraries that can be opened, and the times that they take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.missing: set[str] = set()
        self.tiles_error = 0
        self.times: dict[str, tuple[float, ...]] = {}
        self.opened: list[str] = []
        self.num_measurements = 0
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(platform, "machine", lambda: "x86_64")
        monkeypatch.setattr(path_choice, "open_build", self._open)
        monkeypatch.setattr(path_choice, "time_products", self._time)
        self.set_cpu(HASWELL)

    def set_cpu(self, flags: str, model: str = "a CPU") -> None:
        cpu = CpuInfo(model, frozenset(flags.split()))
        self._monkeypatch.setattr(path_choice, "read_cpu_info", lambda: cpu)

    def start(self, cpu_path: str = "auto") -> str | None:
        """Return the path that a new process takes."""
        load_kernels.cache_clear()
        kernels = load_kernels(cpu_path)
        return None if kernels is None else kernels.path.name

    def _open(self, build: KernelBuild, builds: tuple[KernelBuild, ...]) -> Any:
        self.opened.append(build.name)
        if build.name in self.missing:
            raise LibraryUnavailableError(f"{build.name} cannot be compiled")
        return FakeLibrary(build.name, self.tiles_error)

    def _time(self, libraries: dict[str, tuple[FakeLibrary, bool]]) -> dict[str, tuple[float, ...]]:
        self.num_measurements += 1
        assert [uses_tiles for _, uses_tiles in libraries.values()] == [name == "amx" for name in libraries]
        return {name: self.times[name] for name in libraries}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield Machine(monkeypatch)
    load_kernels.cache_clear()


@pytest.mark.parametrize(("flags", "path"), [(HASWELL, "avx2"), (ZEN_4, "avx512_bf16")])
def test_path_without_a_rival_is_taken_unmeasured_and_compiled_alone(flags: str, path: str, machine: Machine) -> None:
    machine.set_cpu(flags)
    assert machine.start() == path
    assert machine.opened == [path]
    assert machine.num_measurements == 0


@pytest.mark.parametrize(
    ("rival", "path"),
    [((1.0, 10.0), "avx512_vnni"), ((0.95, 9.5), "avx512_vnni"), ((0.8, 9.0), "avx2"), ((2.0, 5.0), "avx512_vnni")],
)
def test_rival_is_taken_if_it_is_faster_by_a_clear_margin(
    rival: tuple[float, ...], path: str, machine: Machine
) -> None:
    machine.set_cpu(ICE_LAKE)
    machine.times = {"avx512_vnni": (1.0, 10.0), "avx2": rival}
    assert machine.start() == path


def test_measured_path_is_kept_from_start_to_start(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.set_cpu(ICE_LAKE)
    machine.times = {"avx512_vnni": (1.0, 10.0), "avx2": (0.5, 5.0)}
    with caplog.at_level(logging.INFO):
        assert machine.start() == "avx2"
        machine.times = {"avx512_vnni": (0.5, 5.0), "avx2": (1.0, 10.0)}
        assert machine.start() == "avx2"
    assert machine.num_measurements == 1
    measured, remembered = caplog.messages
    figures = "a product of 8 MB with 1 and 32 rows takes avx512_vnni 1.00, 10.00 ms; avx2 0.50, 5.00 ms"
    assert measured.startswith("CPU kernels: path avx2, measured now and kept in ")
    assert measured.endswith(figures)
    assert remembered == f"CPU kernels: path avx2, as measured at an earlier start: {figures}"


def only_record(directory: Path) -> Path:
    (record,) = directory.glob("penstock/cpu-path-*.json")
    return record


def cut(record: Path) -> None:
    record.write_bytes(record.read_bytes()[:20])


def name_another_path(record: Path) -> None:
    record.write_bytes(record.read_bytes().replace(b'"path":"avx2"', b'"path":"avx9"'))


def put_text_for_times(record: Path) -> None:
    record.write_bytes(record.read_bytes().replace(b"[1.0,10.0]", b'["1",["x"]]'))


def add_a_field(record: Path) -> None:
    record.write_bytes(record.read_bytes().replace(b'"path"', b'"more":1,"path"'))


def let_others_write(record: Path) -> None:
    record.chmod(0o622)


def make_large(record: Path) -> None:
    record.write_bytes(b" " * 5000 + record.read_bytes())


def replace_by_a_directory(record: Path) -> None:
    record.unlink()
    record.mkdir()


SPOIL = [cut, name_another_path, put_text_for_times, add_a_field, let_others_write, make_large, Path.unlink]


@pytest.mark.parametrize("spoil", SPOIL)
def test_record_that_cannot_be_trusted_is_measured_again(
    spoil: Callable[[Path], None], machine: Machine, tmp_path: Path
) -> None:
    machine.set_cpu(ICE_LAKE)
    machine.times = {"avx512_vnni": (1.0, 10.0), "avx2": (0.5, 5.0)}
    machine.start()
    spoil(only_record(tmp_path))
    machine.times = {"avx512_vnni": (0.5, 5.0), "avx2": (1.0, 10.0)}
    assert [machine.start(), machine.start()] == ["avx512_vnni", "avx512_vnni"]
    assert machine.num_measurements == 2


def test_choice_that_cannot_be_kept_says_so(machine: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    machine.set_cpu(ICE_LAKE)
    machine.times = {"avx512_vnni": (1.0, 10.0), "avx2": (0.5, 5.0)}
    machine.start()
    replace_by_a_directory(only_record(tmp_path))
    with caplog.at_level(logging.INFO):
        assert machine.start() == "avx2"
    assert "measured now, and again at each start because it cannot be kept" in caplog.text
    assert [path.name for path in (tmp_path / "penstock").iterdir()] == [only_record(tmp_path).name]


def test_another_cpu_measures_for_itself(machine: Machine) -> None:
    machine.times = {"avx512_vnni": (1.0, 10.0), "avx2": (0.5, 5.0)}
    for model, flags in (("first", ICE_LAKE), ("second", ICE_LAKE), ("second", f"{ICE_LAKE} gfni")):
        machine.set_cpu(flags, model)
        machine.start()
    assert machine.num_measurements == 3


def test_tiles_and_vectors_of_one_library_are_measured_against_each_other(machine: Machine) -> None:
    machine.set_cpu(SAPPHIRE_RAPIDS)
    machine.times = {"amx": (1.0, 10.0), "avx512_bf16": (0.7, 10.0)}
    assert machine.start() == "avx512_bf16"
    assert machine.opened == ["avx512_bf16"]


def test_refused_tiles_leave_vectors(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.set_cpu(SAPPHIRE_RAPIDS)
    machine.tiles_error = errno.EPERM
    with caplog.at_level(logging.WARNING):
        assert machine.start() == "avx512_bf16"
    assert machine.num_measurements == 0
    assert "refuses AMX tiles to this process" in caplog.text


def test_path_that_cannot_be_compiled_gives_way_to_the_next(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.set_cpu(SAPPHIRE_RAPIDS)
    machine.missing = {"avx512_bf16", "avx2"}
    with caplog.at_level(logging.WARNING):
        assert machine.start() == "avx512_vnni"
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [
        "CPU kernels: path avx512_vnni, because no better one can be had: avx512_bf16 cannot be compiled"
    ]


def test_cpu_without_any_path_gets_no_kernels(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.set_cpu("sse4_2")
    assert machine.start() is None
    assert "this CPU (x86_64) supports no path of theirs: amx, avx512_bf16" in caplog.text


def test_path_that_was_asked_for_is_taken(machine: Machine) -> None:
    machine.set_cpu(SAPPHIRE_RAPIDS)
    assert [machine.start(name) for name in ("amx", "avx512", "avx2")] == ["amx", "avx512", "avx2"]
    assert machine.num_measurements == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "neon",
            "this machine's architecture does not have: choose from auto, amx, avx512_bf16, avx512_vnni, avx512, ",
        ),
        ("amx", "this CPU does not support: choose from auto, avx512_bf16, avx512_vnni, avx512, avx2"),
        ("avx512", "whose kernels cannot be had: avx512 cannot be compiled"),
    ],
)
def test_path_that_cannot_be_had_is_refused_in_one_line(name: str, message: str, machine: Machine) -> None:
    machine.set_cpu(ZEN_4)
    machine.missing = {"avx512"}
    with pytest.raises(StartupError) as error:
        machine.start(name)
    assert message in str(error.value)
    assert str(error.value).startswith(f"--cpu-path is {name}, ")
    assert "\n" not in str(error.value)


def test_tiles_that_were_asked_for_and_are_refused_are_an_error(machine: Machine) -> None:
    machine.set_cpu(SAPPHIRE_RAPIDS)
    machine.tiles_error = errno.EPERM
    with pytest.raises(StartupError, match="--cpu-path is amx, and the system refuses AMX tiles"):
        machine.start("amx")


def test_products_are_timed_on_each_path() -> None:
    libraries = {"avx2": (open_path("avx2"), False), "tiles": (open_emulated_tiles(), True)}
    times = time_products(libraries)
    assert list(times) == list(libraries)
    for least in times.values():
        assert len(least) == len(TIMED_ROWS)
        assert all(0 < milliseconds < math.inf for milliseconds in least)
