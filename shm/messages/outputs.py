"""Backend → frontend: the results of a step."""

from __future__ import annotations

import enum
from typing import Annotated

from msgspec import Meta, Struct

from penstock.shm.messages.bounds import (
    I31,
    MAX_CONTEXT_TOKENS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_SHARED_BUFFERS,
    MAX_STEP_EVENTS,
    MAX_VECTOR_PART_BYTES,
    U63,
    TokenId,
)
from penstock.shm.messages.buffers import BufferReturn
from penstock.shm.messages.handshake import MAX_ADAPTERS, Adapter
from penstock.shm.messages.linger import StreamRecord

NO_TOKEN = -1
"""The token id of an event without a token."""


class Finish(enum.IntEnum):
    """Why a subscriber's stream ended; NONE while it goes on."""

    NONE = 0
    STOP = 1
    """A stop token was sampled; it is the last token id of the stream and is not part of the text."""
    LENGTH = 2
    CANCELLED = 3
    REJECTED = 4
    """It never ran. A Failure gives the reason."""
    FAILED = 5
    """A fault of ours ended it. A Failure gives the reason."""
    EXPIRED = 6
    """Its deadline passed, while it waited or ran."""
    QUOTED = 7
    """It asked for a quote alone, which comes with this event."""


class FailureCode(enum.IntEnum):
    INTERNAL = 0
    OVERLOADED = 1
    CONTEXT_TOO_LONG = 2
    """limit is the number of tokens that fit."""
    BAD_TOKEN = 3
    """limit is the vocabulary's size."""
    BAD_DESCRIPTOR = 4
    SHUTTING_DOWN = 5
    UNAVAILABLE = 6
    """Set by the client only: no backend came back in time, or one with another model."""
    BAD_GRAMMAR = 7
    """text is the compiler's error."""
    NOT_SCORED = 8
    """The forward pass reports no log probabilities of prompts."""
    NOT_SERVED = 9
    """The model does not do this: generate, or compute this kind of vector."""
    TOO_LATE = 10
    """It is expected to finish after its deadline. A Quote comes with it."""
    CANCELLED = 11
    """The operator has cancelled it."""
    NOT_OPEN = 12
    """The request or the stream that it names is not open."""
    TAKEN_OVER = 13
    """Another request reads the stream now."""
    NO_ADAPTER = 14
    """The backend does not have the request's adapter."""
    NOT_SAMPLED = 15
    """The forward pass does not know a parameter; text is its name."""
    BAD_ADAPTER = 16
    """The adapter cannot be loaded; text names the field and says why."""
    BAD_PICTURE = 17
    """text says which of the request's pictures the model cannot take, and why."""


