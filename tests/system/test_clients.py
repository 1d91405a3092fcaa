"""Client libraries for OpenAI's API, pointed at `penstock serve`."""

from __future__ import annotations

import asyncio
import importlib
import json
from typing import TYPE_CHECKING, Any, Literal

import httpx
import ollama
import openai
import pydantic
import pytest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

MODEL = "penstock-demo"
MESSAGES: Any = [{"role": "user", "content": "What does os.path.join do?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
LONG: dict[str, Any] = {"temperature": 0.8, "seed": 1, "max_tokens": 400}


class Strict(pydantic.BaseModel):
    """An untrained model would add fields of its own."""

    model_config = pydantic.ConfigDict(extra="forbid")


class Book(Strict):
    """A book in a library."""

    title: str = pydantic.Field(max_length=20)
    year: int = pydantic.Field(ge=1450, le=2030)
    kind: Literal["novel", "poems"]
    tags: list[Literal["old", "new"]] = pydantic.Field(max_length=3)


class Weather(Strict):
    """Weather at a place."""

    city: Literal["Paris", "Oslo"]
    days: int = pydantic.Field(ge=1, le=9)


@pytest.fixture(scope="module")
def base_url(served_demo: str) -> str:
    return f"{served_demo}/v1"


@pytest.fixture(scope="module", autouse=True)
def _offline() -> Iterator[None]:
    """Without these settings litellm downloads a price table, and langchain sends telemetry."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        patch.setenv("LANGSMITH_TRACING", "false")
        patch.setenv("OPENAI_API_KEY", "none")
        yield


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def text(client: openai.OpenAI) -> str:
    """The model's greedy answer to MESSAGES."""
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, **GREEDY)
    assert answer.choices[0].message.content
    return answer.choices[0].message.content


# openai


def test_openai_streams_with_its_helper(client: openai.OpenAI, text: str) -> None:
    text = text[: text.index("\n")]  # the helper treats a truncated answer as a failure
    options: dict[str, Any] = {"stop": "\n", "stream_options": {"include_usage": True}, **GREEDY}
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2, **options
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta", "logprobs.content.done"} == set(kinds)
    assert final.choices[0].message.content == text
    assert final.usage is not None
    assert final.choices[0].logprobs is not None
    content = final.choices[0].logprobs.content or []
    assert "".join(token.token for token in content).strip() == text
    assert all(len(token.top_logprobs) == 2 for token in content)


def test_openai_parses_into_a_pydantic_model(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Book, n=2, **LONG)
    books = [choice.message.parsed for choice in answer.choices]
    assert all(isinstance(book, Book) for book in books)
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, response_format=Book, **LONG) as stream:
        partial = [event.parsed for event in stream if event.type == "content.delta"]
        assert stream.get_final_completion().choices[0].message.parsed == books[0]
    assert len(partial) > 1


def test_openai_reads_completions_with_logprobs(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="import os", echo=True, logprobs=3, **GREEDY)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert whole.choices[0].text.startswith("import os")
    assert "".join(logprobs.tokens).endswith(whole.choices[0].text)
    assert logprobs.token_logprobs[0] is None
    stream = client.completions.create(model=MODEL, prompt="import os", echo=True, logprobs=3, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    several = client.completions.create(model=MODEL, prompt=["a", "b"], n=1, best_of=3, max_tokens=5, seed=3)
    assert len(several.choices) == 2
    assert several.usage is not None
    assert several.usage.completion_tokens > 10


def test_openai_sends_our_parameters_in_extra_body(client: openai.OpenAI) -> None:
    extra = {"guided_choice": ["left", "right"], "return_token_ids": True, "min_tokens": 1, "top_k": 5}
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body=extra)
    assert answer.choices[0].message.content in ("left", "right")
    assert answer.choices[0].model_extra is not None
    assert answer.choices[0].model_extra["token_ids"]


