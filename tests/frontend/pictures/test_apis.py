"""Pictures through every API, by the real clients: the same chat has the same tokens and pictures everywhere."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from penstock.frontend.app import App
from penstock.frontend.generation.models.served_model import ServedModel
from penstock.frontend.pictures.placing import PictureReader
from penstock.frontend.pictures.workshop import PictureWorkshop
from penstock.frontend.text.tokenizer import ModelTokenizer
from penstock.shm.client import GenerationRequest
from tests.frontend.clients.test_openai_sdk import serving
from tests.frontend.harness import ClientConnection, FakeBackend, make_app, model_keeper, says
from tests.frontend.pictures.vision_models import encoded, picture, save_vision_model

MODEL = "test/model"
FIRST, SECOND = (base64.b64encode(encoded(picture(60, 40, seed))).decode() for seed in (0, 1))


def uri(data: str) -> str:
    return f"data:image/png;base64,{data}"


def vision_app(backend: FakeBackend, directory: Path, workshop: PictureWorkshop, model_type: str = "qwen2_5_vl") -> App:
    card = save_vision_model(directory, model_type)
    backend.model = card
    tokenizer = ModelTokenizer.load(directory)
    reader = PictureReader.of_model(card, tokenizer.added_tokens, workshop)
    client: Any = backend
    return make_app(backend, keeper=model_keeper(backend, ServedModel(card, tokenizer, client, pictures=reader)))


@pytest.fixture
async def url(backend: FakeBackend, tmp_path: Path, workshop: PictureWorkshop) -> AsyncIterator[str]:
    backend.script = says("a cat")
    async with serving(vision_app(backend, tmp_path, workshop)) as url:
        yield url.removesuffix("/v1")


@pytest.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def sent(backend: FakeBackend) -> tuple[list[int], list[bytes], int]:
    """The tokens, the digests of the pictures, and the number of their tokens in the last request."""
    last: GenerationRequest = backend.last
    assert isinstance(last.token_ids, list) or last.pictures
    num_negative = sum(token_id < 0 for token_id in last.token_ids)  # type: ignore[union-attr]
    assert num_negative == sum(each.num_tokens for each in last.pictures)
    return list(last.token_ids), [each.digest for each in last.pictures], num_negative  # type: ignore[arg-type]


async def test_same_chat_is_the_same_request_on_every_api(
    url: str, client: openai.AsyncOpenAI, backend: FakeBackend
) -> None:
    parts: Any = [
        {"type": "image_url", "image_url": {"url": uri(FIRST), "detail": "low"}},
        {"type": "image_url", "image_url": uri(SECOND)},
        {"type": "text", "text": "which?"},
    ]
    chat = await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": parts}])
    assert chat.choices[0].message.content == "a cat"
    first = sent(backend)
    assert len(first[1]) == 2
    assert chat.usage is not None
    assert chat.usage.prompt_tokens == len(first[0])
    items: Any = [
        {
            "role": "user",
            "content": [
                {"type": "input_image", "image_url": uri(FIRST), "detail": "auto"},
                {"type": "input_image", "image_url": uri(SECOND)},
                {"type": "input_text", "text": "which?"},
            ],
        }
    ]
    response = await client.responses.create(model=MODEL, input=items)
    assert response.output_text == "a cat"
    assert sent(backend) == first
    listed = await client.responses.input_items.list(response.id)
    assert [part.type for part in listed.data[0].content] == ["input_image", "input_image", "input_text"]  # type: ignore[union-attr]
    again = await client.responses.create(model=MODEL, input="why?", previous_response_id=response.id)
    tokens, digests, _ = sent(backend)
    assert (tokens[: len(first[0])], digests) == (first[0], first[1])
    assert again.usage is not None
    assert again.usage.input_tokens == len(tokens)
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as claude:
        blocks: Any = [
            *(
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
                for data in (FIRST, SECOND)
            ),
            {"type": "text", "text": "which?"},
        ]
        messages: Any = [{"role": "user", "content": blocks}]
        message = await claude.messages.create(model=MODEL, max_tokens=20, messages=messages)
        assert sent(backend) == first
        assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == len(first[0])
        counted = await claude.messages.count_tokens(model=MODEL, messages=messages)
        assert counted.input_tokens == len(first[0])
    images = [base64.b64decode(FIRST), base64.b64decode(SECOND)]
    async with ollama.AsyncClient(host=url) as local:
        await local.chat(MODEL, [{"role": "user", "content": "which?", "images": images}])
        assert sent(backend) == first
        generated = await local.generate(MODEL, "which?", images=images)
    assert sent(backend) == first
    assert generated.context is None
    assert generated.prompt_eval_count == len(first[0])


async def test_completion_of_llama_cpp_has_pictures_at_its_markers(url: str, backend: FakeBackend) -> None:
    prompt = {"prompt_string": "see <__media__> and <__media__>?", "multimodal_data": [FIRST, SECOND]}
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        answer = (await http.post("/completion", json={"prompt": prompt})).json()
        assert "error" not in answer, answer
        tokens, digests, num_negative = sent(backend)
        assert (len(digests), answer["tokens_evaluated"]) == (2, len(tokens))
        assert num_negative
        refused = await http.post("/completion", json={"prompt": prompt | {"multimodal_data": [FIRST]}})
        assert "1 pictures; prompt.prompt_string has 2 <__media__>" in refused.json()["error"]["message"]
        refused = await http.post("/completion", json={"prompt": prompt | {"multimodal_data": [FIRST, "?"]}})
        assert "prompt.multimodal_data[1]: not base64" in refused.json()["error"]["message"]
        many = {"prompt_string": "<__media__>" * 65, "multimodal_data": [FIRST] * 65}
        refused = await http.post("/completion", json={"prompt": many})
        assert refused.json()["error"]["message"] == "prompt: 65 pictures; the limit is 64"
        late = await http.post("/completion", json={"prompt": prompt, "timeout_ms": 1})
        assert late.status_code == 499


async def test_screenshots_among_tool_results_are_shown_behind_them(url: str, backend: FakeBackend) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": FIRST}
    call: Any = {"type": "tool_use", "id": "call_1", "name": "look", "input": {}}
    result: Any = {
        "type": "tool_result",
        "tool_use_id": "call_1",
        "content": [{"type": "text", "text": "done"}, {"type": "image", "source": source}],
    }
    messages: Any = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
    ]
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as claude:
        await claude.messages.create(model=MODEL, max_tokens=20, messages=messages)
    by_messages = sent(backend)
    assert len(by_messages[1]) == 1
    items = [
        {"role": "user", "content": "look"},
        {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "call_1",
            "output": [{"type": "input_text", "text": "done"}, {"type": "input_image", "image_url": uri(FIRST)}],
        },
    ]
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        answer = await http.post("/v1/responses", json={"model": MODEL, "input": items})
    assert answer.status_code == 200
    assert sent(backend)[1] == by_messages[1]


async def test_models_say_that_they_take_pictures(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        (model,) = (await http.get("/v1/models")).json()["data"]
        assert model["input_modalities"] == ["text", "image"]
        assert model["capabilities"]["vision"] is True
        assert (await http.get("/props")).json()["modalities"] == {"vision": True, "audio": False}
        body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": uri(FIRST)}}]}]}
        tokens = (await http.post("/tokenize", json={"model": MODEL, **body})).json()["tokens"]
        quote = (await http.post("/v1/quote", json={"model": MODEL, **body})).json()
    assert quote["prompt_tokens"] == len(tokens)
    assert min(tokens) >= 0  # the image token, as elsewhere
    async with ollama.AsyncClient(host=url) as local:
        shown = await local.show(MODEL)
    assert "vision" in (shown.capabilities or ())


IMAGE = {"type": "image_url", "image_url": {"url": uri(FIRST)}}
CHAT = "/v1/chat/completions"


def chat(part: dict[str, Any], role: str = "user", **fields: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": "look"}, part]
    return {"messages": [{"role": "user", "content": "hi"}, {"role": role, "content": content}], **fields}


def remote(url: str) -> dict[str, Any]:
    return chat({"type": "image_url", "image_url": {"url": url}})


PART = "messages[1].content[1].image_url"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, remote("https://example.org/a.png"), f"{PART}: pictures from other hosts are refused; send a data URI, or"),
    (CHAT, remote("file:///etc/passwd"), f"{PART}: must be a data URI, such as data:image/png;base64,"),
    (CHAT, remote("data:image/png,abc"), f"{PART}: a data URI must be data:TYPE;base64, and base64 behind it"),
    (CHAT, remote("data:image/png;base64,####"), f"{PART}: not base64"),
    (CHAT, remote(uri(FIRST[:400])), f"{PART}: image/png that cannot be decoded"),
    (CHAT, remote(f"data:image/webp;base64,{FIRST}"), f"{PART}: it is image/png, but is sent as image/webp"),
    (CHAT, chat(IMAGE, "assistant"), "messages[1].content[1].type: must be one of text, refusal in role assistant"),
    (CHAT, chat({"type": "image_url"}), "messages[1].content[1].image_url: missing"),
    (CHAT, chat(IMAGE, prompt_logprobs=1), "prompt_logprobs: not available in a chat with pictures"),
    (CHAT, chat(IMAGE, truncate_prompt_tokens=5), "truncate_prompt_tokens: would cut a prompt with pictures"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [IMAGE] * 65}]},
        "messages: 65 pictures; the limit is 64",
    ),
    (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
        "input[0].content[0].image_url: required; there are no uploaded files here",
    ),
    (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": uri(FIRST[:400])}]}]},
        "input[0].content[0].image_url: image/png that cannot be decoded",
    ),
    (
        "/v1/messages",
        {
            "max_tokens": 9,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "base64", "media_type": "image/gif", "data": FIRST}}
                    ],
                }
            ],
        },
        "messages[0].content[0].source: it is image/png, but is sent as image/gif",
    ),
    (
        "/v1/messages",
        {"max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url"}}]}]},
        "messages[0].content[0].source.url: required",
    ),
    (
        "/api/chat",
        {"model": MODEL, "messages": [{"role": "user", "content": "x", "images": [FIRST, "####"]}]},
        "messages[0].images[1]: not base64",
    ),
    ("/api/generate", {"model": MODEL, "prompt": "x", "raw": True, "images": [FIRST]}, "images: cannot be combined"),
]


async def test_unusable_picture_is_one_line_that_names_the_part(url: str, backend: FakeBackend) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        for path, body, message in REFUSED:
            answer = await http.post(path, json={"model": MODEL, **body})
            assert answer.status_code == 400, (path, message)
            error = answer.json()["error"]
            assert (error if isinstance(error, str) else error["message"]).startswith(message), answer.text
    assert not backend.streams


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        (CHAT, chat(IMAGE), PART),
        (
            "/v1/messages",
            {
                "max_tokens": 9,
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x/"}}]}
                ],
            },
            "messages[0].content[0].source",
        ),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": uri(FIRST)}]}]},
            "input[0].content[0].image_url",
        ),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": [FIRST]}]}, "messages[0].images[0]"),
        ("/tokenize", chat(IMAGE), PART),
    ],
)
async def test_model_without_pictures_refuses_them_by_name(
    path: str, body: dict[str, Any], place: str, connection: ClientConnection
) -> None:
    response = await connection.request("POST", path, {"model": MODEL, **body})
    assert response.status == 400
    error = response.json()["error"]
    assert (error if isinstance(error, str) else error["message"]).startswith(
        f'{place}: "test/model" takes no pictures'
    )


async def test_large_bodies_are_read_for_models_that_take_pictures_only(
    backend: FakeBackend, tmp_path: Path, workshop: PictureWorkshop
) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x" * (3 << 20)}]}
    seen = []
    for app in (make_app(backend), vision_app(backend, tmp_path, workshop)):
        async with serving(app) as url, httpx.AsyncClient(timeout=60) as http:
            seen.append((await http.post(f"{url}/chat/completions", json=body)).status_code)
    assert seen == [413, 400]  # too large; too many tokens
