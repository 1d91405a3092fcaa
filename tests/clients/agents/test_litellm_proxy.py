"""LiteLLM's proxy in front of the server: its health checks, and answers through it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

_START_TIMEOUT_S = 120.0
MODEL = "penstock-demo"


@pytest.fixture
def proxy(server_url: str, tmp_path: Path) -> Iterator[httpx.Client]:
    models = [
        {
            "model_name": "chat",
            "litellm_params": {"model": f"openai/{MODEL}", "api_base": f"{server_url}/v1", "api_key": "none"},
        },
        {
            "model_name": "vectors",
            "litellm_params": {"model": f"openai/{MODEL}-embed", "api_base": f"{server_url}/v1", "api_key": "none"},
            "model_info": {"mode": "embedding"},
        },
    ]
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"model_list": models}))  # JSON is YAML
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    argv = [Path(sys.executable).with_name("litellm"), "--config", config, "--host", "127.0.0.1", "--port", port]
    environment = os.environ | {"LITELLM_TELEMETRY": "False", "NO_DOCS": "True"}
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen([*map(str, argv)], stdout=log, stderr=log, env=environment, cwd=tmp_path)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            deadline_s = time.monotonic() + _START_TIMEOUT_S
            while process.poll() is None and time.monotonic() < deadline_s:
                try:
                    if client.get("/health/liveliness").status_code == 200:
                        break
                except httpx.TransportError:
                    time.sleep(0.2)
            else:
                raise AssertionError((tmp_path / "log").read_text())
            yield client
    finally:
        process.terminate()
        process.wait()


def test_proxy_finds_the_server_healthy_and_passes_answers_on(proxy: httpx.Client) -> None:
    health = proxy.get("/health").json()
    assert (health["healthy_count"], health["unhealthy_count"]) == (2, 0), health
    body = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "temperature": 0}
    whole = proxy.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    lines = proxy.post("/v1/chat/completions", json={**body, "stream": True}).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]) == whole
    assert lines[-1] == "data: [DONE]" or lines[-2] == "data: [DONE]"
    vector = proxy.post("/v1/embeddings", json={"model": "vectors", "input": "hi"}).json()["data"][0]["embedding"]
    assert len(vector) > 8
    message = {"model": "chat", "max_tokens": 12, "messages": [{"role": "user", "content": "hi"}]}
    assert proxy.post("/v1/messages", json=message).json()["content"][0]["text"]
