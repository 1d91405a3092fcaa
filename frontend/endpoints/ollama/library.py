"""POST /api/pull and DELETE /api/delete: what clients ask of a server that downloads models.

This server's models are those of its command line, so a model that is served has been pulled, and no other can be.
"""

from __future__ import annotations

from penstock.frontend.endpoints.context import EndpointContext
from penstock.frontend.endpoints.ollama.requests import known_name
from penstock.frontend.generation.models.model_table import names_of
from penstock.frontend.schemas.ollama import decode_ollama_model
from penstock.frontend.transport.errors import ApiError, ErrorKind, shorten
from penstock.frontend.transport.exchange import Exchange


async def pull(exchange: Exchange, context: EndpointContext) -> None:
    """POST /api/pull: succeeds for a served model. Raises ApiError, ClientGoneError."""
    body = await context.receive_command(exchange, decode_ollama_model)
    name = known_name(context.models, body.model)
    if not _is_served(context, name):
        message = f"model: {shorten(name)} is not served; penstock pull and penstock serve bring models, on the server"
        raise ApiError(ErrorKind.UNKNOWN_MODEL, message, param="model")
    form, answer = exchange.error_format.stream, b'{"status":"success"}'
    if body.stream is False:
        await exchange.respond(200, answer)
    else:
        lines = b'{"status":"pulling manifest"}\n' + answer + b"\n"
        await exchange.respond(200, lines, content_type=form.content_type)


async def delete(exchange: Exchange, context: EndpointContext) -> None:
    """DELETE /api/delete: refused. Raises ApiError, ClientGoneError."""
    body = await context.receive_command(exchange, decode_ollama_model)
    name = known_name(context.models, body.model)
    if _is_served(context, name):
        message = f"model: {shorten(name)} is served; files are deleted by the operator, not over HTTP"
        raise ApiError(ErrorKind.MODEL_IN_USE, message, param="model")
    raise ApiError(ErrorKind.UNKNOWN_MODEL, f"model: {shorten(name)} does not exist", param="model")


def _is_served(context: EndpointContext, name: str) -> bool:
    return any(name in names_of(keeper) for keeper in context.models.keepers)
