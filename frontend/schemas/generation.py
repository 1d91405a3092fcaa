"""The fields that all generating endpoints share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Raw, Struct, field

from penstock.shm.messages import MAX_CONTEXT_TOKENS, MAX_LOGPROB_TOKEN_IDS, MAX_LOGPROBS, TokenId

MAX_TIMEOUT_MS = 86_400_000
MAX_CHOICES = 128
"""Prompts × n (or best_of) of one request."""
MAX_LOGPROB_CELLS = 1 << 22
"""Choices × tokens × log probabilities of one request's answer."""
MAX_PROMPT_LOGPROB_CELLS = 1 << 19
"""Prompts × tokens × log probabilities of one request's prompts, which are reported all at once."""

MAX_STOP_STRINGS = 16
"""OpenAI allows 4; code editors send a dozen."""

MAX_BIASES = 300
"""The same limit as in `penstock.shm.messages.Sampling`."""
BiasedText = Annotated[str, Meta(min_length=1, max_length=256)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)] | Literal[False]
StopString = Annotated[str, Meta(min_length=1, max_length=256)]
TypeName = Annotated[str, Meta(max_length=64)]
ShortText = Annotated[str, Meta(max_length=512)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=512)]
MaxTokens = Annotated[int, Meta(ge=-1, le=MAX_CONTEXT_TOKENS)]
ABSENT: Raw = field(default_factory=Raw)


def limit_of(max_tokens: int | None) -> int | None:
    """Return None for -1, by which clients of llama.cpp ask for the rest of the context."""
    return None if max_tokens == -1 else max_tokens


class SchedulingBody(Struct, kw_only=True):
    """Fields that decide when a request runs and with which requests it shares."""

    priority: Annotated[int, Meta(ge=-1000, le=1000)] | None = None
    timeout_ms: Annotated[int, Meta(ge=1, le=MAX_TIMEOUT_MS)] | None = None
    cache_salt: CacheSalt | None = None
    """Requests share cached pages and sequences only with those of their tenant that have the same one."""


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchemaFormat(Struct, frozen=True):
    """response_format.json_schema."""

    name: ShortText | None = None
    description: Annotated[str, Meta(max_length=65536)] | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True):
    """OpenAI's response_format. llama.cpp's clients put the schema in `schema`, with either JSON type."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | None = None


class StructuredOutputs(Struct, frozen=True):
    """vLLM's structured_outputs: exactly one of its fields."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=1024)] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    # Not supported
    disable_additional_properties: Raw = ABSENT
    disable_any_whitespace: Raw = ABSENT
    structural_tag: Raw = ABSENT
    whitespace_pattern: Raw = ABSENT


class GenerationBody(SchedulingBody, kw_only=True):
    """The fields that all generating endpoints share. None means: not given."""

    model: ShortText | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=16)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=32)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_CONTEXT_TOKENS)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    typical_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    dry_multiplier: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    dry_base: Annotated[float, Meta(ge=1.0, le=100.0)] | None = None
    dry_allowed_length: Annotated[int, Meta(ge=0, le=MAX_CONTEXT_TOKENS)] | None = None
    dry_penalty_last_n: Annotated[int, Meta(ge=-1, le=MAX_CONTEXT_TOKENS)] | None = None
    dry_sequence_breakers: (
        Annotated[list[Annotated[str, Meta(min_length=1, max_length=40)]], Meta(min_length=1, max_length=32)] | None
    ) = None
    xtc_probability: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    xtc_threshold: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_n_sigma: Annotated[float, Meta(ge=-1.0, le=100.0)] | None = None
    """0 and below are off, as in llama.cpp."""
    dynatemp_range: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    dynatemp_exponent: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    logit_bias: (
        Annotated[dict[BiasedText, Bias], Meta(max_length=MAX_BIASES)]
        | Annotated[list[tuple[TokenId | BiasedText, Bias]], Meta(max_length=MAX_BIASES)]
        | None
    ) = None
    """By token id or, as llama.cpp has it, by text; false there forbids the token."""
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=4096)] | None = None
    bad_words: Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=64)] | None = None
    repeat_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] | None = None
    """llama.cpp's name for repetition_penalty; `__post_init__` moves the value there."""
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    logprob_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_LOGPROB_TOKEN_IDS)] | None = None
    """vLLM's: tokens whose log probabilities are reported instead of the likeliest ones; empty is not given."""
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=MAX_CONTEXT_TOKENS)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    """The end of the prompt that is dropped; left by default."""
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """vLLM's: log probabilities name tokens as token_id:N, because texts of tokens may be equal."""
    return_timings: bool | None = None
    timings_per_token: bool | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=1024)] | None = (
        None
    )
    guided_grammar: str | None = None
    regex: str | None = None
    """SGLang's."""
    ebnf: str | None = None
    """SGLang's."""
    grammar: str | None = None
    """llama.cpp's, in GBNF."""
    json_schema: dict[str, Any] | str | None = None
    """llama.cpp's and SGLang's."""

    # Accepted without effect: nothing is stored, and there is one tier.
    user: ShortText | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    metadata: Annotated[dict[Annotated[str, Meta(max_length=64)], ShortText], Meta(max_length=16)] | None = None
    service_tier: Annotated[str, Meta(max_length=64)] | None = None
    store: bool | None = None
    spaces_between_special_tokens: bool | None = None

    # Not supported: refused unless the value asks for nothing.
    guided_whitespace_pattern: Raw = ABSENT
    lora: Raw = ABSENT
    lora_path: Raw = ABSENT
    mirostat: Raw = ABSENT
    prompt_embeds: Raw = ABSENT
    repetition_detection: Raw = ABSENT
    stop_regex: Raw = ABSENT
    structural_tag: Raw = ABSENT
    suffix: Raw = ABSENT
    use_beam_search: Raw = ABSENT

    def __post_init__(self) -> None:
        if self.seed == -1:  # a random one, as in vLLM and llama.cpp
            self.seed = None
        if self.repetition_penalty is None:
            self.repetition_penalty = self.repeat_penalty
        self.repeat_penalty = None

    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def num_prompt_logprobs(self) -> int:
        """Top log probabilities per token of the prompt; -1 for none at all."""
        return -1 if self.prompt_logprobs is None else self.prompt_logprobs

    @property
    def num_candidates(self) -> int:
        """Choices that are generated for each prompt."""
        return self.n or 1

    @property
    def ranks_candidates(self) -> bool:
        """Whether only the best of the candidates are returned."""
        return self.num_candidates > (self.n or 1)

    @property
    def is_prompt_only(self) -> bool:
        """Whether the answer is the prompt, without generated tokens."""
        return False