class Failure(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Comes with a REJECTED or FAILED event. code is a FailureCode; the frontend quotes limit in its error message."""

    request_id: U63
    code: Annotated[int, Meta(ge=0, le=255)]
    limit: I31 = 0
    text: Annotated[str, Meta(max_length=512)] = ""
    """The fault of a grammar; with OVERLOADED, which resource is full if it is not the wait queue."""
    retry_after_s: Annotated[int, Meta(ge=0, le=3600)] = 0
    """With OVERLOADED: when there may be a place; 0 if the frontend knows better."""


class Started(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Comes with a request's first token."""

    request_id: U63
    cached_tokens: I31
    queue_s: Annotated[float, Meta(ge=0.0)]
    is_coalesced: bool = False
    """It subscribes to a sequence that another request started."""


class Progress(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Comes with an event that has no token: a step has computed a part of the request's prompt, but not
    the last part."""

    request_id: U63
    cached_tokens: I31
    computed_tokens: I31
    """Computed tokens of the prompt, including cached ones."""
    spent_s: Annotated[float, Meta(ge=0.0)]
    """Time since its first step began."""


class Quote(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A prediction, in seconds after the request's arrival at the backend. None is unknown: no steps, or no answers,
    have been seen yet."""

    request_id: U63
    num_ahead: I31
    """Waiting sequences that would start before it."""
    cached_tokens: I31
    """Tokens of its prompt in the prefix cache."""
    is_coalesced: bool
    """It would join a sequence that another request started."""
    first_token_s: Annotated[float, Meta(ge=0.0)] | None = None
    finish_s: Annotated[float, Meta(ge=0.0)] | None = None
    """The time for an answer of expected_tokens."""
    latest_finish_s: Annotated[float, Meta(ge=0.0)] | None = None
    """The time if it and all requests before it generate as many tokens as they may."""
    expected_tokens: I31 | None = None
    """Tokens of the longest choice."""


class EventLogprobs(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Comes with an event that has a token: its log probability and rank, and the top tokens at its position, or those
    that the request names."""

    event: Annotated[int, Meta(ge=0, lt=MAX_STEP_EVENTS)]
    """Index in the columns."""
    logprob: float
    rank: I31
    top_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_LOGPROB_TOKEN_IDS)] = ()
    top_logprobs: Annotated[tuple[float, ...], Meta(max_length=MAX_LOGPROB_TOKEN_IDS)] = ()


class PromptLogprobs(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Log probabilities of some prompt tokens, in order and without gaps; the prompt's first token has none.

    All of them come before the request's first token.
    """

    request_id: U63
    entries: Annotated[tuple[EventLogprobs, ...], Meta(max_length=MAX_STEP_EVENTS)]
    """event is the token's index in the prompt."""


class VectorPart(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Consecutive values of a pooled request's result.

    Parts come in order and without gaps, the last one before or with the request's event. That event has no token and
    finish STOP.
    """

    request_id: U63
    num_vectors: Annotated[int, Meta(ge=1, le=MAX_CONTEXT_TOKENS)]
    """Vectors of the whole result: 1, or one for each token of the prompt."""
    num_values: U63
    """Values of the whole result, which are float32; for a sparse result, the number of non-zero values."""
    values: Annotated[bytes, Meta(max_length=MAX_VECTOR_PART_BYTES)]
    """Little-endian float32."""
    indices: Annotated[bytes, Meta(max_length=MAX_VECTOR_PART_BYTES)] = b""
    """The token id of each value of a sparse result, little-endian int32."""


class StepOutputs(Struct, frozen=True, array_like=True, tag=4, forbid_unknown_fields=True):
    """Everything that one step produced for this frontend, in columns of equal length.

    sequence counts the messages of this link from 0 without gaps. An event without a token (NO_TOKEN) ends its request.
    With finish NONE it only reports that the prompt has been copied and its arena slot is free, or a Progress.
    """

    sequence: U63
    request_ids: Annotated[bytes, Meta(max_length=8 * MAX_STEP_EVENTS)]
    token_ids: Annotated[bytes, Meta(max_length=4 * MAX_STEP_EVENTS)]
    finishes: Annotated[bytes, Meta(max_length=MAX_STEP_EVENTS)]
    started: Annotated[tuple[Started, ...], Meta(max_length=MAX_STEP_EVENTS)] = ()
    failures: Annotated[tuple[Failure, ...], Meta(max_length=MAX_STEP_EVENTS)] = ()
    logprobs: Annotated[tuple[EventLogprobs, ...], Meta(max_length=MAX_STEP_EVENTS)] = ()
    prompt_logprobs: Annotated[tuple[PromptLogprobs, ...], Meta(max_length=MAX_STEP_EVENTS)] = ()
    preempted: Annotated[tuple[U63, ...], Meta(max_length=MAX_STEP_EVENTS)] = ()
    """Requests that were preempted, once per preemption; may come with a later event."""
    returned: Annotated[tuple[BufferReturn, ...], Meta(max_length=MAX_SHARED_BUFFERS)] = ()
    """Before or with the end of their requests, never after it."""
    vectors: Annotated[tuple[VectorPart, ...], Meta(max_length=MAX_STEP_EVENTS)] = ()
    quotes: Annotated[tuple[Quote, ...], Meta(max_length=MAX_STEP_EVENTS)] = ()
    record: StreamRecord | None = None
    """At most one, because it may be large."""
    progress: Annotated[tuple[Progress, ...], Meta(max_length=MAX_STEP_EVENTS)] = ()
    has_room: bool = False
    """The wait queue has places again, after it has refused a pooled request of this frontend."""
    adapters: Annotated[tuple[Adapter, ...], Meta(max_length=MAX_ADAPTERS)] | None = None
    """All adapters of the model, if they have changed since the frontend learned of them."""
