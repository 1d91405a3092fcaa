"""Forced calls are valid whatever the model writes: each token is drawn at random from those that the grammar
allows."""

from __future__ import annotations

import asyncio
import contextlib
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

from penstock.backend.structured_output.compile_grammar import CompiledGrammar
from penstock.backend.structured_output.compile_pool import CompilePool
from penstock.backend.structured_output.constraints import SequenceConstraints
from penstock.backend.structured_output.grammar_cache import GrammarCache
from penstock.backend.structured_output.grammar_costs import BadGrammar
from penstock.frontend.generation.answer_rules.chat_rules import AnswerRules, chat_answer_rules
from penstock.frontend.generation.choices.choice import Choice, ChoicePrompt
from penstock.frontend.generation.choices.output_options import OutputOptions
from penstock.frontend.parsing.blocks import ChoiceOutput
from penstock.frontend.schemas.chat import ChatBody, check_chat
from penstock.shm.client import TokenBatch
from penstock.shm.messages import Constraints, Finish, Grammar
from tests.frontend.harness import FakeStream
from tests.frontend.model_families import ALWAYS_THINKING, MODELS, THINKING_HERMES, Model
from tests.frontend.parsing.tool_texts import written

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
STRICT_TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]
NAMED = {"type": "function", "function": {"name": "add"}}


@functools.cache
def compiler(model: Model, directory: Path) -> GrammarCache:
    path = directory / f"{abs(hash(model))}.json"
    model.tokenizer.save(str(path))
    return GrammarCache(CompilePool(path, model.tokenizer.get_vocab_size(), model.served().card.eos_token_ids))


@functools.cache
def compiled(model: Model, directory: Path, grammar: Grammar) -> LLMatcher:
    return compiler(model, directory).compile(grammar).result(timeout=30).matcher


def rules_for(model: Model, **fields: Any) -> AnswerRules:
    body = msgspec.convert({"messages": MESSAGES, "tools": TOOLS, **fields}, ChatBody)
    check_chat(body)
    served = model.served()
    assert served.tokenizer.chat_template is not None
    prompt = model.tokenizer.encode(served.tokenizer.chat_template.render(body)).ids
    return asyncio.run(chat_answer_rules(body, prompt, served))[1]


