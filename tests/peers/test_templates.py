"""Formats of calls and reasoning, found for real chat templates and compared with real outputs."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from penstock.frontend.parsing.answer_parser import AnswerShape
from penstock.frontend.parsing.syntax.found_calls import find_calls, shows_calls
from penstock.frontend.parsing.syntax.generic_tools import GENERIC
from penstock.frontend.parsing.syntax.model_syntax import ModelSyntax, choose_model_syntax
from penstock.frontend.parsing.syntax.rendered import Renderings
from penstock.frontend.schemas.chat import (
    ChatBody,
    ChatMessage,
    ChatTool,
    FunctionCall,
    FunctionDefinition,
    MessageToolCall,
)
from penstock.frontend.text.chat_template import ChatTemplate, TemplateRefusedError
from penstock.frontend.text.spellings import MarkedText, Spellings
from tests.frontend.parsing.tool_texts import FUNCTIONS, read, written
from tests.peers.recorded_outputs import Call, Recorded, read_recorded
from tests.real_models import cache_folder

PEERS = cache_folder() / "peers"
TEMPLATES = sorted((*PEERS.rglob("models/templates/*.jinja"), *PEERS.rglob("examples/**/tool_chat_template*.jinja")))
pytestmark = pytest.mark.skipif(not TEMPLATES, reason=f"no sdists of llama-cpp-python and vllm unpacked in {PEERS}")

MAX_UNKNOWN = 8
MIN_RIGHT = 0.93
"""Of the recorded outputs. The others follow other conventions, or come from formats that are not known."""
TOKENS = ("<|tool_call_start|>", "<|tool_call_end|>")
"""Tokens of LFM2, whose templates do not show them."""
ARGUMENTS: dict[str, Any] = {"place": "Bergen", "count": 12, "deep": {"a": [1, "two", None]}, "is_new": False}
SCHEMA = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "description": "A place"},
        "count": {"type": "integer", "description": "A count"},
        "deep": {"type": "object", "description": "More", "additionalProperties": {"type": "string"}},
        "is_new": {"type": "boolean", "description": "A flag"},
    },
}
NAME = "find-boat"
_TOKEN = re.compile(r"<[|｜][^<>\s'\"{}]{1,40}[|｜]>")


@cache
def template_of(path: Path) -> ChatTemplate:
    return ChatTemplate(path.read_text(encoding="utf-8"), {"bos_token": "<BOS>", "eos_token": "<EOS>"})


@cache
def syntax_of(path: Path) -> ModelSyntax:
    tokens = TOKENS if path.name.startswith("LFM2") else ()
    return choose_model_syntax(template_of(path), dict.fromkeys(tokens, 1))


def rendered_call(template: ChatTemplate) -> str | None:
    """Return a turn with a call that the search for the format has not seen."""
    call = MessageToolCall("abcd12345", FunctionCall(NAME, json.dumps(ARGUMENTS)))
    messages = [ChatMessage("user", "Where is it?"), ChatMessage("assistant", tool_calls=[call])]
    tools = [ChatTool(FunctionDefinition(NAME, "Finds", SCHEMA))]
    try:
        text = template.render(ChatBody(messages=messages, tools=tools, add_generation_prompt=False))
    except TemplateRefusedError:
        return None
    return text.rpartition("Where is it?")[2]


def test_formats_are_found_or_unknown_and_never_wrong() -> None:
    kinds: Counter[str] = Counter()
    wrong = []
    for path in TEMPLATES:
        syntax, template = syntax_of(path), template_of(path)
        renderings = Renderings(template)
        if syntax.tools is None or syntax.tools.name == GENERIC:
            kinds["unknown" if renderings.shows_tools else "no tools"] += 1
            continue
        is_found = shows_calls(renderings) and find_calls(renderings, ()) is not None
        kinds["found" if is_found else "named by hint"] += 1
        text = rendered_call(template) if is_found else None
        if text is None:
            continue
        start = min((place for mark in syntax.tools.triggers if (place := text.find(mark)) >= 0), default=0)
        shape = AnswerShape(tools=syntax.tools, functions={NAME: SCHEMA})
        if syntax.tools.triggers and not reads(shape, text[start:]):
            wrong.append(path.name)
    print(dict(kinds), wrong)
    assert wrong == []
    assert kinds["unknown"] <= MAX_UNKNOWN


def test_forced_calls_are_written_as_they_are_read() -> None:
    calls = [("f", '{"text": "a b", "number": 5}'), ("g", '{"x": "y"}')]
    for form in filter(None, (syntax_of(path).tools for path in TEMPLATES)):
        assert read(AnswerShape(tools=form, functions=FUNCTIONS), [written(form, calls)]) == ("", "", calls)


def test_client_cannot_spell_what_templates_write() -> None:
    for path in TEMPLATES:
        template = template_of(path)
        tokens = sorted(set(_TOKEN.findall(template.source)))
        spellings, text = Spellings(tokens), f"the {' '.join(tokens)} cat"

        def prompts(said: str) -> list[MarkedText]:
            call = MessageToolCall("abcd12345", FunctionCall(NAME, json.dumps({"place": said})))
            turns = [ChatMessage("assistant", "", tool_calls=[call]), ChatMessage("tool", said, tool_call_id=call.id)]
            chats = ([ChatMessage("user", said)], [ChatMessage("user", "Where?"), *turns])
            tools = [ChatTool(FunctionDefinition(NAME, said, SCHEMA))]
            rendered = []
            for messages in chats:
                with contextlib.suppress(TemplateRefusedError):
                    body = ChatBody(messages=list(messages), tools=tools)
                    rendered.append(template.render_marked(body, spellings))  # noqa: B023 - called at once
            return rendered

        ordinary, attacks = prompts("the cat"), prompts(text)
        assert not any(prompt.mark for prompt in ordinary), path
        found = [[len(_TOKEN.findall(prompt.text)) for prompt in kind] for kind in (ordinary, attacks)]
        assert found[0] == found[1], path
        assert not tokens or not attacks or any(text in prompt.plain for prompt in attacks), path


def reads(shape: AnswerShape, text: str) -> bool:
    """Whether the call is read; some templates write every value as a text."""
    _, _, calls = read(shape, [text])
    values = [json.loads(arguments) for _, arguments in calls]
    return [name for name, _ in calls] == [NAME] and values[0]["place"] == ARGUMENTS["place"]


def is_comparable(recorded: Recorded) -> bool:
    others = {"is_partial", "continue_final_message", "json_schema"}
    return not (others & recorded.options.keys()) and not str(recorded.options.get("reasoning_format")).endswith(
        "_NONE"
    )


def answer_of(recorded: Recorded, path: Path, *, reasons: bool) -> tuple[str, str, list[Call]]:
    syntax, template = syntax_of(path), template_of(path)
    tools = [
        ChatTool(FunctionDefinition(name, description, json.loads(parameters or "{}")))
        for name, description, parameters in recorded.options.get("tools", [])
    ]
    thinks = recorded.options.get("enable_thinking", True)
    try:
        body = ChatBody(messages=[ChatMessage("user", "Hey there!")], tools=tools or None, enable_thinking=thinks)
        prompt = template.render(body).rstrip()
    except TemplateRefusedError:
        prompt = ""
    form = syntax.reasoning if reasons else None
    is_open = form is not None and prompt.endswith(form.opening)
    if form is not None and prompt.endswith(form.answer_opening or form.closing) and not form.answer_tags:
        form = None
    shape = AnswerShape(
        form,
        is_reasoning_open=is_open,
        tools=syntax.tools if tools else None,
        functions=recorded.functions,
    )
    whole = read(shape, [recorded.text])
    assert read(shape, list(recorded.text)) == whole
    return whole[0].strip(), whole[1].strip(), [(name, as_value(arguments)) for name, arguments in whole[2]]


def as_value(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def test_recorded_outputs_are_read_as_llama_cpp_reads_them() -> None:
    paths = {path.stem: path for path in TEMPLATES}
    source = next(PEERS.rglob("test-chat.cpp")).read_text(encoding="utf-8")
    recorded = [one for one in read_recorded(source) if is_comparable(one) and one.template in paths]
    num_right = 0
    for one in recorded:
        expected = (
            one.reasoning.strip(),
            one.content.strip(),
            [(name, as_value(arguments)) for name, arguments in one.calls],
        )
        # Where that test names no format of reasoning, its marks are text.
        ways = (True,) if "reasoning_format" in one.options else (True, False)
        num_right += any(answer_of(one, paths[one.template], reasons=reasons) == expected for reasons in ways)
    print(num_right, "of", len(recorded))
    assert num_right >= MIN_RIGHT * len(recorded) > 250
