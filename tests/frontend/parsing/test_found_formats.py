"""Formats of calls that chat templates show, each imitated by a small template."""

from __future__ import annotations

import json

import pytest

from penstock.frontend.parsing.answer_parser import AnswerShape
from penstock.frontend.parsing.syntax.model_syntax import ModelSyntax, choose_model_syntax
from penstock.frontend.text.chat_template import ChatTemplate
from tests.frontend.parsing.tool_texts import FUNCTIONS, read, read_all_ways, written

TEMPLATE = """\
{%- for tool in tools or [] %}{{- tool | tojson }}{%- endfor %}
{%- for message in messages %}
    {{- '<|' + message.role + '|>' }}
    {%- if message.reasoning_content %}{{- THOUGHT }}{%- endif %}
    {{- message.content }}
    {%- if message.tool_calls %}
        {{- OPENING }}
        {%- for call in message.tool_calls %}
            {%- set name, arguments, id = call.function.name, call.function.arguments, call.id %}
            {%- set number = loop.index0 | string %}{{- SEPARATOR if not loop.first }}
            {{- CALL_TEXT }}
        {%- endfor %}
        {{- CLOSING }}
    {%- endif %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""
OBJECT = """'{"name": "' + name + '", "arguments": ' + (arguments | tojson) + '}'"""


def template(
    opening: str, call: str, closing: str = "", separator: str = "", *, parameter: str = "", thought: str = "''"
) -> str:
    """parameter writes one argument of a call; the call has a gap for all of them."""
    source = TEMPLATE.replace("CALL_TEXT", call).replace("THOUGHT", thought)
    for place, text in (("OPENING", opening), ("SEPARATOR", separator), ("CLOSING", closing)):
        source = source.replace(place, repr(text))
    loop = "' }}{%- for key, value in arguments.items() %}{{- " + parameter + " }}{%- endfor %}{{- '"
    return source.replace("PARAMETERS", loop)


TEXT_OR_JSON = "(value if value is string else value | tojson)"
KINDS = {
    "Nemotron": template("<TOOLCALL>[", OBJECT, "]</TOOLCALL>", ", "),
    "Phi-4-mini": template("<|tool_call|>[", OBJECT, "]<|/tool_call|>", ", "),
    "Apriel": template("\n<tool_calls>[", OBJECT.replace("'}'", """', "id": "' + id + '"}'"""), "]</tool_calls>", ", "),
    "MiniMax M1": template("<tool_calls>\n", OBJECT, "\n</tool_calls>", "\n"),
    "Granite 20B": template("", f"'<function_call> ' + {OBJECT}", "", "\n"),
    "xLAM": template("[", OBJECT, "]", ", "),
    "Command R7B": template(
        "<|START_ACTION|>[\n    ",
        OBJECT.replace('{"name"', '{"tool_call_id": "' + "' + number + '" + '", "tool_name"').replace(
            'arguments"', 'parameters"'
        ),
        "\n]<|END_ACTION|>",
        ",\n    ",
    ),
    "Apertus": template(
        "<|tools_prefix|>[", """'{"' + name + '": ' + (arguments | tojson) + '}'""", "]<|tools_suffix|>", ", "
    ),
    "Python's spelling": template("<call>", OBJECT.replace("tojson", "string"), "</call>", "</call><call>"),
    "other keys": template(
        "<call>", OBJECT.replace('"name"', '"tool"').replace('"arguments"', '"args"'), "</call>", "</call><call>"
    ),
    "Functionary 3.1": template("", "'<function=' + name + '>' + (arguments | tojson) + '</function>'"),
    "Solar": template(
        "<|calls|>",
        "'<|begin|>' + id + '<|name|>' + name + '<|args|>' + (arguments | tojson) + '<|end_call|>'",
        "<|calls_end|>",
    ),
    "Kimi K2 without a section": template(
        "", "'<|call|>functions.' + name + ':' + number + '<|arg|>' + (arguments | tojson) + '<|call_end|>'"
    ),
    "Seed-OSS": template(
        "\n",
        "'<seed:tool_call>\\n<function=' + name + '>\\nPARAMETERS</function>\\n</seed:tool_call>'",
        "",
        "\n",
        parameter=f"'<parameter=' + key + '>' + {TEXT_OR_JSON} + '</parameter>\\n'",
    ),
    "MiniMax M2": template(
        "<minimax:tool_call>\n",
        """'<invoke name="' + name + '">\\nPARAMETERS</invoke>\\n'""",
        "</minimax:tool_call>",
        parameter=f"""'<parameter name="' + key + '">' + {TEXT_OR_JSON} + '</parameter>\\n'""",
    ),
    "Hunyuan": template(
        "<calls>\n",
        "'<call>' + name + '<sep>\\nPARAMETERS</call>'",
        "\n</calls>",
        "\n",
        parameter=f"'<key>' + key + '</key>\\n<value>' + {TEXT_OR_JSON} + '</value>\\n'",
    ),
    "Kimi K3": template(
        "<|open|>tools<|sep|>",
        """'<|open|>call tool="' + name + '" index="' + number + '"<|sep|>PARAMETERS<|close|>call<|sep|>'""",
        "<|close|>tools<|sep|>",
        parameter=(
            """'<|open|>arg key="' + key + '" type="' + ('string' if value is string else 'json') + '"<|sep|>' + """
            f"{TEXT_OR_JSON} + '<|close|>arg<|sep|>'"
        ),
    ),
    "LFM2": template(
        "<|tool_call_start|>[",
        "name + '(PARAMETERS)'",
        "]<|tool_call_end|>",
        ", ",
        parameter="(', ' if not loop.first else '') + key + '=' + (value | tojson)",
    ),
    "OLMo 3": template(
        "<function_calls>\n",
        "name + '(PARAMETERS)'",
        "\n</function_calls>",
        "\n",
        parameter="(', ' if not loop.first else '') + key + '=' + (value | tojson)",
    ),
}
CALLS = [("f", '{"text": "a b", "number": 5}'), ("g", '{"x": "y"}')]


def syntax_of(source: str) -> ModelSyntax:
    return choose_model_syntax(ChatTemplate(source, {}), {})


@pytest.mark.parametrize("kind", KINDS)
def test_calls_of_any_marks_are_written_and_read(kind: str) -> None:
    form = syntax_of(KINDS[kind]).tools
    assert form is not None
    text = "" if form.trigger is None else "Well: "
    shape = AnswerShape(tools=form, functions=FUNCTIONS)
    _, content, calls = read_all_ways(text + written(form, CALLS), shape)
    assert content == text.strip()
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [(n, json.loads(a)) for n, a in CALLS]


@pytest.mark.parametrize(
    ("thought", "opening", "closing"),
    [
        ("'<seed:think>' + message.reasoning_content + '</seed:think>'", "<seed:think>", "</seed:think>"),
        ("'<|START|>' + message.reasoning_content + '<|STOP|>'", "<|START|>", "<|STOP|>"),
        ("'<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n'", "<think>", "</think>"),
        ("'[THINK]' + message.reasoning_content + '[/THINK]'", "[THINK]", "[/THINK]"),
        ("'<|a|>think<|b|>' + message.reasoning_content + '<|c|>think<|b|>'", "<|a|>think<|b|>", "<|c|>think<|b|>"),
    ],
)
def test_reasoning_of_any_marks_is_found(thought: str, opening: str, closing: str) -> None:
    syntax = syntax_of(template("<call>", OBJECT, "</call>", thought=thought))
    assert syntax.reasoning is not None
    assert (syntax.reasoning.opening, syntax.reasoning.closing) == (opening, closing)
    assert all(mark in opening + closing for mark in syntax.reasoning.markers)
    shape = AnswerShape(syntax.reasoning, tools=syntax.tools, functions=FUNCTIONS)
    assert read(shape, [f"{opening}Hm.{closing}Yes."]) == ("Hm.", "Yes.", [])


def test_format_that_does_not_read_back_is_unknown() -> None:
    source = template("<tool_call>", "name + ' with ' + (arguments | length | string)", "</tool_call>")
    values = template("<tool_call>", "name + ' with ' + (arguments.values() | join(' '))", "</tool_call>")
    assert syntax_of(values).tools_name == "generic"
    # Where no call is shown, the marks in the source are all there is.
    form = syntax_of(source).tools
    assert form is not None
    assert form.name == "hermes"