def generate_randomly(
    model: Model, rules: AnswerRules, directory: Path, seed: int, preferred_texts: tuple[str, ...] = ()
) -> ChoiceOutput:
    """Generate with random tokens, preferring some tokens and the end; return what a client gets."""
    preferred_ids = {model.tokenizer.token_to_id(text) for text in preferred_texts}
    rng = random.Random(seed)
    assert rules.grammar is not None
    matcher = compiled(model, directory, rules.grammar).deep_copy()
    requested = Constraints(
        rules.grammar, rules.grammar_after, (), (), 0, rules.thinking_budget_tokens, rules.thinking_end
    )
    vocab_size = model.tokenizer.get_vocab_size()
    (end,) = model.served().card.eos_token_ids
    constraints = SequenceConstraints(requested, CompiledGrammar(matcher, end), frozenset([end]), vocab_size)
    stream = FakeStream(None, ())  # type: ignore[arg-type]
    choice = Choice(
        0, ChoicePrompt(0, [1]), stream, model.served().tokenizer,  # type: ignore[arg-type]
        OutputOptions(shape=rules.shape, kept_token_ids=rules.kept_token_ids),
    )  # fmt: skip
    tokens: list[int] = []
    row, output = np.zeros(-(-vocab_size // 32), np.uint32), ChoiceOutput()
    for _ in range(4000):
        constraints.fill_mask(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
        may_end = end in allowed
        preferred = sorted(preferred_ids.intersection(allowed)) + [end] * may_end
        others = [token for token in allowed if token != end] or [end]
        token = rng.choice(preferred if preferred and rng.random() < 0.3 else others)
        tokens.append(token)
        constraints.advance(token)
        output.add(choice.take(TokenBatch([token], Finish.STOP if token == end else Finish.NONE)))
        if choice.finish_reason is not None:
            break
    assert choice.finish_reason is not None
    choice.complete(output)
    return output


def accepts(model: Model, rules: AnswerRules, directory: Path, text: str) -> bool:
    assert rules.grammar is not None
    matcher = compiled(model, directory, rules.grammar).deep_copy()
    ids = model.tokenizer.encode(text, add_special_tokens=False).ids
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def check(output: ChoiceOutput) -> None:
    for call in output.tool_calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


@pytest.mark.parametrize("name", MODELS)
def test_random_tokens_under_the_grammar_make_valid_calls(name: str, directory: Path) -> None:
    model = MODELS[name]
    for seed in range(2):
        output = generate_randomly(model, rules_for(model, tool_choice="required"), directory, seed)
        assert output.finish_reason == "tool_calls"
        assert output.text == ""
        assert output.tool_calls
        check(output)
        (call,) = generate_randomly(model, rules_for(model, tool_choice=NAMED), directory, seed).tool_calls
        assert call.name == "add"
        jsonschema.validate(json.loads(call.arguments), NUMBER)


TAGGED = [name for name, model in MODELS.items() if (form := model.served().syntax.tools) and form.parameters]
EXPRESSED: dict[str, dict[str, Any]] = {
    "nothing": {"properties": {}, "additionalProperties": False},
    "text": {"properties": {"a": {"type": "string", "minLength": 2, "maxLength": 3}}, "required": ["a"]},
    "optional": {"properties": {"a": {"type": "boolean"}, "b": {"type": ["integer", "null"]}}, "required": ["b"]},
    "choice": {"properties": {"a": {"enum": ["1", "null", "\n", "a\n"]}, "b": {"const": " x"}}, "required": ["a", "b"]},
    "reference": {
        "properties": {"a": {"$ref": "#/$defs/point"}, "c": {"type": "null"},
                       "b": {"type": "array", "items": {"$ref": "#/properties/c"}, "maxItems": 2}},
        "required": ["a", "b"],
        "$defs": {"point": {"type": "array", "items": {"$ref": "#/$defs/size"}, "minItems": 1, "maxItems": 2},
                  "size": {"type": "integer", "minimum": 0, "maximum": 9}},
    },
}  # fmt: skip
NOT_EXPRESSED: dict[str, dict[str, Any]] = {
    "pattern": {"properties": {"a": {"type": "string", "pattern": "^[ab]{1,3}$"}}, "required": ["a"]},
    "either": {
        "properties": {"a": {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "number", "maximum": 5}]}},
        "required": ["a"],
    },
    "keyword": {
        "$ref": "#/$defs/only",
        "$defs": {"only": {"properties": {"a": {"type": "null"}}, "required": ["a"], "additionalProperties": False}},
    },
    "others": {"additionalProperties": {"type": "null"}, "maxProperties": 2},
    "key": {"properties": {"a>b": {"type": "null"}}, "required": ["a>b"], "additionalProperties": False},
    "long": {  # each reference needs the whole schema
        "properties": {f"a{number}": {"$ref": "#/$defs/a", "minLength": number} for number in range(40)},
        "$defs": {"a": {"type": "null"}},
        "additionalProperties": False,
    },
    "mark": {
        "properties": {"a": {"enum": ["</parameter>", "</arg_value>", "</｜DSML｜parameter>"]}},
        "required": ["a"],
    },
}


@pytest.mark.parametrize("model_name", TAGGED)
@pytest.mark.parametrize("name", [*EXPRESSED, *NOT_EXPRESSED])
def test_random_parameters_are_valid_by_their_schema(name: str, model_name: str, directory: Path) -> None:
    model, schema = MODELS[model_name], (EXPRESSED | NOT_EXPRESSED)[name]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", **schema}}}]
    rules = rules_for(model, tools=tools, tool_choice="required", parallel_tool_calls=False)
    assert rules.grammar is not None
    assert ("\ntool_0_arguments: %json" in rules.grammar.text) == (name in NOT_EXPRESSED)
    output = generate_randomly(model, rules, directory, seed=0)
    (call,) = output.tool_calls
    assert output.text == ""
    jsonschema.validate(json.loads(call.arguments), schema)


@pytest.mark.parametrize("model_name", TAGGED)
def test_grammar_of_parameters_allows_what_models_write(model_name: str, directory: Path) -> None:
    model = MODELS[model_name]
    form = model.served().syntax.tools
    assert form is not None
    maybe = {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}
    schema = {"type": "object", "properties": {"text": {"type": "string"}, "maybe": maybe, "any": {}}}
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": schema}},
        {"type": "function", "function": {"name": "g"}},
    ]
    rules = rules_for(model, tools=tools, tool_choice="required")
    for arguments in (
        {"text": "a\n\n<b> </c>\n"},
        {"text": "", "maybe": None, "any": [1]},
        {"maybe": "x", "any": "y"},
        {},
    ):
        assert accepts(model, rules, directory, written(form, [("f", json.dumps(arguments))]))
    assert accepts(model, rules, directory, written(form, [("g", '{"x": 1, "y": "z"}'), ("f", "{}")]))
    assert not accepts(model, rules, directory, written(form, [("f", '{"other": 1}')]))


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": ["a"]},
        {"properties": {}, "required": 5},
        {"properties": {}, "required": [["a"]]},
        {"properties": {"a": 5}},
        {"properties": {"a": {"type": "string", "maxLength": "b"}}},
        {"properties": {"a": {"type": "string", "minLength": -1}}},
        {"properties": {"a": {"type": "string", "enum": 5}}},
        {"properties": {"a": {"type": "string", "enum": []}}},
        {"properties": {"a": {"anyOf": 5}}},
        {"properties": {"a": {"anyOf": [{"type": "string"}, 5]}}},
        {"properties": {"a": {"type": 5}}},
        {"additionalProperties": 5},
        {"properties": {"a": {"$ref": "#/properties/a"}}},
    ],
)
def test_invalid_schema_of_parameters_makes_a_grammar_or_none(schema: dict[str, Any], directory: Path) -> None:
    model = MODELS["qwen3_coder"]
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    model = Model(model.template.replace("parameters.properties", "nothing"), added=model.added)
    rules = rules_for(model, tools=tools, tool_choice="required")
    assert rules.grammar is not None
    with contextlib.suppress(BadGrammar):
        compiled(model, directory, rules.grammar)


