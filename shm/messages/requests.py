"""Frontend → backend: the five kinds of request, their cancellation, and credit for more output.

Each kind is a message of its own, so what reads a request matches its kind once and has only the fields of that kind.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Annotated, ClassVar, Literal, TypeAlias

from msgspec import Meta, Struct

from penstock.shm.messages.bounds import (
    I31,
    MAX_BREAKER_BYTES,
    MAX_CONTEXT_TOKENS,
    MAX_GRAMMAR_CHARACTERS,
    MAX_INLINE_PROMPT_TOKENS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_LOGPROBS,
    MAX_PICTURES,
    MAX_POOL_BATCH,
    MAX_WEIGHT,
    MIN_WEIGHT,
    U63,
    TokenId,
)
from penstock.shm.messages.buffers import BufferRef
from penstock.shm.messages.linger import Keep, Linger, StreamQuestion
from penstock.shm.messages.pictures import ArenaRef, Picture

AdapterId: TypeAlias = Annotated[str, Meta(max_length=64)]
"""Names an adapter's weights: other weights of the same name have another id."""
_ADAPTER_CONTEXT = b"adapter"


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
    dry_multiplier: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.0
    dry_base: Annotated[float, Meta(ge=1.0, le=100.0)] = 1.75
    dry_allowed_length: I31 = 2
    dry_penalty_last_n: Annotated[int, Meta(ge=-1, le=MAX_CONTEXT_TOKENS)] = -1
    dry_breakers: Annotated[bytes, Meta(max_length=MAX_BREAKER_BYTES)] = b""
    xtc_probability: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    xtc_threshold: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.1
    top_n_sigma: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.0
    dynatemp_range: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.0
    dynatemp_exponent: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0
    logit_bias: Annotated[
        tuple[tuple[TokenId, Annotated[float, Meta(ge=-100.0, le=100.0)]], ...], Meta(max_length=300)
    ] = ()
    seed: U63 = 0
    num_logprobs: Annotated[int, Meta(ge=-1, le=MAX_LOGPROBS)] = -1
    """Top log probabilities per generated token; -1 for none."""
    logprob_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_LOGPROB_TOKEN_IDS)] = ()
    """Report these tokens instead of the top ones. No effect if num_logprobs is -1."""

    @property
    def llama_cpp_field(self) -> str | None:
        """A field that only passes with `PassSpec.has_llama_cpp_sampling` know; None if none has an effect."""
        fields = ("dry_multiplier", "xtc_probability", "top_n_sigma", "dynatemp_range")
        return next((name for name in fields if getattr(self, name)), None)

    @property
    def num_reported(self) -> int:
        """Tokens beside the generated one whose log probabilities are reported; -1 for none at all."""
        if self.num_logprobs < 0:
            return -1
        return len(self.logprob_token_ids) or self.num_logprobs


class Grammar(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A pattern that a text must match, in one of llguidance's three notations."""

    kind: Literal["json_schema", "regex", "lark"]
    text: Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]


class Constraints(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Rules for which tokens a sequence may contain, however likely they are."""

    grammar: Grammar | None = None
    grammar_after: Annotated[tuple[TokenId, ...], Meta(max_length=8)] = ()
    """The grammar begins after these ids have been generated in a row, such as the end of the model's reasoning."""
    allowed_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=4096)] = ()
    """Empty allows all."""
    bad_words: Annotated[
        tuple[Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=16)], ...], Meta(max_length=64)
    ] = ()
    """Runs of ids that are never completed."""
    min_tokens: I31 = 0
    """Stop ids are not sampled before this many tokens are generated."""
    thinking_budget_tokens: I31 = 0
    """If thinking_end is not among this many generated tokens, it is forced; 0 is no budget."""
    thinking_end: Annotated[tuple[TokenId, ...], Meta(max_length=8)] = ()
    grammar_ends: Annotated[tuple[TokenId, ...], Meta(max_length=8)] = ()
    """Tokens that may end the text where the grammar may end, besides the card's. They are stop tokens, too."""


