"""GET /api/tags, /api/ps and /api/version, POST /api/show: the served models as Ollama describes them."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from penstock.frontend.endpoints.context import EndpointContext
from penstock.frontend.endpoints.ollama.requests import known_name
from penstock.frontend.formats.ollama import rfc3339
from penstock.frontend.generation.models.model_table import can_do, names_of
from penstock.frontend.generation.models.served_model import ModelKeeper, ServedModel, named_tokens, shown_sampling
from penstock.frontend.schemas.ollama import decode_ollama_model
from penstock.frontend.text.pooling_files import read_object
from penstock.frontend.transport.exchange import Exchange
from penstock.shm.memory.model_table import ModelState

API_VERSION = "0.18.0"
"""The version of Ollama whose API this is. Clients refuse versions that are too old for what they need."""
_NEVER = rfc3339(datetime(9999, 12, 31, tzinfo=UTC))
_WEIGHTS = (".gguf", ".safetensors", ".bin")


@dataclass(frozen=True, slots=True)
class _Facts:
    """What the files of a model say."""

    config: dict[str, Any]
    num_bytes: int
    """Size of the weights."""
    format: str

    @classmethod
    def read(cls, served: ServedModel) -> _Facts:
        directory = Path(served.card.model_dir)
        weights = [path for path in directory.glob("*") if path.suffix in _WEIGHTS and path.is_file()]
        config = read_object(directory / "config.json")
        is_gguf = any(path.suffix == ".gguf" for path in weights)
        return cls(config, sum(path.stat().st_size for path in weights), "gguf" if is_gguf else "safetensors")

    @property
    def family(self) -> str:
        """The model type; of a GGUF file's configuration, which names none, the class without its head."""
        if isinstance(kind := self.config.get("model_type"), str):
            return kind
        named = self.config.get("architectures")
        return str(named[0]).partition("For")[0].lower() if isinstance(named, list) and named else "unknown"

    def quantization(self, served: ServedModel) -> str:
        """Return the form of most matrices, such as Q4_K."""
        quantized = self.config.get("quantization_config")
        types = quantized.get("types") if isinstance(quantized, dict) else None
        if isinstance(types, dict) and types:
            return str(max(types, key=lambda name: len(types[name])))
        return served.card.quantization.upper() if served.card.quantization != "none" else self._dtype

    @property
    def _dtype(self) -> str:
        dtype = str(self.config.get("dtype") or self.config.get("torch_dtype") or "")
        return {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}.get(dtype, "unknown")

    def details(self, served: ServedModel) -> dict[str, Any]:
        return {
            "parent_model": "",
            "format": self.format,
            "family": self.family,
            "families": [self.family],
            "parameter_size": "",
            "quantization_level": self.quantization(served),
        }


async def version(exchange: Exchange, _context: EndpointContext) -> None:
    """GET /api/version: the API's version, not this server's."""
    await exchange.respond(200, msgspec.json.encode({"version": API_VERSION}))


async def tags(exchange: Exchange, context: EndpointContext) -> None:
    """GET /api/tags: all served models; one that has never been loaded has only its name. Raises ApiError,
    ClientGoneError."""
    keepers = context.models.keepers
    if not any(keeper.waking is not None for keeper in keepers):
        await context.model_soon(exchange, "any")
    await exchange.respond(200, await asyncio.to_thread(_listed, list(keepers), only_loaded=False))


async def ps(exchange: Exchange, context: EndpointContext) -> None:
    """GET /api/ps: the models that are loaded now."""
    await exchange.respond(200, await asyncio.to_thread(_listed, list(context.models.keepers), only_loaded=True))


async def show(exchange: Exchange, context: EndpointContext) -> None:
    """POST /api/show. Raises ApiError, ClientGoneError."""
    body, served, _ = await context.receive(
        exchange, decode_ollama_model, model_of=lambda body: known_name(context.models, body.model)
    )
    answer = await asyncio.to_thread(lambda: msgspec.json.encode(_shown(served, _Facts.read(served), body.model)))
    await exchange.respond(200, answer)


def _listed(keepers: list[ModelKeeper], *, only_loaded: bool) -> bytes:
    models = [
        _entry(keeper, name, with_state=only_loaded)
        for keeper in keepers
        for name in names_of(keeper)
        if not only_loaded or _is_loaded(keeper)
    ]
    return msgspec.json.encode({"models": models})


def _is_loaded(keeper: ModelKeeper) -> bool:
    return keeper.current is not None and (keeper.waking is None or keeper.waking.state is ModelState.AWAKE)


def _entry(keeper: ModelKeeper, name: str, *, with_state: bool) -> dict[str, Any]:
    served = keeper.current
    if served is None:
        details = {"parent_model": "", "format": "", "family": "", "families": [], "parameter_size": ""}
        unknown = {"modified_at": _moment(0), "size": 0, "digest": "", "details": details}
        return {"name": name, "model": name, **unknown}
    facts = _Facts.read(served)
    entry = {
        "name": name,
        "model": name,
        "modified_at": _moment(served.card.created),
        "size": facts.num_bytes,
        "digest": hashlib.sha256(f"{name} {served.card.fingerprint}".encode()).hexdigest(),
        "details": facts.details(served),
    }
    if with_state:
        left_s = None if keeper.waking is None else keeper.waking.kept_s
        end = _NEVER if left_s is None else rfc3339(datetime.now(UTC) + timedelta(seconds=left_s))
        entry |= {"expires_at": end, "size_vram": facts.num_bytes, "context_length": served.card.max_context_tokens}
    return entry


def _shown(served: ServedModel, facts: _Facts, name: str) -> dict[str, Any]:
    card, family = served.card, facts.family
    template = served.tokenizer.chat_template
    sizes = {
        "context_length": card.max_context_tokens,
        "embedding_length": facts.config.get("hidden_size"),
        "block_count": facts.config.get("num_hidden_layers"),
        "attention.head_count": facts.config.get("num_attention_heads"),
        "attention.head_count_kv": facts.config.get("num_key_value_heads"),
        "vocab_size": card.vocab_size,
    }
    known = {f"{family}.{key}": value for key, value in sizes.items() if isinstance(value, int)}
    return {
        "modelfile": f"FROM {name}\n",
        "parameters": _parameters(served) if card.generates else "",
        "template": "" if template is None else template.source,
        "details": facts.details(served),
        "model_info": {"general.architecture": family, "general.basename": card.model_id, **known},
        "capabilities": _capabilities(served),
        "modified_at": _moment(card.created),
    }


def _parameters(served: ServedModel) -> str:
    """Return the default sampling and the end tokens, a line each, as in a Modelfile."""
    sampling = msgspec.structs.asdict(shown_sampling(served.card.default_sampling))
    sampling["repeat_penalty"] = sampling.pop("repetition_penalty")
    lines = [f"{name:<30} {value:g}" for name, value in sampling.items()]
    ends = named_tokens(served.end_token_ids, served.tokenizer)
    return "\n".join([*lines, *(f"{'stop':<30} {msgspec.json.encode(token.text).decode()}" for token in ends)])


def _capabilities(served: ServedModel) -> list[str]:
    generates, syntax = served.card.generates, served.syntax
    has = {
        "completion": generates,
        "tools": generates and syntax.tools is not None,
        "thinking": generates and syntax.reasoning is not None,
        "insert": generates and syntax.fill_in is not None,
        "vision": served.takes_pictures,
        "embedding": can_do(served.card, "embed"),
    }
    return [name for name, can in has.items() if can]


def _moment(since_1970_s: int) -> str:
    return rfc3339(datetime.fromtimestamp(since_1970_s, UTC))