def test_openai_raises_its_own_errors(client: openai.OpenAI) -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"type": "nonsense"}}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as wrong:
            client.chat.completions.create(model=MODEL, messages=MESSAGES, response_format=schema, stream=stream)  # type: ignore[call-overload]
        assert wrong.value.param == "response_format"


# ollama


def test_ollama_chats_generates_and_follows_a_schema(served_demo: str, text: str) -> None:
    options = {"temperature": 0, "num_predict": 24}
    with ollama.Client(host=served_demo) as client:
        assert MODEL in [model.model for model in client.list().models]
        assert "completion" in (client.show(MODEL).capabilities or ())
        whole = client.chat(MODEL, MESSAGES, options=options)
        assert (whole.message.content, whole.done_reason, whole.eval_count) == (text, "length", 24)
        pieces = list(client.chat(MODEL, MESSAGES, options=options, stream=True))
        assert "".join(piece.message.content or "" for piece in pieces) == text
        generated = client.generate(MODEL, MESSAGES[0]["content"], options=options)
        assert generated.response == text
        assert len(generated.context or ()) == generated.prompt_eval_count + 24  # type: ignore[operator]
        schema = Book.model_json_schema()
        book = client.chat(MODEL, MESSAGES, format=schema, options={"temperature": 0.8, "seed": 1, "num_predict": 400})
        Book.model_validate_json(book.message.content or "")
        with pytest.raises(ollama.ResponseError, match="does not exist"):
            client.chat("none", MESSAGES)


# litellm


@pytest.fixture(scope="module")
def litellm(_offline: None) -> Any:
    module = importlib.import_module("litellm")
    module.telemetry = False
    module.suppress_debug_info = True
    return module


@pytest.fixture
def arguments(base_url: str) -> dict[str, Any]:
    return {"model": f"openai/{MODEL}", "api_base": base_url, "api_key": "none", "messages": MESSAGES, **GREEDY}


@pytest.fixture
async def async_arguments(arguments: dict[str, Any], base_url: str) -> AsyncIterator[dict[str, Any]]:
    """Uses a client that is closed: litellm leaves its own to the garbage collector."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as client:
        yield {**arguments, "client": client}


@pytest.fixture
def loop() -> Iterator[None]:
    """litellm creates an event loop if there is none, and leaves it open."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()


litellms = pytest.mark.filterwarnings("ignore::DeprecationWarning:litellm", "ignore::UserWarning:pydantic")


