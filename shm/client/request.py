"""A caller's request, and its conversion to a message."""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from msgspec import Struct

from penstock.shm.buffers.shared_buffers import BufferSlice
from penstock.shm.messages import (
    MAX_CONTEXT_TOKENS,
    AdapterChange,
    AskQuote,
    AskStream,
    BufferContent,
    CancelOther,
    ChangeAdapter,
    Constraints,
    Generate,
    Grammar,
    Linger,
    Picture,
    Pooled,
    QuoteTerms,
    Request,
    RequestName,
    Sampling,
    StreamQuestion,
    WireError,
    decode_to_backend,
    encode,
)

_PLACEHOLDER = bytes(4)
_STRUCT_FIELDS: dict[str, type[Struct]] = {
    "sampling": Sampling,
    "constraints": Constraints,
    "grammar": Grammar,
    "pooled": Pooled,
    "refuse_late": QuoteTerms,
    "terms": QuoteTerms,
    "target": RequestName,
    "linger": Linger,
    "question": StreamQuestion,
    "pictures": Picture,
}

RequestT = TypeVar("RequestT", bound=Request)


@dataclass(slots=True)
class GenerationRequest:
    """A prompt and how to continue it. Fields without a description here mean the same as in `Generate`.

    A request that uses shared buffers cannot outlive its backend: if the backend dies, it ends FAILED, UNAVAILABLE.
    """

    token_ids: Sequence[int] | BufferSlice
    """The prompt, within the model's context, or the buffer that holds it. The backend returns a buffer of tokens with
    the first generated tokens. It reads a buffer of embeddings in place and returns it at the end; a request with
    embeddings is never coalesced and has no log probabilities of its prompt."""
    max_tokens: int
    """Generated tokens at most."""
    sampling: Sampling
    stop_token_ids: tuple[int, ...] = ()
    salt: bytes = b""
    tenant: bytes = b""
    weight: float = 1.0
    may_share: bool = False
    priority: int = 0
    deadline_s: float | None = None
    """time.monotonic() at which the stream ends EXPIRED, wherever it is."""
    constraints: Constraints | None = None
    num_prompt_logprobs: int = -1
    output: BufferSlice | None = None
    """A buffer that receives logits or hidden states of the first generated tokens. It returns to the caller when the
    stream has ended, or shortly after a cancellation. Such a request is never coalesced."""
    group: int = 0
    """Streams with the same number, unless it is 0, take turns in being read: see `reader_turns`."""
    batch_delivery: bool = False
    """Deliver many tokens at a time, up to a quarter of a second late."""
    refuse_late: QuoteTerms | None = None
    """The prediction is in the stream's `quote` if it is refused."""
    reports_progress: bool = False
    """Batches without tokens say how much of the prompt is computed, until the first token comes."""
    linger: Linger | None = None
    pictures: tuple[Picture, ...] = ()
    """Without `Picture.pixels`."""
    pixels: tuple[bytes, ...] = ()
    """The pixels of each picture, kept until the request ends."""
    adapter: str = ""
    """An `adapter_id` of the model card's adapters."""

    @property
    def is_shareable(self) -> bool:
        """The backend may serve it without a sequence of its own, so even while its wait queue is full."""
        return self.may_share and self.output is None and not self._has_embeddings

    @property
    def _has_embeddings(self) -> bool:
        prompt = self.token_ids
        return isinstance(prompt, BufferSlice) and prompt.content is BufferContent.PROMPT_EMBEDDINGS

    def prompt_tokens(self) -> array[int]:
        """Return the prompt's ids (`request.prompt_tokens`). Raises ValueError."""
        if self._has_embeddings and self.num_prompt_logprobs >= 0:
            raise ValueError(f"num_prompt_logprobs is {self.num_prompt_logprobs}; with embeddings only -1 is allowed")
        if len(self.pictures) != len(self.pixels):
            raise ValueError(f"{len(self.pictures)} pictures with pixels of {len(self.pixels)}")
        return prompt_tokens(self.token_ids)

    def to_message(self, request_id: int, num_prompt_tokens: int) -> Generate:
        """The message without its tokens, buffers and time limit. Raises ValueError when a field is out of bounds."""
        return checked(
            Generate(
                request_id=request_id,
                tokens=_PLACEHOLDER,
                num_prompt_tokens=num_prompt_tokens,
                max_tokens=self.max_tokens,
                sampling=self.sampling,
                stop_token_ids=self.stop_token_ids,
                salt=self.salt,
                tenant=self.tenant,
                weight=self.weight,
                may_share=self.is_shareable,
                priority=self.priority,
                constraints=self.constraints,
                num_prompt_logprobs=self.num_prompt_logprobs,
                pictures=self.pictures,
                batch_delivery=self.batch_delivery,
                reports_progress=self.reports_progress,
                linger=self.linger,
                refuse_late=self.refuse_late,
                adapter=self.adapter,
            )
        )

    def to_quote(self, terms: QuoteTerms, request_id: int, num_prompt_tokens: int) -> AskQuote:
        """`to_message` for the question when the request would finish."""
        return checked(AskQuote.of(self.to_message(request_id, num_prompt_tokens), terms))


Question: TypeAlias = RequestName | StreamQuestion | AdapterChange
"""Another request to cancel, a question about a stream, or an adapter to load or unload."""


def question_message(request_id: int, question: Question) -> CancelOther | AskStream | ChangeAdapter:
    """Raises ValueError."""
    if isinstance(question, AdapterChange):
        return checked(ChangeAdapter(request_id=request_id, change=question))
    if isinstance(question, RequestName):
        return checked(CancelOther(request_id=request_id, target=question))
    return checked(AskStream(request_id=request_id, question=question))


def prompt_tokens(token_ids: Sequence[int] | BufferSlice) -> array[int]:
    """The prompt's ids. A prompt in a shared buffer gives zeros: this process may be unable to read it.

    Raises ValueError.
    """
    if isinstance(token_ids, BufferSlice):
        num_rows = token_ids.num_rows
        if not 1 <= num_rows <= MAX_CONTEXT_TOKENS:
            raise ValueError(f"token_ids.num_rows is {num_rows}; a prompt has 1 to {MAX_CONTEXT_TOKENS} rows")
        return array("i", bytes(4 * num_rows))
    try:
        tokens = array("i", token_ids)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token_ids: {error}") from None
    if not tokens:
        raise ValueError("token_ids is empty; a prompt has at least 1 token")
    return tokens


def checked(message: RequestT) -> RequestT:
    """The message, if the backend can decode it: it drops what it cannot. Raises ValueError with the reason."""
    try:
        decode_to_backend(encode(message))
    except (WireError, TypeError, OverflowError) as error:
        raise ValueError(_with_field_names(str(error), type(message))) from None
    return message


def _with_field_names(text: str, kind: type[Struct]) -> str:
    """Messages are arrays on the wire, so msgspec names a field `$[5][1]`. Say sampling.top_p instead."""
    return re.sub(r"`\$(\[.+\])`", lambda match: _field_name(match[1], kind), text)


def _field_name(path: str, kind: type[Struct]) -> str:
    names: list[str] = []
    struct: type[Struct] | None = kind
    for index in re.findall(r"\d+", path):
        if struct is None:
            break
        tag_items = 1 if struct.__struct_config__.tag is not None else 0  # a tag comes first in the array
        names.append(struct.__struct_fields__[int(index) - tag_items])
        struct = _STRUCT_FIELDS.get(names[-1])
    return ".".join(names)
