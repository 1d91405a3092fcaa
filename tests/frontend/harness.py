"""A frontend without sockets: raw bytes go into the real protocol and app, over a fake backend."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import uvicorn
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from uvicorn.server import ServerState

from penstock.frontend.access.admission import Admission
from penstock.frontend.access.api_keys import named_keys
from penstock.frontend.app import App
from penstock.frontend.generation.models.model_table import ServedModels
from penstock.frontend.generation.models.served_model import ModelKeeper, ServedModel, model_syntax_of
from penstock.frontend.parsing.syntax.model_syntax import ModelSyntax
from penstock.frontend.settings import ParserNames, WorkerLimits
from penstock.frontend.text.chat_template import ChatTemplate
from penstock.frontend.text.tokenizer import ModelTokenizer
from penstock.frontend.transport.serving.server import server_config
from penstock.process.native_libraries import GuardedTokenizer
from penstock.shm.client import BackendUnavailable, GenerationRequest, Overloaded, Question, TokenBatch
from penstock.shm.memory.board import FrontendBoard
from penstock.shm.messages import (
    AdapterChange,
    FailureCode,
    Finish,
    Keep,
    ModelCard,
    Quote,
    QuoteTerms,
    RequestName,
    Sampling,
    StreamName,
)
from tests.frontend.raw_http import MockTransport, Response, ResponseReader

CHAT_TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def byte_level_tokenizer() -> Tokenizer:
    """Return a tokenizer with a token for every byte and some pairs, and <|end|> and two chat marks as special
    tokens."""
    return Tokenizer.from_str(_trained_tokenizer())


@cache
def _trained_tokenizer() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, été 猫 🐈"] * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|end|>", "<|im_start|>", "<|im_end|>")])
    text: str = tokenizer.to_str()
    return text


TOKENIZER = byte_level_tokenizer()
END_TOKEN: int = TOKENIZER.token_to_id("<|end|>")
VOCAB_SIZE: int = TOKENIZER.get_vocab_size()


def token_ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def save_model_files(directory: Path, *, marks_turns: bool = True) -> None:
    """Write the files of a checkpoint that a frontend reads. Without marks no token ends a turn: a scripted backend may
    generate any."""
    template = CHAT_TEMPLATE if marks_turns else CHAT_TEMPLATE.replace("<|im_start|>", "").replace("<|im_end|>", "")
    TOKENIZER.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


def model_card(**changes: Any) -> ModelCard:
    fields: dict[str, Any] = {
        "model_id": "test/model",
        "model_dir": "",
        "created": 1_700_000_000,
        "vocab_size": VOCAB_SIZE,
        "max_context_tokens": 1000,
        "max_waiting": 100,
        "eos_token_ids": (END_TOKEN,),
        "default_sampling": Sampling(),
        "fingerprint": "fp_test",
        "quantization": "int8",
    }
    return ModelCard(**(fields | changes))


class FakeStream:
    """A TokenStream that yields the given batches."""

    def __init__(self, request: GenerationRequest, batches: Iterable[TokenBatch]) -> None:
        self.request = request
        self.request_id, self.cached_tokens = 7, 3
        self.num_moves = self.num_preemptions = self.num_taken = 0
        self.backend = ""
        self.queue_s = 0.0
        self.is_coalesced: bool | None = None
        self.cancelled = asyncio.Event()
        self.ended = self.joins = False
        self.finish = Finish.NONE
        self.quote: Quote | None = None
        self.record = b""
        self.keep = Keep.NOTHING
        self.submitted_ns = time.monotonic_ns()
        self.receive: Callable[[list[int]], bool] | None = None
        self._batches = deque(batches)
        self._more = asyncio.Event()

    @property
    def deadline_s(self) -> float | None:
        return self.request.deadline_s

    @property
    def num_generated(self) -> int:
        return self.num_taken + sum(len(batch.token_ids) for batch in self._batches)

    def push(self, *token_ids: int, finish: Finish = Finish.NONE, failure: FailureCode | None = None) -> None:
        if self._batches or finish or self.receive is None or not self.receive([*token_ids]):
            self._batches.append(TokenBatch(list(token_ids), finish, failure))
            self._more.set()
        else:
            self.num_taken += len(token_ids)

    def cancel(self, keep: Keep = Keep.NOTHING) -> None:
        if not self.ended and not self.cancelled.is_set():
            self.keep = keep
            self.cancelled.set()
            self._batches.append(TokenBatch([], Finish.CANCELLED))
            self._more.set()

    def __aiter__(self) -> AsyncIterator[TokenBatch]:
        return self

    async def __anext__(self) -> TokenBatch:
        if self.ended:
            raise StopAsyncIteration
        while not self._batches:
            self._more.clear()
            await self._more.wait()
        batch = self._batches.popleft()
        if batch.token_ids:
            self.is_coalesced = self.joins
        self.num_taken += len(batch.token_ids)
        self.finish = batch.finish
        self.ended = batch.finish is not Finish.NONE
        return batch

    async def result(self) -> TokenBatch:
        """Play an AnswerStream."""
        return await anext(self)


Script = Callable[[GenerationRequest], Iterable[TokenBatch]]


def says(text: str, *, batch_size: int = 1, finish: Finish = Finish.STOP) -> Script:
    """Answer every request with this text, cut to its max_tokens."""

    def script(request: GenerationRequest) -> list[TokenBatch]:
        ids = token_ids(text) + ([END_TOKEN] if finish is Finish.STOP else [])
        ended = finish
        if len(ids) > request.max_tokens:
            ids, ended = ids[: request.max_tokens], Finish.LENGTH
        batches = [TokenBatch(ids[start : start + batch_size]) for start in range(0, len(ids), batch_size)]
        batches[-1].finish = ended
        return batches

    return script


def silent(request: GenerationRequest) -> list[TokenBatch]:
    return []


@dataclass
class FakeBackend:
    """A BackendClient whose answers are scripted."""

    model: ModelCard | None = field(default_factory=model_card)
    ready: bool = True
    retry_after_s: int = 1
    script: Script = field(default_factory=lambda: says("Hello, world!"))
    streams: list[FakeStream] = field(default_factory=list)
    refusal: Exception | None = None
    full_for_unshared: Overloaded | None = None
    """Raised at the arrival of a request that can share no result."""
    submitted: asyncio.Event = field(default_factory=asyncio.Event)
    backend_counters: dict[str, int] | None = field(default_factory=lambda: {"running": 2, "pages_used": 5})
    board: FrontendBoard = field(default_factory=FrontendBoard.private)
    joins: bool = False
    """Whether new streams report that they joined another request's sequence."""
    queue_s: float = 0.0
    num_preemptions: int = 0
    quote: Quote = Quote(0, 3, 2, False, 0.25, 1.5, 4.0, 20)  # noqa: RUF009 - frozen
    records: dict[StreamName, bytes] = field(default_factory=dict)
    """Records of the streams that linger."""
    terms: list[QuoteTerms] = field(default_factory=list)
    """What was asked with each quote."""
    questions: list[Question] = field(default_factory=list)

    def _check(self) -> None:
        if self.refusal is not None:
            raise self.refusal
        if not self.ready:
            raise BackendUnavailable

    def submit(self, request: GenerationRequest) -> FakeStream:
        self._check()
        if request.linger is not None and request.linger.record:
            self.records[request.linger.stream] = request.linger.record
        stream = FakeStream(request, self.script(request))
        stream.quote = self.quote if request.refuse_late is not None else None
        stream.joins = self.joins
        stream.queue_s, stream.num_preemptions = self.queue_s, self.num_preemptions
        self.streams.append(stream)
        self.submitted.set()
        return stream

    def ask_quote(self, request: GenerationRequest, terms: QuoteTerms) -> FakeStream:
        self._check()
        stream = FakeStream(request, [TokenBatch([], Finish.QUOTED)])
        stream.quote = self.quote
        self.terms.append(terms)
        self.streams.append(stream)
        return stream

    def ask(self, question: Question, deadline_s: float | None = None) -> FakeStream:
        self._check()
        no_request = GenerationRequest([0], 1, Sampling(), deadline_s=deadline_s)
        self.questions.append(question)
        if isinstance(question, RequestName | AdapterChange):
            return FakeStream(no_request, self.script(no_request))
        record = self.records.get(question.stream)
        if record is None:
            return FakeStream(no_request, [TokenBatch([], Finish.REJECTED, FailureCode.NOT_OPEN)])
        stream = FakeStream(no_request, [TokenBatch([], Finish.STOP)])
        if question.action == "drop":
            del self.records[question.stream]
        else:
            stream.record = record
        return stream

    def check_capacity(self, tenant: bytes, *, may_share: bool) -> None:
        if self.refusal is not None:
            raise self.refusal
        if self.full_for_unshared is not None and not may_share:
            raise self.full_for_unshared

    @property
    def counters(self) -> dict[str, int]:
        return {name: count for name, count in self.board.values().items() if name != "pid"}

    @property
    def last(self) -> GenerationRequest:
        return self.streams[-1].request


