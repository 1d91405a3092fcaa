"""The messages of gpt-oss, compared with openai-harmony's own parser, and from the request to the answer."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import openai_harmony
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.frontend.parsing.answer_parser import AnswerShape
from penstock.frontend.parsing.harmony import HARMONY, Harmony
from penstock.shm.messages import Finish
from tests.frontend.model_families import MODELS
from tests.frontend.parsing.test_reasoning import SCHEMA, answered, sent
from tests.frontend.parsing.tool_texts import CUTS, FUNCTIONS, Read, cut, read

MODEL = MODELS["harmony"]
SHAPE = AnswerShape(HARMONY, tools=Harmony(), functions=FUNCTIONS)
TOOLS: dict[str, Any] = {"tools": [{"type": "function", "function": {"name": "f"}}]}
_VOCABULARY = "fb374d419588a4632f3f557e76b4b70aebbca790"
"""The name of o200k_base in tiktoken's cache, as litellm brings it. openai-harmony would download the file."""


@pytest.fixture(scope="module")
def encoding(tmp_path_factory: pytest.TempPathFactory) -> openai_harmony.HarmonyEncoding:
    directory = tmp_path_factory.mktemp("encodings")
    litellm = importlib.util.find_spec("litellm")  # importing it takes seconds
    assert litellm is not None
    assert litellm.origin is not None
    tokenizers = Path(litellm.origin).parent / "litellm_core_utils" / "tokenizers"
    (directory / "o200k_base.tiktoken").symlink_to(tokenizers / _VOCABULARY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(directory))
        return openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


def parsed_by_the_library(encoding: openai_harmony.HarmonyEncoding, text: str) -> Read:
    tokens = encoding.encode(text, allowed_special="all")
    reasoning, content, calls = [], [], []
    for message in encoding.parse_messages_from_completion_tokens(tokens, openai_harmony.Role.ASSISTANT):
        (part,) = message.content
        assert isinstance(part, openai_harmony.TextContent)
        if message.recipient is not None and message.recipient.startswith("functions."):
            calls.append((message.recipient.removeprefix("functions."), part.text))
        else:
            (reasoning if message.channel == "analysis" else content).append(part.text)
    return "\n\n".join(reasoning), "\n\n".join(content), calls


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="<|>")).map(str.strip).filter(bool) | st.sampled_from(
    ["<think>", "a\n\nb", '{"a": 1}', "commentary to=functions.f", "<|", "été 🐈"]
)
BODIES = st.one_of(
    TEXTS.map(lambda text: f"<|channel|>analysis<|message|>{text}<|end|>"),
    TEXTS.map(lambda text: f"<|channel|>commentary<|message|>{text}<|end|>"),
    TEXTS.map(lambda text: f"<|channel|>final<|message|>{text}<|return|>"),
    st.tuples(
        st.sampled_from(
            [
                "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>",
                "<|channel|>commentary to=functions.{} json<|message|>{}<|call|>",
                "<|channel|>analysis to=functions.{}<|message|>{}<|call|>",
                " to=functions.{}<|channel|>commentary <|constrain|>json<|message|>{}<|call|>",
            ]
        ),
        st.sampled_from(sorted(FUNCTIONS)),
        st.dictionaries(TEXTS, TEXTS | st.integers() | st.lists(st.booleans(), max_size=2), max_size=2).map(json.dumps),
    ).map(lambda parts: parts[0].format(*parts[1:])),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(st.lists(BODIES, min_size=1, max_size=4).map("<|start|>assistant".join), CUTS)
def test_messages_are_read_as_the_library_reads_them(
    encoding: openai_harmony.HarmonyEncoding, text: str, cuts: list[int]
) -> None:
    assert read(SHAPE, cut(text, cuts)) == parsed_by_the_library(encoding, text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ("", "", [])),
        ("Hello.", ("", "Hello.", [])),  # continues a final message
        ("<|channel|>fin", ("", "", [])),
        ("<|channel|>analysis<|message|>Hm", ("Hm", "", [])),
        ("<|channel|>final<|message|>Yes.<|return|>", ("", "Yes.", [])),
        ("<|message|>Yes.", ("", "Yes.", [])),
        ("<|channel|>commentary<|message|>Plan<|end|><|start|>assistant<|channel|>final<|message|>Do",
         ("", "Plan\n\nDo", [])),
        ("<|channel|>commentary to=functions.f json<|message|>", ("", "", [])),
        ("<|channel|>commentary to=functions.f json<|message|>{oops}<|call|>", ("", "{oops}", [])),
        ("<|channel|>commentary to=functions.f json<|message|>oops<|call|>", ("", "oops", [])),
        ("<|channel|>commentary to=f<|message|>{}", ("", "", [("f", "{}")])),
        ("<|channel|>analysis to=browser.search<|message|>{}<|call|>", ("", "", [("browser.search", "{}")])),
        ("<|channel|>analysis<|message|>Hm<|channel|>final<|message|>Yes", ("Hm", "Yes", [])),
    ],
)  # fmt: skip
def test_irregular_messages_lose_their_marks_only(text: str, expected: Read) -> None:
    for size in (1, 3, 1000):
        assert read(SHAPE, [text[start : start + size] for start in range(0, len(text), size)]) == expected


