"""`penstock doctor`: each finding from a made-up machine, and the command on this one."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING

import pytest

from penstock.backend.errors import StartupError
from penstock.backend.kv_cache.budget.memory import MemoryInfo
from penstock.backend.passes.cpu import path_choice
from penstock.backend.passes.cpu.library.cpu_paths import PATHS, CpuInfo
from penstock.backend.passes.cpu.library.native_library import LibraryUnavailableError
from penstock.backend.passes.cuda.device.device_choice import Gpu
from penstock.commands.doctor.addresses import backend_socket, http_port
from penstock.commands.doctor.cpu import bandwidth, compiler, cores, examine_cpu, features, measure_bandwidth
from penstock.commands.doctor.finding import Finding, Level
from penstock.commands.doctor.gpu import examine_gpu
from penstock.commands.doctor.memory import free_memory, huge_pages
from penstock.commands.doctor.model import examine_model, fits
from penstock.commands.doctor.software import packages
from penstock.main import app
from penstock.shm.link.listening_address import ListeningAddress
from penstock.tools.free_port import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GPU = Gpu(0, "GPU-1234", "NVIDIA H200", (9, 0))
OLD_GPU = Gpu(1, "GPU-5678", "Tesla T4", (7, 5))
GB = 1_000_000_000


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        app(["doctor", *argv])
    return int(ended.value.code or 0)


def test_machine_that_can_serve_exits_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--quick",
        "--gpu",
        "none",
        f"--port={free_port()}",
        f"--socket={tmp_path / 's'}",
        "--model=penstock-demo",
    ]
    assert run(*options, "--json") == 0
    findings = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    subjects = [finding["subject"] for finding in findings]
    assert {"Python", "packages", "memory", "CPU kernels", "GPU", "backend's socket", "model"} <= set(subjects)
    assert len(subjects) == len(set(subjects))
    assert all(finding["level"] == "ok" or finding["remedy"] for finding in findings)


def test_obstacle_is_printed_with_its_remedy_and_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--quick", f"--port={free_port()}", f"--socket={tmp_path / 's'}", f"--model={tmp_path / 'nothing'}"]
    assert run("--gpu=7", *options) == 1
    lines = capsys.readouterr().out.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("error"))
    assert "--gpu is 7" in lines[first]
    assert lines[first + 1].strip() == "→ choose a GPU that is here, or --gpu none"
    assert lines[-1].endswith("2 error")


def test_finding_that_is_not_in_order_needs_a_remedy() -> None:
    with pytest.raises(ValueError, match="disk is warning and has no remedy"):
        Finding(Level.WARNING, "disk", "full")


def test_missing_and_old_packages_are_named() -> None:
    found = packages(["torch", "penstock-missing", "numpy>=999", 'cupy-cuda13x; extra == "cuda13"'])
    assert found.level is Level.ERROR
    assert "penstock-missing is not installed; numpy is " in found.found
    assert found.found.endswith(", not >=999")
    assert packages(["torch", "numpy"]).level is Level.OK


def test_memory_and_pages_below_what_is_needed_are_warned_of(tmp_path: Path) -> None:
    assert free_memory(MemoryInfo(64 * GB, GB, "this machine")).level is Level.WARNING
    enough = free_memory(MemoryInfo(64 * GB, 60 * GB, "this machine"))
    assert enough.found == "60.00 GB of 64.00 GB are free on this machine"
    setting = tmp_path / "enabled"
    assert huge_pages(setting).found.endswith("unknown")
    setting.write_text("always madvise [never]\n")
    assert (huge_pages(setting).level, huge_pages(setting).found[-5:]) == (Level.NOTE, "never")
    setting.write_text("always [madvise] never\n")
    assert huge_pages(setting).level is Level.OK


def test_cpu_features_are_those_of_the_kernels_and_the_missing_ones_are_named() -> None:
    paths = PATHS["x86_64"]
    best, least = paths[0], paths[-1]
    old = features(CpuInfo("old", frozenset({"sse4_2", "avx2"})), paths)
    assert (old.level, old.found) == (Level.WARNING, "not enough for our kernels: avx2")
    some = features(CpuInfo("some", least.cpu_flags | {"sse4_2"}), paths)
    assert (some.level, some.found.startswith("avx2, f16c, fma; path amx would need amx_bf16")) == (Level.OK, True)
    assert "would need" not in features(CpuInfo("new", best.cpu_flags), paths).found
    assert features(CpuInfo("of another architecture", frozenset()), ()).level is Level.WARNING
    assert [compiler(path).level for path in (None, "/usr/bin/g++")] == [Level.NOTE, Level.OK]


def test_one_core_is_warned_of() -> None:
    assert [cores(count).level for count in (1, 2)] == [Level.WARNING, Level.OK]


def test_product_and_memory_are_timed_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.commands.doctor.cpu._NUM_HEADS", 32)
    kernels = path_choice.load_kernels()
    assert kernels is not None
    product, reading = measure_bandwidth(kernels, 1)
    assert 1e8 < product < 1e13
    assert 1e8 < reading < 1e13
    assert bandwidth(19e9, 20e9, 2).level is Level.OK
    slow = bandwidth(10e9, 20e9, 2)
    assert slow.level is Level.WARNING
    assert slow.found.startswith("a product of one row reads its weights at 10.0 GB/s, and memory gives 20.0 GB/s")


def test_missing_compiler_is_a_warning_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_cpu: object) -> None:
        raise LibraryUnavailableError("no C++ compiler")

    monkeypatch.setattr("penstock.commands.doctor.cpu.open_fastest", fail)
    monkeypatch.setattr("penstock.commands.doctor.cpu.find_compiler", lambda: None)
    found = list(examine_cpu(is_quick=False))[-1]
    assert (found.level, found.subject) == (Level.WARNING, "CPU kernels")
    assert "no C++ compiler" in found.found
    assert "apt-get install g++" in found.remedy


def levels(findings: list[Finding]) -> list[Level]:
    return [finding.level for finding in findings]


def test_gpu_is_named_with_its_memory() -> None:
    found = list(examine_gpu("auto", lambda: [OLD_GPU, GPU], lambda index: MemoryInfo(140 * GB, 139 * GB, str(index))))
    assert levels(found) == [Level.OK, Level.OK]
    assert found[0].found == "GPU 0 (NVIDIA H200), compute capability 9.0, of 2 found"
    busy = list(examine_gpu("0", lambda: [GPU], lambda _: MemoryInfo(140 * GB, 40 * GB, "GPU 0")))
    assert levels(busy) == [Level.OK, Level.WARNING]


def test_missing_or_old_gpu_is_an_error_only_where_it_is_asked_for() -> None:
    def none() -> list[Gpu]:
        raise StartupError("no NVIDIA driver")

    assert levels(list(examine_gpu("none", none))) == [Level.OK]
    assert levels(list(examine_gpu("auto", none))) == [Level.NOTE]
    assert levels(list(examine_gpu("0", none))) == [Level.ERROR]
    assert levels(list(examine_gpu("auto", lambda: [OLD_GPU]))) == [Level.NOTE]
    refused = list(examine_gpu("1", lambda: [OLD_GPU]))
    assert levels(refused) == [Level.ERROR]
    assert "compute capability 8.0 or more" in refused[0].found


def test_gpu_that_does_not_report_its_memory_is_an_error() -> None:
    def fail(_index: int) -> MemoryInfo:
        raise StartupError("GPU 0 does not report its free memory: out of memory")

    assert levels(list(examine_gpu("0", lambda: [GPU], fail))) == [Level.OK, Level.ERROR]


def test_used_socket_and_unsafe_directory_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "own" / "backend.sock"
    assert backend_socket(path).level is Level.OK
    address = ListeningAddress(path)
    assert backend_socket(path).level is Level.NOTE
    address.close()
    path.parent.chmod(0o777)
    unsafe = backend_socket(path)
    assert unsafe.level is Level.ERROR
    assert str(path.parent) in unsafe.found


def test_used_port_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert http_port("127.0.0.1", port).found == "in use on 127.0.0.1"
    assert http_port("127.0.0.1", free_port()).level is Level.OK
    assert http_port("no.such.host.invalid", 80).level is Level.ERROR


@pytest.mark.parametrize(
    ("status", "answer", "found"),
    [
        (200, b'{"status": "ready", "running": 1}', "in use on 127.0.0.1 by a Penstock that is ready"),
        (
            503,
            b'{"error": {"message": "the backend is not connected"}}',
            "in use on 127.0.0.1 by a Penstock that is not ready: the backend is not connected",
        ),
        (200, b"<html>", "in use on 127.0.0.1"),
        (200, b"[]", "in use on 127.0.0.1"),
    ],
)
def test_penstock_at_the_port_is_asked_for_its_health(status: int, answer: bytes, found: str) -> None:
    with answering(status, answer) as port:
        assert http_port("127.0.0.1", port).found == found


@contextmanager
def answering(status: int, answer: bytes) -> Iterator[int]:
    """A server that answers each GET so."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_model_is_described_and_its_size_compared(tmp_path: Path) -> None:
    found = list(examine_model("penstock-demo", None))
    assert [finding.subject for finding in found] == ["model", "model's size"]
    assert levels(found) == [Level.OK, Level.OK]
    (tmp_path / "config.json").write_text('{"architectures": ["UnheardOfForCausalLM"]}')
    refused = list(examine_model(str(tmp_path), None))
    assert levels(refused) == [Level.ERROR]
    assert "UnheardOfForCausalLM" in refused[0].found
    assert fits(8 * GB, MemoryInfo(8 * GB, 4 * GB, "this machine")).level is Level.WARNING
