"""Tools of POST /v1/responses: functions, custom tools, namespaces of both, and hosted ones, which are left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from penstock.frontend.schemas.chat import FunctionName
from penstock.frontend.schemas.generation import TypeName
from penstock.frontend.transport.errors import ApiError, ErrorKind, invalid, shorten

MAX_TOOLS = 128
CALLABLE = ("function", "custom")
_HOSTED = (
    "apply_patch", "code_interpreter", "computer", "computer_use_preview", "file_search", "image_generation",
    "local_shell", "shell", "tool_search", "web_search", "web_search_preview",
)  # fmt: skip


class CustomFormat(Struct, frozen=True):
    """The input that a custom tool takes."""

    type: Literal["text", "grammar"] = "text"
    syntax: Literal["lark", "regex"] | None = None
    definition: Annotated[str, Meta(max_length=32_768)] | None = None


class CallableTool(Struct, frozen=True):
    """A function or a custom tool. A custom tool's input is a text instead of a JSON object."""

    type: TypeName
    name: FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: CustomFormat | None = None


class ResponseTool(CallableTool, frozen=True):
    """A tool; one of type namespace contains several under its name."""

    tools: Annotated[list[CallableTool], Meta(max_length=MAX_TOOLS)] | None = None

    @property
    def is_hosted(self) -> bool:
        """Whether OpenAI's servers or its client's built-in tools would carry out the call."""
        return self.type in _HOSTED or self.type.startswith(("web_search_", "computer_"))


class ChosenTool(Struct, frozen=True):
    """A tool that tool_choice names."""

    type: TypeName
    name: FunctionName | None = None
    namespace: FunctionName | None = None


class NamedToolChoice(ChosenTool, frozen=True):
    """{"type": "function" or "custom", "name": …} or {"type": "allowed_tools", "mode": …, "tools": […]}."""

    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[ChosenTool], Meta(max_length=MAX_TOOLS)] | None = None


def qualified(name: str, namespace: str | None) -> str:
    """Return the name by which the model knows a tool."""
    return name if namespace is None else f"{namespace.rstrip('_')}__{name}"


def callable_tools(tools: Sequence[ResponseTool] | None) -> Iterator[tuple[str, str | None, CallableTool]]:
    """Yield each tool that the model may call: its path in the body, and its namespace."""
    for position, tool in enumerate(tools or ()):
        path = f"tools[{position}]"
        if tool.type == "namespace":
            for index, inner in enumerate(tool.tools or ()):
                yield f"{path}.tools[{index}]", tool.name, inner
        elif not tool.is_hosted:
            yield path, None, tool


def left_out_tools(tools: Sequence[ResponseTool] | None) -> list[tuple[str, str]]:
    """Return the path and type of each hosted tool."""
    return [(f"tools[{place}]", tool.type) for place, tool in enumerate(tools or ()) if tool.is_hosted]


def check_tools(tools: Sequence[ResponseTool] | None, choice: str | NamedToolChoice | None) -> None:
    """Check the tools and the choice among them. Raises ApiError."""
    for position, tool in enumerate(tools or ()):
        if tool.type == "namespace":
            required(f"tools[{position}].name", tool.name)
            required(f"tools[{position}].tools", tool.tools)
    names: dict[str, str] = {}
    for path, namespace, offered in callable_tools(tools):
        _check_callable(path, offered)
        name = qualified(offered.name or "", namespace)
        if name in names:
            invalid(f"{path}.name", f"{shorten(name)} is the name of {names[name]} too")
        names[name] = path
    if len(names) > MAX_TOOLS:
        invalid("tools", f"{len(names)} with those in namespaces; the limit is {MAX_TOOLS}")
    if isinstance(choice, NamedToolChoice):
        _check_choice(choice, names)


def _check_callable(path: str, tool: CallableTool) -> None:
    if tool.type not in CALLABLE:
        message = f"{path}.type: only {' and '.join(CALLABLE)} tools are supported, got {shorten(tool.type)}"
        raise ApiError(ErrorKind.UNSUPPORTED_FIELD, message, param=f"{path}.type")
    required(f"{path}.name", tool.name)
    if tool.format is not None and tool.format.type == "grammar":
        required(f"{path}.format.syntax", tool.format.syntax)
        required(f"{path}.format.definition", tool.format.definition)


def _check_choice(choice: NamedToolChoice, names: dict[str, str]) -> None:
    if choice.type in CALLABLE:
        required("tool_choice.name", choice.name)
        return
    if choice.type != "allowed_tools":
        message = f'must be "function", "custom" or "allowed_tools", got {shorten(choice.type)}'
        invalid("tool_choice.type", message)
    required("tool_choice.mode", choice.mode)
    required("tool_choice.tools", choice.tools)
    for position, tool in enumerate(choice.tools or ()):
        path = f"tool_choice.tools[{position}]"
        if tool.type not in CALLABLE:
            continue
        required(f"{path}.name", tool.name)
        if qualified(tool.name or "", tool.namespace) not in names:
            invalid(f"{path}.name", f"{shorten(tool.name)} is not among tools")


def required(path: str, value: object) -> None:
    """Raises ApiError if the value is None."""
    if value is None:
        raise ApiError(ErrorKind.MISSING_FIELD, f"{path}: required", param=path)