@litellms
@pytest.mark.usefixtures("loop")
def test_litellm_completes_and_streams(litellm: Any, arguments: dict[str, Any], text: str) -> None:
    whole = litellm.completion(**arguments, logprobs=True)
    assert whole.choices[0].message.content == text
    assert whole.usage.completion_tokens == 24
    chunks = list(litellm.completion(**arguments, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert litellm.stream_chunk_builder(chunks).choices[0].message.content == text


@litellms
@pytest.mark.usefixtures("loop")
@pytest.mark.parametrize("provider", ["ollama_chat", "ollama"])
def test_litellm_speaks_ollamas_api(litellm: Any, served_demo: str, text: str, provider: str) -> None:
    arguments = {"model": f"{provider}/{MODEL}", "api_base": served_demo, "messages": MESSAGES, **GREEDY}
    assert litellm.completion(**arguments).choices[0].message.content
    chunks = list(litellm.completion(**arguments, stream=True))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == text if provider == "ollama_chat" else streamed  # the other one writes a template of its own


@litellms
async def test_litellm_completes_and_streams_asynchronously(
    litellm: Any, async_arguments: dict[str, Any], text: str
) -> None:
    assert (await litellm.acompletion(**async_arguments)).choices[0].message.content == text
    stream = await litellm.acompletion(**async_arguments, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == text


@litellms
@pytest.mark.usefixtures("loop")
def test_litellm_requests_formats_and_tool_calls(litellm: Any, arguments: dict[str, Any]) -> None:
    book = litellm.completion(**arguments | LONG, response_format=Book)
    Book.model_validate_json(book.choices[0].message.content)
    tool = {"name": "weather", "parameters": Weather.model_json_schema()}
    calls = litellm.completion(
        **arguments | LONG,
        tools=[{"type": "function", "function": tool}],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    (call,) = calls.choices[0].message.tool_calls
    assert call.function.name == "weather"
    Weather.model_validate_json(call.function.arguments)


@litellms
@pytest.mark.usefixtures("loop")
def test_litellm_completes_texts(litellm: Any, base_url: str) -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", api_base=base_url, api_key="none", prompt="import os", **GREEDY
    )
    assert answer.choices[0].text


# langchain-openai


@pytest.fixture(scope="module")
def langchain(base_url: str) -> Any:
    chat = importlib.import_module("langchain_openai").ChatOpenAI
    return lambda **options: chat(model=MODEL, base_url=base_url, api_key="none", max_retries=0, **options)


def test_langchain_invokes_and_streams(langchain: Any, text: str) -> None:
    chat = langchain(**GREEDY)
    answer = chat.invoke("What does os.path.join do?")
    assert answer.content == text
    assert answer.usage_metadata["output_tokens"] == 24
    pieces = list(chat.stream("What does os.path.join do?", stream_usage=True))
    assert "".join(piece.content for piece in pieces) == text
    assert langchain(**GREEDY).bind(logprobs=True).invoke("hi").response_metadata["logprobs"]["content"]


async def test_langchain_invokes_and_streams_asynchronously(langchain: Any, text: str) -> None:
    async with httpx.AsyncClient() as http:  # langchain's own client is never closed
        chat = langchain(http_async_client=http, **GREEDY)
        assert (await chat.ainvoke("What does os.path.join do?")).content == text
        assert "".join([piece.content async for piece in chat.astream("What does os.path.join do?")]) == text
        assert [answer.content for answer in await chat.abatch(["What does os.path.join do?"] * 2)] == [text, text]


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_langchain_gets_structured_output(langchain: Any, method: str) -> None:
    chat = langchain(**LONG)
    if method == "json_mode":  # any object
        assert isinstance(chat.with_structured_output(None, method=method).invoke("a book"), dict)
        return
    assert isinstance(chat.with_structured_output(Book, method=method).invoke("a book"), Book)


@pytest.mark.parametrize("choice", ["any", "Weather"])
def test_langchain_binds_tools(langchain: Any, choice: str) -> None:
    chat = langchain(**LONG).bind_tools([Weather], tool_choice=choice, parallel_tool_calls=False)
    (call,) = chat.invoke("How is the weather?").tool_calls
    assert call["name"] == "Weather"
    streamed = None
    for piece in chat.stream("How is the weather?"):
        streamed = piece if streamed is None else streamed + piece
    assert streamed is not None
    assert [(one["name"], one["args"]) for one in streamed.tool_calls] == [("Weather", call["args"])]
    Weather.model_validate(call["args"])


# instructor


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor_makes_a_model(client: openai.OpenAI, mode: str) -> None:
    instructor = importlib.import_module("instructor")
    patched = instructor.from_openai(client, mode=getattr(instructor.Mode, mode))
    book = patched.chat.completions.create(
        model=MODEL, messages=MESSAGES, response_model=Book, max_retries=0, parallel_tool_calls=False, **LONG
    )
    assert isinstance(book, Book)
    assert json.loads(book.model_dump_json())["year"] >= 1450


def test_instructor_calls_a_tool_although_it_asks_for_a_text_format(client: openai.OpenAI) -> None:
    instructor = importlib.import_module("instructor")
    patched = instructor.from_openai(client, mode=instructor.Mode.RESPONSES_TOOLS)
    options = {"temperature": 0.8, "max_output_tokens": 400, "extra_body": {"seed": 1}}
    book = patched.responses.create(model=MODEL, input=MESSAGES, response_model=Book, max_retries=0, **options)
    assert isinstance(book, Book)