_SYNTAXES: dict[tuple[str, str, ParserNames], ModelSyntax] = {}


@cache
def compiled_template(source: str) -> ChatTemplate:
    """Compiling a template takes most of the time in which an app is made."""
    return ChatTemplate(source, {})


def served_model(
    card: ModelCard,
    backend: FakeBackend | None = None,
    *,
    template: str = CHAT_TEMPLATE,
    tokenizer: Tokenizer = TOKENIZER,
    parsers: ParserNames = ParserNames(),  # noqa: B008 - frozen
) -> ServedModel:
    loaded = ModelTokenizer(GuardedTokenizer(tokenizer), compiled_template(template))
    client: Any = backend or FakeBackend(model=card)
    key = template, tokenizer.to_str(), parsers
    if key not in _SYNTAXES:  # found by many renderings: most of the time in which an app is made
        _SYNTAXES[key] = model_syntax_of(loaded, parsers)
    return ServedModel(card, loaded, client, _SYNTAXES[key])


def model_keeper(backend: FakeBackend, served: ServedModel | None = None) -> ModelKeeper:
    """Return a keeper that has loaded the model, if the backend has one."""
    keeper = ModelKeeper(backend)  # type: ignore[arg-type]
    keeper.current = served or (None if backend.model is None else served_model(backend.model, backend))
    keeper.settled.set()
    return keeper


