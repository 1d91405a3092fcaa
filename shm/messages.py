"""Every message between a frontend and the backend, once. Frozen, array-like, tagged msgspec Structs; no other codec.

Every bound is in the type: what decodes is within its limits. Token ids travel as packed little-endian int32, request
ids as packed little-endian uint64. Decode through `decode_*`, which turns each of the codec's errors into WireError.
"""

from __future__ import annotations

import enum
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

PROTOCOL_VERSION = 4

MAX_CONTEXT_TOKENS = 1 << 24
MAX_INLINE_PROMPT_TOKENS = 4096
"""Prompts up to this length travel in the message; longer ones in the frontend's arena."""
MAX_STEP_EVENTS = 1 << 16
MAX_LOGPROBS = 20
"""Of the likeliest tokens at one place of a stream."""
MAX_GRAMMAR_CHARACTERS = 32 << 10
MAX_TO_BACKEND_BYTES = 192 << 10
"""No message to the backend is longer: the longest is a Submit with an inline prompt, full constraints and a grammar
all of characters of four bytes."""
MAX_TO_FRONTEND_BYTES = 4 << 20
NO_TOKEN = -1
"""The token id of an event without a token."""
MAX_SHARED_BUFFERS = 64
"""Of one client."""
MAX_SHARED_BUFFER_BYTES = 1 << 30
"""Of one buffer."""

U63 = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
I31 = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]


class Finish(enum.IntEnum):
    """Why a subscriber's stream ended; NONE while it goes on."""

    NONE = 0
    STOP = 1
    """A stop token was sampled; it is the last token id of the stream and is not part of the text."""
    LENGTH = 2
    CANCELLED = 3
    REJECTED = 4
    """Never ran: see the Failure beside it."""
    FAILED = 5
    """Ended by a fault of ours: see the Failure beside it."""
    EXPIRED = 6
    """Its deadline passed, wherever it was then."""


class BufferKind(enum.IntEnum):
    """Where a shared buffer lies."""

    HOST = 0
    """In a memfd."""
    CUDA = 1
    """On the backend's GPU, shared by CUDA IPC handles."""


class BufferContent(enum.IntEnum):
    """What a shared buffer carries, and so which way: the first two to the backend, the others from it."""

    TOKENS = 0
    """A prompt; a row is one token id."""
    PROMPT_EMBEDDINGS = 1
    """A prompt; a row is what the model's embedding gives for one token."""
    LOGITS = 2
    """Row i is what generated token i was sampled from, before sampling parameters change it."""
    HIDDEN_STATES = 3
    """Row i is the last layer's normed output from which row i of the logits is made."""

    @property
    def to_backend(self) -> bool:
        return self in (BufferContent.TOKENS, BufferContent.PROMPT_EMBEDDINGS)


class ArenaRef(Struct, frozen=True, array_like=True, tag=20, forbid_unknown_fields=True):
    """A claim about bytes in the sender's arena; nothing is believed until `Arena.read` has checked and copied them."""

    slot: Annotated[int, Meta(ge=0, le=(1 << 16) - 1)]
    sequence: U63
    num_bytes: Annotated[int, Meta(ge=4, le=4 * MAX_CONTEXT_TOKENS)]


class BufferRef(Struct, frozen=True, array_like=True, tag=21, forbid_unknown_fields=True):
    """A client lends one of its shared buffers to the backend, until the `BufferReturn` of the same generation.

    generation grows with each loan of a buffer, so that nothing said of an earlier one is taken for this one.
    """

    index: Annotated[int, Meta(ge=0, lt=MAX_SHARED_BUFFERS)]
    generation: U63
    content: BufferContent
    num_rows: Annotated[int, Meta(ge=1, le=MAX_CONTEXT_TOKENS)]


class Sampling(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The distribution of the next token; the same fields and bounds as the backend's `SamplingParams`."""

    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: I31 = 0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    typical_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] = 1.0
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    logit_bias: Annotated[
        tuple[tuple[TokenId, Annotated[float, Meta(ge=-100.0, le=100.0)]], ...], Meta(max_length=300)
    ] = ()
    seed: U63 = 0
    num_logprobs: Annotated[int, Meta(ge=-1, le=MAX_LOGPROBS)] = -1


