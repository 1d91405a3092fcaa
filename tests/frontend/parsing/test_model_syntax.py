"""Which formats a model has: by its template and tokens, or as the operator says."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.frontend.parsing.syntax.model_syntax import ModelSyntax, choose_model_syntax
from penstock.frontend.text.chat_template import ChatTemplate
from tests.frontend.harness import CHAT_TEMPLATE
from tests.frontend.model_families import (
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

GEMMA4 = (
    GEMMA.replace("<start_function_call>", "<|tool_call>")
    .replace("<end_function_call>", "<tool_call|>")
    .replace("<escape>", '<|"|>')
)


def syntax_of(source: str | None, *tokens: str) -> ModelSyntax:
    template = None if source is None else ChatTemplate(source, {})
    return choose_model_syntax(template, {token: number for number, token in enumerate(tokens)})


@pytest.mark.parametrize(
    ("source", "tokens", "expected"),
    [
        (HERMES, (), ("hermes", None)),
        (THINKING_HERMES, (), ("hermes", "think")),
        (HERMES, ("<think>", "</think>"), ("hermes", "think")),
        (LLAMA3 + "Environment: ipython", (), ("llama3_json", None)),
        (LLAMA3 + "<|python_tag|>", (), ("llama3_json", None)),
        (PYTHONIC, (), ("pythonic", None)),
        (MISTRAL, ("[THINK]", "[/THINK]"), ("mistral", "mistral")),
        (QWEN3_CODER, (), ("qwen3_coder", None)),
        (GLM4, ("<think>", "</think>"), ("glm4", "think")),
        (DEEPSEEK_V3 + "</think>", (), ("deepseek", "think")),
        (DEEPSEEK_V32 + "</think>", (), ("deepseek_v32", "think")),
        ("{{ tools }}", ("｜DSML｜",), ("deepseek_v32", None)),
        (KIMI_K2, (), ("kimi_k2", None)),
        ("{{ tools }}", ("<|tool_calls_section_begin|>", "<think>", "</think>"), ("kimi_k2", "think")),
        (GRANITE, (), ("granite", None)),
        (GRANITE + "Here is my thought process: Here is my response:", (), ("granite", "granite")),
        (GRANITE + "<think></think><response></response>", (), ("granite", "granite")),
        (GEMMA, (), ("gemma", None)),
        (GEMMA4, ("<|channel>", "<channel|>"), ("gemma", "gemma")),
        (HARMONY, (), ("harmony", "harmony")),
        (None, ("<|channel|>", "<|message|>"), (None, "harmony")),
        (CHAT_TEMPLATE, (), ("generic", None)),
        (CHAT_TEMPLATE, ("<tool_call>",), ("hermes", None)),
        (CHAT_TEMPLATE, ("<|python_tag|>",), ("generic", None)),
        (DEEPSEEK_V3.replace("tools", "listing"), (), ("deepseek", None)),
        (None, (), (None, None)),
    ],
)
def test_model_syntax_is_chosen_by_template_and_tokens(
    source: str | None, tokens: tuple[str, ...], expected: Any
) -> None:
    syntax = syntax_of(source, *tokens)
    found = (syntax.tools and syntax.tools.name, syntax.reasoning and syntax.reasoning.name)
    assert found == expected


def test_layout_of_forced_calls_is_that_of_the_template() -> None:
    def before(source: str) -> str:
        syntax = syntax_of(source)
        assert syntax.tools is not None
        return syntax.tools.opening + syntax.tools.around("f")[0]

    assert before(DEEPSEEK_V3) == "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    assert before(DEEPSEEK_V31) == "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
    assert before(DEEPSEEK_V32) == '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
    fourth = DEEPSEEK_V32.replace("function_calls", "tool_calls")
    assert before(fourth) == '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n'
    assert before(GLM4) == "<tool_call>f\n"


def test_operator_can_choose_the_parsers() -> None:
    syntax = choose_model_syntax(ChatTemplate(HERMES, {}), {"[ARGS]": 5}, "mistral", "think")
    assert syntax.tools is not None
    assert syntax.tools.around("f") == ("[TOOL_CALLS]f[ARGS]", "")
    assert syntax.reasoning is not None
    assert syntax.reasoning.name == "think"