def make_app(backend: FakeBackend, **options: Any) -> App:
    """Return an app with a loaded model, if the backend has one. options: keeper, models, api_keys, admission,
    report_spans, or those of WorkerLimits."""
    keeper = options.pop("keeper", None) or model_keeper(backend)
    models = options.pop("models", None) or ServedModels(keeper)
    admission = options.pop("admission", None) or Admission(named_keys(options.pop("api_keys", ())))
    report_spans = options.pop("report_spans", None)
    return App(models, admission=admission, limits=WorkerLimits(**options), report_spans=report_spans)


class ClientConnection:
    """A client's connection to the app."""

    def __init__(self, app: App, config: uvicorn.Config | None = None, loop: Any = None) -> None:
        """Connections of one config are counted together. loop replaces the protocol's event loop."""
        config = config or server_config(app)
        if not config.loaded:
            config.load()
        self.state = ServerState()
        self.transport = MockTransport()
        self.protocol: Any = config.http_protocol_class(
            config=config,  # type: ignore[call-arg]
            server_state=self.state,
            app_state={},
            _loop=loop or asyncio.get_running_loop(),
        )
        self.transport.protocol = self.protocol
        self.protocol.connection_made(self.transport)
        self._reader = ResponseReader()
        self._num_read = 0
        self._num_taken = 0

    def send(self, data: bytes) -> None:
        if not self.transport.closed:
            self.protocol.data_received(data)

    async def output(self, expected: bytes, timeout_s: float = 60.0) -> None:
        """Wait until the server has sent these bytes."""
        async with asyncio.timeout(timeout_s):
            while expected not in self.transport.output:
                assert not self.transport.closed, bytes(self.transport.output)
                self.transport.changed.clear()
                await self.transport.changed.wait()

    async def response(self, timeout_s: float = 60.0) -> Response:
        """Return the next whole response."""
        async with asyncio.timeout(timeout_s):
            while True:
                fresh = bytes(self.transport.output[self._num_read :])
                self._num_read += len(fresh)
                if fresh:
                    self._reader.parser.feed_data(fresh)
                if len(self._reader.responses) > self._num_taken:
                    self._num_taken += 1
                    return self._reader.responses[self._num_taken - 1]
                assert not self.transport.closed, f"closed without a response: {bytes(self.transport.output)!r}"
                self.transport.changed.clear()
                await self.transport.changed.wait()

    async def closed(self, timeout_s: float = 60.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not self.transport.closed:
                self.transport.changed.clear()
                await self.transport.changed.wait()

    async def request(
        self, method: str, path: str, body: Any = None, headers: Sequence[tuple[str, str]] = ()
    ) -> Response:
        self.send(request_bytes(method, path, body, headers))
        return await self.response()

    async def post(self, path: str, body: Any) -> Response:
        return await self.request("POST", path, body)

    async def idle(self) -> None:
        """Wait until no request runs on the connection."""
        while self.state.tasks:
            await asyncio.gather(*self.state.tasks)

    async def end(self) -> None:
        self.transport.close()
        await self.idle()
        await asyncio.sleep(0)


def request_bytes(method: str, path: str, body: Any = None, headers: Sequence[tuple[str, str]] = ()) -> bytes:
    """Return a request as a client writes it. body is bytes, or is encoded as JSON."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", *(f"{name}: {value}" for name, value in headers)]
    if body is not None:
        lines += [f"content-length: {len(data)}", "content-type: application/json"]
    return "\r\n".join([*lines, "", ""]).encode() + data
