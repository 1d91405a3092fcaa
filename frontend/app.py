"""The ASGI application of one worker: its routes, who may use them, and the one place where errors become answers."""

from __future__ import annotations

import logging

from penstock.frontend.access.admission import Admission
from penstock.frontend.endpoints import (
    chat_completions,
    invocations,
    label_scores,
    messages,
    text_completions,
    tokens,
)
from penstock.frontend.endpoints.context import EndpointContext
from penstock.frontend.endpoints.docs import endpoint_docs, local_docs, pooling_docs
from penstock.frontend.endpoints.docs.openapi import Documentation
from penstock.frontend.endpoints.llama_cpp import completion, infill, props, slots
from penstock.frontend.endpoints.ollama import chat, embed, generate, library
from penstock.frontend.endpoints.ollama import models as ollama_models
from penstock.frontend.endpoints.pooling import (
    cohere_embed,
    openai_embeddings,
    rerank,
    tei_embed,
    tei_info,
    tei_predict,
    tei_root,
    tei_tokens,
    vllm_scores,
)
from penstock.frontend.endpoints.responses.endpoint import Responses
from penstock.frontend.endpoints.responses.storage.state_files import open_database
from penstock.frontend.endpoints.responses.storage.store import ResponseStore
from penstock.frontend.endpoints.responses.web_socket import LatestResponses, ResponseSocket, Turn
from penstock.frontend.endpoints.routes import Methods, RouteTable, delete, get, post, select
from penstock.frontend.endpoints.server import adapters, health, metrics, models, quote
from penstock.frontend.endpoints.server.cancel_request import cancel_request
from penstock.frontend.endpoints.server.engine_feed import EngineStreams
from penstock.frontend.endpoints.server.streams import StreamTable
from penstock.frontend.endpoints.static_files import CHAT_POLICY, StaticFiles, manual_routes
from penstock.frontend.generation.models.model_table import ServedModels
from penstock.frontend.schemas.ignored_fields import IgnoredFields
from penstock.frontend.settings import WorkerLimits
from penstock.frontend.telemetry.request_log import ReportSpans
from penstock.frontend.transport.asgi import AsgiMessage, Receive, Scope, Send
from penstock.frontend.transport.disconnect import ClientGoneError
from penstock.frontend.transport.errors import ApiError, ErrorKind, shorten
from penstock.frontend.transport.exchange import Exchange
from penstock.frontend.transport.open_exchanges import OpenExchanges
from penstock.process.admission import TenantPlaces

logger = logging.getLogger("penstock.app")


def _routes(responses: Responses) -> dict[str, Methods]:
    docs = endpoint_docs
    streams = StreamTable(
        {
            "/v1/chat/completions": chat_completions.create_chat_completion,
            "/v1/completions": text_completions.create_completion,
            "/v1/responses": responses.create,
            "/v1/messages": messages.create_message,
            "/invocations": invocations.invoke,
        }
    )
    return {
        "/v1/chat/completions": post(chat_completions.create_chat_completion, docs.CHAT),
        "/v1/completions": post(text_completions.create_completion, docs.COMPLETION),
        "/v1/responses": post(responses.create, docs.RESPONSE),
        "/v1/streams/{stream_id}": get(streams.resume, docs.STREAM) | delete(streams.drop, docs.DROP_STREAM),
        "/v1/messages": post(messages.create_message, docs.MESSAGE),
        "/v1/responses/{response_id}": get(responses.retrieve, docs.RETRIEVE) | delete(responses.delete, docs.DELETE),
        "/v1/responses/{response_id}/cancel": post(responses.cancel, docs.CANCEL),
        "/v1/responses/{response_id}/input_items": get(responses.list_input, docs.INPUT_ITEMS),
        "/v1/responses/compact": post(responses.compact, docs.COMPACT),
        "/v1/responses/input_tokens": post(responses.count_input, docs.COUNT_RESPONSE),
        "/v1/messages/count_tokens": post(messages.count_tokens, docs.COUNT_MESSAGE),
        **_pooling_routes(),
        **_local_routes(),
        "/tokenize": post(tokens.tokenize, docs.TOKENIZE),
        "/detokenize": post(tokens.detokenize, docs.DETOKENIZE),
        "/apply-template": post(tokens.apply_template, docs.TEMPLATE),
        "/tokenizer_info": get(tokens.tokenizer_info, docs.TOKENIZER_INFO),
        "/v1/quote": post(quote.quote, docs.QUOTE),
        "/invocations": post(invocations.invoke, docs.INVOCATIONS),
        "/admin/requests/{request}/cancel": post(cancel_request, docs.CANCEL_REQUEST, needs_key=False),
        "/v1/models": get(models.list_models, docs.MODELS),
        "/v1/models/load": post(models.load, docs.LOAD_MODEL),
        "/v1/models/unload": post(models.unload, docs.UNLOAD_MODEL),
        "/v1/load_lora_adapter": post(adapters.load, docs.LOAD_ADAPTER, needs_key=False),
        "/v1/unload_lora_adapter": post(adapters.unload, docs.UNLOAD_ADAPTER, needs_key=False),
        "/v1/models/{model}": get(models.describe_model, docs.MODEL),
        "/version": get(health.version, docs.VERSION),
        "/v1/load": get(metrics.load, docs.LOAD),
        "/health": get(health.health, docs.HEALTH, needs_key=False),
        "/v1/health": get(health.health, docs.HEALTH, needs_key=False),
        "/ping": get(health.health, docs.HEALTH, needs_key=False),
        health.READY_PATH: get(health.ready, docs.READY, needs_key=False),
        "/metrics": get(metrics.prometheus, docs.METRICS, needs_key=False),
    }


