"""Requests whose result is a vector: embeddings, scores of pairs, classes of texts."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from penstock.shm.buffers.shared_buffers import BufferSlice
from penstock.shm.client.request import checked, prompt_tokens
from penstock.shm.client.streams.open_stream import OpenStream
from penstock.shm.link.frontend_link import LinkBroken
from penstock.shm.messages import BufferContent, FailureCode, Finish, ModelCard, Pool, Pooled, PooledKind, VectorPart

_PLACEHOLDER = bytes(4)
_PER_TOKEN = frozenset(["token_embed", "token_classify"])
"""Kinds with a vector for each token."""


@dataclass(slots=True)
class PooledRequest:
    """A text, or a pair of texts, and the kind of vector to compute from it.

    Fields without a description here mean the same as in `Pool` and `Pooled`.
    """

    token_ids: Sequence[int] | BufferSlice
    """The whole input, special tokens included, or the buffer of tokens that holds it."""
    kind: PooledKind
    pixels: ClassVar[tuple[bytes, ...]] = ()
    second_start: int = 0
    num_dimensions: int = 0
    normalize: bool = False
    salt: bytes = b""
    tenant: bytes = b""
    weight: float = 1.0
    priority: int = 0
    deadline_s: float | None = None
    """time.monotonic() at which the stream ends EXPIRED, wherever it is."""
    group: int = 0
    """Inputs of one request share a number, at least 1; 0 for a request with one input.

    A group takes turns with other requests of the tenant in the backend, and with other streams of this client when
    results are read.
    """
    may_share: bool = True
    """The backend may compute it once for this and equal inputs, and may answer from its cache."""
    has_begun: bool = False
    """Other inputs of its request have been computed. Then a full backend is asked even if its board shows a full wait
    queue: after it refuses, it reports when it has room (`BackendClient.wait_for_room`)."""

    @property
    def is_shareable(self) -> bool:
        return self.may_share

    def prompt_tokens(self) -> array[int]:
        """Return the input's ids (`request.prompt_tokens`). Raises ValueError."""
        if isinstance(self.token_ids, BufferSlice) and self.token_ids.content is not BufferContent.TOKENS:
            raise ValueError(f"token_ids.content is {self.token_ids.content.name}; a pooled request takes TOKENS")
        return prompt_tokens(self.token_ids)

    def to_message(self, request_id: int, num_prompt_tokens: int) -> Pool:
        """The message without its tokens, buffers and time limit. Raises ValueError when a field is out of bounds."""
        if self.num_dimensions and self.kind not in ("embed", "token_embed"):
            raise ValueError(f'num_dimensions is {self.num_dimensions}; for kind "{self.kind}" it must be 0')
        if not 0 <= self.second_start < num_prompt_tokens:
            raise ValueError(f"second_start is {self.second_start}; the input has {num_prompt_tokens} tokens")
        return checked(
            Pool(
                request_id=request_id,
                tokens=_PLACEHOLDER,
                num_prompt_tokens=num_prompt_tokens,
                salt=self.salt,
                tenant=self.tenant,
                weight=self.weight,
                may_share=self.may_share,
                priority=self.priority,
                pooled=Pooled(self.kind, self.second_start, self.num_dimensions, self.normalize, self.group),
            )
        )


@dataclass(slots=True)
class PooledResult:
    """The vectors of one input."""

    values: array[float]
    """float32, one vector after the other; of a sparse result the values that are not zero."""
    num_vectors: int
    """1, or one for each token of the input."""
    indices: array[int] | None
    """The token id of each value of a sparse result, ascending; None for other kinds."""
    num_prompt_tokens: int
    is_coalesced: bool
    """It was computed once for this and an equal input."""
    is_cached: bool
    """It was computed for an equal input before."""
    queue_s: float
    """Seconds from the backend's receipt to the input's step."""