def test_several_calls_are_allowed_unless_the_request_limits_them(directory: Path) -> None:
    model = MODELS["hermes"]
    required = rules_for(model, tool_choice="required")
    assert max(len(generate_randomly(model, required, directory, seed).tool_calls) for seed in range(12)) > 1
    one = rules_for(model, tool_choice="required", parallel_tool_calls=False)
    assert all(len(generate_randomly(model, one, directory, seed).tool_calls) == 1 for seed in range(6))


@pytest.mark.parametrize("seed", range(4))
def test_forced_call_follows_the_reasoning(directory: Path, seed: int) -> None:
    model = Model(ALWAYS_THINKING)
    rules = rules_for(model, tool_choice="required", thinking_budget=20)
    output = generate_randomly(model, rules, directory, seed)
    assert output.reasoning
    assert output.tool_calls
    check(output)


def test_model_may_reason_before_a_forced_call(directory: Path) -> None:
    model = Model(THINKING_HERMES)
    rules = rules_for(model, tool_choice="required")
    outputs = [
        generate_randomly(model, rules, directory, seed, preferred_texts=("<think>", "</think>")) for seed in range(12)
    ]
    assert any(output.tool_calls for output in outputs)
    assert any(output.reasoning for output in outputs)
    for output in outputs:
        if output.tool_calls:
            check(output)
        assert output.text == ""


