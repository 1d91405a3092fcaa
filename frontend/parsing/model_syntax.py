"""Chooses the syntax of the served model's reasoning and tool calls: from its chat template and tokens, or as
configured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.frontend.parsing.harmony import CHANNEL, HARMONY, Harmony
from penstock.frontend.parsing.reasoning import (
    GEMMA_THOUGHT,
    GRANITE_PHRASES,
    GRANITE_TAGS,
    MISTRAL_THINK,
    THINK,
    ReasoningFormat,
)
from penstock.frontend.parsing.tool_formats.deepseek import DeepSeek
from penstock.frontend.parsing.tool_formats.deepseek_v32 import MARK as DSML
from penstock.frontend.parsing.tool_formats.deepseek_v32 import DeepSeekV32
from penstock.frontend.parsing.tool_formats.gemma import Gemma
from penstock.frontend.parsing.tool_formats.glm4 import Glm4
from penstock.frontend.parsing.tool_formats.granite import Granite
from penstock.frontend.parsing.tool_formats.hermes import Hermes
from penstock.frontend.parsing.tool_formats.kimi_k2 import SECTION as KIMI_SECTION
from penstock.frontend.parsing.tool_formats.kimi_k2 import KimiK2
from penstock.frontend.parsing.tool_formats.llama3_json import Llama3Json
from penstock.frontend.parsing.tool_formats.mistral import Mistral
from penstock.frontend.parsing.tool_formats.pythonic import Pythonic
from penstock.frontend.parsing.tool_formats.qwen3_coder import Qwen3Coder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.frontend.parsing.tool_formats.base import ToolFormat
    from penstock.frontend.settings import ReasoningParserName, ToolParserName


@dataclass(frozen=True, slots=True)
class ModelSyntax:
    """The syntax of one model's reasoning and tool calls."""

    tools: ToolFormat | None = None
    """None if the model writes no calls, or in an unknown format."""
    shows_tools: bool = True
    """False if the chat template does not show the tools to the model."""
    reasoning: ReasoningFormat | None = None
    offers_tools: bool = True
    """False if the operator disabled tools."""


def choose_model_syntax(
    template: str | None,
    added_tokens: Mapping[str, int],
    tool_parser: ToolParserName = "auto",
    reasoning_parser: ReasoningParserName = "auto",
) -> ModelSyntax:
    """Return the syntax of a model.

    template is the source of its chat template; added_tokens are the tokens outside the tokenizer's vocabulary.
    """
    source = template or ""
    name = _tool_format_of(source, added_tokens) if tool_parser == "auto" else tool_parser
    formats: dict[str, ToolFormat] = {
        "deepseek": DeepSeek(in_code="```json" in source),
        "deepseek_v32": DeepSeekV32(is_fourth="tool_calls>" in source),
        "gemma": Gemma(is_fourth="<|tool_call>" in source),
        "glm4": Glm4(has_lines="</arg_key><arg_value>" not in source),
        "granite": Granite(),
        "harmony": Harmony(),
        "hermes": Hermes(),
        "kimi_k2": KimiK2(),
        "llama3_json": Llama3Json(),
        "mistral": Mistral(names_first="[ARGS]" in added_tokens),
        "pythonic": Pythonic(),
        "qwen3_coder": Qwen3Coder(),
    }
    return ModelSyntax(
        tools=formats.get(name),
        reasoning=_reasoning_format(source, added_tokens, reasoning_parser),
        shows_tools=tool_parser != "auto" or "tools" in source,
        offers_tools=tool_parser != "none",
    )


def _tool_format_of(source: str, added_tokens: Mapping[str, int]) -> str:
    """Return the name of the model's tool format. The order matters: a template may mention several formats.

    Some templates for Kimi K2 and DeepSeek V3.2 show the tools, but no calls: their tokens decide.
    """
    if f"{CHANNEL}commentary" in source:
        return "harmony"
    if "[TOOL_CALLS]" in source:
        return "mistral"
    if "<｜tool▁calls▁begin｜>" in source:
        return "deepseek"
    if DSML in source:
        return "deepseek_v32"
    if KIMI_SECTION in source:
        return "kimi_k2"
    if "<start_function_call>" in source or "<|tool_call>" in source:
        return "gemma"
    if "<|tool_call|>" in source:
        return "granite"
    if "<tool_call>" in source:
        return _tagged_format_of(source)
    if "[func_name1(" in source:
        return "pythonic"
    if "<|python_tag|>" in source or ("ipython" in source and "parameters" in source):
        return "llama3_json"
    if KIMI_SECTION in added_tokens:
        return "kimi_k2"
    return "deepseek_v32" if DSML in added_tokens else "none"


def _tagged_format_of(source: str) -> str:
    """Return the name of a format with the tag <tool_call>, judging by the text inside it."""
    if "<function=" in source:
        return "qwen3_coder"
    return "glm4" if "<arg_key>" in source else "hermes"


def _reasoning_format(
    source: str, added_tokens: Mapping[str, int], requested: ReasoningParserName
) -> ReasoningFormat | None:
    granite = GRANITE_TAGS if "</response>" in source else GRANITE_PHRASES
    forms = {form.name: form for form in (HARMONY, granite, THINK, MISTRAL_THINK, GEMMA_THOUGHT)}
    if requested != "auto":
        return forms.get(requested)
    if HARMONY.opening in source or CHANNEL in added_tokens:
        return HARMONY
    if granite.closing in source and (granite is GRANITE_TAGS or granite.opening in source):
        return granite
    known = (
        form for form in (THINK, MISTRAL_THINK, GEMMA_THOUGHT) if form.closing in source or form.closing in added_tokens
    )
    return next(known, None)
