"""llama.cpp's native routes, against what the README of its server promises."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from penstock.shm.messages import Adapter
from tests.frontend.formats.scoring import ScoringBackend
from tests.frontend.harness import (
    END_TOKEN,
    ClientConnection,
    FakeBackend,
    Response,
    make_app,
    model_card,
    says,
    token_ids,
)


def events(response: Response) -> list[dict[str, Any]]:
    assert response.status == 200
    return [json.loads(event.removeprefix(b"data: ")) for event in response.body.split(b"\n\n") if event]


async def test_completion_has_the_promised_fields(connection: ClientConnection, backend: FakeBackend) -> None:
    body = {"prompt": "the cat", "n_predict": 4, "temperature": 0.3, "stop": ["zz"], "cache_prompt": True}
    answer = (await connection.post("/completion", body)).json()
    assert (answer["content"], answer["tokens"], answer["stop"]) == ("Hell", [], True)
    assert (answer["stop_type"], answer["stopping_word"], answer["truncated"]) == ("limit", "", False)
    assert (answer["tokens_evaluated"], answer["tokens_predicted"]) == (len(token_ids("the cat")), 4)
    assert (answer["prompt"], answer["model"]) == ("the cat", "test/model")
    settings = answer["generation_settings"]
    assert (settings["n_predict"], settings["temperature"], settings["stop"]) == (4, 0.3, ["zz"])
    assert {"prompt_n", "prompt_ms", "predicted_per_second"} <= answer["timings"].keys()
    assert backend.last.sampling.temperature == 0.3


@pytest.mark.parametrize(
    ("change", "content", "kind", "word"),
    [({}, "Hello, world!", "eos", ""), ({"stop": ["wor"]}, "Hello, ", "word", "wor")],
)
async def test_stop_type_tells_why_it_ended(
    connection: ClientConnection, change: dict[str, Any], content: str, kind: str, word: str
) -> None:
    answer = (await connection.post("/completion", {"prompt": "x", "return_tokens": True, **change})).json()
    assert (answer["content"], answer["stop_type"], answer["stopping_word"]) == (content, kind, word)
    assert answer["tokens"][:6] == token_ids("Hello,")


async def test_stream_has_pieces_with_tokens_and_a_last_event(connection: ClientConnection) -> None:
    body = {"prompt": "x", "stream": True, "return_progress": True, "timings_per_token": True}
    progress, *pieces, last = events(await connection.post("/completion", body))
    assert progress["prompt_progress"].keys() == {"total", "cache", "processed", "time_ms"}
    assert "".join(piece["content"] for piece in pieces) == "Hello, world!"
    assert [token for piece in pieces for token in piece["tokens"]] == token_ids("Hello, world!")
    assert not any(piece["stop"] for piece in pieces)
    assert all("timings" in piece for piece in pieces)
    assert (last["stop"], last["stop_type"], last["content"], last["tokens"]) == (True, "eos", "", [END_TOKEN])


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("the", ["the"]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([5, "the", 7], [[5, "the", 7]]),
        (["a", "b"], ["a", "b"]),
        ([[5, "a"], "b", {"prompt_string": "c"}], [[5, "a"], "b", "c"]),
    ],
)
async def test_prompts_have_all_promised_shapes(
    connection: ClientConnection, backend: FakeBackend, prompt: Any, expected: list[Any]
) -> None:
    answer = (await connection.post("/completion", {"prompt": prompt})).json()
    assert len(answer) == len(expected) if len(expected) > 1 else isinstance(answer, dict)
    for stream, segments in zip(backend.streams, expected, strict=True):
        listed = segments if isinstance(segments, list) else [segments]
        tokens = [each for item in listed for each in (token_ids(item) if isinstance(item, str) else [item])]
        assert list(stream.request.token_ids) == tokens


async def test_probabilities_come_with_ids_and_bytes() -> None:
    connection = ClientConnection(make_app(ScoringBackend()))
    answer = (await connection.post("/completion", {"prompt": "x", "n_probs": 2, "n_predict": 3})).json()
    assert len(answer["completion_probabilities"]) == 3
    for entry in answer["completion_probabilities"]:
        assert entry.keys() == {"id", "token", "bytes", "logprob", "top_logprobs"}
        assert [top.keys() for top in entry["top_logprobs"]] == [entry.keys() - {"top_logprobs"}] * 2
    await connection.end()


async def test_response_fields_select_by_path(connection: ClientConnection) -> None:
    body = {"prompt": "x", "n_predict": 0, "response_fields": ["content", "timings/prompt_n", "none"]}
    answer = (await connection.post("/completion", body)).json()
    assert (answer.keys(), answer["content"]) == ({"content", "timings/prompt_n"}, "")
    assert events(await connection.post("/completion", {**body, "stream": True}))[-1].keys() == answer.keys()


async def test_answer_reports_the_prompt_that_was_computed(connection: ClientConnection, backend: FakeBackend) -> None:
    body = {"prompt": "x" * 100_000 + "the cat", "truncate_prompt_tokens": len(token_ids("the cat"))}
    answer = (await connection.post("/completion", body)).json()
    assert (answer["prompt"], answer["tokens_evaluated"]) == ("the cat", len(token_ids("the cat")))
    assert list(backend.last.token_ids) == token_ids("the cat")


@pytest.mark.parametrize("text", ["one\ntwo", "one two"])
async def test_last_event_tells_whether_the_text_had_a_new_line(
    connection: ClientConnection, backend: FakeBackend, text: str
) -> None:
    backend.script = says(text)
    *_, last = events(await connection.post("/completion", {"prompt": "x", "stream": True}))
    assert last["has_new_line"] == ("\n" in text)


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "message"),
    [
        ("/completion", {}, 400, "invalid_request_error", "prompt: required"),
        ("/completion", {"prompt": "x", "top_p": 2}, 400, "invalid_request_error", "top_p: "),
        ("/completion", {"prompt": "x" * 2000}, 400, "exceed_context_size_error", "prompt: "),
        (
            "/completion",
            {"prompt": ["a"] * 128, "n": 16},
            400,
            "invalid_request_error",
            "prompt: prompts × n_cmpl is 2048; the limit is 128",
        ),
        ("/completion", {"prompt": [9999]}, 400, "invalid_request_error", "prompt: token id 9999"),
        (
            "/completion",
            {"prompt": "x", "post_sampling_probs": True},
            400,
            "invalid_request_error",
            "post_sampling_probs",
        ),
        ("/completion", {"prompt": "x", "prompt_logprobs": 1}, 400, "invalid_request_error", "prompt_logprobs: not"),
        (
            "/infill",
            {"truncate_prompt_tokens": 5},
            400,
            "invalid_request_error",
            "truncate_prompt_tokens: not supported by this endpoint",
        ),
        ("/infill", {"input_prefix": "x"}, 400, "invalid_request_error", 'input_suffix: "test/model" has no tokens'),
    ],
)
async def test_errors_have_llama_cpps_form(
    connection: ClientConnection, path: str, body: dict[str, Any], status: int, kind: str, message: str
) -> None:
    refused = await connection.post(path, body)
    error = refused.json()["error"]
    assert (refused.status, error["code"], error["type"]) == (status, status, kind)
    assert error["message"].startswith(message)


async def test_props_slots_and_adapters_describe_the_server() -> None:
    backend = FakeBackend(model=model_card(adapters=(Adapter("tuned", "a" * 16, 8),)))
    connection = ClientConnection(make_app(backend))
    props = (await connection.request("GET", "/props")).json()
    assert props["default_generation_settings"]["n_ctx"] == 1000
    assert props["default_generation_settings"]["params"]["temperature"] == 1.0
    assert (props["total_slots"], props["is_sleeping"], props["modalities"]["vision"]) == (3, False, False)
    assert props["chat_template"].startswith("{% for message")
    slots = (await connection.request("GET", "/slots")).json()
    assert [slot["is_processing"] for slot in slots] == [True, True, False]
    assert (await connection.request("GET", "/slots?fail_on_no_slot=1")).status == 200
    backend.backend_counters = {"running": 2, "waiting": 1}
    assert (await connection.request("GET", "/slots?fail_on_no_slot=1")).status == 503
    assert (await connection.request("GET", "/lora-adapters")).json() == [{"id": 0, "path": "tuned", "scale": 0.0}]
    assert (await connection.request("GET", "/v1/health")).json() == {"status": "ok"}
    await connection.end()


async def test_special_tokens_are_plaintext_if_the_client_says_so(connection: ClientConnection) -> None:
    body = {"content": "a<|end|>"}
    read = (await connection.post("/tokenize", body)).json()["tokens"]
    assert read == [*token_ids("a"), END_TOKEN]
    plain = (await connection.post("/tokenize", {**body, "parse_special": False})).json()["tokens"]
    assert END_TOKEN not in plain
    assert (await connection.post("/detokenize", {"tokens": plain})).json()["content"] == "a<|end|>"
    refused = (await connection.post("/tokenize", {"content": "x" * 100_000, "parse_special": False})).json()["error"]
    assert refused["message"].startswith("content: at least ")


async def test_progress_of_a_completion_is_in_openais_stream_too(
    connect: Callable[..., ClientConnection], backend: FakeBackend
) -> None:
    backend.script = says("Hi")
    answer = await connect().post("/v1/completions", {"prompt": "x", "stream": True, "return_progress": True})
    assert "prompt_progress" in answer.events()[0]
