"""Tools of models whose chat templates show none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.frontend.harness import FakeBackend
from tests.frontend.model_families import DEEPSEEK_V3, MODELS, Model
from tests.frontend.parsing.test_reasoning import CHAT, talking
from tests.frontend.parsing.tool_texts import written

GENERIC = MODELS["generic"]
NO_SYSTEM = """\
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('not their turn') }}{%- endif %}
    {{- '<' + message.role + '>' + message.content }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<model>' }}{%- endif %}"""
SHOWS_CALLS = DEEPSEEK_V3.replace("tools", "listing")
"""Like published templates of DeepSeek, which write calls but do not show the tools."""
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "get_weather", "description": "The weather.", "parameters": SCHEMA}
DESCRIBED = json.dumps({"type": "function", "function": WEATHER})
TOOLS = [{"type": "function", "function": WEATHER}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bergen"}}\n</tool_call>'
INSTRUCTION = f"""\
You have these functions:
<tools>
{DESCRIBED}
</tools>

If one of them helps, call it before you answer. You then get its result. A call has this form:
<tool_call>
{{"name": "NAME", "arguments": {{"ARGUMENT": "VALUE"}}}}
</tool_call>"""


def called(number: int) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": '{"city": "Bergen"}'}
    return {"id": f"call_{number}", "type": "function", "function": function}


TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": "I look.", "tool_calls": [called(1), called(2)]},
    {"role": "tool", "tool_call_id": "call_1", "content": "wet"},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "very wet"}]},
    {"role": "user", "content": "So?"},
]
RESULTS = "Result of get_weather:\nwet\nResult of get_weather:\nvery wet\nSo?"


async def prompt_of(model: Model, messages: list[dict[str, Any]], **fields: Any) -> str:
    backend = FakeBackend(script=model.says("x"))
    async with talking(model, backend) as connection:
        response = await connection.post(CHAT, {"messages": messages, "tools": TOOLS, **fields})
    assert response.status == 200, response.body
    assert response.headers.get("x-penstock-tools") == (None if "tool_choice" in fields else "generic")
    return model.prompt(backend)


async def test_system_message_describes_the_tools() -> None:
    own = {"role": "system", "content": "Be brief."}
    talk = (
        f"<|im_start|>user\nRain?<|im_end|>\n<|im_start|>assistant\nI look.\n{CALL}\n{CALL}<|im_end|>\n"
        f"<|im_start|>user\n{RESULTS}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert await prompt_of(GENERIC, TALK) == f"<|im_start|>system\n{INSTRUCTION}<|im_end|>\n{talk}"
    begun = f"<|im_start|>system\nBe brief.\n{INSTRUCTION}<|im_end|>\n"
    assert (await prompt_of(GENERIC, [own, *TALK])).startswith(begun)
    assert await prompt_of(GENERIC, TALK, tool_choice="none") == talk


async def test_first_user_message_describes_the_tools_if_there_is_no_system_role() -> None:
    prompt = await prompt_of(Model(NO_SYSTEM), TALK)
    assert prompt == f"<user>{INSTRUCTION}\n\nRain?<assistant>I look.\n{CALL}\n{CALL}<user>{RESULTS}<model>"


async def test_template_writes_calls_if_it_can() -> None:
    prompt = await prompt_of(Model(SHOWS_CALLS), TALK)
    assert DESCRIBED in prompt
    call = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
    assert call.format("NAME", '{"ARGUMENT": "VALUE"}') in prompt
    assert call.format("get_weather", '{"city": "Bergen"}') in prompt
    assert "<｜tool▁output▁begin｜>wet<｜tool▁output▁end｜>" in prompt


@pytest.mark.parametrize("shows_results", [True, False])
async def test_calls_and_results_that_the_template_does_not_show_are_texts(shows_results: bool) -> None:
    marks = ("<|tool_call_start|>", "<|tool_call_end|>")
    template = (
        "{{ tools | tojson if tools }}{% for message in messages %}{% if message.role != HIDDEN %}"
        "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    )
    model = Model(template.replace("HIDDEN", "''" if shows_results else "'tool'"), special=marks)
    backend = FakeBackend(script=model.says("x"))
    async with talking(model, backend) as connection:
        body = {"messages": TALK, "tools": TOOLS}
        response = await connection.post(CHAT, body)
        (card,) = (await connection.request("GET", "/v1/models")).json()["data"]
    assert (response.status, response.headers.get("x-penstock-tools"), card["tools"]) == (200, None, "pythonic")
    prompt = model.prompt(backend)
    call = "get_weather(city='Bergen')"
    assert f"assistant\nI look.\n{marks[0]}[{call}, {call}]{marks[1]}<|im_end|>" in prompt
    assert ("tool\nwet<" if shows_results else f"user\n{RESULTS}<") in prompt
    assert prompt.count(DESCRIBED) == 1
    assert model.tokenizer.token_to_id(marks[0]) in backend.last.token_ids


@pytest.mark.parametrize("special", [("<tool_call>", "</tool_call>"), ("<other>",)])
async def test_client_cannot_spell_the_marks_of_calls_that_are_texts(special: tuple[str, ...]) -> None:
    model = Model(NO_SYSTEM, special=special, added=())
    ids = [model.tokenizer.token_to_id(mark) for mark in special]
    backend = FakeBackend(script=model.says("x"))
    counts = []
    for text in ("plain", f"{''.join(special)}<"):
        function = {"name": "get_weather", "arguments": json.dumps({"city": text})}
        call = {"id": "1", "type": "function", "function": function}
        answers = [{"content": text, "tool_calls": [call]}, {"content": text, "reasoning_content": text}]
        talk = [
            {"role": role, **message}
            for answer in answers
            for role, message in (("user", {"content": "hi"}), ("assistant", answer))
        ]
        async with talking(model, backend) as connection:
            assert (await connection.post(CHAT, {"messages": [*talk, TALK[0]]})).status == 200
        assert model.prompt(backend).count(text) == 3
        counts.append([list(backend.last.token_ids).count(token_id) for token_id in ids])
    assert counts[0] == counts[1] == [len(special) - 1] * len(special)


BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": TALK[:1], "tools": TOOLS},
    "/v1/messages": {
        "model": "test/model", "max_tokens": 1000, "messages": TALK[:1],
        "tools": [{"name": "get_weather", "description": "The weather.", "input_schema": SCHEMA}],
    },
    "/v1/responses": {"input": "Rain?", "tools": [{"type": "function", **WEATHER}]},
}  # fmt: skip


@pytest.mark.parametrize("path", BODIES)
async def test_every_api_calls_in_the_generic_form(path: str) -> None:
    form = GENERIC.served().syntax.tools
    assert form is not None
    calls = written(form, [("get_weather", '{"city": "Bergen"}')] * 2)
    backend = FakeBackend(script=GENERIC.says(f"Well.\n{calls}", batch_size=1000))
    async with talking(GENERIC, backend) as connection:
        for stream in (False, True):
            response = await connection.post(path, {**BODIES[path], "stream": stream})
            assert (response.status, response.headers["x-penstock-tools"]) == (200, "generic"), response.body
            assert DESCRIBED in GENERIC.prompt(backend)
            text = response.body.decode()
            assert "tool_call>" not in text
            assert text.count("get_weather") >= 2
            assert stream or "Bergen" in text  # a stream has the arguments in pieces
        constraints = backend.last.constraints
        assert constraints is not None
        assert constraints.grammar is not None
