"""TEI's root, which does what the model is for, and the statuses of TEI's errors."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from penstock.frontend.generation.models.model_table import ServedModels
from penstock.frontend.schemas.pooling.common import MAX_INPUTS
from penstock.shm.client import FailureCode, Finish, PooledFailed
from tests.frontend.endpoints.pooling.conftest import MAX_TOKENS
from tests.frontend.harness import ClientConnection, make_app
from tests.frontend.pooled_backend import OVERLOADED, PooledBackend, encoder, encoder_card


async def same(connection: ClientConnection, path: str, body: dict[str, Any]) -> None:
    at_root, there = await connection.post("/", body), await connection.post(path, body)
    assert (at_root.status, at_root.body) == (there.status, there.body)
    assert at_root.status == 200


async def test_root_embeds_predicts_and_reranks_as_the_model_can(
    connection: ClientConnection, classifying: ClientConnection
) -> None:
    for inputs in ("cat", ["cat", "x"], [1, 2], [[1, 2], [3]]):
        await same(connection, "/embed", {"inputs": inputs, "normalize": False})
    await same(connection, "/rerank", {"query": "cat", "texts": ["a", "b"], "return_text": True})
    await same(connection, "/predict", {"inputs": [["cat"], ["a", "b"]], "model": "reranker"})
    for predicted in ("cat", ["cat", "x"], [["cat"], ["x"]]):
        await same(classifying, "/predict", {"inputs": predicted})


async def test_root_of_a_sparse_model_answers_weights() -> None:
    backend = PooledBackend(model=encoder_card("splade", ("sparse", 300)))
    connection = ClientConnection(make_app(backend, models=ServedModels(encoder(backend))))
    await same(connection, "/embed_sparse", {"inputs": ["cat"]})


@pytest.mark.parametrize(
    ("path", "body", "status", "error_type"),
    [
        ("/embed", {"inputs": ["x"] * (MAX_INPUTS + 1)}, 413, "Validation"),
        ("/", {"query": "a", "texts": ["x"] * (MAX_INPUTS + 1)}, 413, "Validation"),
        ("/rerank", {"query": "a", "texts": ["x"] * (MAX_INPUTS + 1)}, 413, "Validation"),
        ("/embed", {"inputs": [1] * (MAX_TOKENS + 1)}, 413, "Validation"),
        ("/", {"inputs": [[1]], "truncate": "yes"}, 422, "Validation"),
        ("/", {}, 422, "Validation"),
        ("/embed", {"inputs": "x", "normalise": True, "inputs_": 1, "dimensions": 0}, 422, "Validation"),
        ("/predict", {"inputs": "x", "model": "bert"}, 424, "Backend"),
        ("/embed", b"{", 400, "Validation"),
        ("/embed", {"inputs": ""}, 400, "Empty"),
        ("/embed", {"inputs": []}, 400, "Empty"),
        ("/embed_sparse", {"inputs": ["x", ""]}, 400, "Empty"),
        ("/predict", {"inputs": []}, 400, "Empty"),
        ("/predict", {"inputs": [[""]], "model": "reranker"}, 400, "Empty"),
        ("/rerank", {"query": "a", "texts": []}, 400, "Empty"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": [""]}}, 400, "Empty"),
        ("/embed", {"inputs": "x", "model": "none"}, 404, "Validation"),
    ],
)
async def test_errors_have_teis_statuses_in_the_answer_and_the_log(
    connection: ClientConnection,
    path: str,
    body: Any,
    status: int,
    error_type: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "penstock.app")
    refused = await connection.post(path, body)
    assert (refused.status, refused.json()["error_type"]) == (status, error_type)
    assert set(refused.json()) == {"error", "error_type"}
    (line,) = [record.getMessage() for record in caplog.records if record.name == "penstock.app"]
    assert f": {status} " in line


async def test_other_methods_at_root_have_openais_errors(connection: ClientConnection) -> None:
    """The chat page is at /, and does not belong to TEI."""
    for method, path, status in (("PUT", "/", 405), ("GET", "/none", 404)):
        refused = await connection.request(method, path)
        assert (refused.status, refused.error["type"]) == (status, "invalid_request_error")
    refused = await connection.request("GET", "/embed")
    assert (refused.status, set(refused.json())) == (405, {"error", "error_type"})


@pytest.mark.parametrize(
    ("failed", "status", "error_type"),
    [
        (PooledFailed(Finish.FAILED, FailureCode.INTERNAL), 424, "Backend"),
        (OVERLOADED, 429, "Overloaded"),
        (PooledFailed(Finish.FAILED, FailureCode.UNAVAILABLE), 503, "Unhealthy"),
    ],
)
async def test_failures_of_the_backend_have_teis_statuses(
    connection: ClientConnection, embedder: PooledBackend, failed: PooledFailed, status: int, error_type: str
) -> None:
    embedder.failures = [failed]
    response = await connection.post("/embed", {"inputs": "x"})
    assert (response.status, response.json()["error_type"]) == (status, error_type)