def _pooling_routes() -> dict[str, Methods]:
    docs = pooling_docs
    return {
        "/v1/embeddings": post(openai_embeddings.create_embeddings, docs.EMBEDDINGS),
        "/v1/embed": post(cohere_embed.embed, docs.COHERE_EMBED),
        "/v2/embed": post(cohere_embed.embed, docs.COHERE_EMBED),
        "/v1/rerank": post(rerank.rerank, docs.RERANK),
        "/v2/rerank": post(rerank.rerank, docs.RERANK),
        "/rerank": post(rerank.rerank_either, docs.RERANK_EITHER),
        "/v1/score": post(label_scores.score, docs.SCORE),
        "/score": post(label_scores.score, docs.SCORE),
        "/classify": post(vllm_scores.classify, docs.CLASSIFY),
        "/pooling": post(vllm_scores.pooling, docs.POOLING),
        "/": post(tei_root.root, docs.ROOT),
        "/embed": post(tei_embed.embed, docs.EMBED),
        "/embed_all": post(tei_embed.embed_all, docs.EMBED_ALL),
        "/embed_sparse": post(tei_embed.embed_sparse, docs.EMBED_SPARSE),
        "/similarity": post(tei_embed.similarity, docs.SIMILARITY),
        "/predict": post(tei_predict.predict, docs.PREDICT),
        "/decode": post(tei_tokens.decode, docs.DECODE),
        "/info": get(tei_info.info, docs.INFO),
    }


def _local_routes() -> dict[str, Methods]:
    docs = local_docs
    return {
        "/api/chat": post(chat.chat, docs.CHAT),
        "/api/generate": post(generate.generate, docs.GENERATE),
        "/api/embed": post(embed.embed, docs.EMBED),
        "/api/embeddings": post(embed.embeddings, docs.EMBEDDINGS),
        "/api/tags": get(ollama_models.tags, docs.TAGS),
        "/api/ps": get(ollama_models.ps, docs.PS),
        "/api/show": post(ollama_models.show, docs.SHOW),
        "/api/version": get(ollama_models.version, docs.API_VERSION),
        "/api/pull": post(library.pull, docs.PULL),
        "/api/delete": delete(library.delete, docs.DELETE_MODEL),
        "/completion": post(completion.complete, docs.COMPLETION),
        "/infill": post(infill.infill, docs.INFILL),
        "/props": get(props.props, docs.PROPS),
        "/slots": get(slots.slots, docs.SLOTS),
        "/lora-adapters": get(slots.lora_adapters, docs.LORA_ADAPTERS),
    }


def _page_routes(documentation: Documentation) -> dict[str, Methods]:
    docs = endpoint_docs
    chat = StaticFiles("penstock.frontend.endpoints", "chat_page", "/page/", CHAT_POLICY)
    engine = StaticFiles("penstock.frontend.endpoints.server", "engine_page", "/engine/")
    api = StaticFiles("penstock.frontend.endpoints.docs", "page", "/docs/")
    return {
        "/": get(chat.index, docs.CHAT_PAGE, needs_key=False),
        "/page/{file}": get(chat.file, docs.CHAT_PAGE_FILE, needs_key=False),
        "/page/vendor/{file}": get(chat.file, docs.CHAT_PAGE_FILE, needs_key=False),
        "/engine": get(engine.index, docs.ENGINE_PAGE, needs_key=False),
        "/engine/{file}": get(engine.file, docs.ENGINE_PAGE_FILE, needs_key=False),
        "/engine/events": get(EngineStreams().watch, docs.ENGINE_EVENTS, needs_key=False),
        "/openapi.json": get(documentation.document, docs.DOCUMENT, needs_key=False),
        "/docs": get(api.index, docs.PAGE, needs_key=False),
        "/docs/{file}": get(api.file, docs.PAGE_FILE, needs_key=False),
        **manual_routes(docs.MANUAL),
    }


