"""/tokenize, /detokenize and /apply-template."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.frontend.text.tokenizer import ModelTokenizer
from tests.frontend.harness import (
    TOKENIZER,
    VOCAB_SIZE,
    ClientConnection,
    FakeBackend,
    make_app,
    model_card,
    model_keeper,
    save_model_files,
    served_model,
    token_ids,
)

HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
RENDERED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


async def test_prompt_becomes_tokens_as_in_vllm(connection: ClientConnection) -> None:
    body = {"model": "test/model", "prompt": "the cat 猫", "return_token_strs": True}
    answer = (await connection.post("/tokenize", body)).json()
    ids = token_ids("the cat 猫")
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids, len(ids), 1000)
    assert answer["token_strs"][:2] == ["the", " cat"]
    assert (await connection.post("/tokenize", {"prompt": "x"})).json()["token_strs"] is None
    assert (await connection.post("/tokenize", {"prompt": ""})).json()["tokens"] == []


async def test_messages_become_the_tokens_of_their_chat(connection: ClientConnection, backend: FakeBackend) -> None:
    answer = (await connection.post("/tokenize", HI)).json()
    await connection.post("/v1/chat/completions", HI)
    assert answer["tokens"] == list(backend.last.token_ids) == token_ids(RENDERED)
    short = (await connection.post("/tokenize", {**HI, "add_generation_prompt": False})).json()
    assert short["tokens"] == token_ids(RENDERED.removesuffix("<|im_start|>assistant\n"))


async def test_content_becomes_tokens_as_in_llama_cpp(connection: ClientConnection) -> None:
    assert (await connection.post("/tokenize", {"content": "the cat"})).json() == {"tokens": token_ids("the cat")}
    pieces = (await connection.post("/tokenize", {"content": "the 猫", "with_pieces": True})).json()["tokens"]
    assert [piece["id"] for piece in pieces] == token_ids("the 猫")
    raw = b"".join(p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"]) for p in pieces)
    assert raw == "the 猫".encode()


async def test_token_texts_are_the_same_for_many_tokens_and_few(connection: ClientConnection) -> None:
    few, times = 'the 猫 "\\', 500
    for body, field in (({"content": few, "with_pieces": True}, "tokens"), ({"return_token_strs": True}, "token_strs")):
        source = "content" if "content" in body else "prompt"
        texts = (await connection.post("/tokenize", {**body, source: few})).json()[field]
        assert len(texts) * times > 1024
        many = (await connection.post("/tokenize", {**body, source: few * times})).json()[field]
        assert many == texts * times


@pytest.mark.parametrize("num_tokens", [0, 3, 5000])
async def test_tokens_become_a_text_under_both_names(connection: ClientConnection, num_tokens: int) -> None:
    ids = (token_ids("the cat 猫<|im_end|>") * num_tokens)[:num_tokens]
    text = TOKENIZER.decode(ids, skip_special_tokens=False)
    assert (await connection.post("/detokenize", {"tokens": ids})).json() == {"prompt": text, "content": text}


async def test_chat_becomes_its_prompt(connection: ClientConnection) -> None:
    assert (await connection.post("/apply-template", HI)).json() == {"prompt": RENDERED}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("POST", "/apply-template"),
        ("GET", "/version"),
        ("GET", "/v1/load"),
    ],
)
async def test_every_token_endpoint_needs_a_key(
    connect: Callable[..., ClientConnection], method: str, path: str
) -> None:
    assert (await connect(api_keys=("one",)).request(method, path, HI if method == "POST" else None)).status == 401


@pytest.mark.parametrize(
    ("path", "body", "param", "shown"),
    [
        ("/tokenize", {}, "prompt", "required"),
        ("/tokenize", {"prompt": 5}, "prompt", "5"),
        ("/tokenize", {"prompt": "x", "content": "x"}, "content", "prompt"),
        ("/tokenize", {"prompt": "x", **HI}, "messages", "prompt"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model", "other"),
        ("/tokenize", {"messages": []}, "messages", "length"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content", "content"),
        ("/detokenize", {}, "tokens", "required"),
        ("/detokenize", {"tokens": ["x"]}, "tokens[0]", "x"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]", "-1"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens", f"{VOCAB_SIZE}"),
        ("/detokenize", {"tokens": [1], "model": "other"}, "model", "other"),
        ("/apply-template", {}, "messages", "required"),
        ("/apply-template", {**HI, "model": "other"}, "model", "other"),
    ],
)
async def test_invalid_field_is_named(
    connection: ClientConnection, path: str, body: dict[str, Any], param: str, shown: str
) -> None:
    response = await connection.post(path, body)
    assert response.status == (404 if param == "model" else 400)
    assert response.error["param"] == param
    assert shown in response.error["message"]


async def test_large_answer_is_sent_in_pieces(connection: ClientConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between them the server waits for a client that does not read."""
    sizes: list[int] = []
    write = connection.transport.write

    def noted(data: bytes) -> None:
        sizes.append(len(data))
        write(data)

    monkeypatch.setattr(connection.transport, "write", noted)
    response = await connection.post("/detokenize", {"tokens": token_ids("the cat sat on the mat, ") * 30_000})
    assert response.json()["content"] == "the cat sat on the mat, " * 30_000
    assert int(response.headers["content-length"]) == len(response.body) > 1_000_000
    assert max(sizes) <= 256 << 10


async def test_tokenizer_info_has_the_special_tokens_and_the_template_in_use(tmp_path: Path) -> None:
    save_model_files(tmp_path)
    own = {
        "tokenizer_class": "LlamaTokenizerFast",
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "pad_token": None,
        "name_or_path": "/home/somebody/model",
        "chat_template": "{{ replaced }}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    backend = FakeBackend(model=model_card())
    tokenizer = ModelTokenizer.load(tmp_path)
    served = dataclasses.replace(served_model(model_card(), backend), tokenizer=tokenizer)
    connection = ClientConnection(make_app(backend, keeper=model_keeper(backend, served)))
    info = (await connection.request("GET", "/tokenizer_info")).json()
    assert tokenizer.chat_template is not None
    assert info == {
        "tokenizer_class": "LlamaTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": tokenizer.chat_template.source,
    }
    assert (await connection.request("GET", "/tokenizer_info?model=test/model")).json() == info
    assert (await connection.request("GET", "/tokenizer_info?model=other")).status == 404
    await connection.end()
