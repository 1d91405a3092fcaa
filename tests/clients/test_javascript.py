"""JavaScript: the SDKs of OpenAI, Anthropic, Ollama, Vercel and LangChain.

Each by its quick start (javascript/quick_start.mjs), and with tools on a real model (javascript/tools.mjs).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from demo_models import REAL

NODE_CLIENTS = Path(os.environ.get("PENSTOCK_NODE_CLIENTS", Path(__file__).parents[2] / ".venv-clients" / "javascript"))
"""A directory with the packages of javascript/package.json."""

pytestmark = pytest.mark.skipif(not (NODE_CLIENTS / "node_modules").is_dir(), reason="npm is not installed")


CALLERS = [f"{sdk}-{api}" for sdk in ("ai-sdk", "langchain") for api in ("chat", "responses", "anthropic")]


def run(*arguments: str) -> Any:
    argv = ["node", *arguments]
    ended = subprocess.run(argv, cwd=NODE_CLIENTS, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.parametrize("client", ["openai", "ollama", "ai-sdk-compatible", "ai-sdk-anthropic", "langchain"])
def test_quick_start_streams_the_same_text_and_calls_a_tool(client: str, server_url: str) -> None:
    result = run("quick_start.mjs", client, f"{server_url}/v1")
    assert result["text"]
    assert result["streamed"] == result["text"]
    if client == "ollama":  # its API has no tool_choice
        assert result["generated"] == result["text"]
        assert {"penstock-demo", "penstock-demo-embed"} <= set(result["models"])
        assert (result["dimensions"] > 1, result["refusal"]) == (True, 400)
        return
    assert result["call"]["name"] == "weather"
    assert set(result["call"]["arguments"]) == {"city"}
    if client == "openai":
        assert result["lastEvent"] == "response.incomplete"
        assert result["refusal"] == 400


@pytest.mark.parametrize("client", [*CALLERS, "ai-sdk-compatible", "openai-chat", "openai-responses", "anthropic"])
def test_real_model_without_tools_calls_a_function(client: str, real_url: str) -> None:
    calls = run("tools.mjs", client, real_url, REAL)
    assert set(calls) == {"auto", "required", "named"}
    rome = [{"name": "get_weather", "arguments": {"city": "Rome"}}]
    assert all(made == [rome, rome] for made in calls.values()), calls  # whole and streamed
