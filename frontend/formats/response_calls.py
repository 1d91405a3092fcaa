"""Calls of tools as items of the Responses API: of functions, of functions in a namespace, and of custom tools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec


class _CustomInput(msgspec.Struct):
    input: str


_custom_input = msgspec.json.Decoder(_CustomInput)


@dataclass(frozen=True, slots=True)
class CalledTool:
    """The client's name for a tool. The model calls a custom tool as a function whose argument is the input."""

    name: str
    namespace: str | None = None
    is_custom: bool = False

    def fields(self, arguments: str) -> dict[str, Any]:
        """Return the fields of an item that name the tool and give its arguments."""
        where = {} if self.namespace is None else {"namespace": self.namespace}
        if self.is_custom:
            return {"type": "custom_tool_call", "name": self.name, **where, "input": custom_input(arguments)}
        return {"type": "function_call", "name": self.name, **where, "arguments": arguments}


def custom_input(arguments: str) -> str:
    """Return the text within a call's arguments.

    If the answer was cut off within them, return them unchanged.
    """
    try:
        return _custom_input.decode(arguments.encode()).input
    except (msgspec.DecodeError, msgspec.ValidationError):
        return arguments


def custom_arguments(text: str) -> str:
    """Return the arguments with which the model has called a custom tool."""
    return msgspec.json.encode(_CustomInput(text)).decode()
