"""An illegal access on the (emulated) device, from the request that met with it to the server that goes on."""

from __future__ import annotations

import httpx

from tests.decoder.cuda.emulated_pass import POISON
from tests.system.processes import START_TIMEOUT_S, Command, running, wait_until

SMALL = ("--max-running", "2", "--max-batch-tokens", "16", "--kv-budget", "4MB", "--page-size", "16")


def test_its_request_fails_the_log_names_step_and_kernel_and_the_backend_is_restarted() -> None:
    poisoned = ("--forward-pass", "tests.decoder.cuda.emulated_pass:PoisonedCudaPass", "--gpu", "none")
    serve = Command("tools.main", "serve", *poisoned, *SMALL, "--host", "127.0.0.1", "--port", "0")
    with running(serve), httpx.Client(timeout=START_TIMEOUT_S, verify=False) as http:  # noqa: S501 - plain HTTP
        url = serve.wait_for(r"Ready: (http://[^/\s]+)").group(1)

        def complete(*prompt: int) -> httpx.Response:
            body = {"model": "penstock-demo", "prompt": prompt, "max_tokens": 4, "temperature": 0}
            return http.post(f"{url}/v1/completions", json=body)

        before = complete(5, 6, 7)
        assert before.status_code == 200
        failed = complete(9, POISON)
        assert (failed.status_code, failed.json()["error"]["type"]) == (500, "server_error")
        named = r"DeviceLost: a step of 2 tokens in 1 rows: .*illegal memory access.* given last was scan_rows\["
        serve.wait_for(named)
        serve.wait_for("backend exited with status 1; restarting")
        wait_until(lambda: complete(5, 6, 7).status_code == 200, START_TIMEOUT_S)
        assert complete(5, 6, 7).json()["choices"] == before.json()["choices"]
        assert serve.terminate() == 0
