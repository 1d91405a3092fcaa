"""POST /v1/embeddings, and what every endpoint of its kind does: portions, refusals, cancellation, limits of keys."""

from __future__ import annotations

import asyncio
import base64
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from penstock.frontend.access.admission import Admission
from penstock.frontend.access.api_keys import ApiKey, KeyLimits
from penstock.frontend.generation.models.model_table import ServedModels
from penstock.frontend.generation.submission.pooled_run import PORTION
from penstock.frontend.schemas.pooling.common import MAX_INPUTS
from penstock.frontend.text.tokenizer import ModelTokenizer
from penstock.shm.client import FailureCode, Finish, Overloaded, PooledFailed
from tests.frontend.endpoints.pooling.conftest import MAX_TOKENS
from tests.frontend.harness import ClientConnection, make_app, request_bytes, token_ids
from tests.frontend.pooled_backend import (
    END,
    OVERLOADED,
    START,
    PooledBackend,
    encoder,
    encoder_card,
    normalized,
    vector_of,
)

PATH = "/v1/embeddings"


def single(text: str) -> list[int]:
    return [START, *token_ids(text), END]


def expected(ids: list[int], width: int = 8) -> list[float]:
    return normalized(vector_of("embed", ids, 8)[:width])


async def test_each_form_of_input_gives_its_vectors_in_order(connection: ClientConnection) -> None:
    ids = token_ids("the cat")
    cases: list[tuple[Any, list[list[int]]]] = [
        ("the cat", [single("the cat")]),
        (["a", "b", "a"], [single("a"), single("b"), single("a")]),
        (ids, [ids]),
        ([ids, [3]], [ids, [3]]),
    ]
    for given, inputs in cases:
        answer = (await connection.post(PATH, {"input": given, "model": "bert", "user": "me"})).json()
        assert (answer["object"], answer["model"]) == ("list", "bert")
        assert [item["index"] for item in answer["data"]] == list(range(len(inputs)))
        assert [list(array("f", item["embedding"])) for item in answer["data"]] == [expected(each) for each in inputs]
        num_tokens = sum(map(len, inputs))
        assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


async def test_base64_dimensions_and_prompts(connection: ClientConnection) -> None:
    body = {"input": "x", "encoding_format": "base64", "dimensions": 3, "prompt_name": "query"}
    (item,) = (await connection.post(PATH, body)).json()["data"]
    assert list(array("f", base64.b64decode(item["embedding"]))) == expected(single("query: x"), width=3)


@pytest.mark.parametrize("field", ["normalize", "use_activation"])
async def test_vectors_can_be_raw_and_without_special_tokens(connection: ClientConnection, field: str) -> None:
    body = {"input": "x", field: False, "add_special_tokens": False}
    (item,) = (await connection.post(PATH, body)).json()["data"]
    assert list(array("f", item["embedding"])) == vector_of("embed", token_ids("x"), 8)


async def test_an_input_is_truncated_only_on_request(connection: ClientConnection) -> None:
    long = list(range(2 * MAX_TOKENS))
    refused = await connection.post(PATH, {"input": ["x", "y" * 200]})
    assert (refused.status, refused.error["param"]) == (400, "input[1]")
    assert refused.error["message"].startswith("input[1]: 202 tokens, but the limit of this model is 64 tokens")
    for body, kept in (
        ({"truncate_prompt_tokens": -1}, long[:MAX_TOKENS]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "left"}, long[-5:]),
    ):
        (item,) = (await connection.post(PATH, {"input": long, **body})).json()["data"]
        assert list(array("f", item["embedding"])) == expected(kept)
    text = await connection.post(PATH, {"input": "y" * 200, "truncate_prompt_tokens": 4})
    assert list(array("f", text.json()["data"][0]["embedding"])) == expected(single("yy"))


@pytest.mark.parametrize(
    ("path", "field", "otherwise"),
    [
        (PATH, "input", {}),
        ("/embed", "inputs", {"truncate": False}),
    ],
)
async def test_server_that_truncates_says_how_many_inputs_it_has_cut(
    path: str, field: str, otherwise: dict[str, bool], embedder: PooledBackend
) -> None:
    connection = ClientConnection(make_app(embedder, models=ServedModels(encoder(embedder, truncates_inputs=True))))
    answer = await connection.post(path, {field: ["x", "y" * 200]})
    assert (answer.status, answer.headers["x-penstock-truncated"]) == (200, "1")
    assert "x-penstock-truncated" not in (await connection.post(path, {field: "x"})).headers
    if otherwise:
        assert (await connection.post(path, {field: "y" * 200, **otherwise})).status == 413


