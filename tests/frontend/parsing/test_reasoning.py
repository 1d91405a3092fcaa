"""Reasoning: separated from the answer, limited, or dropped."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.frontend.parsing.answer_parser import AnswerShape
from penstock.frontend.parsing.reasoning import GEMMA_THOUGHT, MISTRAL_THINK, THINK
from penstock.frontend.settings import ParserNames
from penstock.shm.messages import Constraints, Finish
from tests.frontend.harness import ClientConnection, FakeBackend
from tests.frontend.model_families import ALWAYS_THINKING, GRANITE, HERMES, THINKING_HERMES, Model
from tests.frontend.parsing.tool_texts import CUTS, FORMATS, FUNCTIONS, cut, read, read_all_ways

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
OPENS_ITSELF = Model(THINKING_HERMES)
OPEN = Model(ALWAYS_THINKING)
SCHEMA: dict[str, Any] = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
}


@contextlib.asynccontextmanager
async def talking(model: Model, backend: FakeBackend) -> AsyncIterator[ClientConnection]:
    connection = ClientConnection(model.app(backend))
    yield connection
    await connection.end()


async def answered(model: Model, text: str, finish: Finish = Finish.STOP, **fields: Any) -> Any:
    """Return the choice of a whole answer with its usage, after comparing it with the streamed answer."""
    backend = FakeBackend(script=model.says(text, finish=finish))
    async with talking(model, backend) as connection:
        response = await connection.post(CHAT, {**HI, **fields})
        assert response.status == 200, response.body
        whole = response.json()
        events = (
            await connection.post(CHAT, {**HI, **fields, "stream": True, "stream_options": {"include_usage": True}})
        ).events()
    assert events.pop() == "[DONE]"
    assert events.pop()["usage"] == whole["usage"]
    choice = whole["choices"][0]
    deltas = [event["choices"][0]["delta"] for event in events]
    for field in ("content", "reasoning_content"):
        assert "".join(delta.get(field, "") for delta in deltas) == (choice["message"].get(field) or "")
    assert events[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    return {**choice["message"], "finish_reason": choice["finish_reason"], **whole["usage"]}


async def sent(model: Model, **fields: Any) -> tuple[str, Constraints | None]:
    """Return the prompt and constraints that the backend receives."""
    backend = FakeBackend(script=model.says("x"))
    async with talking(model, backend) as connection:
        response = await connection.post(CHAT, {**HI, **fields})
    assert response.status == 200, response.body
    return model.prompt(backend), backend.last.constraints


TEXT_MARKS = Model(THINKING_HERMES, added=())
SPECIAL_MARKS = Model(THINKING_HERMES, added=(), special=("<think>", "</think>"))


@pytest.mark.parametrize("model", [OPENS_ITSELF, TEXT_MARKS, SPECIAL_MARKS])
async def test_text_between_the_markers_is_reasoning(model: Model) -> None:
    message = await answered(model, "<think>\nLet me see: été 🐈\n</think>\n\nYes.\n")
    assert message["reasoning_content"] == "Let me see: été 🐈"
    assert message["content"] == "Yes.\n"
    assert message["finish_reason"] == "stop"
    tokens = len(model.tokenizer.encode("<think>\nLet me see: été 🐈\n</think>").ids)
    # If the marker is not a token, its first characters may be the answer's.
    num_unsure = len("<think") if model is TEXT_MARKS else 0
    assert message["completion_tokens_details"] == {"reasoning_tokens": tokens - num_unsure}


async def test_reasoning_is_recognized_if_the_prompt_opens_it() -> None:
    message = await answered(OPEN, "Let me see.</think>Yes.")
    assert (message["reasoning_content"], message["content"]) == ("Let me see.", "Yes.")
    prompt, _ = await sent(OPEN)
    assert prompt.endswith("<|im_start|>assistant\n<think>\n")
    message = await answered(OPEN, "<think>Once more.</think>Yes.")
    assert (message["reasoning_content"], message["content"]) == ("Once more.", "Yes.")


async def test_marker_in_the_question_does_not_open_the_reasoning() -> None:
    messages = [{"role": "user", "content": "<think>"}]
    message = await answered(OPENS_ITSELF, "A tag.", messages=messages)
    assert (message["content"], message.get("reasoning_content")) == ("A tag.", None)


async def test_mistral_markers_are_recognized() -> None:
    model = Model("[THINK][/THINK]", special=("[THINK]", "[/THINK]"), added=())
    assert model.served().syntax.reasoning is MISTRAL_THINK
    message = await answered(model, "[THINK]Hm.[/THINK]Yes.")
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (
            "Here is my thought process: Here is my response:",
            "Here is my thought process: Hm. Here is my response: Yes.",
        ),
        (
            "Here is my thought process: Here is my response:",
            "Here's my thought process: Hm.\n\nHere's my response: Yes.",
        ),
        ("<think></think><response></response>", "<think>Hm.</think>\n<response>Yes.</response>"),
        ("<think></think><response></response>", "<think>Hm.</think>Yes."),
        ("<think></think><response></response>", "<think>Hm.</think><response>Yes.</resp"),
    ],
)
async def test_granite_s_reasoning_is_recognized(template: str, text: str) -> None:
    message = await answered(Model(template, added=()), text)
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")


async def test_gemma_s_markers_are_recognized() -> None:
    model = Model("<|channel>thought\n<channel|>", added=(), special=("<|channel>", "<channel|>"))
    message = await answered(model, "<|channel>thought\nHm.\n<channel|>Yes.")
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel>thought\nHm.<channel|>Yes.<channel|>", ("Hm.", "Yes.")),
        ("<|channel>thought\n<channel|>Yes.<|channel>thought\n<channel|><channel|>", ("", "Yes.")),
        ("<|channel><|channel>thought\n<channel|>Yes.", ("", "Yes.")),
        ("Yes<channel|>, <chan<channel|>nel|><|channel>though", ("", "Yes, <channel|><|channel>though")),
        ("Yes.<channel|><|tool_call>call:f{}<tool_call|><channel|>", ("", "Yes.")),
    ],
)
def test_gemma_s_marks_around_nothing_are_dropped(text: str, expected: tuple[str, str]) -> None:
    shape = AnswerShape(GEMMA_THOUGHT, tools=FORMATS["gemma, 4"], functions=FUNCTIONS)
    assert read_all_ways(text, shape)[:2] == expected


async def test_granite_s_calls_follow_its_response() -> None:
    model = Model(GRANITE + "<think></think><response></response>", added=(), special=("<|tool_call|>",))
    text = '<think>Hm.</think><response>I look.</response>\n<|tool_call|>[{"name": "f", "arguments": {}}]'
    message = await answered(model, text, tools=[{"type": "function", "function": {"name": "f"}}])
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "I look.")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f"]


@pytest.mark.parametrize("parameter", ["enable_thinking", "thinking"])
async def test_template_receives_the_choice_by_either_name(parameter: str) -> None:
    model = Model("{{ " + parameter + " }}")
    assert await sent(model, enable_thinking=False) == ("False", None)
    assert await sent(model, reasoning_effort="high") == ("True", None)
    assert await sent(model, chat_template_kwargs={parameter: "own"}) == ("own", None)


async def test_answer_without_reasoning_has_no_reasoning_content() -> None:
    message = await answered(OPENS_ITSELF, "  A <think> tag opens, </think> closes.")
    assert message["content"] == "  A <think> tag opens, </think> closes."
    assert "reasoning_content" not in message
    assert message["completion_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize("finish", [Finish.STOP, Finish.LENGTH])
async def test_reasoning_that_never_ends_leaves_no_text(finish: Finish) -> None:
    message = await answered(OPEN, "on and on </thi", finish)
    assert message["reasoning_content"] == "on and on </thi"
    assert not message["content"]
    assert message["finish_reason"] == ("stop" if finish is Finish.STOP else "length")


async def test_include_reasoning_false_drops_the_reasoning() -> None:
    message = await answered(OPEN, "Hm.</think>Yes.", include_reasoning=False)
    assert "reasoning_content" not in message
    assert message["content"] == "Yes."
    assert message["completion_tokens_details"]["reasoning_tokens"] > 0


async def test_stop_strings_in_the_reasoning_are_ignored() -> None:
    message = await answered(OPEN, "Is it END? Hm.</think>Yes. END of it", stop=["END"])
    assert (message["reasoning_content"], message["content"]) == ("Is it END? Hm.", "Yes. ")
    assert message["finish_reason"] == "stop"


async def test_operator_can_leave_the_reasoning_in_the_text() -> None:
    message = await answered(Model(THINKING_HERMES, parsers=ParserNames(reasoning="none")), "<think>a</think>b")
    assert message["content"] == "<think>a</think>b"


@pytest.mark.parametrize(
    ("fields", "closed"),
    [
        ({}, False),
        ({"enable_thinking": True}, False),
        ({"enable_thinking": False}, True),
        ({"reasoning_effort": "none"}, True),
        ({"reasoning_effort": "low"}, False),
        ({"thinking_budget": 0}, True),
        ({"enable_thinking": True, "reasoning_effort": "none"}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, True),
    ],
)
async def test_template_receives_enable_thinking(fields: dict[str, Any], closed: bool) -> None:
    prompt, constraints = await sent(OPENS_ITSELF, **fields)
    assert prompt.endswith("assistant\n<think>\n\n</think>\n\n" if closed else "assistant\n")
    assert constraints is None


async def test_template_receives_reasoning_effort() -> None:
    prompt, _ = await sent(Model("{{ reasoning_effort }}"), reasoning_effort="high")
    assert prompt == "high"


async def test_budget_of_0_closes_the_reasoning_in_the_prompt() -> None:
    prompt, constraints = await sent(OPEN, thinking_budget=0)
    assert prompt.endswith("assistant\n<think>\n</think>\n\n")
    assert constraints is None
    prompt, _ = await sent(Model(HERMES), thinking_budget=0)
    assert prompt.endswith("assistant\n<think>\n\n</think>\n\n")
    message = await answered(OPEN, "Yes.", thinking_budget=0)
    assert (message["content"], message["completion_tokens_details"]["reasoning_tokens"]) == ("Yes.", 0)


@pytest.mark.parametrize("model", [OPEN, OPENS_ITSELF])
async def test_backend_receives_the_thinking_budget(model: Model) -> None:
    end = (model.tokenizer.token_to_id("</think>"),)
    prompt, constraints = await sent(model, thinking_budget=50)
    assert prompt.endswith("<think>\n")
    assert constraints == Constraints(thinking_budget_tokens=50, thinking_end=end)


async def test_budget_is_refused_if_the_end_marker_is_not_a_token() -> None:
    backend = FakeBackend()
    async with talking(Model(ALWAYS_THINKING, added=()), backend) as connection:
        response = await connection.post(CHAT, {**HI, "thinking_budget": 5})
        assert (response.status, response.error["param"]) == (400, "thinking_budget")
    prompt, constraints = await sent(Model(added=()), thinking_budget=5)
    assert (prompt.endswith("assistant\n"), constraints) == (True, None)  # it does not reason


async def test_grammar_starts_after_the_reasoning() -> None:
    end = (OPEN.tokenizer.token_to_id("</think>"),)
    prompt, constraints = await sent(OPEN, **SCHEMA)
    assert prompt.endswith("<think>\n")
    assert constraints is not None
    assert constraints.grammar_after == end
    assert constraints.grammar is not None
    assert constraints.grammar.text.startswith("start: GAP? answer\n")
    prompt, constraints = await sent(OPENS_ITSELF, **SCHEMA, enable_thinking=True)
    assert prompt.endswith("<think>\n")
    assert constraints is not None
    assert constraints.grammar_after == end


async def test_grammar_allows_optional_reasoning() -> None:
    _, constraints = await sent(OPENS_ITSELF, **SCHEMA)
    assert constraints is not None
    assert constraints.grammar is not None
    opening, closing = (OPENS_ITSELF.tokenizer.token_to_id(mark) for mark in ("<think>", "</think>"))
    assert constraints.grammar.text.startswith(f"start: (<[{opening}]> TEXT <[{closing}]> GAP?)? answer")
    assert constraints.grammar_after == ()
    prompt, constraints = await sent(OPENS_ITSELF, **SCHEMA, enable_thinking=False)
    assert prompt.endswith("</think>\n\n")
    assert constraints is not None
    assert constraints.grammar is not None
    assert (constraints.grammar.kind, constraints.grammar_after) == ("json_schema", ())


async def test_reasoning_without_an_end_token_is_skipped_before_a_grammar() -> None:
    model = Model(ALWAYS_THINKING, added=())
    prompt, constraints = await sent(model, **SCHEMA)
    assert prompt.endswith("<think>\n</think>\n\n")
    assert constraints is not None
    assert constraints.grammar_after == ()


@pytest.mark.parametrize(("content", "reasoning"), [("<think>\nWell", ", hm."), ("<think>a</think>Well", "")])
async def test_continued_message_may_end_within_its_reasoning(content: str, reasoning: str) -> None:
    messages = [*HI["messages"], {"role": "assistant", "content": content}]
    message = await answered(OPENS_ITSELF, ", hm.</think>Yes.", messages=messages, continue_final_message=True)
    assert (message.get("reasoning_content") or "") == reasoning
    assert message["content"] == ("Yes." if reasoning else ", hm.</think>Yes.")


async def test_each_choice_has_its_own_reasoning() -> None:
    backend = FakeBackend(script=OPEN.says("Hm.</think>Yes."))
    async with talking(OPEN, backend) as connection:
        whole = (await connection.post(CHAT, {**HI, "n": 3})).json()
    assert [choice["message"]["reasoning_content"] for choice in whole["choices"]] == ["Hm."] * 3
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] % 3 == 0


CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "num_calls"),
    [
        (f"I need it.\n{CALL}", "I need it.", "", 1),
        (f"I need both.\n{CALL}\n{CALL}\n", "I need both.", "", 2),
        (f"Maybe {CALL}? No, rather\n{CALL}", f"Maybe {CALL}? No, rather", "", 1),
        (f"Maybe {CALL} or not", f"Maybe {CALL} or not", "", 0),
        (f"Maybe {CALL}</think>Well, {CALL}", f"Maybe {CALL}", "Well,", 1),
        ("I write <tool_call> and a name", "I write <tool_call> and a name", "", 0),
        (f"<<tool_call{CALL}", "<<tool_call", "", 1),
        (CALL[:-20], CALL[:-20], "", 0),
    ],
)
async def test_calls_at_the_end_of_unclosed_reasoning_are_calls(
    text: str, reasoning: str, content: str, num_calls: int
) -> None:
    message = await answered(OPEN, text, tools=[{"type": "function", "function": {"name": "f"}}])
    assert (message.get("reasoning_content") or "", message["content"] or "") == (reasoning, content)
    assert message.get("reasoning") == message.get("reasoning_content")
    assert len(message.get("tool_calls", ())) == num_calls
    assert message["finish_reason"] == ("tool_calls" if num_calls else "stop")
    shape = AnswerShape(THINK, is_reasoning_open=True, tools=FORMATS["hermes"], functions=FUNCTIONS)
    for size in (1, 2, 5):
        assert read(shape, [text[start : start + size] for start in range(0, len(text), size)]) == read(shape, [text])


async def test_answer_cut_within_a_call_in_its_reasoning_stays_reasoning() -> None:
    message = await answered(
        OPEN, f"Hm. {CALL}", Finish.LENGTH, tools=[{"type": "function", "function": {"name": "f"}}]
    )
    assert (message["reasoning_content"], message["finish_reason"]) == (f"Hm. {CALL}", "length")


PARTS = ["<think>", "</think>", "<thi", "nk>", "hm", " ", "\n", "<tool_call>", '{"name": "f"}', "</tool_call>", "é"]


@settings(max_examples=100)
@given(st.lists(st.sampled_from(PARTS), max_size=12).map("".join), CUTS, st.booleans())
def test_reasoning_and_calls_are_read_alike_in_any_split(text: str, cuts: list[int], is_open: bool) -> None:
    shape = AnswerShape(THINK, is_reasoning_open=is_open, tools=FORMATS["hermes"], functions=FUNCTIONS)
    assert read(shape, cut(text, cuts)) == read(shape, [text])


@settings(max_examples=15)
@given(st.lists(st.sampled_from(PARTS), max_size=12).map("".join), st.sampled_from([2, 3, 50]))
def test_batching_of_tokens_does_not_change_the_answer(text: str, batch_size: int) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]

    async def run(batch_size: int) -> Any:
        backend = FakeBackend(script=OPENS_ITSELF.says(text, batch_size=batch_size))
        async with talking(OPENS_ITSELF, backend) as connection:
            whole = (await connection.post(CHAT, {**HI, "tools": tools, "stop": ["hm", "éé"]})).json()
        for call in whole["choices"][0]["message"].get("tool_calls", ()):
            del call["id"]
        return whole["choices"], whole["usage"]

    assert asyncio.run(run(1)) == asyncio.run(run(batch_size))
