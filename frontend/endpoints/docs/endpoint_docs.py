"""Descriptions of all endpoints: what each does, takes and returns. The routes in `app` pair them with handlers."""

from __future__ import annotations

from msgspec import Struct

from penstock.frontend.endpoints.routes import EndpointDoc
from penstock.frontend.schemas import answers
from penstock.frontend.schemas.chat import ChatBody
from penstock.frontend.schemas.completion import CompletionBody
from penstock.frontend.schemas.messages import CountTokensBody, MessagesBody
from penstock.frontend.schemas.pooling.answers import LocatedToken
from penstock.frontend.schemas.pooling.tei import TeiTokenizeBody
from penstock.frontend.schemas.responses import ResponsesBody
from penstock.frontend.schemas.utilities import (
    DetokenizeBody,
    LoadAdapterBody,
    ModelCommandBody,
    TokenizeBody,
    UnloadAdapterBody,
)

HTML, CSS, SCRIPT, TEXT = "text/html", "text/css", "text/javascript", "text/plain"

CHAT = EndpointDoc(
    "Generation",
    "Answers a chat, whole or as server-sent events that end with [DONE].",
    answers.ChatAnswer,
    ChatBody,
    answers.ChatChunk,
)
COMPLETION = EndpointDoc(
    "Generation",
    "Completes texts or token ids, whole or as server-sent events that end with [DONE].",
    answers.CompletionAnswer,
    CompletionBody,
    answers.CompletionAnswer,
)
MESSAGE = EndpointDoc(
    "Generation", "Anthropic's Messages API.", answers.MessageAnswer, MessagesBody, answers.MessageEvent
)
COUNT_MESSAGE = EndpointDoc(
    "Tokens", "Counts the tokens of a message's input.", answers.CountTokensAnswer, CountTokensBody
)
RESPONSE = EndpointDoc(
    "Generation", "OpenAI's Responses API.", answers.ResponseAnswer, ResponsesBody, answers.ResponseEvent
)
COUNT_RESPONSE = EndpointDoc("Tokens", "Counts the tokens of a response's input.", answers.InputTokens, ResponsesBody)
COMPACT = EndpointDoc(
    "Generation", "Summarizes a conversation for the input of the next response.", answers.CompactAnswer, ResponsesBody
)
RETRIEVE = EndpointDoc(
    "Kept responses",
    "Returns a kept response as it stands, or its events again.",
    answers.ResponseAnswer,
    events=answers.ResponseEvent,
    query=(
        ("stream", bool, "true: return its events."),
        ("starting_after", int, "Only the events after this sequence number."),
    ),
    can_be_missing=True,
)
DELETE = EndpointDoc(
    "Kept responses",
    "Deletes a response; cancels one that runs.",
    answers.DeletedResponse,
    can_be_missing=True,
)
CANCEL = EndpointDoc("Kept responses", "Cancels a background response.", answers.ResponseAnswer, can_be_missing=True)
INPUT_ITEMS = EndpointDoc(
    "Kept responses",
    "Lists the input items of a response, in pages.",
    answers.InputItems,
    query=(
        ("limit", int, "Items per page, 1 to 100; default 20."),
        ("order", str, "asc or desc; default desc."),
        ("after", str, "Only the items after the one with this id."),
    ),
    can_be_missing=True,
)
STREAM = EndpointDoc(
    "Streams",
    "Returns the events of a stream that lingers, in its endpoint's format: those after Last-Event-ID, or all.",
    "text/event-stream",
    can_be_missing=True,
)
DROP_STREAM = EndpointDoc(
    "Streams", "Ends a stream that lingers, and deletes what is kept of it.", answers.DeletedStream, can_be_missing=True
)
TOKENIZE = EndpointDoc(
    "Tokens",
    "Returns the tokens of a text or a chat, or with inputs as TEI does.",
    answers.TokenizeAnswer,
    TokenizeBody,
    other=(TeiTokenizeBody, list[list[LocatedToken]]),
)
DETOKENIZE = EndpointDoc("Tokens", "Returns the text of tokens.", answers.DetokenizeAnswer, DetokenizeBody)
TEMPLATE = EndpointDoc("Tokens", "Returns a chat's prompt as text.", answers.TemplateAnswer, ChatBody)
TOKENIZER_INFO = EndpointDoc(
    "Tokens",
    "Returns the tokenizer's configuration with the chat template in use (vLLM's).",
    answers.TokenizerInfo,
    query=(("model", str, "The model; default: the one that generates."),),
)
INVOCATIONS = EndpointDoc(
    "Generation",
    "Answers any body as the endpoint for its fields does (Amazon SageMaker's).",
    answers.ChatAnswer,
    ChatBody,
    answers.ChatChunk,
    other=(CompletionBody, answers.CompletionAnswer),
)
QUOTE = EndpointDoc(
    "Generation",
    "Tells when a chat or completion would start and finish, without running it.",
    answers.QuoteAnswer,
    ChatBody,
    other=(CompletionBody, answers.QuoteAnswer),
)
CANCEL_REQUEST = EndpointDoc(
    "Server",
    "Cancels an open request of any client. Needs the admin key; penstock top shows the names of requests.",
    answers.CancelledRequest,
    can_be_missing=True,
)
MODELS = EndpointDoc("Server", "Lists the served models.", answers.ModelsAnswer)
MODEL = EndpointDoc("Server", "Describes a served model.", answers.ModelAnswer, can_be_missing=True)
LOAD_MODEL = EndpointDoc(
    "Server", "Loads a model that is asleep; needs an admin key.", answers.ModelStateAnswer, ModelCommandBody
)
UNLOAD_MODEL = EndpointDoc(
    "Server", "Lets a model fall asleep; needs an admin key.", answers.ModelStateAnswer, ModelCommandBody
)
LOAD_ADAPTER = EndpointDoc(
    "Server", "Loads a LoRA adapter (vLLM's); needs an admin key.", answers.AdapterAnswer, LoadAdapterBody
)
UNLOAD_ADAPTER = EndpointDoc(
    "Server", "Unloads a LoRA adapter (vLLM's); needs an admin key.", answers.AdapterAnswer, UnloadAdapterBody
)
VERSION = EndpointDoc("Server", "Returns this server's version.", answers.VersionAnswer)
LOAD = EndpointDoc(
    "Server", "Counts this worker's open requests and the whole system's sequences and pages.", answers.LoadAnswer
)
HEALTH = EndpointDoc("Server", "Whether this frontend process is alive.", answers.HealthAnswer)
READY = EndpointDoc("Server", "Whether requests can be answered.", answers.ReadyAnswer)
METRICS = EndpointDoc("Server", "Metrics in Prometheus' text format.", TEXT)
DOCUMENT = EndpointDoc("Server", "This document.", Struct)
PAGE = EndpointDoc("Server", "This document as a page.", HTML)
PAGE_FILE = EndpointDoc("Server", "The page's script or style.", SCRIPT, can_be_missing=True)
MANUAL = EndpointDoc("Server", "A page of the manual.", HTML, can_be_missing=True)
CHAT_PAGE = EndpointDoc("Server", "A page to chat with the model.", HTML)
CHAT_PAGE_FILE = EndpointDoc("Server", "The chat page's scripts and style.", SCRIPT, can_be_missing=True)
ENGINE_PAGE = EndpointDoc("Server", "A page that shows what the scheduler does.", HTML)
ENGINE_PAGE_FILE = EndpointDoc("Server", "The engine page's scripts and style.", SCRIPT, can_be_missing=True)
ENGINE_EVENTS = EndpointDoc(
    "Server",
    "Streams the engine's steps, sequences and pages, for the engine page; others' as sums, see --engine-view. With "
    "keys it needs one, or the admin key.",
    "text/event-stream",
    query=(
        ("model", str, "The model whose engine is shown; the first one by default."),
        ("replica", str, "The replica whose engine is shown, by its label in /metrics; the first one by default."),
    ),
)
