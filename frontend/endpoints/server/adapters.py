"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter (vLLM's): the adapters of a running model."""

from __future__ import annotations

import contextlib
import logging

import msgspec

from penstock.frontend.endpoints.context import EndpointContext
from penstock.frontend.generation.failures import backend_unavailable
from penstock.frontend.generation.models.model_table import unknown_model
from penstock.frontend.generation.models.served_model import ServedModel
from penstock.frontend.generation.questions import ask
from penstock.frontend.schemas.answers import AdapterAnswer
from penstock.frontend.schemas.utilities import decode_load_adapter, decode_unload_adapter
from penstock.frontend.transport.errors import ApiError, ErrorKind
from penstock.frontend.transport.exchange import Exchange
from penstock.shm.client import AdapterChange, BackendClient, clients_of

logger = logging.getLogger("penstock.admin")

_LOAD_TIMEOUT_S = 300.0


async def load(exchange: Exchange, context: EndpointContext) -> None:
    """Answers when all replicas have the adapter; if one cannot load it, none keeps it. Raises ApiError,
    ClientGoneError."""
    context.admission.check_operator(exchange)
    body = await context.receive_command(exchange, decode_load_adapter)
    served = await context.model_soon(exchange, "generate", body.base_model_name)
    context.models.check_adapter_name(body.lora_name, served)
    done: list[BackendClient] = []
    try:
        for backend in _ready_backends(served):
            try:
                await ask(backend, AdapterChange(body.lora_name, body.lora_path), _LOAD_TIMEOUT_S)
            except ApiError as error:
                if error.kind is ErrorKind.EXPIRED:
                    done.append(backend)  # it may load the adapter yet
                raise
            done.append(backend)
        # Again: another model may have got the name meanwhile. Of two such loads, one or both fail.
        context.models.check_adapter_name(body.lora_name, served)
    except ApiError:
        for backend in done:
            with contextlib.suppress(ApiError):  # the first error says what is wrong
                await ask(backend, AdapterChange(body.lora_name))
        raise
    logger.warning("the operator loaded the adapter %s", body.lora_name)
    await _respond(exchange, body.lora_name, is_loaded=True)


async def unload(exchange: Exchange, context: EndpointContext) -> None:
    """Open requests that have the adapter go on. Raises ApiError, ClientGoneError."""
    context.admission.check_operator(exchange)
    body = await context.receive_command(exchange, decode_unload_adapter)
    name = body.lora_name
    for keeper in context.models.keepers:
        keeper.take_adapters()
    loaded = context.models.loaded()
    served = next((model for model in loaded if model.card.adapter_named(name) is not None), None)
    if served is None:
        raise unknown_model(name, [adapter.name for model in loaded for adapter in model.card.adapters], "lora_name")
    for backend in _ready_backends(served):
        try:
            await ask(backend, AdapterChange(name))
        except ApiError as error:
            if error.kind is not ErrorKind.UNKNOWN_MODEL:  # another replica may have it alone
                raise
    logger.warning("the operator unloaded the adapter %s", name)
    await _respond(exchange, name, is_loaded=False)


def _ready_backends(served: ServedModel) -> list[BackendClient]:
    """All backends of the model. Raises ApiError unless all are ready: one that starts would have other adapters."""
    backends = clients_of(served.backend)
    for backend in backends:
        if not backend.ready:
            raise backend_unavailable(backend.retry_after_s)
    return backends


async def _respond(exchange: Exchange, name: str, *, is_loaded: bool) -> None:
    await exchange.respond(200, msgspec.json.encode(AdapterAnswer(name, "lora_adapter", is_loaded)))
