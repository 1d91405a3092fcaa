"""Raw outputs of models, and the calls in them, taken from the source of vLLM's tests of tool parsers.

The source is not run: literals are read, constants made of them, and the few calls that write expected tool calls.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Call = tuple[str | None, Any]
"""Name and arguments; None for what the test does not say."""
_DROPPED = r"</s>|<\|python_(start|end)\|>"
"""Special tokens, which a parser does not see."""
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


@dataclass(frozen=True)
class VllmOutput:
    parser: str
    text: str
    calls: list[Call]
    content: str | None = None

    @property
    def functions(self) -> dict[str, dict[str, Any]]:
        """The functions that are called, with parameters of the types of the arguments."""
        names = ("get_weather", "get_time", "refresh", "test_function")
        schemas: dict[str, dict[str, Any]] = {name: {} for name in names}
        for name, arguments in self.calls:
            if name is not None and isinstance(arguments, dict):
                types = {key: {"type": _TYPES[type(value)]} for key, value in arguments.items() if value is not None}
                schemas[name] = {"type": "object", "properties": types}
        return schemas


def read_outputs(path: Path) -> list[VllmOutput]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    parser = path.stem.removeprefix("test_").removesuffix("_tool_parser")
    outputs: dict[str, VllmOutput] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            match ast.unparse(node.func):
                case "ToolParserTestConfig":
                    found = _of_config(_keywords(node, names))
                case "pytest.mark.parametrize":
                    found = _of_table(node, names)
                case _:
                    continue
            for written, calls, content in found:
                text = re.sub(_DROPPED, "", written)
                outputs[text] = VllmOutput(parser, text, calls, content)
    return [output for text, output in outputs.items() if text]


def _keywords(node: ast.Call, names: dict[str, ast.expr]) -> dict[str, Any]:
    return {keyword.arg: _value(keyword.value, names) for keyword in node.keywords if keyword.arg is not None}


def _of_config(config: dict[str, Any]) -> Iterator[tuple[str, list[Call], str | None]]:
    plain = config["no_tool_calls_output"]
    yield plain, [], plain
    name = config.get("single_tool_call_expected_name", "get_weather")
    yield config["single_tool_call_output"], [(name, config.get("single_tool_call_expected_args"))], None
    several = config.get("parallel_tool_calls_names", ["get_weather", "get_time"])
    yield config["parallel_tool_calls_output"], [(name, None) for name in several], None
    yield config["empty_arguments_output"], [(None, {})], None
    for kind in ("various_data_types", "surrounding_text", "escaped_strings"):
        yield config[f"{kind}_output"], [(None, None)], None


def _of_table(node: ast.Call, names: dict[str, ast.expr]) -> Iterator[tuple[str, list[Call], str | None]]:
    given = dict(zip(("argnames", "argvalues"), node.args, strict=False))
    given |= {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg is not None}
    columns = _value(given["argnames"], names)
    if isinstance(columns, str):
        columns = [column.strip() for column in columns.split(",")]
    if not {"model_output", "expected_tool_calls"} <= set(columns):
        return
    rows = given["argvalues"]
    rows = names[rows.id] if isinstance(rows, ast.Name) else rows
    assert isinstance(rows, ast.List)
    for row in rows.elts:
        cells = dict(zip(columns, _value(row, names), strict=True))
        yield cells["model_output"], cells["expected_tool_calls"], cells.get("expected_content")


def _value(node: ast.expr, names: dict[str, ast.expr]) -> Any:
    match node:
        case ast.Name(id=name) if name in names:
            return _value(names[name], names)
        case ast.JoinedStr(values=parts):
            return "".join(str(_value(part, names)) for part in parts)
        case ast.FormattedValue(value=value):
            return _value(value, names)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left, names) + _value(right, names)
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_value(element, names) for element in elements]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {_value(key, names): _value(value, names) for key, value in zip(keys, values, strict=True) if key}
        case ast.Call():
            return _called(ast.unparse(node.func), [_value(arg, names) for arg in node.args], _keywords(node, names))
    return ast.literal_eval(node)


def _called(function: str, values: list[Any], named: dict[str, Any]) -> Any:
    match function:
        case "json.dumps":
            return json.dumps(values[0])
        case "pytest.param":
            return values
        case "ToolCall":
            return named["function"]
        case "FunctionCall":
            return named["name"], json.loads(named["arguments"])
        case "make_tool_call":
            return tuple(values)
        case "_wrap":  # LFM2's
            return "\n".join([f"<|tool_call_start|>[{values[0]}]<|tool_call_end|>", *named.values()])
    raise ValueError(f"vLLM's tests call {function}")
