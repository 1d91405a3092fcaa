"""Raw outputs of models, and how they should be read, taken from the C++ source of llama.cpp's tests.

Only what these tests use of C++ is understood: literals, braces, calls, and constants made of them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

_TOKEN = re.compile(
    r"""\s+|//[^\n]*|/\*.*?\*/
    |(?P<raw>R"(?P<mark>[^(\s]*)\((?P<text>.*?)\)(?P=mark)")
    |(?P<string>"(?:[^"\\]|\\.)*")
    |(?P<word>[A-Za-z_][\w:]*|-?\d[\d.]*)
    |(?P<sign>.)""",
    re.DOTALL | re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]+|[0-7]{1,3}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0"}

Call = tuple[str, Any]


@dataclass
class Recorded:
    """One output of a model."""

    template: str
    text: str
    options: dict[str, Any] = field(default_factory=dict)
    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    @property
    def functions(self) -> dict[str, dict[str, Any]]:
        return {tool[0]: json.loads(tool[2] or "{}") for tool in self.options.get("tools", [])}


class _Source:
    def __init__(self, text: str) -> None:
        self.tokens = [match for match in _TOKEN.finditer(text) if match.lastgroup is not None]
        self.place = 0

    def sign(self) -> str:
        return self.tokens[self.place][0] if self.place < len(self.tokens) else ""

    def take(self) -> re.Match[str]:
        self.place += 1
        return self.tokens[self.place - 1]

    def value(self, names: dict[str, Any]) -> Any:
        """Read a literal, a list in braces, a call as (name, arguments), or a constant."""
        first = self.take()
        if first["string"] is not None or first["raw"] is not None:
            parts = [_text(first)]
            while self.place < len(self.tokens) and (
                self.tokens[self.place]["string"] is not None or self.tokens[self.place]["raw"] is not None
            ):
                parts.append(_text(self.take()))
            return "".join(parts)
        if first[0] == "{":
            return self._list("}", names)
        name = first[0]
        if self.sign() in ("(", "{") and first["word"] is not None:
            closer = ")" if self.take()[0] == "(" else "}"
            return _called(name, self._list(closer, names))
        return names.get(name, name)

    def _list(self, closer: str, names: dict[str, Any]) -> list[Any]:
        values = []
        while self.sign() != closer:
            values.append(self.value(names))
            while self.sign() not in (",", closer):  # what is not understood
                values[-1] = (values[-1], self.take()[0])
            if self.sign() == ",":
                self.take()
        self.take()
        return values


def _text(token: re.Match[str]) -> str:
    if token["raw"] is not None:
        return token["text"]
    return _ESCAPE.sub(_escape, token["string"][1:-1].encode().decode("utf-8"))


def _escape(match: re.Match[str]) -> str:
    escape = match[1]
    if escape[0] == "x":
        return chr(int(escape[1:], 16))
    return _ESCAPES.get(escape, escape)


def _called(name: str, values: list[Any]) -> Any:
    match name:
        case "simple_assist_msg":
            content, reasoning, function, arguments, *_ = [*values, "", "", "", ""][:5]
            return (content, reasoning, [(function, arguments)] if function else [])
        case "message_with_tool_calls":
            return ("", "", [(values[0], values[1])])
        case "message_with_tool_calls_and_reasoning":
            return ("", values[2], [(values[0], values[1])])
        case "message_with_reasoning_content_and_multiple_tool_calls":
            return (values[1], values[0], [tuple(call) for call in values[2]])
        case "message_with_content_and_tool_call":
            return (values[0], "", [(values[1], values[2])])
        case "message_with_reasoning_and_tool_call":
            return ("", values[0], [(values[1], values[2])])
        case "std::string":
            return values[0]
    return (name, values)


def read_recorded(source: str) -> list[Recorded]:
    names: dict[str, Any] = {"true": True, "false": False}
    for match in re.finditer(r"common_chat_msg +(message_\w+)\s*=\s*", source):
        names[match[1]] = _Source(source[match.end() : match.end() + 2000]).value(names)
    for match in re.finditer(r"common_chat_tool +(\w+)\s*(?=\{)", source):
        names[match[1]] = _Source(source[match.end() : match.end() + 4000]).value(names)
    names["tools"] = _Source(source[re.search(r"> tools(?=\{)", source).end() :][:300]).value(names)  # type: ignore[union-attr]
    paths = {match[1]: match[2] for match in re.finditer(r'(\w+) *= *"models/templates/([^"]+)\.jinja"', source)}
    found = []
    template = ""
    for match in re.finditer(r"peg_tester\(\s*(?:\"models/templates/([^\"]+)\.jinja\"|(\w+))|tst\.\s*test\(", source):
        if match[0].startswith("peg_tester"):
            template = match[1] or paths.get(match[2] or "", "")
        elif template and (one := _recorded(template, _Source(source[match.end() - 1 : match.end() + 9000]), names)):
            found.append(one)
    return found


def _recorded(template: str, chain: _Source, names: dict[str, Any]) -> Recorded | None:
    chain.take()
    text = chain._list(")", names)[0]
    if not isinstance(text, str):
        return None
    one = Recorded(template, text)
    while chain.sign() == ".":
        chain.take()
        method = chain.take()[0]
        chain.take()
        values = chain._list(")", names)
        if method == "run":
            return one
        value = values[0] if values else True
        match method:
            case "expect" if isinstance(value, tuple) and len(value) == 3:
                one.content, one.reasoning, one.calls = value
            case "expect_content":
                one.content = value
            case "expect_reasoning":
                one.reasoning = value
            case "expect_tool_calls":
                one.calls = [tuple(call[:2]) for call in value]
            case _:
                one.options[method] = value
    return None
