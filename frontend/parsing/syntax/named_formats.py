"""Marks of well-known families, for models whose chat templates show no calls, and for the operator's choice."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.frontend.parsing.harmony import CHANNEL, Harmony
from penstock.frontend.parsing.tool_formats.base import CALL_NUMBER, ParameterLayout, ToolFormat
from penstock.frontend.parsing.tool_formats.gemma import Gemma
from penstock.frontend.parsing.tool_formats.marked import CallMarks, Marked
from penstock.frontend.parsing.tool_formats.pythonic import Pythonic

FUNCTOOLS = "functools"
"""Begins calls of Firefunction and Phi-4-mini, before a list."""
_OBJECT = ('{"name": "', '", "arguments": ', "}")
_DSML = "｜DSML｜"
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")

MARKS = {
    "hermes": CallMarks(call=("<tool_call>\n", "\n</tool_call>"), separator="\n", object=_OBJECT),
    "llama3_json": CallMarks(
        separator="; ", object=('{"name": "', '", "parameters": ', "}"), starts=("<|python_tag|>",)
    ),
    "mistral": CallMarks(("[TOOL_CALLS]", ""), separator=", ", object=_OBJECT, is_list=True, short_ids=True),
    "mistral, names first": CallMarks(call=("[TOOL_CALLS]", ""), middle="[ARGS]", short_ids=True),
    "granite": CallMarks(("<|tool_call|>", ""), separator=", ", object=_OBJECT, is_list=True, starts=("<tool_call>",)),
    "firefunction": CallMarks((f" {FUNCTOOLS}", ""), separator=", ", object=_OBJECT, is_list=True),
    "qwen3_coder": CallMarks(
        call=("<tool_call>\n<function=", "</function>\n</tool_call>"),
        separator="\n",
        middle=">\n",
        parameters=ParameterLayout("<parameter=", ">\n", "</parameter>", "\n", is_indented=True),
    ),
    "glm4": CallMarks(
        call=("<tool_call>", "</tool_call>"),
        separator="\n",
        middle="\n",
        parameters=ParameterLayout("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>", "\n"),
    ),
    "deepseek": CallMarks(
        _DEEPSEEK,
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```<｜tool▁call▁end｜>"),
        separator="\n",
        middle="\n```json\n",
    ),
    "deepseek, V3.1": CallMarks(_DEEPSEEK, ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"), middle="<｜tool▁sep｜>"),
    "deepseek_v32": CallMarks(
        (f"<{_DSML}function_calls>\n", f"</{_DSML}function_calls>"),
        (f'<{_DSML}invoke name="', f"</{_DSML}invoke>\n"),
        middle='">\n',
        parameters=ParameterLayout(
            f'<{_DSML}parameter name="',
            '" string="true">',
            f"</{_DSML}parameter>",
            "\n",
            json_middle='" string="false">',
        ),
    ),
    "kimi_k2": CallMarks(
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        ("<|tool_call_begin|>functions.", "<|tool_call_end|>"),
        middle=f":{CALL_NUMBER}<|tool_call_argument_begin|>",
    ),
}

_HINTS = (
    (f"{CHANNEL}commentary", "harmony"),
    ("<|tool_call_start|>", "lfm2"),
    ("[ARGS]", "mistral, names first"),
    ("[TOOL_CALLS]", "mistral"),
    ("<｜tool▁sep｜>", "deepseek"),
    (_DSML, "deepseek_v32"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<start_function_call>", "gemma"),
    ("<|tool_call>", "gemma"),
    ("<|tool_call|>", "granite"),
    ("<arg_key>", "glm4"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    (f" {FUNCTOOLS}[", "firefunction"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
)
"""Texts in the template's source, or tokens, and what they mean where the template shows no calls. The order matters: a
template may mention several formats."""


def named_format(name: str, added_tokens: Iterable[str] = (), source: str = "") -> ToolFormat | None:
    """Return the format with a name of the option --tool-parser, or of a hint."""
    if name == "mistral" and "[ARGS]" in added_tokens:
        name = "mistral, names first"
    if (marks := MARKS.get(name)) is not None:
        return Marked(name.partition(",")[0], marks, added_tokens)
    match name:
        case "harmony":
            return Harmony()
        case "gemma":
            return Gemma(is_fourth="<|tool_call>" in source)
        case "lfm2":
            return Pythonic(("<|tool_call_start|>", "<|tool_call_end|>"))
        case "pythonic":
            return Pythonic()
    return None


def hinted_format(source: str, added_tokens: Iterable[str]) -> ToolFormat | None:
    """Return the format that a template's source or tokens hint at."""
    tokens = frozenset(added_tokens)
    for hint, name in _HINTS:
        if hint in source or hint in tokens:
            return named_format(name, tokens, source)
    return None
