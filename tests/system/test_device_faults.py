"""Faults of the (emulated) device: the request fails, and the server continues or restarts."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.backend.passes.cuda.emulated_pass import FAULT_TOKEN, OUT_OF_MEMORY_TOKEN
from tests.system.processes import START_TIMEOUT_S, Command, running, wait_until

PASSES = "tests.backend.passes.cuda.emulated_pass"
SMALL = ("--gpu", "none", "--max-running", "2", "--max-batch-tokens", "16", "--kv-budget", "4MB", "--page-size", "16")


def test_device_fault_fails_its_request_and_a_lost_device_restarts_the_backend() -> None:
    arguments = ("--forward-pass", f"{PASSES}:FaultyCudaPass", *SMALL, "--host", "127.0.0.1", "--port", "0")
    serve = Command("penstock.main", "serve", *arguments)
    with running(serve), httpx.Client(timeout=START_TIMEOUT_S, verify=False) as http:  # noqa: S501 - plain HTTP
        url = serve.wait_for(r"Ready: (http://[^/\s]+)").group(1)

        def complete(*prompt: int) -> httpx.Response:
            body = {"model": "penstock-demo", "prompt": prompt, "max_tokens": 4, "temperature": 0}
            return http.post(f"{url}/v1/completions", json=body)

        def fails(*prompt: int) -> bool:
            response = complete(*prompt)
            return (response.status_code, response.json()["error"]["type"]) == (500, "server_error")

        before = complete(5, 6, 7)
        assert before.status_code == 200
        assert fails(8, OUT_OF_MEMORY_TOKEN)
        serve.wait_for("CUDA out of memory")
        serve.wait_for(r"in a step of 2 tokens in 1 rows; last launch: \w+\[ACT=1")
        assert complete(5, 6, 7).json()["choices"] == before.json()["choices"]
        assert "restarting" not in serve.output
        assert fails(9, FAULT_TOKEN)
        serve.wait_for(r"DeviceLost: a step of 2 tokens in 1 rows: .*illegal memory access.* last launch: scan_rows\[")
        serve.wait_for("backend exited with status 1; restarting")
        wait_until(lambda: complete(5, 6, 7).status_code == 200, START_TIMEOUT_S)
        assert complete(5, 6, 7).json()["choices"] == before.json()["choices"]
        assert serve.terminate() == 0


def test_kernel_that_does_not_compile_is_refused_in_one_line(tmp_path: Path) -> None:
    socket = tmp_path / "private" / "backend.sock"
    backend = Command(
        "penstock.backend.main", "--socket", str(socket), "--forward-pass", f"{PASSES}:UncompiledCudaPass", *SMALL
    )
    with running(backend):
        assert backend.status() == 1
    assert "the GPU kernels do not run: embed[ACT=1] cannot be compiled: no such header (" in backend.output
    assert "Traceback" not in backend.output
