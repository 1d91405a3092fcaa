"""Translates the Responses API's tools to functions of a chat, and calls of them back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.frontend.formats.responses import CalledTool
from penstock.frontend.schemas.chat import ChatTool, FunctionDefinition, NamedFunction, NamedTool
from penstock.frontend.schemas.response_tools import NamedToolChoice, callable_tools, qualified
from penstock.frontend.transport.errors import ApiError, ErrorKind

if TYPE_CHECKING:
    from penstock.frontend.schemas.response_tools import CallableTool
    from penstock.frontend.schemas.responses import ResponsesBody


def chat_tools(body: ResponsesBody) -> tuple[list[ChatTool] | None, Any]:
    """Return the tools that may be called, and the choice among them. Raises ApiError."""
    tools = [_as_function(tool, namespace) for _, namespace, tool in callable_tools(body.tools)]
    choice = body.tool_choice
    if not isinstance(choice, NamedToolChoice):
        if choice == "required" and body.tools and not tools:
            message = "tool_choice: requires a call, but this server carries out none of these tools"
            raise ApiError(ErrorKind.UNSUPPORTED_FIELD, message, param="tool_choice")
        return tools or None, choice
    if choice.tools is None:
        return tools or None, NamedTool(NamedFunction(qualified(choice.name or "", choice.namespace)))
    allowed = {qualified(tool.name or "", tool.namespace) for tool in choice.tools}
    return [tool for tool in tools if tool.function.name in allowed] or None, choice.mode


def forces_call(body: ResponsesBody) -> bool:
    choice = body.tool_choice
    if isinstance(choice, NamedToolChoice):
        return choice.tools is None or choice.mode == "required"
    return choice == "required"


def called_tools(body: ResponsesBody) -> dict[str, CalledTool]:
    """Return this API's description of each tool's call, by the name that the model knows. Plain functions are left
    out."""
    return {
        qualified(tool.name or "", namespace): CalledTool(tool.name or "", namespace, is_custom=tool.type == "custom")
        for _, namespace, tool in callable_tools(body.tools)
        if namespace is not None or tool.type == "custom"
    }


def _as_function(tool: CallableTool, namespace: str | None) -> ChatTool:
    name = qualified(tool.name or "", namespace)
    if tool.type == "function":
        return ChatTool(FunctionDefinition(name, tool.description, tool.parameters, tool.strict))
    text: dict[str, Any] = {"type": "string"}
    description, strict = tool.description or "", None
    form = tool.format
    if form is not None and form.type == "grammar":
        if form.syntax == "regex":
            text["pattern"], strict = f"^(?:{form.definition})$", True
        # A grammar's rules cannot be enforced within a JSON string; the model reads them.
        description = f"{description}\n\nThe input must match this {form.syntax} grammar:\n{form.definition}".lstrip()
    parameters = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
    return ChatTool(FunctionDefinition(name, description, parameters, strict))
