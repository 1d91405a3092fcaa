"""JavaScript: the SDKs of OpenAI, Ollama, Vercel and LangChain, each by its quick start (quick_start.mjs)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

NODE_CLIENTS = Path(os.environ.get("PENSTOCK_NODE_CLIENTS", Path(__file__).parents[2] / ".venv-clients" / "javascript"))
"""A directory with the packages of javascript/package.json."""

pytestmark = pytest.mark.skipif(not (NODE_CLIENTS / "node_modules").is_dir(), reason="npm is not installed")


@pytest.fixture(params=["openai", "ollama", "ai-sdk-compatible", "ai-sdk-anthropic", "langchain"])
def result(request: pytest.FixtureRequest, server_url: str) -> dict[str, Any]:
    argv = ["node", "quick_start.mjs", request.param, f"{server_url}/v1"]
    ended = subprocess.run(argv, cwd=NODE_CLIENTS, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return {"client": request.param, **json.loads(ended.stdout)}


def test_quick_start_streams_the_same_text_and_calls_a_tool(result: dict[str, Any]) -> None:
    assert result["text"]
    assert result["streamed"] == result["text"]
    if result["client"] == "ollama":  # its API has no tool_choice
        assert result["generated"] == result["text"]
        assert {"penstock-demo", "penstock-demo-embed"} <= set(result["models"])
        assert (result["dimensions"] > 1, result["refusal"]) == (True, 400)
        return
    assert result["call"]["name"] == "weather"
    assert set(result["call"]["arguments"]) == {"city"}
    if result["client"] == "openai":
        assert result["lastEvent"] == "response.incomplete"
        assert result["refusal"] == 400
