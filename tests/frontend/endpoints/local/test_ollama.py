"""Ollama's API: what clients send and read, translated to chats and completions."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.frontend.endpoints.ollama.chat import _messages
from penstock.frontend.schemas.ollama import OllamaFunctionCall, OllamaMessage, OllamaToolCall
from penstock.shm.messages import FailureCode, Finish
from tests.frontend.harness import (
    END_TOKEN,
    ClientConnection,
    FakeBackend,
    Response,
    make_app,
    model_card,
    model_keeper,
    says,
    served_model,
    silent,
    token_ids,
)
from tests.frontend.pooled_backend import END, START, PooledBackend, encoder, encoder_card, normalized, vector_of

MODEL = "test/model"
HI = [{"role": "user", "content": "hi"}]
PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
THINKING = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n{# </think> #}"


def lines(response: Response) -> list[dict[str, Any]]:
    assert (response.status, response.headers["content-type"]) == (200, "application/x-ndjson")
    return [json.loads(line) for line in response.body.splitlines()]


@pytest.mark.parametrize("model", [MODEL, f"{MODEL}:latest"])
async def test_chat_streams_lines_until_done(connection: ClientConnection, model: str) -> None:
    *pieces, last = lines(await connection.post("/api/chat", {"model": model, "messages": HI}))
    assert "".join(piece["message"]["content"] for piece in pieces) == "Hello, world!"
    assert {(piece["done"], piece["message"]["role"]) for piece in pieces} == {(False, "assistant")}
    assert (last["done"], last["done_reason"], last["model"]) == (True, "stop", MODEL)
    assert (last["prompt_eval_count"], last["eval_count"]) == (len(token_ids(PROMPT)), 14)
    assert last["total_duration"] >= last["load_duration"] > 0
    whole = (await connection.post("/api/chat", {"model": model, "messages": HI, "stream": False})).json()
    assert whole["message"] == {"role": "assistant", "content": "Hello, world!"}
    assert whole["eval_count"] == 14


async def test_options_are_the_sampling_parameters(connection: ClientConnection, backend: FakeBackend) -> None:
    options = {"num_predict": 4.0, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.8}
    options |= {"repeat_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.4, "seed": 7}
    ignored = {"num_ctx": 8192, "num_gpu": 1, "numa": True}
    body = {"model": MODEL, "messages": HI, "options": options | ignored}
    response = await connection.post("/api/chat", body)
    assert lines(response)[-1]["done_reason"] == "length"
    assert response.headers["x-penstock-ignored"] == "options.numa"
    sampling = backend.last.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 3, 0.9, 0.1)
    assert (sampling.typical_p, sampling.repetition_penalty, sampling.seed) == (0.8, 1.2, 7)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.3, 0.4)
    assert (await connection.post("/api/chat", {**body, "options": None})).status == 200
    body["options"] = {"repeat_penalty": 1.2, "repeat_last_n": 0, "num_predict": -1, "stop": ["wor"]}
    assert "".join(line["message"]["content"] for line in lines(await connection.post("/api/chat", body))) == "Hello, "
    assert (backend.last.sampling.repetition_penalty, backend.last.max_tokens) == (1.0, 1000 - len(token_ids(PROMPT)))


@pytest.mark.parametrize(
    ("form", "kind", "text"),
    [("json", "json_object", None), ({"type": "object", "properties": {}}, "json_schema", "properties")],
)
async def test_format_is_a_grammar(
    connection: ClientConnection, backend: FakeBackend, form: Any, kind: str, text: str | None
) -> None:
    await connection.post("/api/chat", {"model": MODEL, "messages": HI, "format": form})
    constraints = backend.last.constraints
    assert constraints is not None
    assert constraints.grammar is not None
    assert constraints.grammar.kind == "json_schema" or kind == "json_object"
    assert text is None or text in constraints.grammar.text


async def test_generate_uses_the_template_system_and_context(
    connection: ClientConnection, backend: FakeBackend
) -> None:
    body = {"model": MODEL, "prompt": "hi", "system": "Be.", "stream": False}
    first = (await connection.post("/api/generate", body)).json()
    prompt = token_ids(f"<|im_start|>system\nBe.<|im_end|>\n{PROMPT}")
    assert list(backend.last.token_ids) == prompt
    assert (first["response"], first["context"]) == ("Hello, world!", prompt + token_ids("Hello, world!") + [END_TOKEN])
    streamed = lines(
        await connection.post("/api/generate", {"model": MODEL, "prompt": "hi", "context": first["context"]})
    )
    assert list(backend.last.token_ids) == first["context"] + token_ids(PROMPT)
    assert streamed[-1]["context"] == first["context"] + token_ids(f"{PROMPT}Hello, world!") + [END_TOKEN]
    assert "".join(line["response"] for line in streamed) == "Hello, world!"


async def test_raw_prompt_has_no_template_and_no_context(connection: ClientConnection, backend: FakeBackend) -> None:
    body = {"model": MODEL, "prompt": "hi", "raw": True, "stream": False, "logprobs": True}
    assert "context" not in (await connection.post("/api/generate", body)).json()
    assert (list(backend.last.token_ids), backend.last.sampling.num_logprobs) == (token_ids("hi"), 0)


async def test_thinking_has_a_field_of_its_own() -> None:
    backend = FakeBackend(script=says("Hm.</think>Yes."))
    keeper = model_keeper(backend, served_model(model_card(), backend, template=THINKING))
    connection = ClientConnection(make_app(backend, keeper=keeper))
    for think in (None, True, "high"):
        body = {"model": MODEL, "messages": HI, "think": think}
        streamed = lines(await connection.post("/api/chat", body))
        message = (await connection.post("/api/chat", {**body, "stream": False})).json()["message"]
        assert (message["thinking"], message["content"]) == ("Hm.", "Yes.")
        assert "".join(line["message"].get("thinking", "") for line in streamed) == "Hm."
        assert "".join(line["message"]["content"] for line in streamed) == "Yes."
    await connection.end()


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


async def test_tool_calls_are_objects_and_their_results_find_them() -> None:
    backend = FakeBackend(script=says('<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'))
    keeper = model_keeper(backend)
    connection = ClientConnection(make_app(backend, keeper=keeper))
    body = {"model": MODEL, "messages": HI, "tools": TOOLS}
    whole = (await connection.post("/api/chat", {**body, "stream": False})).json()
    (call,) = whole["message"]["tool_calls"]
    assert call["function"] == {"index": 0, "name": "look", "arguments": {"at": "x"}}
    streamed = [line["message"] for line in lines(await connection.post("/api/chat", body))]
    assert [m["tool_calls"][0]["function"] for m in streamed if "tool_calls" in m] == [call["function"]]
    history = [*HI, {"role": "assistant", "tool_calls": [{"function": call["function"]}]}]
    for name in ({}, {"tool_name": "look"}):
        result = {"role": "tool", "content": "seen", **name}
        assert (await connection.post("/api/chat", {**body, "messages": [*history, result]})).status == 200
        assert keeper.current is not None
        assert "Result of look:\nseen" in keeper.current.tokenizer.decode(list(backend.last.token_ids))  # type: ignore[arg-type]
    cut = {**body, "options": {"num_predict": len(token_ids('<tool_call>\n{"name": "look", "arguments": {"at": "'))}}
    whole = (await connection.post("/api/chat", {**cut, "stream": False})).json()
    assert (whole["message"], whole["done_reason"]) == ({"role": "assistant", "content": ""}, "length")
    streamed = lines(await connection.post("/api/chat", cut))
    assert (streamed[-1]["done_reason"], any("tool_calls" in line["message"] for line in streamed)) == ("length", False)
    await connection.end()


def test_results_take_the_call_that_they_name_else_the_oldest_open_one() -> None:
    named = [("a", "look"), ("b", "read"), ("c", "look"), ("d", "read")]
    calls = [OllamaToolCall(OllamaFunctionCall(name), call_id) for call_id, name in named]
    given = [OllamaMessage("assistant", tool_calls=calls)]
    wanted: list[dict[str, str]] = [{"tool_call_id": "c"}, {"tool_name": "read"}, {"tool_name": "look"}, {}, {}]
    given += [OllamaMessage("tool", "seen", **fields) for fields in wanted]
    results = [message for message in _messages(given) if message.role == "tool"]
    assert [result.tool_call_id for result in results] == ["c", "b", "a", "d", ""]
    assert [result.name for result in results] == ["look", "read", "look", "read", None]


@pytest.mark.parametrize(
    ("path", "change", "status", "message"),
    [
        ("/api/chat", {"model": "none"}, 404, 'model: "none" does not exist; this server has "test/model"'),
        ("/api/chat", {"model": None}, 400, "model: "),
        (
            "/api/chat",
            {"messages": [{"role": "judge", "content": "x"}]},
            400,
            "messages[0].role: must be one of system",
        ),
        ("/api/chat", {"messages": [{**HI[0], "images": ["AA=="]}]}, 400, "messages[0].images[0]: "),
        ("/api/chat", {"options": {"temperature": 3}}, 400, "options.temperature: expected float <= 2.0, got 3"),
        ("/api/chat", {"format": "xml"}, 400, 'format: must be "json" or a JSON schema, got "xml"'),
        ("/api/chat", {"format": {"type": "no"}, "think": True}, 400, 'think: "test/model" does not support thinking'),
        (
            "/api/chat",
            {"keep_alive": "soon"},
            400,
            'keep_alive: must be seconds or a duration such as "5m", got "soon"',
        ),
        ("/api/chat", {"messages": [{"role": "user", "content": "x" * 3000}]}, 400, "messages: 3"),
        ("/api/generate", {"prompt": "x", "raw": True, "system": "y"}, 400, "system: cannot be combined with raw"),
        ("/api/generate", {"prompt": "x", "context": [5000]}, 400, "context: token id 5000 is outside the vocabulary"),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, 400, "suffix: "),
        ("/api/generate", {"prompt": "x", "template": "{{ .Prompt }}"}, 400, "template: not supported by this server"),
        ("/api/embed", {"input": "x"}, 400, "model: this endpoint needs one that can compute embeddings"),
        ("/api/pull", {"model": "none"}, 404, 'model: "none" is not served'),
        ("/api/create", {}, 404, 'no such path: "/api/create"'),
    ],
)
async def test_errors_have_ollamas_form(
    connection: ClientConnection, path: str, change: dict[str, Any], status: int, message: str
) -> None:
    refused = await connection.post(path, {"model": MODEL, "messages": HI, "stream": False} | change)
    assert refused.status == status
    assert refused.json().keys() == {"error"}
    assert refused.json()["error"].startswith(message)


async def test_error_within_a_stream_is_its_last_line(connection: ClientConnection, backend: FakeBackend) -> None:
    backend.script = silent
    posted = json.dumps({"model": MODEL, "messages": HI}).encode()
    head = f"POST /api/chat HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(posted)}\r\n\r\n".encode()
    connection.send(head + posted)
    await backend.submitted.wait()
    backend.streams[0].push(*token_ids("x"))
    await connection.output(b'"x"')
    backend.streams[0].push(finish=Finish.FAILED, failure=FailureCode.INTERNAL)
    last = (await connection.response()).body.splitlines()[-1]
    assert json.loads(last).keys() == {"error"}


async def test_client_that_hangs_up_frees_its_sequence(connection: ClientConnection, backend: FakeBackend) -> None:
    backend.script = silent
    body = json.dumps({"model": MODEL, "prompt": "hi"}).encode()
    connection.send(
        b"POST /api/generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    )
    await backend.submitted.wait()
    connection.transport.close()
    await backend.streams[0].cancelled.wait()


async def test_request_without_text_loads_its_model(connection: ClientConnection, backend: FakeBackend) -> None:
    for keep, reason in ((None, "load"), (0, "unload"), ("0s", "unload"), ("5m", "load")):
        for path in ("/api/chat", "/api/generate"):
            answered = (await connection.post(path, {"model": MODEL, "keep_alive": keep})).json()
            assert (answered["done"], answered["done_reason"]) == (True, reason)
    assert backend.streams == []


async def test_models_are_listed_and_shown(connection: ClientConnection) -> None:
    for path in ("/api/tags", "/api/ps"):
        (model,) = (await connection.request("GET", path)).json()["models"]
        assert (model["name"], model["model"], len(model["digest"])) == (MODEL, MODEL, 64)
    shown = (await connection.post("/api/show", {"name": f"{MODEL}:latest"})).json()
    architecture = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{architecture}.context_length"] == 1000
    assert shown["capabilities"] == ["completion", "tools"]
    assert (await connection.request("GET", "/api/version")).json()["version"].count(".") == 2
    assert lines(await connection.post("/api/pull", {"model": MODEL}))[-1] == {"status": "success"}
    for name, status in ((MODEL, 409), ("none", 404)):
        assert (await connection.request("DELETE", "/api/delete", {"model": name})).status == status


async def test_details_come_from_the_models_files(tmp_path: Path) -> None:
    formats = {"quant_method": "gguf", "types": {"Q6_K": ["a"], "Q4_K": ["b", "c"]}}
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 576, "quantization_config": formats}
    config["time_step_limit"] = [0.0, math.inf]  # written as Infinity, as Mamba 2's is
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "weights-00001.gguf").write_bytes(b"x" * 1234)
    backend = FakeBackend(model=model_card(model_dir=str(tmp_path)))
    connection = ClientConnection(make_app(backend))
    (model,) = (await connection.request("GET", "/api/tags")).json()["models"]
    details = model["details"]
    assert (model["size"], details["format"], details["family"]) == (1234, "gguf", "llama")
    assert details["quantization_level"] == "Q4_K"
    shown = (await connection.post("/api/show", {"model": MODEL})).json()
    assert shown["model_info"]["llama.embedding_length"] == 576
    await connection.end()


async def test_embeddings_are_truncated_unless_the_request_forbids_it() -> None:
    backend = PooledBackend(model=encoder_card("bert", ("embed", 16), max_context_tokens=8))
    connection = ClientConnection(make_app(backend, keeper=encoder(backend)))
    body = {"model": "bert", "input": ["cat", "the cat sat down"]}
    answer = (await connection.post("/api/embed", body)).json()
    kept = [token_ids("cat"), token_ids("the cat sat down")[:6]]
    for vector, ids in zip(answer["embeddings"], kept, strict=True):
        assert vector == pytest.approx(normalized(vector_of("embed", [START, *ids, END], 16)))
    assert answer["prompt_eval_count"] == sum(len(ids) + 2 for ids in kept)
    refused = await connection.post("/api/embed", {**body, "truncate": False})
    assert refused.json()["error"].startswith("input[1]: ")
    short = (await connection.post("/api/embed", {**body, "input": "cat", "dimensions": 4})).json()["embeddings"]
    assert [len(vector) for vector in short] == [4]
    assert (await connection.post("/api/embed", {"model": "bert"})).json()["embeddings"] == []
    older = (await connection.post("/api/embeddings", {"model": "bert", "prompt": "cat"})).json()
    assert older["embedding"] == pytest.approx(vector_of("embed", [START, *kept[0], END], 16))
    await connection.end()


async def test_stream_cannot_linger(connection: ClientConnection) -> None:
    refused = await connection.request(
        "POST", "/api/chat", {"model": MODEL, "messages": HI}, [("x-penstock-linger", "5")]
    )
    assert refused.json()["error"].startswith("X-Penstock-Linger: streams of /api/chat cannot linger")


ASKING = Callable[..., ClientConnection]


async def test_every_route_asks_for_the_key_unless_it_is_public(connect: ASKING) -> None:
    connection = connect(api_keys=("secret",))
    public = {"/", "/health", "/v1/health", "/ping", "/ready", "/metrics", "/docs", "/openapi.json"}
    public_folders = (
        "/page/",
        "/engine",
        "/docs/",
        "/manual/",
        "/admin/",
    )  # /engine/events and /admin/ check it themselves
    asked = 0
    for path, methods in make_app(FakeBackend()).routes.items():
        for method in methods.keys() - {"HEAD"}:
            if (path in public or path.startswith(public_folders)) and (path, method) != ("/", "POST"):
                continue
            answer = await connection.request(method, path, b"{}" if method == "POST" else None)
            assert answer.status == 401, (method, path, answer.body)
            asked += 1
    assert asked > 50
