"""Tools, calls and results in chat templates, compared with transformers' rendering."""

from __future__ import annotations

import json
from typing import Any

import jinja2
import msgspec
import pytest
from transformers import PreTrainedTokenizerFast

from penstock.frontend.schemas.chat import ChatBody, check_chat
from penstock.frontend.text.chat_template import ChatTemplate, TemplateRefusedError
from tests.frontend.harness import byte_level_tokenizer
from tests.frontend.model_families import (
    ALWAYS_THINKING,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    DEEPSEEK_V32,
    GEMMA,
    GLM4,
    GRANITE,
    HARMONY,
    HERMES,
    KIMI_K2,
    LLAMA3,
    MISTRAL,
    PYTHONIC,
    QWEN3_CODER,
    THINKING_HERMES,
)

TEMPLATES = {
    "hermes": HERMES,
    "thinking": THINKING_HERMES,
    "always thinking": ALWAYS_THINKING,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "pythonic": PYTHONIC,
    "qwen3_coder": QWEN3_CODER,
    "glm4": GLM4,
    "deepseek_v32": DEEPSEEK_V32,
    "gemma": GEMMA,
    "granite": GRANITE,
    "harmony": HARMONY,
}
JOINING_TEMPLATES = {"deepseek": DEEPSEEK_V3, "deepseek, V3.1": DEEPSEEK_V31}
"""They concatenate the arguments of a call, which must be a text."""
NUMBERING_TEMPLATES = {"kimi_k2": KIMI_K2}
"""They write the ids of calls, which must have the form that the model writes."""
SPLITTING_TEMPLATES = ("llama3", "pythonic", "harmony")
"""They write one call of a message, or refuse more."""
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'The weather <of> a "city" & été',
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": None}},
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "get_time",
            "description": "The time.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]
ARGUMENTS = {"city": "Mâcon & <co>", "days": 3, "more": [True, None, {"a": 1.5}]}
USER = {"role": "user", "content": "hi"}
CALL = {"id": "abcDEF123", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "a question": [USER],
    "a call": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}],
    "a call with a text": [USER, {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]}, USER],
    "a call and its result": [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abcDEF123", "content": '{"sky": "blue"}'},
    ],
    "two calls": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL, {**CALL, "id": "0123456789"}]}, USER],
}


def as_clients_send(message: dict[str, Any]) -> dict[str, Any]:
    """Convert to OpenAI's form: arguments as a string, and no content beside calls."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "content": message["content"] or None, "tool_calls": calls}


def split(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**message, "tool_calls": [call]} for call in message.get("tool_calls", ())] or [message]


def numbered(message: dict[str, Any]) -> dict[str, Any]:
    """Replace the ids of calls by those that Kimi K2 writes."""
    if "tool_calls" in message:
        ids = [f"functions.get_weather:{number}" for number in range(len(message["tool_calls"]))]
        calls = [{**call, "id": new} for call, new in zip(message["tool_calls"], ids, strict=True)]
        return {**message, "tool_calls": calls}
    return {**message, "tool_call_id": "functions.get_weather:0"} if message["role"] == "tool" else message


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["without tools", "with tools"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", [*TEMPLATES, *JOINING_TEMPLATES, *NUMBERING_TEMPLATES])
def test_template_renders_as_in_transformers(
    template: str, conversation: str, tools: list[dict[str, Any]] | None
) -> None:
    oracle = PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer())
    source = oracle.chat_template = (TEMPLATES | JOINING_TEMPLATES | NUMBERING_TEMPLATES)[template]
    messages = CONVERSATIONS[conversation]
    sent = {"messages": [as_clients_send(message) for message in messages], "tools": tools, "enable_thinking": False}
    if template in JOINING_TEMPLATES:
        messages = [{**as_clients_send(message), "content": message["content"]} for message in messages]
    if template in NUMBERING_TEMPLATES:
        messages = [numbered(message) for message in messages]
    if template in SPLITTING_TEMPLATES:
        messages = [one for message in messages for one in split(message)]
    body = msgspec.convert(sent, ChatBody)
    check_chat(body)
    ours = ChatTemplate(source, {})
    try:
        expected = oracle.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
    except jinja2.TemplateError:
        with pytest.raises(TemplateRefusedError):
            ours.render(body)
    else:
        assert ours.render(body) == expected
        assert ("get_time" in expected) == (tools is not None) or conversation != "a question"
