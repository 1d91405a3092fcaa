"""The answers of the endpoints, for /openapi.json. The formats write them by hand; a test compares the two."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct


class ErrorObject(Struct):
    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(Struct):
    """OpenAI's error object."""

    error: ErrorObject


class AnthropicErrorObject(Struct):
    type: str
    message: str


class AnthropicErrorAnswer(Struct):
    """Anthropic's error object."""

    type: Literal["error"]
    error: AnthropicErrorObject
    request_id: str


class PromptTokensDetails(Struct):
    cached_tokens: int


class CompletionTokensDetails(Struct):
    reasoning_tokens: int


class PenstockUsage(Struct):
    coalesced: bool


class UsageAnswer(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    penstock: PenstockUsage


class TimingsAnswer(Struct):
    """llama.cpp's timings, followed by Penstock's own from queue_ms on."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float | None
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float | None
    predicted_per_second: float | None
    queue_ms: float
    ttft_ms: float
    total_ms: float
    preemptions: int


class FunctionCallAnswer(Struct):
    name: str
    arguments: str


class ToolCallAnswer(Struct):
    id: str
    type: Literal["function"]
    function: FunctionCallAnswer


class AnswerMessage(Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallAnswer] | None = None


FinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoice(Struct):
    index: int
    message: AnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class ChatAnswer(Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChoice]
    usage: UsageAnswer
    timings: TimingsAnswer | None = None


class ChatChunkChoice(Struct):
    index: int
    delta: dict[str, Any]
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatChunk(Struct):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChunkChoice]
    usage: UsageAnswer | None = None
    timings: TimingsAnswer | None = None


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class CompletionAnswer(Struct):
    """A whole completion, and each chunk of a streamed one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionChoice]
    usage: UsageAnswer | None = None
    timings: TimingsAnswer | None = None


class ResponseAnswer(Struct):
    """OpenAI's response object: the fields that are always present. It also repeats fields of the request."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[dict[str, Any]]


class ResponseEvent(Struct):
    """One of OpenAI's events, such as response.output_text.delta."""

    type: str
    sequence_number: int


class DeletedResponse(Struct):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(Struct):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool


class CompactAnswer(Struct):
    """A shortened conversation, to be sent as the input of the next request."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[dict[str, Any]]
    usage: dict[str, Any]


class InputTokens(Struct):
    object: Literal["response.input_tokens"]
    input_tokens: int


class MessageAnswer(Struct):
    """Anthropic's message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: dict[str, Any]


class MessageEvent(Struct):
    """One of Anthropic's events, such as content_block_delta."""

    type: str


class CountTokensAnswer(Struct):
    input_tokens: int


class TokenizeAnswer(Struct):
    """vLLM's object; for a request with `content`, llama.cpp's, which has only tokens."""

    tokens: list[Any]
    count: int | None = None
    max_model_len: int | None = None
    token_strs: list[str] | None = None


class DetokenizeAnswer(Struct):
    prompt: str
    content: str


class TokenizerInfo(Struct):
    """tokenizer_config.json, with these fields."""

    tokenizer_class: str
    chat_template: str | None


class TemplateAnswer(Struct):
    prompt: str


class VersionAnswer(Struct):
    version: str


class LoadAnswer(Struct):
    server_load: int
    running: int | None = None
    waiting: int | None = None
    pages_used: int | None = None
    pages_total: int | None = None


class EndToken(Struct):
    id: int
    text: str


class SamplingDefaults(Struct):
    """The settings of requests that do not name them."""

    temperature: float
    top_p: float
    top_k: int
    """0 is no limit."""
    min_p: float
    typical_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    dry_multiplier: float
    """0 is off, as of xtc_probability, top_n_sigma and dynatemp_range."""
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    """-1 is all tokens."""
    xtc_probability: float
    xtc_threshold: float
    top_n_sigma: float
    dynatemp_range: float
    dynatemp_exponent: float


class ModelAnswer(Struct):
    id: str
    object: Literal["model"]
    created: int
    """0 for a model that has never been loaded. Then the fields down to its state are missing."""
    owned_by: str
    max_model_len: int | None = None
    kv_cache_tokens: int | None = None
    """Tokens of all sequences together; null without a KV cache."""
    max_tokens_per_second: float | None = None
    """The most that a single request gets, measured by one step at the start; null if the model generates no text."""
    vocab_size: int | None = None
    end_tokens: list[EndToken] | None = None
    """The tokens that end an answer; null if the model generates no text."""
    default_sampling: SamplingDefaults | None = None
    """Null if the model generates no text."""
    state: Literal["asleep", "loading", "awake"] | None = None
    """Missing, like the fields after it, if no model of the server sleeps."""
    last_wake_seconds: float | None = None
    last_error: str | None = None
    """Why the last attempt to load it failed."""


class ModelsAnswer(Struct):
    object: Literal["list"]
    data: list[ModelAnswer]


class ModelStateAnswer(Struct):
    model: str
    state: Literal["asleep", "loading", "awake"]
    last_wake_seconds: float | None


class AdapterAnswer(Struct):
    id: str
    object: Literal["lora_adapter"]
    is_loaded: bool


class HealthAnswer(Struct):
    status: Literal["ok"]


class ReadyAnswer(Struct):
    status: Literal["ready"]
    running: int | None = None
    waiting: int | None = None
    pages_used: int | None = None
    pages_total: int | None = None


class DeletedStream(Struct):
    object: Literal["stream.deleted"]


class CancelledRequest(Struct):
    """The request was open and has been cancelled."""

    object: Literal["request.cancelled"] = "request.cancelled"


class QuoteAnswer(Struct, kw_only=True):
    """Times are milliseconds from now; null is unknown."""

    object: Literal["quote"] = "quote"
    model: str
    status: Literal["known", "unknown"]
    queue_position: int
    prompt_tokens: int
    cached_tokens: int
    coalesced: bool
    expected_completion_tokens: int | None
    expected_ttft_ms: int | None
    expected_finish_ms: int | None
    latest_finish_ms: int | None
    meets_deadline: bool | None
