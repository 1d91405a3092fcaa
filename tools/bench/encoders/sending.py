"""Sends embedding requests in a closed loop and measures them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import Struct

from penstock.tools.bench.encoders.inputs import Batch
from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.load_generator.http_client import ClientConnection, ConnectionBroken, HttpClient, HungUp
from penstock.tools.bench.load_generator.http_client import HttpReply as _Reply


class _Model(Struct):
    id: str


class _Models(Struct):
    data: list[_Model]


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
        try:
            reply = await http.get(models_path)
            models = msgspec.json.decode(reply.body, type=_Models).data if reply.status == 200 else []
        except (ConnectionBroken, msgspec.MsgspecError) as error:
            raise BenchError(f"{models_path}: {error}") from None
        if not models:
            raise BenchError(f"{models_path} (status {reply.status}) offers no model")
        return cls(http, models[-1].id, path)

    def encode(self, texts: Sequence[str]) -> bytes:
        body = {"model": self.model, "input": list(texts), "encoding_format": "base64"}
        return self.http.encode_post(self.path, msgspec.json.encode(body))


@dataclass(slots=True)
class EmbeddingRound:
    """The result of one round of requests."""

    inputs: int
    tokens: int
    """Tokens of the inputs whose vectors arrived."""
    wall_s: float
    latencies_s: list[float] = field(default_factory=list)
    dropped_tokens: int = 0
    """Tokens of requests whose client hung up."""


async def send_all(
    target: EmbeddingTarget, batches: Sequence[Batch], concurrency: int, *, drop: float = 0.0, seed: int = 0
) -> EmbeddingRound:
    """Send the batches from `concurrency` clients; each sends its next one when its last has ended.

    drop is the share of requests whose client hangs up early. Raises BenchError if a request fails.
    """
    found = EmbeddingRound(0, 0, 0.0)
    waiting = iter(batches)
    rng = random.Random(seed)  # noqa: S311

    async def client() -> None:
        for batch in waiting:
            started_s = time.perf_counter()
            if rng.random() < drop:
                await _send_and_hang_up(target, batch, rng.uniform(0.0, 0.05))
                found.dropped_tokens += batch.num_tokens
                continue
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
    request = target.encode(batch.texts)
    try:
        reply: _Reply = await target.http.ask(lambda connection: connection.exchange(request))
    except ConnectionBroken as error:
        raise BenchError(f"a request for vectors failed: {error}") from None
    if reply.status != 200:
        raise BenchError(f"a request for vectors failed: status {reply.status}, {reply.body[:300].decode()}")
    vectors = msgspec.json.decode(reply.body, type=_Vectors).data
    if len(vectors) != len(batch.texts):
        raise BenchError(f"{len(vectors)} vectors for {len(batch.texts)} inputs")


async def _send_and_hang_up(target: EmbeddingTarget, batch: Batch, after_s: float) -> None:
    request = target.encode(batch.texts)

    async def exchange(connection: ClientConnection) -> _Reply:
        asyncio.get_running_loop().call_later(after_s, connection.hang_up)
        return await connection.exchange(request)

    try:
        await target.http.ask(exchange)
    except HungUp:
        return
    except ConnectionBroken as error:
        raise BenchError(f"a request for vectors failed: {error}") from None