class Grammar(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a text must match, in one of llguidance's three notations."""

    kind: Literal["json_schema", "regex", "lark"]
    text: Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]


class Constraints(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Which tokens a sequence may have, beside how likely they are."""

    grammar: Grammar | None = None
    grammar_after: Annotated[tuple[TokenId, ...], Meta(max_length=8)] = ()
    """The grammar begins when these ids have been generated one after the other: behind a model's reasoning."""
    allowed_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=4096)] = ()
    """Empty: all."""
    bad_words: Annotated[
        tuple[Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=16)], ...], Meta(max_length=64)
    ] = ()
    """Runs of ids that are never completed."""
    min_tokens: I31 = 0
    """Stop ids are not sampled before this many tokens are there."""
    thinking_budget_tokens: I31 = 0
    """When this many tokens are there and thinking_end is not among them, it is forced; 0 is no budget."""
    thinking_end: Annotated[tuple[TokenId, ...], Meta(max_length=8)] = ()


class Submit(Struct, frozen=True, array_like=True, tag=1, forbid_unknown_fields=True):
    """Frontend → backend: run this. The tokens are the prompt and, when a stream resumes after a backend's death, what
    it has generated so far; the first num_prompt_tokens are the prompt. max_tokens counts from the prompt's end.

    A buffer of PROMPT_EMBEDDINGS has num_prompt_tokens rows, is read where it is and so lent until the end. Such a
    request joins no other, and its prompt has no log probabilities.
    """

    request_id: U63
    tokens: Annotated[bytes, Meta(min_length=4, max_length=4 * MAX_INLINE_PROMPT_TOKENS)] | ArenaRef | BufferRef
    num_prompt_tokens: Annotated[int, Meta(ge=1, le=MAX_CONTEXT_TOKENS)]
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_CONTEXT_TOKENS)]
    sampling: Sampling
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=64)] = ()
    salt: Annotated[bytes, Meta(max_length=16)] = b""
    """The tenant's: requests of different salts share neither tokens nor pages."""
    may_share: bool = False
    """Its tokens are determined (temperature 0, or a seed of the client's), and it may listen to an equal request's."""
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
    """Lower runs sooner, where the backend's policy is priority."""
    timeout_ms: Annotated[int, Meta(ge=0, le=1 << 31)] = 0
    """Milliseconds from arrival at the backend after which it ends as EXPIRED; 0 is never."""
    constraints: Constraints | None = None
    num_prompt_logprobs: Annotated[int, Meta(ge=-1, le=MAX_LOGPROBS)] = -1
    """As Sampling.num_logprobs, for the prompt's tokens, each given those before it."""
    output: BufferRef | None = None
    """What else than tokens is wanted, of the first num_rows generated tokens. Such a request joins no other."""
    batch_delivery: bool = False
    """Nobody reads its tokens one by one: all but the first may be kept for a moment and sent together."""


class Cancel(Struct, frozen=True, array_like=True, tag=2, forbid_unknown_fields=True):
    """Frontend → backend: the listener has gone. Unknown and repeated ids are normal."""

    request_id: U63
    noticed_ns: U63 = 0
    """When the frontend noticed, on the clock that all processes of a machine share (CLOCK_MONOTONIC); 0 is unknown."""


class Credit(Struct, frozen=True, array_like=True, tag=3, forbid_unknown_fields=True):
    """Frontend → backend: count more StepOutputs may be in flight to me."""

    count: Annotated[int, Meta(ge=1, le=1 << 16)]


