"""A backend whose vectors a test can compute itself, and models with a tokenizer that has templates of pairs."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from array import array
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer, processors

from penstock.frontend.generation.models.served_model import ModelKeeper, ServedModel
from penstock.frontend.text.pooling_files import PoolingFiles
from penstock.frontend.text.tokenizer import ModelTokenizer
from penstock.process.native_libraries import GuardedTokenizer
from penstock.shm.client import FailureCode, Finish, PooledFailed, PooledRequest, PooledResult
from penstock.shm.messages import ModelCard, PooledWidth
from tests.frontend.harness import FakeBackend, byte_level_tokenizer, model_card, model_keeper


def encoder_tokenizer() -> Tokenizer:
    """Return the byte-level tokenizer with BERT's template: [CLS] a [SEP] b [SEP]."""
    tokenizer = byte_level_tokenizer()
    ends = [(name, tokenizer.token_to_id(name)) for name in ("<|im_start|>", "<|im_end|>")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        pair="<|im_start|> $A <|im_end|> $B:1 <|im_end|>:1",
        special_tokens=ends,
    )
    return tokenizer


ENCODER_TOKENIZER = encoder_tokenizer()
START, END = (ENCODER_TOKENIZER.token_to_id(name) for name in ("<|im_start|>", "<|im_end|>"))


def encoder_card(name: str, *pooled: tuple[Any, int], **changes: Any) -> ModelCard:
    widths = tuple(PooledWidth(*each) for each in pooled)
    return model_card(model_id=name, generates=False, pooled=widths, **changes)


def vector_of(kind: str, token_ids: list[int], width: int) -> list[float]:
    """Return the raw vector that the fake backend computes of these tokens, as float32."""
    numbers = random.Random(f"{kind} {list(token_ids)}")
    return list(array("f", [numbers.gauss(0, 1) for _ in range(width)]))


def normalized(vector: list[float]) -> list[float]:
    length = math.sqrt(math.fsum(value * value for value in vector))
    return list(array("f", [value / length for value in vector]))


@dataclass
class PooledStream:
    request: PooledRequest
    answer: PooledResult | PooledFailed | None
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    backend: str = ""
    num_moves: int = 0

    async def result(self) -> PooledResult:
        if self.answer is None:
            with contextlib.suppress(asyncio.CancelledError):
                await self.cancelled.wait()
            raise PooledFailed(Finish.CANCELLED, None)
        if isinstance(self.answer, PooledFailed):
            raise self.answer
        return self.answer

    def cancel(self) -> None:
        self.cancelled.set()


@dataclass
class PooledBackend(FakeBackend):
    """Computes at once, or with `is_silent` never. failures has those of the next requests; None is none."""

    pooled_streams: list[PooledStream] = field(default_factory=list)
    failures: list[PooledFailed | Exception | None] = field(default_factory=list)
    is_silent: bool = False
    is_coalesced: bool = False
    room: asyncio.Event = field(default_factory=asyncio.Event)
    waits_for_room: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait_for_room(self) -> None:
        self.waits_for_room.set()
        await self.room.wait()

    def submit_pooled(self, request: PooledRequest) -> PooledStream:
        if self.refusal is not None:
            raise self.refusal
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None and not isinstance(failure, PooledFailed):
            raise failure
        answer = failure or (None if self.is_silent else self._compute(request))
        stream = PooledStream(request, answer)
        self.pooled_streams.append(stream)
        self.submitted.set()
        return stream

    def _compute(self, request: PooledRequest) -> PooledResult:
        assert self.model is not None
        width = self.model.pooled_width(request.kind)
        assert width is not None
        token_ids = list(request.token_ids)  # type: ignore[arg-type]
        indices, num_vectors = None, 1
        if request.kind == "sparse":
            indices = array("i", sorted(set(token_ids)))
            values = [float(index) for index in indices]
        elif request.kind.startswith("token_"):
            num_vectors = len(token_ids)
            values = [value for each in token_ids for value in self._vector(request, [each], width)]
        else:
            values = self._vector(request, token_ids, width)
        return PooledResult(array("f", values), num_vectors, indices, len(token_ids), self.is_coalesced, False, 0.25)

    @staticmethod
    def _vector(request: PooledRequest, token_ids: list[int], width: int) -> list[float]:
        vector = vector_of(request.kind, token_ids, width)[: request.num_dimensions or width]
        return normalized(vector) if request.normalize else vector


def encoder(
    backend: PooledBackend,
    pooling: PoolingFiles = PoolingFiles(),  # noqa: B008 - frozen
    **settings: Any,
) -> ModelKeeper:
    """Return the keeper of an encoder. settings are those of ServedModel."""
    assert backend.model is not None
    client: Any = backend
    return model_keeper(
        backend,
        ServedModel(
            backend.model,
            ModelTokenizer(GuardedTokenizer(ENCODER_TOKENIZER), None),
            client,
            pooling=pooling,
            **settings,
        ),
    )


OVERLOADED = PooledFailed(Finish.REJECTED, FailureCode.OVERLOADED, limit=7, retry_after_s=3)