async def test_token_ids_of_other_tokenizers_are_refused_with_the_remedy(embedder: PooledBackend) -> None:
    connection = ClientConnection(make_app(embedder, models=ServedModels(encoder(embedder, takes_token_ids=False))))
    refused = await connection.post(PATH, {"input": [[9906, 11, 856], [1]]})
    assert (refused.status, refused.error["param"]) == (400, "input[0]")
    assert (
        "OpenAIEmbeddings: check_embedding_ctx_length=False), or start the server with --allow-token-ids"
        in (refused.error["message"])
    )
    assert (await connection.post(PATH, {"input": ["x"]})).status == 200


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"input": ""}, "input", "an empty text"),
        ({"input": ["x", ""]}, "input[1]", "an empty text"),
        ({"input": []}, "input", "length >= 1"),
        ({"input": [[1], []]}, "input[1]", "an empty list of token ids"),
        ({"input": ["x", 1]}, "input[1]", "not a mix"),
        ({"input": ["x"] * (MAX_INPUTS + 1)}, "input", "at most 2048 inputs in one request, got 2049"),
        ({"input": [1, 5000]}, "input", "token id 5000 is outside the vocabulary of"),
        ({"dimensions": 9}, "dimensions", "9, but the embeddings of this model have 8 values"),
        ({"dimensions": 0}, "dimensions", ">= 1"),
        ({"encoding_format": "hex"}, "encoding_format", "must be one of base64, float"),
        ({"prompt_name": "none"}, "prompt_name", 'is not a prompt of this model; it has "query", "passage"'),
        ({"truncate_prompt_tokens": 65}, "truncate_prompt_tokens", "65, but the limit of this model is 64 tokens"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "must be -1 or at least 1"),
        ({"model": "llm"}, "model", '"llm" can generate text'),
        ({"model": "reranker"}, "model", '"reranker" can rerank and classify'),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages", "not supported"),
        ({"embed_dtype": "float16"}, "embed_dtype", "not supported"),
    ],
)
async def test_a_wrong_field_is_named_with_value_and_limit(
    connection: ClientConnection, embedder: PooledBackend, changes: dict[str, Any], param: str, message: str
) -> None:
    refused = await connection.post(PATH, {"input": "x", **changes})
    assert (refused.status, refused.error["param"]) == (400, param)
    assert message in refused.error["message"]
    assert not embedder.pooled_streams


async def test_a_request_names_a_field_that_is_missing(connection: ClientConnection) -> None:
    refused = await connection.post(PATH, {})
    assert (refused.status, refused.error["code"]) == (400, "missing_required_parameter")


async def test_inputs_are_sent_in_portions_and_stay_in_order(
    connection: ClientConnection, embedder: PooledBackend
) -> None:
    texts = [str(number) for number in range(MAX_INPUTS)]
    answer = (await connection.post(PATH, {"input": texts, "encoding_format": "base64"})).json()
    vectors = [list(array("f", base64.b64decode(item["embedding"]))) for item in answer["data"]]
    assert vectors == [expected(single(text)) for text in texts]
    assert len({stream.request.group for stream in embedder.pooled_streams}) == 1
    embedder.is_silent = True
    embedder.pooled_streams.clear()
    connection.send(request_bytes("POST", PATH, {"input": texts}))
    for _ in range(PORTION + 20):
        await asyncio.sleep(0)
    assert len(embedder.pooled_streams) == PORTION
    await connection.end()
    assert all(stream.cancelled.is_set() for stream in embedder.pooled_streams)


async def test_a_full_queue_refuses_before_the_first_result_and_delays_after_it(
    connection: ClientConnection, embedder: PooledBackend
) -> None:
    for failure in (Overloaded(3, 7), OVERLOADED):
        embedder.failures = [failure]
        refused = await connection.post(PATH, {"input": ["a", "b"]})
        assert (refused.status, refused.error["code"], refused.headers["retry-after"]) == (429, "overloaded", "3")
        assert "the limit is 7" in refused.error["message"]
    embedder.failures = [None, OVERLOADED, Overloaded(3, 7), OVERLOADED]
    embedder.pooled_streams.clear()
    answering = asyncio.ensure_future(connection.post(PATH, {"input": ["a", "b", "c"]}))
    await embedder.waits_for_room.wait()
    assert len(embedder.pooled_streams) == 3  # nothing is sent while it waits
    assert not embedder.room.is_set()
    embedder.room.set()
    answer = (await answering).json()
    vectors = [list(array("f", item["embedding"])) for item in answer["data"]]
    assert vectors == [expected(single(text)) for text in "abc"]
    assert embedder.pooled_streams[-1].request.has_begun


async def test_waiting_for_room_ends_at_the_deadline_and_with_the_client(
    connection: ClientConnection, embedder: PooledBackend
) -> None:
    embedder.failures = [None, OVERLOADED]
    late = await connection.post(PATH, {"input": ["a", "b"], "timeout_ms": 50})
    assert (late.status, late.error["code"]) == (499, "timeout")
    embedder.failures = [None, OVERLOADED]
    embedder.waits_for_room.clear()
    connection.send(request_bytes("POST", PATH, {"input": ["a", "b"]}))
    await embedder.waits_for_room.wait()
    connection.transport.reset()
    await connection.idle()


