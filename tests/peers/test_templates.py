"""Formats of calls, found for real chat templates."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from typing import Any

from penstock.frontend.parsing.answer_parser import AnswerShape
from penstock.frontend.parsing.syntax.found_calls import find_calls, shows_calls
from penstock.frontend.parsing.syntax.generic_tools import GENERIC
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
from tests.peers.templates import peers_templates, syntax_of, template_of
from tests.real_models import download_timeout

pytestmark = download_timeout

MAX_UNKNOWN = 8
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
    assert len(peers_templates()) == 97
    kinds: Counter[str] = Counter()
    wrong = []
    for path in peers_templates().values():
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
        places = [place for mark in syntax.tools.triggers if (place := text.find(mark)) >= 0]
        start = min(places, default=text.rfind("{", 0, text.index(NAME)))
        shape = AnswerShape(tools=syntax.tools, functions={NAME: SCHEMA})
        if start >= 0 and not reads(shape, text[start:]):
            wrong.append(path.name)
    assert wrong == []
    assert kinds["unknown"] <= MAX_UNKNOWN


def test_forced_calls_are_written_as_they_are_read() -> None:
    calls = [("f", '{"text": "a b", "number": 5}'), ("g", '{"x": "y"}')]
    for form in filter(None, (syntax_of(path).tools for path in peers_templates().values())):
        assert read(AnswerShape(tools=form, functions=FUNCTIONS), [written(form, calls)]) == ("", "", calls)


def test_client_cannot_spell_what_templates_write() -> None:
    for path in peers_templates().values():
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