PooledKind: TypeAlias = Literal["embed", "token_embed", "sparse", "classify", "token_classify"]
"""A kind of vector that a pass computes for a whole sequence: see `PooledRows` in `penstock.backend.forward_pass`."""


class Pooled(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Compute a vector, or one vector per token, instead of generating tokens."""

    kind: PooledKind
    second_start: Annotated[int, Meta(ge=0, le=MAX_CONTEXT_TOKENS)] = 0
    """Position of the first token of a pair's second text; 0 if the prompt is one text."""
    num_dimensions: Annotated[int, Meta(ge=0, le=1 << 16)] = 0
    """First values of each vector to keep (Matryoshka, arXiv 2205.13147); 0 keeps all."""
    normalize: bool = False
    """Divide each vector by its Euclidean length, after the choice of dimensions."""
    group: U63 = 0
    """Inputs of one client request share a number; 0 for a request with one input.

    Requests of a tenant take turns, one input each at a time.
    """


class QuoteTerms(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a client's request has beside the sequence that carries these terms: a quote is for all of it."""

    num_choices: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Sequences of the client's request. It finishes when the last of them does."""
    num_other_prompt_tokens: I31 = 0
    """Tokens of the client's further prompts."""


class RequestName(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An open request of any frontend, as the flight recorder names it."""

    frontend: U63
    request_id: U63


class PromptHeader(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """The fields of every request with a prompt: its tokens, its tenant, and its place in the queue.

    A buffer of PROMPT_EMBEDDINGS has num_prompt_tokens rows. The backend reads it in place, so the loan lasts until the
    request ends. Such a request is never coalesced, and its prompt has no log probabilities.
    """

    request_id: U63
    tokens: Annotated[bytes, Meta(min_length=4, max_length=4 * MAX_INLINE_PROMPT_TOKENS)] | ArenaRef | BufferRef
    """The prompt, and after a backend's death also what the stream has generated so far."""
    num_prompt_tokens: Annotated[int, Meta(ge=1, le=MAX_CONTEXT_TOKENS)]
    """The first tokens are the prompt."""
    salt: Annotated[bytes, Meta(max_length=16)] = b""
    """Requests with different salts share no tokens and no pages."""
    tenant: Annotated[bytes, Meta(max_length=16)] = b""
    """The tenant that the scheduler charges for the work. All requests with an empty one belong to one tenant."""
    weight: Annotated[float, Meta(ge=MIN_WEIGHT, le=MAX_WEIGHT)] = 1.0
    """The tenant's share of the device in proportion to the other tenants'. Its latest request decides."""
    may_share: bool = False
    """Its result is deterministic (temperature 0, the client's seed, or a vector): an equal request's is the same."""
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
    """Lower runs sooner, if the backend orders by priority."""
    timeout_ms: Annotated[int, Meta(ge=0, le=1 << 31)] = 0
    """Milliseconds after arrival at the backend at which it ends as EXPIRED; 0 is never."""
    admitted_ns: U63 = 0
    """When it was first admitted, in CLOCK_MONOTONIC; 0 for a new request.

    An admitted request is not refused again for limits that it has passed. It waits before its tenant's new requests,
    in the order of these times. This is the frontend's claim: a false one gains its requests a place, up to the
    backend's limit on open requests that were admitted.
    """
    adapter: AdapterId = ""
    """The `Adapter.adapter_id` of the adapter that it uses; empty for the model alone. A backend without that adapter
    refuses it: REJECTED, NO_ADAPTER."""

    @property
    def own_salt(self) -> bytes:
        """The salt of its pages and tokens: requests with different adapters share none, whatever their salt is."""
        if not self.adapter:
            return self.salt
        return blake2b(self.adapter.encode(), digest_size=16, key=self.salt, person=_ADAPTER_CONTEXT).digest()


class TextHeader(PromptHeader, frozen=True, kw_only=True):
    """What comes after the prompt."""

    max_tokens: Annotated[int, Meta(ge=1, le=MAX_CONTEXT_TOKENS)]
    """Counts from the prompt's end."""
    sampling: Sampling
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=64)] = ()
    constraints: Constraints | None = None
    num_prompt_logprobs: Annotated[int, Meta(ge=-1, le=MAX_LOGPROBS)] = -1
    """Like Sampling.num_logprobs, for each prompt token given the tokens before it. Not with pictures."""
    pictures: Annotated[tuple[Picture, ...], Meta(max_length=MAX_PICTURES)] = ()
    """In the order of the prompt. All other tokens of the prompt are in the vocabulary."""


class Generate(TextHeader, frozen=True, kw_only=True, tag=1):
    """Generate tokens after the prompt."""

    output: BufferRef | None = None
    """Receives logits or hidden states of the first num_rows generated tokens. Such a request is never coalesced."""
    batch_delivery: bool = False
    """Tokens need not arrive one by one: all but the first may be held for a moment and sent together."""
    reports_progress: bool = False
    """Answer with a Progress for each part of the prompt that is computed."""
    linger: Linger | None = None
    """Not allowed with shared buffers or log probabilities of the prompt."""
    refuse_late: QuoteTerms | None = None
    """End as REJECTED, TOO_LATE, with the quote, if the request is expected to finish after timeout_ms."""


class Pool(PromptHeader, frozen=True, kw_only=True, tag=5):
    """Compute vectors of the prompt, and generate nothing. Its tokens are the prompt alone."""

    pooled: Pooled


class AskQuote(TextHeader, frozen=True, kw_only=True, tag=6):
    """Predict when a Generate with these fields would finish: answer with a Quote, and end as QUOTED."""

    terms: QuoteTerms = QuoteTerms()

    @classmethod
    def of(cls, request: TextHeader, terms: QuoteTerms) -> AskQuote:
        """The quote of this request."""
        return cls(terms=terms, **{name: getattr(request, name) for name in TextHeader.__struct_fields__})


class QuestionHeader(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """The fields of a request without a prompt. It concerns other requests, and is answered at once."""

    tenant: ClassVar[bytes] = b""
    adapter: ClassVar[str] = ""
    request_id: U63


class CancelOther(QuestionHeader, frozen=True, kw_only=True, tag=7):
    """Cancel another request for the operator, and end as STOP, or as REJECTED, NOT_OPEN.

    The cancelled request ends as FAILED, CANCELLED.
    """

    target: RequestName


class AskStream(QuestionHeader, frozen=True, kw_only=True, tag=8):
    """Ask about a stream that lingers. It ends as STOP, after the record if it reads, or as REJECTED, NOT_OPEN."""

    question: StreamQuestion


class AdapterChange(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An adapter to load from a directory, or to unload."""

    name: Annotated[str, Meta(min_length=1, max_length=512)]
    directory: Annotated[str, Meta(max_length=4096)] = ""
    """Empty to unload it."""


class ChangeAdapter(QuestionHeader, frozen=True, kw_only=True, tag=9):
    """Load or unload an adapter for the operator. It ends as STOP once all frontends were told, or as REJECTED."""

    change: AdapterChange


Question: TypeAlias = CancelOther | AskStream | ChangeAdapter
Request: TypeAlias = Generate | Pool | AskQuote | Question


class PoolBatch(Struct, frozen=True, array_like=True, tag=4, forbid_unknown_fields=True):
    """Inputs that are sent together, in order, such as those of one client's request."""

    inputs: Annotated[tuple[Pool, ...], Meta(min_length=1, max_length=MAX_POOL_BATCH)]


class Cancel(Struct, frozen=True, array_like=True, tag=2, forbid_unknown_fields=True):
    """The client has disconnected or cancelled. Unknown and repeated ids are normal."""

    request_id: U63
    noticed_ns: U63 = 0
    """When the frontend noticed, in CLOCK_MONOTONIC, which all processes of a machine share; 0 is unknown."""
    keep: Keep = Keep.NOTHING


class Credit(Struct, frozen=True, array_like=True, tag=3, forbid_unknown_fields=True):
    """The backend may send count more StepOutputs."""

    count: Annotated[int, Meta(ge=1, le=1 << 16)]
