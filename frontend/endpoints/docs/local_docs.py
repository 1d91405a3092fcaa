"""Descriptions of the endpoints of local servers: Ollama's and llama.cpp's."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from penstock.frontend.endpoints.routes import EndpointDoc
from penstock.frontend.schemas.completion import InfillBody, NativeCompletionBody
from penstock.frontend.schemas.ollama import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaModelBody,
)

_OLLAMA, _LLAMA_CPP = "Ollama", "llama.cpp"


class OllamaErrorAnswer(Struct):
    error: str


class LlamaCppErrorObject(Struct):
    code: int
    message: str
    type: str


class LlamaCppErrorAnswer(Struct):
    error: LlamaCppErrorObject


class OllamaLine(Struct):
    """A whole answer, or one line of a stream. The last one has the reason, counts, and durations in nanoseconds."""

    model: str
    created_at: str
    done: bool
    message: dict[str, Any] | None = None
    """Of a chat."""
    response: str | None = None
    """Of a prompt."""
    thinking: str | None = None
    context: list[int] | None = None
    logprobs: list[dict[str, Any]] | None = None
    done_reason: str | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class OllamaEmbedAnswer(Struct):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsAnswer(Struct):
    embedding: list[float]


class OllamaModels(Struct):
    models: list[dict[str, Any]]


class OllamaShowAnswer(Struct):
    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[str]
    parameters: str
    template: str
    modelfile: str
    modified_at: str


class OllamaVersion(Struct):
    version: str


class OllamaStatus(Struct):
    status: str


class NativeCompletionAnswer(Struct):
    """The whole answer, and the last event of a stream; earlier events have the fields up to tokens_evaluated."""

    index: int
    content: str
    tokens: list[int]
    stop: bool
    tokens_predicted: int
    tokens_evaluated: int
    stop_type: str | None = None
    stopping_word: str | None = None
    truncated: bool | None = None
    tokens_cached: int | None = None
    timings: dict[str, Any] | None = None
    generation_settings: dict[str, Any] | None = None


class PropsAnswer(Struct):
    default_generation_settings: dict[str, Any]
    total_slots: int
    chat_template: str
    model_alias: str


CHAT = EndpointDoc(_OLLAMA, "Answers a chat as lines of JSON, or whole.", OllamaLine, OllamaChatBody, OllamaLine)
GENERATE = EndpointDoc(
    _OLLAMA, "Answers a prompt as lines of JSON, or whole.", OllamaLine, OllamaGenerateBody, OllamaLine
)
EMBED = EndpointDoc(_OLLAMA, "Computes an embedding of each text.", OllamaEmbedAnswer, OllamaEmbedBody)
EMBEDDINGS = EndpointDoc(
    _OLLAMA, "Computes an embedding of one text (the older form).", OllamaEmbeddingsAnswer, OllamaEmbeddingsBody
)
TAGS = EndpointDoc(_OLLAMA, "Lists the served models.", OllamaModels)
PS = EndpointDoc(_OLLAMA, "Lists the models that are loaded.", OllamaModels)
SHOW = EndpointDoc(_OLLAMA, "Describes a served model.", OllamaShowAnswer, OllamaModelBody)
API_VERSION = EndpointDoc(_OLLAMA, "Returns the version of Ollama whose API this is.", OllamaVersion)
PULL = EndpointDoc(_OLLAMA, "Succeeds for a model that is served.", OllamaStatus, OllamaModelBody)
DELETE_MODEL = EndpointDoc(_OLLAMA, "Refused: the operator deletes models.", OllamaStatus, OllamaModelBody)
COMPLETION = EndpointDoc(
    _LLAMA_CPP,
    "Continues prompts, whole or as server-sent events.",
    NativeCompletionAnswer,
    NativeCompletionBody,
    NativeCompletionAnswer,
)
INFILL = EndpointDoc(
    _LLAMA_CPP,
    "Fills in code between a prefix and a suffix.",
    NativeCompletionAnswer,
    InfillBody,
    NativeCompletionAnswer,
)
_MODEL = (("model", str, "The model; default: the one that generates."),)
PROPS = EndpointDoc(_LLAMA_CPP, "Describes model and defaults.", PropsAnswer, query=_MODEL)
SLOTS = EndpointDoc(
    _LLAMA_CPP,
    "Lists a slot for each running sequence, and an idle one while none waits.",
    list[dict[str, Any]],
    query=(*_MODEL, ("fail_on_no_slot", int, "1: 503 without an idle slot.")),
)
LORA_ADAPTERS = EndpointDoc(_LLAMA_CPP, "Lists the model's adapters.", list[dict[str, Any]], query=_MODEL)