@pytest.mark.parametrize("name", ["hermes", "glm4", "kimi_k2", "harmony"])
def test_calls_of_a_strict_function_are_valid_within_free_text(name: str, directory: Path) -> None:
    model = MODELS[name]
    rules = rules_for(model, tools=STRICT_TOOLS)
    marks = ("<tool_call>", "<|tool_calls_section_begin|>", "<|channel|>", "<|end|>")
    outputs = [generate_randomly(model, rules, directory, seed, preferred_texts=marks) for seed in range(15)]
    assert any(output.tool_calls for output in outputs)
    assert any(output.text for output in outputs)
    for output in outputs:
        check(output)


@pytest.mark.parametrize("name", ["hermes", "deepseek_v32", "kimi_k2", "harmony"])
def test_calls_of_a_strict_function_may_follow_text(name: str, directory: Path) -> None:
    model = MODELS[name]
    form = model.served().syntax.tools
    assert form is not None
    rules = rules_for(model, tools=STRICT_TOOLS)
    text = "Let me see: 1 < 2.\n\n"
    if form.messages is not None:
        text = f"{form.messages.openings[0]}{text}{form.messages.separator}"
    assert accepts(model, rules, directory, text + written(form, [("add", '{"n": 1}')]))
    assert not accepts(model, rules, directory, text + written(form, [("add", '{"n": 6}')]))
    assert not accepts(model, rules, directory, text + written(form, [("subtract", '{"n": 1}')]))


def test_what_begins_as_a_call_of_the_generic_form_is_a_call(directory: Path) -> None:
    model = MODELS["generic"]
    form = model.served().syntax.tools
    assert form is not None
    rules = rules_for(model)
    one, two = written(form, [("add", '{"n": 1}')]), written(form, [("add", '{"n": 1}'), ("add", '{"n": 2}')])
    for text in ("", "1 < 2 <tool", one, f"Well <{one}", f"{two} Done.", f"{one}And{one}"):
        assert accepts(model, rules, directory, text)
    for text in ("<tool_call>", "<tool_call>\nfirst", "<tool_call>\n{}", one.replace("1", "9"), f"{one}<tool_call>"):
        assert not accepts(model, rules, directory, text)
    single = rules_for(model, tool_choice="required", parallel_tool_calls=False)
    assert accepts(model, single, directory, one)
    assert not accepts(model, single, directory, two)
    long = {"type": "object", "properties": {"a": {"enum": ["x" * 1000] * 40}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": long}}]
    assert accepts(model, rules_for(model, tools=tools), directory, written(form, [("f", '{"a": 1}')]))


def test_continued_answer_of_harmony_begins_within_its_text(directory: Path) -> None:
    model = MODELS["harmony"]
    messages = [*MESSAGES, {"role": "assistant", "content": "Two and"}]
    settings = {"continue_final_message": True, "add_generation_prompt": False}
    rules = rules_for(model, messages=messages, tools=STRICT_TOOLS, **settings)
    assert accepts(model, rules, directory, " two")
    assert not accepts(model, rules, directory, "<|channel|>final<|message|> two")


def test_answer_is_valid_json_or_valid_calls(directory: Path) -> None:
    model = MODELS["hermes"]
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": NUMBER}}
    rules = rules_for(model, response_format=schema, enable_thinking=False)
    outputs = [generate_randomly(model, rules, directory, seed) for seed in range(12)]
    assert {bool(output.tool_calls) for output in outputs} == {True, False}
    for output in outputs:
        if output.tool_calls:
            check(output)
        else:
            jsonschema.validate(json.loads(output.text), NUMBER)


@pytest.mark.parametrize("model", [Model(ALWAYS_THINKING), Model(THINKING_HERMES)], ids=["opened", "by itself"])
def test_json_answer_follows_the_reasoning(model: Model, directory: Path) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}
    rules = rules_for(model, tools=None, response_format=schema)
    outputs = [
        generate_randomly(model, rules, directory, seed, preferred_texts=("<think>", "</think>")) for seed in range(8)
    ]
    assert any(output.reasoning for output in outputs)
    for output in outputs:
        jsonschema.validate(json.loads(output.text), CITY)
