"""Sends embedding requests in a closed loop and measures them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import Struct

from penstock.tools.bench.encoders.inputs import Batch
from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.load_generator.http_client import HttpClient
from penstock.tools.bench.load_generator.sending import ask_whole
from penstock.tools.bench.load_generator.target import offered_models


class _Vector(Struct):
    index: int
    embedding: str | list[float]


class _Vectors(Struct):
    data: list[_Vector]


@dataclass(frozen=True, slots=True)
class EmbeddingTarget:
    """A server's POST /v1/embeddings, or the path of a server that has it elsewhere."""

    http: HttpClient
    model: str
    path: str = "/v1/embeddings"

    @classmethod
    async def discover(cls, http: HttpClient, path: str) -> EmbeddingTarget:
        """Ask for the model's name. Raises BenchError."""
        models_path = path.removesuffix("/embeddings") + "/models"
        models = await offered_models(http, models_path)
        if not models:
            raise BenchError(f"{models_path} offers no model")
        return cls(http, models[-1].id, path)

    def encode(self, texts: Sequence[str]) -> bytes:
        body = {"model": self.model, "input": list(texts), "encoding_format": "base64"}
        return self.http.encode_post(self.path, msgspec.json.encode(body))


@dataclass(slots=True)
class EmbeddingRound:
    """The result of one round of requests."""

    inputs: int
    tokens: int
    wall_s: float
    latencies_s: list[float] = field(default_factory=list)


async def send_all(target: EmbeddingTarget, batches: Sequence[Batch], concurrency: int) -> EmbeddingRound:
    """Send the batches from `concurrency` clients; each sends its next one when its last has ended.

    Raises BenchError if a request fails.
    """
    found = EmbeddingRound(0, 0, 0.0)
    waiting = iter(batches)

    async def client() -> None:
        for batch in waiting:
            started_s = time.perf_counter()
            await _send(target, batch)
            found.latencies_s.append(time.perf_counter() - started_s)
            found.inputs += len(batch.texts)
            found.tokens += batch.num_tokens

    started_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(batches))):
            group.create_task(client())
    found.wall_s = time.perf_counter() - started_s
    return found


async def _send(target: EmbeddingTarget, batch: Batch) -> None:
    body = await ask_whole(target.http, target.encode(batch.texts))
    vectors = msgspec.json.decode(body, type=_Vectors).data
    if len(vectors) != len(batch.texts):
        raise BenchError(f"{len(vectors)} vectors for {len(batch.texts)} inputs")
