"""GET /props: the server's settings, as llama.cpp's clients read them."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs

import msgspec

from penstock.frontend.endpoints.context import EndpointContext
from penstock.frontend.endpoints.llama_cpp.slots import num_slots
from penstock.frontend.endpoints.server.health import VERSION
from penstock.frontend.generation.models.served_model import shown_sampling
from penstock.frontend.schemas.completion import CompletionBody
from penstock.frontend.text.chat_template import special_tokens_of
from penstock.frontend.transport.exchange import Exchange
from penstock.shm.memory.model_table import ModelState
from penstock.shm.messages import ModelCard


async def props(exchange: Exchange, context: EndpointContext) -> None:
    """GET /props; ?model=ID names the model. Raises ApiError, ClientGoneError."""
    requested = parse_qs(exchange.query.decode("latin-1")).get("model", [None])[0]
    served = await context.model_soon(exchange, "any", requested)
    waking = context.models.find("any", requested).waking
    card, tokenizer = served.card, served.tokenizer
    special = special_tokens_of(tokenizer.config)
    settings = {"id": 0, "id_task": -1, "n_ctx": card.max_context_tokens, "speculative": False, "is_processing": False}
    answer = {
        "default_generation_settings": {**settings, "params": generation_settings(card), "prompt": ""},
        "total_slots": num_slots(served),
        "model_alias": card.model_id,
        "model_path": card.model_id,  # the directory is the operator's affair
        "chat_template": "" if tokenizer.chat_template is None else tokenizer.chat_template.source,
        "chat_template_caps": {"supports_tools": served.syntax.tools is not None and served.syntax.writer is None},
        "modalities": {"vision": served.takes_pictures, "audio": False},
        "bos_token": special.get("bos_token", ""),
        "eos_token": special.get("eos_token", ""),
        "build_info": f"penstock-{VERSION}",
        "is_sleeping": waking is not None and waking.state is ModelState.ASLEEP,
    }
    await exchange.respond(200, msgspec.json.encode(answer))


def generation_settings(card: ModelCard, body: CompletionBody | None = None) -> dict[str, Any]:
    """Return the settings of a completion, or those of one that says nothing."""
    sampling = msgspec.structs.asdict(shown_sampling(card.default_sampling))
    if body is not None:
        sampling = {
            name: default if (own := getattr(body, name)) is None else own for name, default in sampling.items()
        }
    limit = None if body is None else body.max_tokens
    return {
        "repeat_penalty": sampling.pop("repetition_penalty"),
        **sampling,
        "n_predict": -1 if limit is None else limit,
        "max_tokens": -1 if limit is None else limit,
        "seed": -1 if body is None or body.seed is None else body.seed,
        "stop": [] if body is None else list(body.stop_strings()),
        "ignore_eos": body is not None and body.ignore_eos is True,
        "stream": body is not None and body.stream is True,
        "n_probs": max(0, -1 if body is None else body.num_logprobs),
        "grammar": "" if body is None else body.grammar or "",
        "n_ctx": card.max_context_tokens,
        "model": card.model_id,
    }