def test_calls_are_text_without_tools() -> None:
    text = '<|channel|>commentary to=functions.f json<|message|>{"a": 1}<|call|>'
    assert read(AnswerShape(HARMONY), [text]) == ("", '{"a": 1}', [])


async def test_channels_are_reasoning_answer_and_calls() -> None:
    text = "<|channel|>analysis<|message|>Two and two.<|end|><|start|>assistant<|channel|>final<|message|>Four."
    message = await answered(MODEL, text)
    assert (message["reasoning_content"], message["content"]) == ("Two and two.", "Four.")
    assert message["completion_tokens_details"]["reasoning_tokens"] >= len(MODEL.tokenizer.encode("Two and two.").ids)
    text = "<|channel|>analysis<|message|>A call.<|end|><|start|>assistant<|channel|>commentary to=functions.f json"
    message = await answered(MODEL, f"{text}<|message|>{{}}", **TOOLS)
    assert message["reasoning_content"] == "A call."
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "f", "arguments": "{}"}]
    assert message["finish_reason"] == "tool_calls"
    message = await answered(MODEL, "<|channel|>analysis<|message|>On and on", Finish.LENGTH, include_reasoning=False)
    assert (message.get("reasoning_content"), message["content"]) == (None, "")


async def test_budget_ends_the_analysis() -> None:
    end = (MODEL.tokenizer.token_to_id("<|end|>"),)
    prompt, constraints = await sent(MODEL, thinking_budget=50)
    assert prompt.endswith("<|start|>assistant<|channel|>analysis<|message|>")
    assert constraints is not None
    assert (constraints.thinking_budget_tokens, constraints.thinking_end) == (50, end)
    prompt, constraints = await sent(MODEL, thinking_budget=0)
    assert prompt.endswith("<|start|>assistant<|channel|>analysis<|message|><|end|><|start|>assistant")
    assert constraints is None
    text = "Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    message = await answered(MODEL, text, thinking_budget=50)
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")


async def test_grammar_includes_the_channel_of_the_answer() -> None:
    start, channel, mark, end = (
        f"<[{MODEL.tokenizer.token_to_id(text)}]>" for text in ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
    )
    _, constraints = await sent(MODEL, **SCHEMA)
    assert constraints is not None
    assert constraints.grammar is not None
    analysis = f'({channel} "analysis" {mark} TEXT {end} {start} "assistant")?'
    assert constraints.grammar.text.startswith(f'start: {analysis} {channel} "final" {mark} answer\n')
    prompt, constraints = await sent(MODEL, **SCHEMA, reasoning_effort="low")
    assert prompt.endswith("<|start|>assistant<|channel|>analysis<|message|>")
    assert constraints is not None
    assert constraints.grammar is not None
    assert constraints.grammar.text.startswith(f'start: {start} "assistant" {channel} "final" {mark} answer\n')
    assert constraints.grammar_after == (MODEL.tokenizer.token_to_id("<|end|>"),)
    prompt, constraints = await sent(MODEL, guided_regex="a+", reasoning_effort="low")
    assert prompt.endswith("<|start|>assistant<|channel|>final<|message|>")
    assert constraints is not None
    assert constraints.grammar_after == ()


async def test_template_receives_the_reasoning_of_a_call() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    calls = {"role": "assistant", "tool_calls": [call], "reasoning_content": "Hm."}
    result = {"role": "tool", "tool_call_id": "a", "content": "x"}
    prompt, _ = await sent(MODEL, messages=[{"role": "user", "content": "hi"}, calls, result], **TOOLS)
    assert (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.f<|channel|>commentary json" in prompt
    )
    prompt, _ = await sent(MODEL, messages=[{"role": "user", "content": "hi"}, {**calls, "content": "So:"}, result])
    assert "<|channel|>analysis<|message|>So:<|end|>" in prompt
