"""Chooses how the served model writes reasoning and tool calls: from its chat template and tokens, or as configured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.frontend.parsing.reasoning import MISTRAL_THINK, THINK, ReasoningFormat
from penstock.frontend.parsing.tool_formats.hermes import Hermes
from penstock.frontend.parsing.tool_formats.llama3_json import Llama3Json
from penstock.frontend.parsing.tool_formats.mistral import Mistral
from penstock.frontend.parsing.tool_formats.pythonic import Pythonic

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.frontend.parsing.tool_formats.base import ToolFormat
    from penstock.frontend.settings import ReasoningParserName, ToolParserName

_OTHER_XML = ("<function=", "<arg_key>", "<parameter=")
"""Markers of formats that also use <tool_call>, but with XML inside. They are not supported."""


@dataclass(frozen=True, slots=True)
class ModelSyntax:
    """How one model writes reasoning and tool calls."""

    tools: ToolFormat | None = None
    """None if the model has no tools, or writes calls in an unknown format."""
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
    name = _tool_format_of(source) if tool_parser == "auto" else tool_parser
    formats: dict[str, ToolFormat] = {
        "hermes": Hermes(),
        "llama3_json": Llama3Json(),
        "mistral": Mistral(names_first="[ARGS]" in added_tokens),
        "pythonic": Pythonic(),
    }
    return ModelSyntax(
        tools=formats.get(name),
        reasoning=_reasoning_format(source, added_tokens, reasoning_parser),
        offers_tools=tool_parser != "none",
    )


def _tool_format_of(source: str) -> str:
    """Return the name of the template's tool format. The order matters: a template may mention several formats."""
    if "tools" not in source:
        return "none"
    if "[TOOL_CALLS]" in source:
        return "mistral"
    if "<tool_call>" in source:
        return "none" if any(mark in source for mark in _OTHER_XML) else "hermes"
    if "[func_name1(" in source:
        return "pythonic"
    if "<|python_tag|>" in source or ("ipython" in source and "parameters" in source):
        return "llama3_json"
    return "none"


def _reasoning_format(
    source: str, added_tokens: Mapping[str, int], requested: ReasoningParserName
) -> ReasoningFormat | None:
    forms = {form.name: form for form in (THINK, MISTRAL_THINK)}
    if requested != "auto":
        return forms.get(requested)
    known = (form for form in forms.values() if form.closing in source or form.closing in added_tokens)
    return next(known, None)
