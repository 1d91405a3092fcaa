"""Chooses the syntax of the served model's reasoning and tool calls: from its chat template and tokens, or as
configured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.frontend.parsing.harmony import CHANNEL, HARMONY
from penstock.frontend.parsing.reasoning import GRANITE_TAGS, KNOWN_FORMATS, ReasoningFormat
from penstock.frontend.parsing.syntax.fill_in import FillInTokens
from penstock.frontend.parsing.syntax.found_calls import find_calls, shows_calls
from penstock.frontend.parsing.syntax.found_reasoning import find_reasoning
from penstock.frontend.parsing.syntax.generic_tools import GENERIC, GenericTools, generic_tools
from penstock.frontend.parsing.syntax.named_formats import FUNCTOOLS, hinted_format, named_format
from penstock.frontend.parsing.syntax.rendered import Renderings
from penstock.frontend.parsing.tool_formats.base import ToolFormat
from penstock.frontend.settings import ReasoningParserName, ToolParserName
from penstock.frontend.text.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True)
class ModelSyntax:
    """The syntax of one model's reasoning and tool calls."""

    tools: ToolFormat | None = None
    """None if the operator disabled tools, or if there is no chat template."""
    writer: GenericTools | None = None
    """Writes into the messages what the chat template does not show of tools; None if it shows all, or if the operator
    chose the format."""
    reasoning: ReasoningFormat | None = None
    offers_tools: bool = True
    """False if the operator disabled tools."""
    fill_in: FillInTokens | None = None

    @property
    def is_generic(self) -> bool:
        """Whether the tools are described in the messages."""
        return self.writer is not None and not self.writer.shows_tools

    @property
    def tools_name(self) -> str | None:
        """The name of the format of calls, as operators and clients see it."""
        name = None if self.tools is None else self.tools.name
        return GENERIC if self.is_generic else name


def choose_model_syntax(
    template: ChatTemplate | None,
    added_tokens: Mapping[str, int],
    tool_parser: ToolParserName = "auto",
    reasoning_parser: ReasoningParserName = "auto",
) -> ModelSyntax:
    """Return the syntax of a model. added_tokens are the tokens outside the tokenizer's vocabulary."""
    source = "" if template is None else template.tool_source
    renderings = None if template is None else Renderings(template)
    reasoning = _reasoning_format(source, renderings, added_tokens, reasoning_parser)
    tools: ToolFormat | None
    writer = None
    if tool_parser != "auto":
        tools = named_format(tool_parser, added_tokens, source)
    elif template is None or renderings is None:
        tools = hinted_format("", added_tokens)
    else:
        tools = _found_format(renderings, source, added_tokens, reasoning)
        has_calls = shows_calls(renderings)
        if tools is None or not renderings.shows_tools:
            writer = generic_tools(tools, added_tokens, shows_calls=has_calls)
            tools = writer.form
        elif not has_calls:
            shows_results = renderings.shows_results
            writer = GenericTools(tools, shows_calls=False, shows_tools=True, shows_results=shows_results)
    return ModelSyntax(tools, writer, reasoning, offers_tools=tool_parser != "none")


def _found_format(
    renderings: Renderings, source: str, added_tokens: Mapping[str, int], reasoning: ReasoningFormat | None
) -> ToolFormat | None:
    opening, closing = ("", "") if reasoning is None else reasoning.answer_tags or ("", "")
    closings = filter(None, ("" if reasoning is None else reasoning.closing, closing))
    told = (FUNCTOOLS,) if f" {FUNCTOOLS}[" in source else ()
    tools = find_calls(renderings, (*added_tokens, *told), tuple(closings))
    if tools is not None and tools.trigger is not None and opening.startswith(tools.trigger):
        tools.trigger = None  # an answer that is a text begins like calls
    if tools is None and not shows_calls(renderings):
        tools = hinted_format(source, added_tokens)
    return tools


def _reasoning_format(
    source: str, renderings: Renderings | None, added_tokens: Mapping[str, int], requested: ReasoningParserName
) -> ReasoningFormat | None:
    if requested != "auto":
        granite = [form for form in KNOWN_FORMATS if form is not GRANITE_TAGS or "</response>" in source]
        return next((form for form in (HARMONY, *granite) if form.name == requested), None)
    if HARMONY.opening in source or CHANNEL in added_tokens:
        return HARMONY
    found = None if renderings is None else find_reasoning(renderings)
    if found is not None:
        return found
    # The template shows no reasoning of earlier turns, but its source or the tokens may have the marks.
    for form in KNOWN_FORMATS:
        is_common = form.answer_tags is None and not form.spellings
        texts = (form.closing,) if is_common else (form.opening, form.closing, *(form.answer_tags or ()))
        if all(text in source for text in texts) or (is_common and form.closing in added_tokens):
            return form
    return None
