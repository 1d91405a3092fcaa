"""Real outputs of models, read as the projects read them that recorded them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from penstock.frontend.parsing.answer_parser import AnswerShape
from penstock.frontend.schemas.chat import ChatBody, ChatMessage, ChatTool, FunctionDefinition
from penstock.frontend.text.chat_template import TemplateRefusedError
from tests.frontend.parsing.tool_texts import read
from tests.peers.llama_cpp_outputs import Call, Recorded, read_recorded
from tests.peers.templates import peers_templates, syntax_of, template_of
from tests.peers.vllm_outputs import VllmOutput, read_outputs
from tests.real_models import LLAMA_CPP, VLLM, download_timeout, fixture_file

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = download_timeout

NUM_LLAMA_CPP, NUM_VLLM = (291, 306), (95, 102)
"""Outputs that are read as expected, and all. The others follow other conventions, or come from formats that are not
known (docs/models.md)."""
VLLM_TEMPLATES = {
    "deepseekv3": ("deepseekv3",),
    "gigachat3": ("GigaChat3-10B-A1.8B", "GigaChat3.1-10B-A1.8B"),
    "granite": ("granite", "ibm-granite-granite-3.3-2B-Instruct"),
    "granite_20b_fc": ("granite_20b_fc",),
    "hunyuan_a13b": ("hunyuan_a13b",),
    "internlm2": ("internlm2_tool",),
    "lfm2": ("LFM2-8B-A1B",),
    "llama4_pythonic": ("llama4_pythonic",),
    "phi4mini": ("phi4_mini",),
    "pythonic": ("llama3.2_pythonic",),
    "qwen3coder": ("qwen3coder",),
    "step3p5": ("StepFun3.5-Flash",),
    "xlam": ("xlam_llama", "xlam_qwen"),
}
"""The templates of the models that vLLM's parsers are for, where the sources have one."""


def is_comparable(recorded: Recorded) -> bool:
    others = {"is_partial", "continue_final_message", "json_schema"}
    return not (others & recorded.options.keys()) and not str(recorded.options.get("reasoning_format")).endswith(
        "_NONE"
    )


def answer_of(recorded: Recorded, path: Path, *, reasons: bool) -> tuple[str, str, list[Call]]:
    syntax, template = syntax_of(path), template_of(path)
    tools = [
        ChatTool(FunctionDefinition(name, description, json.loads(parameters or "{}")))
        for name, description, parameters in recorded.options.get("tools", [])
    ]
    thinks = recorded.options.get("enable_thinking", True)
    try:
        body = ChatBody(messages=[ChatMessage("user", "Hey there!")], tools=tools or None, enable_thinking=thinks)
        prompt = template.render(body).rstrip()
    except TemplateRefusedError:
        prompt = ""
    form = syntax.reasoning if reasons else None
    is_open = form is not None and prompt.endswith(form.opening)
    if form is not None and prompt.endswith(form.answer_opening or form.closing) and not form.answer_tags:
        form = None
    shape = AnswerShape(
        form,
        is_reasoning_open=is_open,
        tools=syntax.tools if tools else None,
        functions=recorded.functions,
    )
    whole = read(shape, [recorded.text])
    assert read(shape, list(recorded.text)) == whole
    return whole[0].strip(), whole[1].strip(), [(name, as_value(arguments)) for name, arguments in whole[2]]


def as_value(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def test_recorded_outputs_are_read_as_llama_cpp_reads_them() -> None:
    paths = peers_templates()
    source = (fixture_file(LLAMA_CPP) / "test-chat.cpp").read_text(encoding="utf-8")
    recorded = [one for one in read_recorded(source) if is_comparable(one) and one.template in paths]
    num_right = 0
    for one in recorded:
        expected = (
            one.reasoning.strip(),
            one.content.strip(),
            [(name, as_value(arguments)) for name, arguments in one.calls],
        )
        # Where that test names no format of reasoning, its marks are text.
        ways = (True,) if "reasoning_format" in one.options else (True, False)
        num_right += any(answer_of(one, paths[one.template], reasons=reasons) == expected for reasons in ways)
    assert (num_right, len(recorded)) == NUM_LLAMA_CPP


def test_recorded_outputs_are_read_as_vllm_reads_them() -> None:
    outputs = [
        output
        for parser in VLLM_TEMPLATES
        for output in read_outputs(fixture_file(VLLM) / f"test_{parser}_tool_parser.py")
    ]
    num_right = sum(
        any(is_read(output, peers_templates()[name]) for name in VLLM_TEMPLATES[output.parser]) for output in outputs
    )
    assert (num_right, len(outputs)) == NUM_VLLM


def is_read(output: VllmOutput, path: Path) -> bool:
    shape = AnswerShape(tools=syntax_of(path).tools, functions=output.functions)
    whole = read(shape, [output.text])
    assert read(shape, list(output.text)) == whole
    _, content, calls = whole
    return (
        len(calls) == len(output.calls)
        and all(name in (None, called) for (name, _), (called, _) in zip(output.calls, calls, strict=True))
        and all(given in (None, json.loads(made)) for (_, given), (_, made) in zip(output.calls, calls, strict=True))
        and (output.content is None or content.strip() == output.content.strip())
    )
