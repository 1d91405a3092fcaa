"""What all of Ollama's requests have in common: names of models, options, and how long a model stays loaded."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from penstock.frontend.endpoints.answering import AnswerStyle
from penstock.frontend.endpoints.chat_translation import renamed
from penstock.frontend.endpoints.context import EndpointContext
from penstock.frontend.formats.base import Identity, StreamUsageOptions, Usage
from penstock.frontend.formats.ollama import OllamaFormat, without_answer
from penstock.frontend.generation.models.model_table import ServedModels, Task, names_of
from penstock.frontend.generation.models.served_model import ServedModel
from penstock.frontend.schemas.chat import ContentPart, picture_part
from penstock.frontend.schemas.generation import JsonSchemaFormat, ResponseFormat
from penstock.frontend.schemas.ollama import GenerativeBody, OllamaBody, OllamaOptions
from penstock.frontend.transport.errors import ApiError, ErrorKind, shorten
from penstock.frontend.transport.exchange import Exchange
from penstock.shm.memory.model_table import ModelState

Body = TypeVar("Body", bound=OllamaBody)
_LATEST = ":latest"
_RENAMED = (
    (re.compile(r"^max_(completion_)?tokens$"), "options.num_predict"),
    (re.compile(r"^stop$"), "options.stop"),
    (re.compile(r"^response_format\b(\.json_schema\.schema)?"), "format"),
    (re.compile(r"^(reasoning_effort|enable_thinking)$"), "think"),
)
"""This API's names for a chat request's fields."""


@dataclass(frozen=True, slots=True)
class Received(Generic[Body]):
    body: Body
    served: ServedModel
    num_bytes: int
    load_s: float
    """Time until the model was there."""


async def receive(
    exchange: Exchange,
    context: EndpointContext,
    decode: Callable[[bytes], Body],
    task: Task,
    is_empty: Callable[[Body], bool],
    answer_empty: Callable[[Body, float], Awaitable[None]],
) -> Received[Body] | None:
    """Receive a body. is_empty: it only loads its model, or with keep_alive 0 unloads it; then answer_empty answers it
    with the seconds that loading took, and this returns None. Raises ApiError, ClientGoneError."""

    def decode_named(data: bytes) -> Body:
        body = decode(data)
        body.model = known_name(context.models, body.model)
        _ = body.keep_alive_s  # raises
        return body

    body, num_bytes = await context.receive_alone(exchange, decode_named)
    unloads = is_empty(body) and body.keep_alive_s == 0
    keeper = context.models.find("any", body.model)
    if unloads and keeper.waking is not None and keeper.waking.state is ModelState.ASLEEP:
        await answer_empty(body, 0.0)
        return None
    served = await context.model_soon(
        exchange, "any" if unloads else task, body.model, is_streaming=getattr(body, "stream", False), body=body
    )
    waking = context.models.find("any", body.model).waking
    # With keys, one client cannot decide for the others.
    if waking is not None and (exchange.key_name is None or exchange.is_admin):
        exchange.at_end.append(partial(waking.keep, body.keep_alive_s))
    load_s = time.monotonic() - exchange.received_s
    if is_empty(body):
        await answer_empty(body, load_s)
        return None
    return Received(body, served, num_bytes, load_s)


def known_name(models: ServedModels, requested: str) -> str:
    """Return the name without the tag that clients add to a name without one, if only that is known."""
    if requested.endswith(_LATEST) and all(requested not in names_of(keeper) for keeper in models.keepers):
        return requested.removesuffix(_LATEST)
    return requested


def answers_empty(exchange: Exchange, *, is_chat: bool) -> Callable[[GenerativeBody, float], Awaitable[None]]:
    """Return a function that answers a request that only loads or unloads its model."""

    def answer(body: GenerativeBody, _load_s: float) -> Awaitable[None]:
        reason = "unload" if body.keep_alive_s == 0 else "load"
        return exchange.respond(200, without_answer(body.model, reason, is_chat=is_chat))

    return answer


def style_of(received: Received[Any], *, is_chat: bool, returns_context: bool = False) -> AnswerStyle:
    def make_format(identity: Identity, usage: Usage, _: StreamUsageOptions) -> OllamaFormat:
        return OllamaFormat(identity.model, usage, received.load_s, is_chat=is_chat, returns_context=returns_context)

    return AnswerStyle("ollama-", make_format, stops_at_context=True)


def with_own_names() -> AbstractContextManager[None]:
    """Errors inside name this API's fields."""
    return renamed(_RENAMED)


def shared_fields(body: GenerativeBody) -> dict[str, Any]:
    """Return the fields of a chat or completion that Ollama's body decides, apart from the prompt."""
    return {
        "model": body.model,
        "stream": body.stream,
        "priority": body.priority,
        "timeout_ms": body.timeout_ms,
        "cache_salt": body.cache_salt,
        "return_timings": True,
        "response_format": _response_format(body.format),
        **_sampling(body.options or OllamaOptions()),
    }


def think_fields(body: GenerativeBody, served: ServedModel) -> dict[str, Any]:
    """Return a chat's fields. Raises ApiError for thinking that the model cannot do."""
    if body.think and served.syntax.reasoning is None:
        message = f"think: {shorten(served.card.model_id)} does not support thinking"
        raise ApiError(ErrorKind.WRONG_MODEL, message, param="think")
    if isinstance(body.think, str):
        return {"reasoning_effort": body.think}
    return {"enable_thinking": body.think}


def picture_parts(images: Sequence[str] | None, path: str) -> list[ContentPart]:
    """Return parts of files in base64. path is the body's name of the list."""
    return [picture_part(f"data:;base64,{data}", f"{path}[{index}]") for index, data in enumerate(images or ())]


def _sampling(options: OllamaOptions) -> dict[str, Any]:
    limit, seed, top_k = options.num_predict, options.seed, options.top_k
    return {
        "max_tokens": int(limit) if limit is not None and limit >= 1 else None,
        "seed": int(seed) if seed is not None and seed >= 0 else None,
        "stop": options.stop,
        "temperature": options.temperature,
        "top_k": None if top_k is None else int(top_k),
        "top_p": options.top_p,
        "min_p": options.min_p,
        "typical_p": options.typical_p,
        "repetition_penalty": 1.0 if options.repeat_last_n == 0 else options.repeat_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
    }


def _response_format(form: dict[str, Any] | str | None) -> ResponseFormat | None:
    if isinstance(form, dict):
        return ResponseFormat("json_schema", JsonSchemaFormat(schema=form, strict=True))
    return ResponseFormat("json_object") if form else None