class Started(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Rides with a request's first token."""

    request_id: U63
    cached_tokens: I31
    queue_s: Annotated[float, Meta(ge=0.0)]
    is_coalesced: bool = False
    """It listens to a sequence that another request had started."""


class Failure(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Rides with a REJECTED or FAILED event. code is one of FailureCode; numbers fill the frontend's own wording."""

    request_id: U63
    code: Annotated[int, Meta(ge=0, le=255)]
    limit: I31 = 0
    text: Annotated[str, Meta(max_length=512)] = ""
    """What is wrong with a grammar."""


class FailureCode(enum.IntEnum):
    INTERNAL = 0
    OVERLOADED = 1
    CONTEXT_TOO_LONG = 2
    """limit is the tokens that fit."""
    BAD_TOKEN = 3
    """limit is the vocabulary's size."""
    BAD_DESCRIPTOR = 4
    SHUTTING_DOWN = 5
    UNAVAILABLE = 6
    """Made by the client only: no backend came back in time, or one with another model."""
    BAD_GRAMMAR = 7
    """text says why it does not compile."""


class BufferReturn(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The backend has done with a loan: the buffer is its client's again. The first num_rows rows were written.

    A buffer on a device may be touched once its event has passed.
    """

    index: Annotated[int, Meta(ge=0, lt=MAX_SHARED_BUFFERS)]
    generation: U63
    num_rows: Annotated[int, Meta(ge=0, le=MAX_CONTEXT_TOKENS)]


class EventLogprobs(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Rides with an event that has a token: its log probability and rank, and the likeliest tokens at its place."""

    event: Annotated[int, Meta(ge=0, lt=MAX_STEP_EVENTS)]
    """Place in the columns."""
    logprob: float
    rank: I31
    top_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_LOGPROBS)] = ()
    top_logprobs: Annotated[tuple[float, ...], Meta(max_length=MAX_LOGPROBS)] = ()


class PromptLogprobs(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Of some of a prompt's tokens, in order and without gaps; the prompt's first token has none. All come before the
    request's first token."""

    request_id: U63
    entries: Annotated[tuple[EventLogprobs, ...], Meta(max_length=MAX_STEP_EVENTS)]
    """event is the token's index in the prompt."""


class StepOutputs(Struct, frozen=True, array_like=True, tag=4, forbid_unknown_fields=True):
    """Backend → frontend: all that one step brought this frontend, in columns of equal length.

    sequence counts the messages of this link from 0 without gaps. A token id of -1 accompanies an end without a token,
    or, with finish NONE, says no more than that the submission's arena slot has been copied and may be used again.
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
    """Requests that were set back because pages were short, once for each time; told with some later event."""
    returned: Annotated[tuple[BufferReturn, ...], Meta(max_length=MAX_SHARED_BUFFERS)] = ()
    """Before or with the end of their requests, never behind it."""


class BufferRequest(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Shared buffers that a client wants for as long as it is connected, and the kinds that it can use."""

    num_buffers: Annotated[int, Meta(ge=1, le=MAX_SHARED_BUFFERS)]
    num_bytes: Annotated[int, Meta(ge=1, le=MAX_SHARED_BUFFER_BYTES)]
    """Of each."""
    kinds: Annotated[tuple[BufferKind, ...], Meta(min_length=1, max_length=2)] = (BufferKind.HOST,)


class ContentSpec(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A content that the backend takes or gives: num_values little-endian values a row, of 4 bytes each."""

    content: BufferContent
    num_values: Annotated[int, Meta(ge=1, le=1 << 24)]
    dtype: Literal["<i4", "<f4"]
    """As numpy writes it."""

    @property
    def row_bytes(self) -> int:
        return 4 * self.num_values


class BufferGrant(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The shared buffers that a client has got. They are the backend's memory: nobody gives it memory to open.

    HOST: one more fd, after the three of the welcome, holds them back to back. CUDA: for each a handle of an allocation
    and one of an event, on the device with this UUID.
    """

    kind: BufferKind
    num_buffers: Annotated[int, Meta(ge=1, le=MAX_SHARED_BUFFERS)]
    num_bytes: Annotated[int, Meta(ge=1, le=MAX_SHARED_BUFFER_BYTES)]
    """Of each; never less than was asked for."""
    contents: Annotated[tuple[ContentSpec, ...], Meta(max_length=8)]
    device_uuid: Annotated[bytes, Meta(max_length=16)] = b""
    memory_handles: Annotated[
        tuple[Annotated[bytes, Meta(min_length=64, max_length=64)], ...], Meta(max_length=MAX_SHARED_BUFFERS)
    ] = ()
    event_handles: Annotated[
        tuple[Annotated[bytes, Meta(min_length=64, max_length=64)], ...], Meta(max_length=MAX_SHARED_BUFFERS)
    ] = ()

    def spec_of(self, content: BufferContent) -> ContentSpec | None:
        return next((spec for spec in self.contents if spec.content is content), None)


class Hello(Struct, frozen=True, array_like=True, tag=10, forbid_unknown_fields=True):
    """Frontend → backend over the rendezvous socket: the first word."""

    protocol_version: Annotated[int, Meta(ge=0, le=1 << 16)]
    buffers: BufferRequest | None = None


class BuffersClosed(Struct, frozen=True, array_like=True, tag=13, forbid_unknown_fields=True):
    """Frontend → backend over the rendezvous socket: the last word of one that lives on. It has no device memory of the
    backend's open any more."""


class ModelCard(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a frontend must know of the model to speak for it. model_dir holds tokenizer and chat template."""

    model_id: Annotated[str, Meta(min_length=1, max_length=512)]
    model_dir: Annotated[str, Meta(max_length=4096)]
    created: U63
    vocab_size: Annotated[int, Meta(ge=1, le=1 << 24)]
    max_context_tokens: Annotated[int, Meta(ge=1, le=MAX_CONTEXT_TOKENS)]
    """Prompt and generated tokens of one sequence; never more than the KV budget holds."""
    max_waiting: I31
    """Requests that may wait before new ones are answered 429."""
    eos_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=64)] = ()
    default_sampling: Sampling = Sampling()
    fingerprint: Annotated[str, Meta(max_length=64)] = ""


class Welcome(Struct, frozen=True, array_like=True, tag=11, forbid_unknown_fields=True):
    """Backend → frontend: who you are and where to connect. Three fds ride along, in this order: the frontend's arena
    (read and write), the backend's board (read only), the frontend's own board (read and write)."""

    epoch: U63
    identity: Annotated[bytes, Meta(min_length=16, max_length=16)]
    endpoint: Annotated[str, Meta(max_length=256)]
    backend_pid: I31
    arena_slots: Annotated[int, Meta(ge=1, le=1 << 16)]
    arena_slot_bytes: Annotated[int, Meta(ge=4096, le=1 << 30)]
    credit: Annotated[int, Meta(ge=1, le=1 << 16)]
    model: ModelCard
    buffers: BufferGrant | None = None


class Refusal(Struct, frozen=True, array_like=True, tag=12, forbid_unknown_fields=True):
    """Backend → frontend: refused, in one sentence."""

    reason: Annotated[str, Meta(max_length=512)]


class WireError(ValueError):
    """A message that is not one of ours, or not within its bounds."""


_encoder = msgspec.msgpack.Encoder()
_to_backend: msgspec.msgpack.Decoder[Submit | Cancel | Credit] = msgspec.msgpack.Decoder(Submit | Cancel | Credit)
_to_frontend = msgspec.msgpack.Decoder(StepOutputs)
_hello = msgspec.msgpack.Decoder(Hello)
_welcome: msgspec.msgpack.Decoder[Welcome | Refusal] = msgspec.msgpack.Decoder(Welcome | Refusal)

encode = _encoder.encode


T = TypeVar("T")


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes | memoryview) -> T:
    # The codec raises these four for hostile bytes; RecursionError for nesting beyond the interpreter's limit.
    try:
        return decoder.decode(data)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(str(error)) from None


def decode_to_backend(data: bytes | memoryview) -> Submit | Cancel | Credit:
    return _decode(_to_backend, data)


def decode_to_frontend(data: bytes | memoryview) -> StepOutputs:
    """Raises WireError also where the columns differ in length."""
    outputs = _decode(_to_frontend, data)
    events = len(outputs.finishes)
    if len(outputs.request_ids) != 8 * events or len(outputs.token_ids) != 4 * events:
        raise WireError(f"columns of unequal length in a StepOutputs of {events} events")
    return outputs


def decode_hello(data: bytes | memoryview) -> Hello:
    return _decode(_hello, data)


def decode_welcome(data: bytes | memoryview) -> Welcome | Refusal:
    return _decode(_welcome, data)
