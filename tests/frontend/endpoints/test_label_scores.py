"""/v1/score with SGLang's fields: the probability of each label as the next token."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.frontend.formats.scoring import ScoringBackend, entry
from tests.frontend.harness import VOCAB_SIZE, ClientConnection, make_app, token_ids

URL = "/v1/score"


@pytest.fixture
def backend() -> ScoringBackend:
    return ScoringBackend()


async def test_each_label_is_scored_after_query_and_item(connection: ClientConnection, backend: ScoringBackend) -> None:
    body = {"query": "the cat", "items": [" sat", " on the mat"], "label_token_ids": [7, 9]}
    answer = (await connection.post(URL, body)).json()
    prompts = [[*token_ids("the cat" + item), label] for item in body["items"] for label in (7, 9)]
    assert [list(stream.request.token_ids) for stream in backend.streams] == prompts
    logprobs = [entry(prompt[-1], len(prompt) - 1, 0).logprob for prompt in prompts]
    expected = [[math.exp(logprob) for logprob in logprobs[:2]], [math.exp(logprob) for logprob in logprobs[2:]]]
    assert answer["scores"] == [pytest.approx(scores) for scores in expected]
    assert (answer["object"], answer["model"]) == ("scoring", "test/model")
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))


async def test_softmax_makes_the_scores_of_an_item_one(connection: ClientConnection) -> None:
    body = {"query": [1, 2], "items": [[3], [4, 5]], "label_token_ids": [7, 9, 11], "apply_softmax": True}
    scores = (await connection.post("/score", body)).json()["scores"]
    assert [sum(each) for each in scores] == [pytest.approx(1.0)] * 2


async def test_items_may_come_first(connection: ClientConnection, backend: ScoringBackend) -> None:
    await connection.post(URL, {"query": [1, 2], "items": [[3]], "label_token_ids": [7], "item_first": True})
    assert list(backend.last.token_ids) == [3, 1, 2, 7]
    await connection.post(URL, {"query": " cat", "items": "the", "label_token_ids": [7], "item_first": True})
    assert list(backend.last.token_ids) == [*token_ids("the cat"), 7]


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"label_token_ids": []}, "label_token_ids", "length >= 1"),
        ({"label_token_ids": [VOCAB_SIZE]}, "label_token_ids[0]", "outside the vocabulary"),
        ({"items": [[1]]}, "items[0]", "must be a text"),
        ({"items": ["a"] * 65, "label_token_ids": [1, 2]}, "items", "the limit"),
        ({"items": ["x" * 5000]}, "items", "context"),
        ({"query": "", "items": ["a", ""]}, "items[1]", "at least one"),
        ({"query": 5}, "query", "got `int`"),
    ],
)
async def test_what_cannot_be_scored_is_refused(
    connection: ClientConnection, fields: dict[str, Any], param: str, reason: str
) -> None:
    refused = await connection.post(URL, {"query": "a", "items": ["b"], "label_token_ids": [1], **fields})
    assert (refused.status, refused.error["param"]) == (400, param)
    assert reason.replace("`", "") in refused.error["message"]


async def test_vllms_body_at_the_same_path_needs_a_model_that_scores(backend: ScoringBackend) -> None:
    connection = ClientConnection(make_app(backend))
    refused = await connection.post(URL, {"text_1": "a", "text_2": "b"})
    assert (refused.status, refused.error["code"]) == (400, "model_not_capable")
    await connection.end()
