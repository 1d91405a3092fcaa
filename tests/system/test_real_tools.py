"""Tools with a real model whose chat template has none: SmolLM2-135M-Instruct."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx

from tests.real_models import download_timeout
from tests.system.processes import Command, running

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "The weather of a city.", "parameters": PARAMETERS}


@download_timeout
def test_model_without_tools_calls_a_function_and_answers_with_its_result(real_gguf: Path) -> None:
    serve = Command("penstock.main", "serve", "--model", str(real_gguf), "--gpu", "none", "--port", "0")
    with running(serve), httpx.Client(timeout=120) as client:
        url = serve.wait_for(r"^Ready: (http://\S+)/v1$").group(1)
        (model,) = client.get(f"{url}/v1/models").json()["data"]
        assert (model["tools"], model["capabilities"]["tool_calls"]) == ("generic", True)
        messages: list[dict[str, Any]] = []

        def ask(content: str | None, **fields: Any) -> dict[str, Any]:
            if content is not None:
                messages.append({"role": "user", "content": content})
            tools = [{"type": "function", "function": WEATHER}]
            body = {"messages": messages, "tools": tools, "temperature": 0, "max_tokens": 60, **fields}
            answer = client.post(f"{url}/v1/chat/completions", json=body)
            assert answer.headers["x-penstock-tools"] == "generic"
            messages.append(answer.json()["choices"][0]["message"])
            return messages[-1]

        def give(call: dict[str, Any], sky: str) -> None:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": json.dumps({"sky": sky})})

        assert "<tool_call>" not in ask("What is 2 + 2?")["content"]
        messages.clear()
        (first,) = ask("What is the weather in Paris?", tool_choice="required", parallel_tool_calls=False)["tool_calls"]
        assert json.loads(first["function"]["arguments"]) == {"city": "Paris"}
        give(first, "sunny")
        assert "sunny" in ask(None)["content"]
        messages[-1] = {"role": "assistant", "content": "It is sunny in Paris."}
        (second,) = ask("What is the weather in Rome?")["tool_calls"]  # by the example of the first
        assert second["function"] == {"name": "get_weather", "arguments": '{"city": "Rome"}'}
        give(second, "rainy")
        assert "rainy" in ask(None)["content"]
