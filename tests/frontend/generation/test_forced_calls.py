"""Calls that must be made are valid, whatever the model would have said: every token is drawn at random from those
that the grammar of the request allows."""

from __future__ import annotations

import asyncio
import functools
import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest
from llguidance import LLMatcher

from penstock.backend.structured_output.constraints import SequenceConstraints
from penstock.backend.structured_output.grammar_compiler import GrammarCompiler
from penstock.frontend.generation.answer_rules.chat_rules import chat_answer_rules
from penstock.frontend.generation.answer_rules.rules import AnswerRules
from penstock.frontend.generation.choice import Choice, ChoicePrompt
from penstock.frontend.generation.output_options import OutputOptions
from penstock.frontend.parsing.choice_output import ChoiceOutput
from penstock.frontend.schemas.chat import ChatBody, check_chat
from penstock.shm.client import TokenBatch
from penstock.shm.messages import Constraints, Finish, Grammar
from tests.frontend.harness import FakeStream
from tests.frontend.response_shapes import ALWAYS_THINKING, MODELS, THINKING_HERMES, Model

CITY = {
    "type": "object",
    "description": 'A } city " with ] marks',
    "properties": {
        "name": {"$ref": "#/$defs/name"},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["</tool_call>", "[TOOL_CALLS]", "}{", "'\"\\"]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/name"}, "maxItems": 2},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
    "$defs": {"name": {"type": "string", "maxLength": 4, "description": "a name"}},
}
NUMBER = {
    "type": "object",
    "properties": {"n": {"anyOf": [{"type": "number", "minimum": -5, "maximum": 5}, {"type": "null"}]}},
    "required": ["n"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {"find_city": CITY, "add": NUMBER}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
MESSAGES = [{"role": "user", "content": "hi"}]
NAMED = {"type": "function", "function": {"name": "add"}}


@functools.cache
def compiler(model: Model, directory: Path) -> GrammarCompiler:
    path = directory / f"{abs(hash(model))}.json"
    model.tokenizer.save(str(path))
    return GrammarCompiler(path, model.tokenizer.get_vocab_size(), model.served().card.eos_token_ids)


@functools.cache
def compiled(model: Model, directory: Path, grammar: Grammar) -> LLMatcher:
    return compiler(model, directory).compile(grammar).result(timeout=30)


def guided(model: Model, **fields: Any) -> AnswerRules:
    body = msgspec.convert({"messages": MESSAGES, "tools": TOOLS, **fields}, ChatBody)
    check_chat(body)
    served = model.served()
    assert served.tokenizer.chat_template is not None
    prompt = model.tokenizer.encode(served.tokenizer.chat_template.render(body)).ids
    return asyncio.run(chat_answer_rules(body, prompt, served))[1]


def babble(
    model: Model, guidance: AnswerRules, directory: Path, seed: int, likes: tuple[str, ...] = ()
) -> ChoiceOutput:
    """What a client gets of a model without a clue, which likes some tokens, and to end."""
    liked = {model.tokenizer.token_to_id(text) for text in likes}
    rng = random.Random(seed)
    assert guidance.grammar is not None
    matcher = compiled(model, directory, guidance.grammar).deep_copy()
    wanted = Constraints(
        guidance.grammar, guidance.grammar_after, (), (), 0, guidance.thinking_budget_tokens, guidance.thinking_end
    )
    vocab_size = model.tokenizer.get_vocab_size()
    (end,) = model.served().card.eos_token_ids
    constraints = SequenceConstraints(wanted, matcher, frozenset([end]), vocab_size)
    stream = FakeStream(None, ())  # type: ignore[arg-type]
    choice = Choice(
        0, ChoicePrompt(0, [1]), stream, model.served().tokenizer,  # type: ignore[arg-type]
        OutputOptions(shape=guidance.shape, kept_token_ids=guidance.kept_token_ids),
    )  # fmt: skip
    tokens: list[int] = []
    row, message = np.zeros(-(-vocab_size // 32), np.uint32), ChoiceOutput()
    for _ in range(4000):
        constraints.fill(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
        may_end = end in allowed
        preferred = sorted(liked.intersection(allowed)) + [end] * may_end
        others = [token for token in allowed if token != end] or [end]
        token = rng.choice(preferred if preferred and rng.random() < 0.3 else others)
        tokens.append(token)
        constraints.advance(token)
        message.add(choice.take(TokenBatch([token], Finish.STOP if token == end else Finish.NONE)))
        if choice.finish_reason is not None:
            break
    assert choice.finish_reason is not None
    choice.complete(message)
    return message


def check(message: ChoiceOutput) -> None:
    for call in message.tool_calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


@pytest.mark.parametrize("name", MODELS)
def test_a_model_without_a_clue_calls_what_it_must(name: str, directory: Path) -> None:
    model = MODELS[name]
    for seed in range(6):
        message = babble(model, guided(model, tool_choice="required"), directory, seed)
        assert message.finish_reason == "tool_calls"
        assert message.text == ""
        assert message.tool_calls
        check(message)
        (call,) = babble(model, guided(model, tool_choice=NAMED), directory, seed).tool_calls
        assert call.name == "add"
        jsonschema.validate(json.loads(call.arguments), NUMBER)


def test_several_calls_may_be_made_unless_one_is_wanted(directory: Path) -> None:
    model = MODELS["hermes"]
    required = guided(model, tool_choice="required")
    assert max(len(babble(model, required, directory, seed).tool_calls) for seed in range(12)) > 1
    one = guided(model, tool_choice="required", parallel_tool_calls=False)
    assert all(len(babble(model, one, directory, seed).tool_calls) == 1 for seed in range(6))


@pytest.mark.parametrize("seed", range(4))
def test_reasoning_comes_first(directory: Path, seed: int) -> None:
    model = Model(ALWAYS_THINKING)
    guidance = guided(model, tool_choice="required", thinking_budget=20)
    message = babble(model, guidance, directory, seed)
    assert message.reasoning
    assert message.tool_calls
    check(message)


def test_a_model_may_reason_before_a_call_that_it_must_make(directory: Path) -> None:
    model = Model(THINKING_HERMES)
    guidance = guided(model, tool_choice="required")
    messages = [babble(model, guidance, directory, seed, likes=("<think>", "</think>")) for seed in range(12)]
    assert any(message.tool_calls for message in messages)
    assert any(message.reasoning for message in messages)
    for message in messages:
        if message.tool_calls:
            check(message)
        assert message.text == ""


def test_a_strict_functions_calls_are_valid_beside_free_text(directory: Path) -> None:
    model = MODELS["hermes"]
    strict = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]  # type: ignore[dict-item]
    guidance = guided(model, tools=strict)
    messages = [babble(model, guidance, directory, seed, likes=("<tool_call>",)) for seed in range(30)]
    assert any(message.tool_calls for message in messages)
    assert any(message.text for message in messages)
    for message in messages:
        check(message)


def test_an_answer_in_json_or_calls(directory: Path) -> None:
    model = MODELS["hermes"]
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": NUMBER}}
    guidance = guided(model, response_format=schema, enable_thinking=False)
    messages = [babble(model, guidance, directory, seed) for seed in range(12)]
    assert {bool(message.tool_calls) for message in messages} == {True, False}
    for message in messages:
        if message.tool_calls:
            check(message)
        else:
            jsonschema.validate(json.loads(message.text), NUMBER)


@pytest.mark.parametrize("model", [Model(ALWAYS_THINKING), Model(THINKING_HERMES)], ids=["opened", "by itself"])
def test_an_answer_in_json_comes_behind_the_reasoning(model: Model, directory: Path) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}
    guidance = guided(model, tools=None, response_format=schema)
    messages = [babble(model, guidance, directory, seed, likes=("<think>", "</think>")) for seed in range(8)]
    assert any(message.reasoning for message in messages)
    for message in messages:
        jsonschema.validate(json.loads(message.text), CITY)
