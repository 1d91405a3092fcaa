"""Cohere's embeddings: its types of vectors, its prompts by type of input, its truncation."""

from __future__ import annotations

import base64
from array import array
from typing import Any

import numpy as np
import pytest

from tests.frontend.endpoints.pooling.conftest import MAX_TOKENS
from tests.frontend.harness import ClientConnection, token_ids
from tests.frontend.pooled_backend import END, START, PooledBackend, normalized, vector_of

PATH = "/v2/embed"


def expected(text: str, width: int = 8) -> list[float]:
    return normalized(vector_of("embed", [START, *token_ids(text), END], 8)[:width])


async def test_every_type_of_vector_is_made_of_the_same_one(connection: ClientConnection) -> None:
    types = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    answer = (await connection.post(PATH, {"texts": ["cat", "x"], "embedding_types": types})).json()
    assert (answer["response_type"], answer["texts"]) == ("embeddings_by_type", ["cat", "x"])
    assert answer["meta"]["api_version"] == {"version": "2"}
    assert answer["meta"]["billed_units"]["input_tokens"] == len(token_ids("cat")) + len(token_ids("x")) + 4
    found = answer["embeddings"]
    assert list(found) == types
    for index, text in enumerate(("cat", "x")):
        vector = np.array(expected(text), np.float32)
        bits = "".join("1" if value > 0 else "0" for value in vector)
        assert list(array("f", found["float"][index])) == expected(text)
        assert list(array("f", base64.b64decode(found["base64"][index]))) == expected(text)
        np.testing.assert_allclose(found["int8"][index], 127 * vector, atol=0.5)
        assert [value + 128 for value in found["int8"][index]] == found["uint8"][index]
        assert found["ubinary"][index] == [int(bits, 2)]
        assert found["binary"][index] == [int(bits, 2) - 128]


async def test_v1_answers_a_list_unless_types_are_named(connection: ClientConnection) -> None:
    plain = (await connection.post("/v1/embed", {"texts": ["cat"]})).json()
    assert plain["response_type"] == "embeddings_floats"
    assert [list(array("f", vector)) for vector in plain["embeddings"]] == [expected("cat")]
    typed = (await connection.post("/v1/embed", {"texts": ["cat"], "embedding_types": ["float", "float"]})).json()
    assert list(typed["embeddings"]) == ["float"]
    assert typed["meta"]["api_version"] == {"version": "1"}


@pytest.mark.parametrize(
    ("input_type", "prompt"), [("search_query", "query: "), ("search_document", "passage: "), ("clustering", "")]
)
async def test_type_of_input_chooses_the_prompt(connection: ClientConnection, input_type: str, prompt: str) -> None:
    body = {"inputs": [{"content": [{"type": "text", "text": "cat"}]}], "input_type": input_type, "output_dimension": 3}
    (vector,) = (await connection.post(PATH, body)).json()["embeddings"]["float"]
    assert list(array("f", vector)) == expected(f"{prompt}cat", 3)


async def test_long_inputs_lose_the_end_that_truncate_names(
    connection: ClientConnection, embedder: PooledBackend
) -> None:
    long = "ab" * MAX_TOKENS
    whole = token_ids(long)
    for changes, kept in (
        ({}, whole[: MAX_TOKENS - 2]),
        ({"truncate": "START"}, whole[-(MAX_TOKENS - 2) :]),
        ({"max_tokens": 6}, whole[:4]),
    ):
        assert (await connection.post(PATH, {"texts": [long], **changes})).status == 200
        assert list(embedder.pooled_streams[-1].request.token_ids) == [START, *kept, END]  # type: ignore[arg-type]
    refused = await connection.post(PATH, {"texts": ["x", long], "truncate": "NONE"})
    assert refused.status == 400
    assert "texts[1]: 130 tokens, but the limit of this model is 64 tokens" in refused.json()["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "texts: required, or inputs"),
        ({"texts": []}, "texts: expected array of length >= 1"),
        ({"texts": ["a", ""]}, "texts[1]: an empty text"),
        ({"texts": ["a"] * 2049}, "texts: at most 2048 inputs in one request, got 2049"),
        ({"texts": ["a"], "inputs": [{"content": [{"type": "text", "text": "b"}]}]}, "inputs: not together with texts"),
        ({"images": ["data:"]}, "images: not supported"),
        ({"texts": ["a"], "input_type": "image"}, "input_type: must be one of"),
        ({"texts": ["a"], "output_dimension": 9}, "dimensions: 9, but the embeddings of this model have 8 values"),
        ({"texts": ["a"], "embedding_types": ["int4"]}, "embedding_types"),
        ({"texts": ["a"], "model": "reranker"}, "model: this endpoint needs one that can compute embeddings"),
    ],
)
async def test_errors_have_coheres_format(connection: ClientConnection, body: dict[str, Any], message: str) -> None:
    refused = await connection.post(PATH, body)
    assert refused.status == 400
    assert refused.json()["message"].startswith(message)
