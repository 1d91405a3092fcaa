"""Completions as the clients of the real processes ask for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import msgspec

if TYPE_CHECKING:
    import asyncio

    from tests.system.processes import Frontend

PACED = ("--forward-pass", "penstock.backend.passes.fake:PacedFakePass", "--kv-budget", "64MB")
"""Options of a backend that generates at the speed of a device."""
SLOW = ("--forward-pass", "tests.passes:SlowFakePass", "--kv-budget", "64MB")
"""Options of a backend whose streams last, with few tokens."""


def client() -> httpx.AsyncClient:
    # Without verify=False each client reads all of the system's certificates, even for plain HTTP.
    return httpx.AsyncClient(timeout=90.0, limits=httpx.Limits(max_connections=1000), verify=False)  # noqa: S501


def body(prompt: list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True} | more


async def read_stream(
    http: httpx.AsyncClient, url: str, request: dict[str, Any], began: asyncio.Event | None = None
) -> str:
    """Return the text of one stream, which must end without an error. began is set at its first line."""
    text = ""
    async with http.stream("POST", f"{url}/v1/completions", json=request | {"stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if began is not None:
                began.set()
            if line == "data: [DONE]":
                return text
            if line.startswith("data: "):
                chunk = msgspec.json.decode(line[6:])
                assert "error" not in chunk, chunk
                text += chunk["choices"][0]["text"]
    raise AssertionError("the stream ended without [DONE]")


def metric(frontend: Frontend, name: str) -> int:
    """Return the sum of a metric's samples over all labels; 0 without a backend."""
    lines = frontend.get("/metrics").text.splitlines()
    return sum(int(float(line.split()[1])) for line in lines if line.startswith((f"{name} ", f"{name}{{")))
