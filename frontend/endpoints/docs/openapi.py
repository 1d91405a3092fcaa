"""GET /openapi.json: the OpenAPI 3.1 document, from the routes and the types of their bodies and answers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from http import HTTPStatus
from typing import Any

import msgspec
from msgspec import Struct

from penstock.frontend.endpoints.context import EndpointContext
from penstock.frontend.endpoints.docs import local_docs
from penstock.frontend.endpoints.docs.field_docs import FIELD_DOCS, effective_fields
from penstock.frontend.endpoints.routes import EndpointDoc, Route
from penstock.frontend.endpoints.server.health import READY_PATH
from penstock.frontend.schemas import messages, ollama, responses
from penstock.frontend.schemas.answers import AnthropicErrorAnswer, ErrorAnswer
from penstock.frontend.schemas.chat import ChatBody
from penstock.frontend.schemas.completion import (
    UNSUPPORTED_INFILL,
    UNSUPPORTED_NATIVE,
    CompletionBody,
    InfillBody,
    NativeCompletionBody,
)
from penstock.frontend.schemas.messages import CountTokensBody, MessagesBody
from penstock.frontend.schemas.pooling import tei
from penstock.frontend.schemas.pooling.answers import CohereErrorAnswer, TeiErrorAnswer
from penstock.frontend.schemas.pooling.cohere import CohereEmbedBody
from penstock.frontend.schemas.pooling.common import PooledBody
from penstock.frontend.schemas.pooling.openai import EmbeddingsBody
from penstock.frontend.schemas.pooling.rerank import RerankBody
from penstock.frontend.schemas.pooling.sglang import LabelScoreBody
from penstock.frontend.schemas.pooling.tei import TeiBody
from penstock.frontend.schemas.pooling.vllm import ClassifyBody, PoolingBody, ScoreBody
from penstock.frontend.schemas.responses import ResponsesBody
from penstock.frontend.schemas.utilities import (
    DetokenizeBody,
    LoadAdapterBody,
    ModelCommandBody,
    TokenizeBody,
    UnloadAdapterBody,
)
from penstock.frontend.transport.errors import (
    ANTHROPIC_PATH,
    COHERE_PATHS,
    LLAMA_CPP_PATHS,
    TEI_STATUSES,
    ErrorKind,
    error_format_for,
    is_of_ollama,
    is_of_tei,
)
from penstock.frontend.transport.exchange import Exchange

_QUESTION = "What is the capital of Japan?"
_TEXTS = ["Tokyo is the capital of Japan.", "Rice is a grain."]
_MESSAGES = [{"role": "user", "content": _QUESTION}]
_TOKENS = [1, 2, 3]

BODY_EXAMPLES: dict[type[Struct], dict[str, Any]] = {
    ChatBody: {"messages": _MESSAGES, "max_completion_tokens": 60, "temperature": 0.7},
    CompletionBody: {"prompt": "The capital of Japan is", "max_tokens": 60, "temperature": 0.7},
    MessagesBody: {"messages": _MESSAGES, "max_tokens": 60},
    CountTokensBody: {"messages": _MESSAGES},
    ResponsesBody: {"input": _QUESTION, "max_output_tokens": 60},
    TokenizeBody: {"prompt": _QUESTION, "return_token_strs": True},
    tei.TeiTokenizeBody: {"inputs": [_QUESTION]},
    DetokenizeBody: {"tokens": _TOKENS},
    tei.DecodeBody: {"ids": _TOKENS},
    LoadAdapterBody: {"lora_name": "sql", "lora_path": "sql-lora"},
    UnloadAdapterBody: {"lora_name": "sql"},
    ModelCommandBody: {"model": "a-model"},
    EmbeddingsBody: {"input": _TEXTS},
    CohereEmbedBody: {"texts": _TEXTS, "input_type": "search_document", "embedding_types": ["float"]},
    PoolingBody: {"input": _TEXTS},
    tei.EmbedBody: {"inputs": _TEXTS},
    tei.EmbedPlainBody: {"inputs": _TEXTS},
    tei.SimilarityBody: {"inputs": {"source_sentence": _QUESTION, "sentences": _TEXTS}},
    RerankBody: {"query": _QUESTION, "documents": _TEXTS, "return_documents": True},
    tei.TeiRerankBody: {"query": _QUESTION, "texts": _TEXTS, "return_text": True},
    ScoreBody: {"text_1": _QUESTION, "text_2": _TEXTS},
    LabelScoreBody: {"query": _QUESTION, "items": _TEXTS, "label_token_ids": _TOKENS},
    ClassifyBody: {"input": _TEXTS},
    tei.PredictBody: {"inputs": _TEXTS},
    ollama.OllamaChatBody: {"model": "a-model", "messages": _MESSAGES, "stream": False, "options": {"num_predict": 60}},
    ollama.OllamaGenerateBody: {
        "model": "a-model",
        "prompt": _QUESTION,
        "stream": False,
        "options": {"num_predict": 60},
    },
    ollama.OllamaEmbedBody: {"model": "a-model", "input": _TEXTS},
    ollama.OllamaEmbeddingsBody: {"model": "a-model", "prompt": _QUESTION},
    ollama.OllamaModelBody: {"model": "a-model"},
    NativeCompletionBody: {"prompt": "def join(path, *paths):", "n_predict": 60},
    InfillBody: {"input_prefix": "def join(path, *paths):\n", "input_suffix": "    return path\n", "n_predict": 60},
}


_JSON = "application/json"
_REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(\w+)\}")
_JSON_TYPES = {bool: "boolean", int: "integer", str: "string"}
_REFUSED_FIELDS: dict[type[Struct], Iterable[str]] = {
    responses.ResponsesBody: responses.UNSUPPORTED_FIELDS,
    messages.MessagesBody: messages.UNSUPPORTED_FIELDS,
    messages.CountTokensBody: messages.UNSUPPORTED_FIELDS,
    NativeCompletionBody: UNSUPPORTED_NATIVE,
    InfillBody: UNSUPPORTED_INFILL,
}

_ERROR_TYPES = (
    ErrorAnswer,
    AnthropicErrorAnswer,
    CohereErrorAnswer,
    TeiErrorAnswer,
    local_docs.OllamaErrorAnswer,
    local_docs.LlamaCppErrorAnswer,
)
_ANY_ERRORS = (ErrorKind.FOREIGN_HOST, ErrorKind.INTERNAL)
_KEY_ERRORS = (ErrorKind.BAD_KEY,)
_PATH_ERRORS = (ErrorKind.UNKNOWN_PATH,)
_MODEL_ERRORS = (ErrorKind.UNAVAILABLE,)
_BODY_ERRORS = (
    ErrorKind.INVALID_VALUE,
    ErrorKind.UNKNOWN_MODEL,
    ErrorKind.TOO_SLOW,
    ErrorKind.BODY_TOO_LARGE,
    ErrorKind.UNSUPPORTED_BODY,
    ErrorKind.OVERLOADED,
    ErrorKind.SHUTTING_DOWN,
)
_GENERATION_ERRORS = (ErrorKind.EXPIRED,)


def document(routes: Mapping[str, Mapping[str, Route]], version: str) -> dict[str, Any]:
    """Return the document of all routes. Their paths have parameters in braces."""
    paths = {
        path: {method.lower(): _operation(path, method, route) for method, route in methods.items() if method != "HEAD"}
        for path, methods in routes.items()
    }
    docs = [route.doc for methods in routes.values() for route in methods.values()]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Penstock",
            "version": version,
            "description": "The APIs of OpenAI, Anthropic, Ollama and llama.cpp, of embeddings and reranking.",
        },
        "tags": [{"name": tag} for tag in dict.fromkeys(doc.tag for doc in docs)],
        "paths": paths,
        "components": {
            "schemas": _schemas(docs),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            },
        },
    }


def _operation(path: str, method: str, route: Route) -> dict[str, Any]:
    doc = route.doc
    words = re.findall(r"\w+", path.replace("{", "by_"))
    operation: dict[str, Any] = {
        "operationId": "_".join([method.lower(), *words]),
        "tags": [doc.tag],
        "summary": doc.summary,
        "responses": {"200": _answer(doc, error_format_for(path, method).stream.content_type)}
        | _errors(path, method, route),
        # {} because a server without keys needs none.
        "security": [{"bearer": []}, {"header": []}, {}] if route.needs_key else [],
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PARAMETER.findall(path)
    ]
    parameters += [
        {"name": name, "in": "query", "description": text, "schema": {"type": _JSON_TYPES[kind]}}
        for name, kind, text in doc.query
    ]
    if _runs_a_model(doc):
        parameters += _GENERATION_HEADERS
    if parameters:
        operation["parameters"] = parameters
    if doc.body is not None:
        other = [] if doc.other is None else [doc.other[0]]
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": _any_of([doc.body, *other])}}}
    return operation


def _runs_a_model(doc: EndpointDoc) -> bool:
    is_pooled = doc.body is not None and issubclass(doc.body, PooledBody | TeiBody)
    return is_pooled or (doc.body is not None and doc.events is not None)


_GENERATION_HEADERS = [
    {"name": name, "in": "header", "description": text, "schema": schema}
    for name, text, schema in (
        ("X-Request-Id", "Returned with the answer and written to the log.", {"type": "string", "maxLength": 128}),
        (
            "X-Request-Timeout-Ms",
            "Like timeout_ms; the smaller of the two applies.",
            {"type": "integer", "minimum": 1, "maximum": 86_400_000},
        ),
        (
            "X-Penstock-Refuse-Late",
            "on: refuse the request (429) if it is expected to miss its time limit.",
            {"type": "string", "enum": ["on", "off"]},
        ),
        (
            "X-Penstock-Coalesce",
            "off: the request is not coalesced with equal ones.",
            {"type": "string", "enum": ["on", "off"]},
        ),
    )
]


def _answer(doc: EndpointDoc, stream_type: bytes) -> dict[str, Any]:
    if isinstance(doc.answer, str):
        content: dict[str, Any] = {doc.answer: {"schema": {"type": "string"}}}
    elif doc.answer is Struct:
        content = {_JSON: {"schema": {"type": "object"}}}
    else:
        other = [] if doc.other is None else [doc.other[1]]
        content = {_JSON: {"schema": _any_of([doc.answer, *other])}}
    if doc.events is not None:
        content[stream_type.partition(b";")[0].decode()] = {"schema": _reference(doc.events)}
    return {"description": doc.summary, "content": content}


def _errors(path: str, method: str, route: Route) -> dict[str, Any]:
    doc, kinds = route.doc, [*_ANY_ERRORS]
    kinds += _KEY_ERRORS if route.needs_key else ()
    kinds += _BODY_ERRORS if doc.body is not None else ()
    kinds += _GENERATION_ERRORS if _runs_a_model(doc) else ()
    kinds += _PATH_ERRORS if doc.can_be_missing else ()
    kinds += _MODEL_ERRORS if route.needs_key or path == READY_PATH else ()
    is_anthropic = path.startswith(ANTHROPIC_PATH)
    error = _any_of([_error_type(path, method), *([] if doc.other is None else [TeiErrorAnswer])])
    statuses = {kind.status for kind in kinds} | ({529} if is_anthropic else set())
    if is_of_tei(path, method) or doc.other is not None:
        statuses |= set(TEI_STATUSES)
    return {
        str(status): {"description": _phrase(status), "content": {_JSON: {"schema": error}}}
        for status in sorted(statuses)
    }


def _error_type(path: str, method: str) -> type[Struct]:
    if is_of_tei(path, method):
        return TeiErrorAnswer
    if path in COHERE_PATHS:
        return CohereErrorAnswer
    if is_of_ollama(path):
        return local_docs.OllamaErrorAnswer
    if path in LLAMA_CPP_PATHS:
        return local_docs.LlamaCppErrorAnswer
    return AnthropicErrorAnswer if path.startswith(ANTHROPIC_PATH) else ErrorAnswer


def _phrase(status: int) -> str:
    own = {499: "The request's own time limit has passed", 529: "Overloaded"}
    return own.get(status) or HTTPStatus(status).phrase


def _any_of(kinds: list[Any]) -> dict[str, Any]:
    schemas = [_reference(kind) for kind in kinds]
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


@cache
def _reference(kind: Any) -> dict[str, Any]:
    """Most kinds occur on many routes, and msgspec takes milliseconds for each."""
    (schema,), _ = msgspec.json.schema_components((kind,), ref_template=_REF)
    return schema


def _schemas(docs: Iterable[EndpointDoc]) -> dict[str, Any]:
    others = [doc.other for doc in docs if doc.other is not None]
    bodies = {doc.body for doc in docs if doc.body is not None} | {body for body, _ in others}
    kinds: list[Any] = [*bodies, *(doc.events for doc in docs if doc.events is not None), *_ERROR_TYPES]
    kinds += [doc.answer for doc in docs if not isinstance(doc.answer, str) and doc.answer is not Struct]
    in_order = sorted([*kinds, *(answer for _, answer in others)], key=str)
    _, schemas = msgspec.json.schema_components(in_order, ref_template=_REF)
    for body in bodies:
        properties = schemas[body.__name__]["properties"]
        shown = effective_fields(body) - set(_REFUSED_FIELDS.get(body, ()))
        for name in list(properties):
            if name not in shown:
                del properties[name]
            elif name in FIELD_DOCS:
                properties[name]["description"] = FIELD_DOCS[name]
        schemas[body.__name__]["examples"] = [BODY_EXAMPLES[body]]
    return {name: schemas[name] for name in sorted(schemas)}


class Documentation:
    """Serves the document. It stays the same while the process runs."""

    def __init__(self, routes: Mapping[str, Mapping[str, Route]], version: str) -> None:
        self._routes = routes
        self._version = version
        self._document: bytes | None = None

    async def document(self, exchange: Exchange, _context: EndpointContext) -> None:
        if self._document is None:
            self._document = msgspec.json.encode(document(self._routes, self._version))
        await exchange.respond(200, self._document)
