"""The server under load: its address, its model and how a request to it is written."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec import Struct

from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.load_generator.http_client import ConnectionBroken, HttpClient
from penstock.tools.bench.load_generator.workload import PlannedRequest

Endpoint = Literal["completions", "chat"]
GREEDY = {"temperature": 0}


class OfferedModel(Struct):
    """What only Penstock says may be missing."""

    id: str
    vocab_size: int | None = None
    kv_cache_tokens: int | None = None
    root: str | None = None
    """The model's own name; id may be a further one."""
    state: str | None = None
    """Of models that may sleep."""
    input_modalities: list[str] = []


class _Models(Struct):
    data: list[OfferedModel]


class ReadyState(Struct):
    """The body of Penstock's /ready. Other servers leave fields out."""

    running: int | None = None
    waiting: int | None = None
    pages_used: int | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """A server under load. Only Penstock says its vocab_size; prompts can then be token ids."""

    http: HttpClient
    endpoint: Endpoint
    model: str
    vocab_size: int | None
    sampling: Mapping[str, Any] = field(default_factory=lambda: GREEDY)
    """Fields of each request's body."""

    @classmethod
    async def discover(
        cls, http: HttpClient, endpoint: Endpoint, model: str | None, sampling: Mapping[str, Any] = GREEDY
    ) -> Target:
        """Ask /v1/models; take the first model if none is named. Raises BenchError."""
        models = await offered_models(http, "/v1/models")
        chosen = next((entry for entry in models if model in (None, entry.id)), None)
        if chosen is None:
            names = ", ".join(entry.id for entry in models)
            raise BenchError(f"/v1/models offers [{names}], not {model or 'a model'}")
        return cls(http, endpoint, chosen.id, chosen.vocab_size, sampling)

    async def ready_state(self) -> ReadyState:
        """Raises BenchError if /ready does not answer as Penstock does."""
        try:
            return msgspec.json.decode((await self.http.get("/ready")).body, type=ReadyState)
        except (ConnectionBroken, msgspec.MsgspecError) as error:
            raise BenchError(f"/ready: {error}") from None

    async def samples(self, metric: str) -> list[float]:
        """The values on /metrics, one for each replica or label; empty for another server."""
        lines = (await self.http.get("/metrics")).body.decode().splitlines()
        return [float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{metric} ", f"{metric}{{"))]

    def encode(self, request: PlannedRequest) -> bytes:
        """Return the whole HTTP request: streamed, and of exactly output_tokens if the server supports
        ignore_eos."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.output_tokens,
            **self.sampling,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.endpoint == "completions":
            body["prompt"] = request.prompt
            return self.http.encode_post("/v1/completions", msgspec.json.encode(body))
        body["messages"] = [{"role": "user", "content": request.prompt}]
        return self.http.encode_post("/v1/chat/completions", msgspec.json.encode(body))


async def offered_models(http: HttpClient, path: str) -> list[OfferedModel]:
    """Raises BenchError."""
    try:
        reply = await http.get(path)
        if reply.status != 200:
            raise BenchError(f"{path}: status {reply.status}")
        return msgspec.json.decode(reply.body, type=_Models).data
    except (ConnectionBroken, msgspec.MsgspecError) as error:
        raise BenchError(f"{path}: {error}") from None


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The URL of a server, with the API key and the model for requests to it."""

    url: str
    api_key: str | None = None
    model: str | None = None
    """Name of the model to ask for; None for the first that the server offers."""

    @asynccontextmanager
    async def connect(
        self, endpoint: Endpoint = "completions", sampling: Mapping[str, Any] = GREEDY
    ) -> AsyncIterator[Target]:
        """Idle connections close at exit. Raises BenchError."""
        try:
            http = HttpClient(self.url, self.api_key)
        except ValueError as error:
            raise BenchError(str(error)) from None
        try:
            yield await Target.discover(http, endpoint, self.model, sampling)
        finally:
            http.close()