class PooledFailed(Exception):
    """The request has ended without a result."""

    def __init__(
        self, finish: Finish, failure: FailureCode | None, limit: int = 0, text: str = "", retry_after_s: int = 0
    ) -> None:
        """failure is None for CANCELLED and EXPIRED. limit, text and retry_after_s are those of `Failure`."""
        reason = "" if failure is None else f": {failure.name.lower()}"
        super().__init__(f"the request is {finish.name.lower()}{reason}{f', {text}' if text else ''}")
        self.finish = finish
        self.failure = failure
        self.limit = limit
        self.text = text
        self.retry_after_s = retry_after_s


class PooledStream(OpenStream):
    """The result of one request, delivered whole."""

    __slots__ = ("_indices", "_num_values", "_num_vectors", "_values")
    message: Pool

    async def result(self) -> PooledResult:
        """Wait for the result. Raises PooledFailed."""
        if self.finish is Finish.NONE:
            await self._next_turn()
        if self.finish is not Finish.STOP:
            raise PooledFailed(*self._end)
        num_prompt_tokens = self.num_prompt_tokens
        return PooledResult(
            self._values,
            self._num_vectors,
            self._indices if self.message.pooled.kind == "sparse" else None,
            num_prompt_tokens,
            bool(self.is_coalesced),
            self.cached_tokens >= num_prompt_tokens,  # the prefix cache never serves all tokens
            self.queue_s,
        )

    # Called by the client

    def restart(self) -> None:
        """Forget the parts that have arrived: the next backend sends all of them."""
        self._num_vectors = 0
        self._num_values = -1
        self._values = array("f")
        self._indices = array("i")

    def add_part(self, part: VectorPart, model: ModelCard) -> None:
        """Raises LinkBroken for a part that does not continue what came before, or is not what was asked for."""
        if self._num_values < 0:
            self._check_first(part, model)
            self._num_vectors, self._num_values = part.num_vectors, part.num_values
        elif (part.num_vectors, part.num_values) != (self._num_vectors, self._num_values):
            raise LinkBroken("parts of a vector differ in the size of the whole")
        num_values, odd_bytes = divmod(len(part.values), 4)
        if odd_bytes or len(self._values) + num_values > self._num_values:
            raise LinkBroken(f"a part of {len(part.values)} bytes continues {len(self._values)} of {self._num_values}")
        if len(part.indices) != (len(part.values) if self.message.pooled.kind == "sparse" else 0):
            raise LinkBroken(f"a part has {len(part.values)} bytes of values and {len(part.indices)} of indices")
        if part.indices:
            self._add_indices(part.indices, model)
        self._values.frombytes(part.values)

    def _check_first(self, part: VectorPart, model: ModelCard) -> None:
        pooled = self.message.pooled
        if (width := model.pooled_width(pooled.kind)) is None:
            raise LinkBroken(f'a vector of kind "{pooled.kind}", which the backend has not announced')
        num_vectors = self.num_prompt_tokens if pooled.kind in _PER_TOKEN else 1
        most = num_vectors * min(width, pooled.num_dimensions or width)
        is_right = part.num_values <= most if pooled.kind == "sparse" else part.num_values == most
        if part.num_vectors != num_vectors or not is_right:
            raise LinkBroken(
                f"{part.num_vectors} vectors with {part.num_values} values; {num_vectors} with {most} are expected"
            )

    def _add_indices(self, packed: bytes, model: ModelCard) -> None:
        indices = array("i", packed)
        last = self._indices[-1] if self._indices else -1
        for index in indices:
            if index <= last:
                raise LinkBroken(f"index {index} of a sparse vector follows {last}")
            last = index
        if last >= (model.pooled_width("sparse") or 0):
            raise LinkBroken(f"index {last} is beyond the end of a sparse vector")
        self._indices += indices

    def check_finish(self, finish: Finish) -> None:
        """Raises LinkBroken if the result is not complete."""
        if finish is Finish.LENGTH or (finish is Finish.STOP and len(self._values) != self._num_values):
            raise LinkBroken(f"a vector ends after {len(self._values)} of {self._num_values} values")