class App:
    """One worker's application. `exchanges.run` must run beside it."""

    def __init__(
        self,
        models: ServedModels,
        *,
        admission: Admission | None = None,
        limits: WorkerLimits,
        report_spans: ReportSpans | None = None,
    ) -> None:
        """Without admission every request is allowed. Without report_spans none is traced."""
        self._report_spans = report_spans
        self.exchanges = OpenExchanges(
            max_open=limits.max_open_requests,
            keep_alive_interval_s=limits.keep_alive_interval_s,
            client_timeout_s=limits.client_timeout_s,
        )
        self._admission = admission or Admission()
        ignored_fields = IgnoredFields(refuses=limits.refuses_unknown_fields)
        places_to_wait = TenantPlaces(limits.max_held_requests)
        self.context = EndpointContext(models, self._admission, limits, self.exchanges, ignored_fields, places_to_wait)
        database = open_database(limits.response_database, limits.max_response_file_bytes)
        self.store = ResponseStore(
            database,
            max_bytes=limits.max_stored_response_bytes,
            max_responses=limits.max_stored_responses,
            max_idle_s=limits.stored_response_idle_s,
        )
        self.responses = Responses(self.store, self.exchanges)
        self._latest = LatestResponses(limits.max_stored_response_bytes)
        self.routes = _routes(self.responses)
        for path, methods in _page_routes(Documentation(self.routes, health.VERSION)).items():
            self.routes[path] = self.routes.get(path, {}) | methods
        self._table = RouteTable(self.routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._serve_web_socket(scope, receive, send)
            return
        if scope["type"] != "http":
            raise ValueError(f"neither HTTP nor a WebSocket: {scope['type']}")
        await self._serve(Exchange(scope, receive, send, self.exchanges.incomplete))

    async def _serve_web_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit the upgrade. Then each message is a request of its own, admitted like any other."""

        async def send_http(message: AsgiMessage) -> None:
            await send(message | {"type": f"websocket.{message['type']}"})

        upgrade = Exchange(scope | {"method": "GET"}, receive, send_http)
        try:
            self._admission.check_host(upgrade)
            # A browser asks nobody before it opens a WebSocket.
            self._admission.cors.refuse_foreign(upgrade, "open a WebSocket")
            self._admission.identify(upgrade)
        except ApiError as error:
            logger.info("refused a WebSocket: %d %s", error.kind.status, error.kind.name)
            await upgrade.respond_error(error)
            return
        limits = self.context.limits
        socket = ResponseSocket(
            scope,
            receive,
            send,
            self._serve,
            self._latest,
            max_queued_bytes=limits.body_limit(has_pictures=self.context.takes_pictures),
            idle_timeout_s=limits.idle_socket_timeout_s,
        )
        await socket.run()

    async def _serve(self, exchange: Exchange, turn: Turn | None = None) -> None:
        """Answer one request, of a WebSocket if it is a turn."""
        exchange.report_spans = self._report_spans
        self.exchanges.add(exchange)
        try:
            await self._answer(exchange, turn)
        except ClientGoneError:
            logger.debug("the client of %s hung up", exchange.request_id)
        finally:
            self.exchanges.discard(exchange)
            if exchange.status is not None:
                count_status = exchange.count_status or self.context.models.generation.backend.board.count_response
                count_status(exchange.status)
            exchange.finish()

    async def _answer(self, exchange: Exchange, turn: Turn | None) -> None:
        """Answer the request, with an error if its handler raises one. Raises ClientGoneError."""
        try:
            await self._handle(exchange, turn)
        except ApiError as error:
            if exchange.is_event_stream:  # keep-alive comments were sent while the request waited
                await exchange.end_events(error)
                return
            if exchange.started:
                logger.error("%s failed after its answer began, closing: %s", exchange.request_id, error.message)
                exchange.drop()
                return
            # Probes ask many times a second while the backend loads.
            level = logging.DEBUG if exchange.path == health.READY_PATH else logging.INFO
            kind, param = error.kind, error.param or ""
            where = f"{exchange.method} {shorten(exchange.path)}" if kind is ErrorKind.UNKNOWN_PATH else param
            try:
                await exchange.respond_error(error)
            finally:  # the API's own status is known now
                status = exchange.status or kind.status
                logger.log(level, "refused %s: %d %s %s", exchange.request_id, status, kind.name, where)
        except ClientGoneError:
            raise
        except Exception:  # noqa: BLE001 - logged there
            unforeseen = exchange.unforeseen()
            if exchange.is_event_stream:
                await exchange.end_events(unforeseen)
            elif exchange.started:
                exchange.drop()
            else:
                await exchange.respond_error(unforeseen)

    async def _handle(self, exchange: Exchange, turn: Turn | None) -> None:
        """Check who sends the request, and pass it to its endpoint. Raises ApiError, ClientGoneError."""
        exchange.more_headers = self._admission.cors.headers(exchange)
        self._admission.check_host(exchange)
        methods = self._table.methods(exchange.path)
        if (allowed := self._admission.cors.preflight(exchange, methods)) is not None:
            await exchange.start(204, allowed)
            await exchange.send(b"", more=False)
            return
        route = select(methods, exchange.method)
        if route.needs_key:
            self._admission.identify(exchange)
        if turn is not None:
            await self.responses.create(exchange, self.context, turn)
            return
        await route.handler(exchange, self.context)