async def test_a_full_backend_refuses_several_inputs_before_they_are_encoded(
    connection: ClientConnection, embedder: PooledBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedder.full_for_unshared = Overloaded(3, 7)
    assert (await connection.post(PATH, {"input": ["a"]})).status == 200  # its vector may be there already

    async def encode_inputs(*_: Any, **__: Any) -> Any:
        raise AssertionError("encoded")

    monkeypatch.setattr(ModelTokenizer, "encode_inputs", encode_inputs)
    for body, headers in (({"input": ["a", "b"]}, []), ({"input": "a"}, [("x-penstock-coalesce", "off")])):
        refused = await connection.request("POST", PATH, body, headers)
        assert (refused.status, refused.error["code"], refused.headers["retry-after"]) == (429, "overloaded", "3")


async def test_coalesce_off_keeps_an_input_to_itself(connection: ClientConnection, embedder: PooledBackend) -> None:
    for value, may_share in (("on", True), ("off", False)):
        assert (await connection.request("POST", PATH, {"input": "x"}, [("x-penstock-coalesce", value)])).status == 200
        assert embedder.pooled_streams[-1].request.may_share is may_share
    wrong = await connection.request("POST", PATH, {"input": "x"}, [("x-penstock-coalesce", "no")])
    assert (wrong.status, wrong.error["param"]) == (400, "X-Penstock-Coalesce")


@pytest.mark.parametrize(
    ("failed", "status", "code"),
    [
        (PooledFailed(Finish.EXPIRED, None), 499, "timeout"),
        (PooledFailed(Finish.FAILED, FailureCode.INTERNAL), 500, "internal_error"),
        (PooledFailed(Finish.FAILED, FailureCode.UNAVAILABLE), 503, "backend_unavailable"),
        (PooledFailed(Finish.REJECTED, FailureCode.SHUTTING_DOWN), 503, "shutting_down"),
        (PooledFailed(Finish.REJECTED, FailureCode.CONTEXT_TOO_LONG, 9), 400, "context_length_exceeded"),
        (PooledFailed(Finish.REJECTED, FailureCode.NOT_SERVED), 400, "model_not_capable"),
    ],
)
async def test_a_failed_input_fails_the_request_and_cancels_the_others(
    connection: ClientConnection, embedder: PooledBackend, failed: PooledFailed, status: int, code: str
) -> None:
    embedder.failures = [None, failed]
    embedder.is_silent = False
    response = await connection.post(PATH, {"input": ["a", "b", "c"]})
    assert (response.status, response.error["code"]) == (status, code)
    assert embedder.pooled_streams[-1].cancelled.is_set()


async def test_a_hang_up_cancels_every_input(connection: ClientConnection, embedder: PooledBackend) -> None:
    embedder.is_silent = True
    connection.send(request_bytes("POST", PATH, {"input": ["a", "b"]}))
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(embedder.pooled_streams) == 2
    connection.transport.reset()
    await connection.idle()
    assert all(stream.cancelled.is_set() for stream in embedder.pooled_streams)


async def test_an_answer_that_is_too_large_is_refused_before_it_is_computed(embedder: PooledBackend) -> None:
    embedder.model = encoder_card("wide", ("token_embed", 1 << 16))
    connection = ClientConnection(make_app(embedder, models=ServedModels(encoder(embedder))))
    refused = await connection.post("/embed_all", {"inputs": [[1] * 65, [1] * 64]})
    message = "inputs: 129 tokens with 65536 values each; the limit of one answer is 8388608 values"
    assert (refused.status, refused.json()["error"]) == (413, message)
    assert not embedder.pooled_streams
    assert (await connection.post("/embed_all", {"inputs": [1]})).status == 200


async def test_policy_and_headers(connection: ClientConnection, embedder: PooledBackend) -> None:
    body = {"input": "x", "priority": 2, "timeout_ms": 5000}
    response = await connection.request("POST", PATH, body, [("x-request-timeout-ms", "1000")])
    assert response.headers["x-penstock-coalesced"] == "none"
    assert "queue;dur=250.0" in response.headers["server-timing"]
    request = embedder.pooled_streams[-1].request
    assert request.priority == 2
    assert request.deadline_s is not None
    embedder.is_coalesced = True
    assert (await connection.post(PATH, body)).headers["x-penstock-coalesced"] == "joined"


async def test_tokens_count_against_the_limits_of_a_key(connect: Callable[..., ClientConnection]) -> None:
    key = ApiKey(b"secret", "one", KeyLimits(requests_in_flight=1, tokens_per_minute=10))
    connection = connect(admission=Admission([key]))
    bearer = [("authorization", "Bearer secret")]
    assert (await connection.request("POST", PATH, {"input": "x"})).status == 401
    first = await connection.request("POST", PATH, {"input": [[1, 2], [3, 4]]}, bearer)
    assert (first.status, first.headers["x-ratelimit-remaining-tokens"]) == (200, "6")
    beyond = await connection.request("POST", PATH, {"input": [1] * 7}, bearer)
    assert (beyond.status, beyond.error["code"]) == (429, "rate_limit_exceeded")
    never = await connection.request("POST", PATH, {"input": [1] * 11}, bearer)
    assert (never.status, never.error["param"]) == (400, "input")
