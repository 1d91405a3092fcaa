"""Inputs that give wrong vectors or none: token ids of another tokenizer, and texts longer than the model's window."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.frontend.text.pooling_files import PoolingFiles
from tests.frontend.harness import ClientConnection, make_app, model_keeper, token_ids
from tests.frontend.pooled_backend import PooledBackend, encoder, encoder_card

LONG = "zebra xylophone"
LIMIT = 8


def connected(backend: PooledBackend, **changes: Any) -> ClientConnection:
    served = encoder(backend).current
    assert served is not None
    return ClientConnection(make_app(backend, keeper=model_keeper(backend, replace(served, **changes))))


@pytest.fixture
def backend() -> PooledBackend:
    kinds: tuple[tuple[Any, int], ...] = (("embed", 8), ("classify", 1))
    return PooledBackend(model=encoder_card("bert", *kinds, max_context_tokens=LIMIT))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": [9906, 11]}),
        ("/v1/embeddings", {"input": [[1, 2], [3]]}),
        ("/pooling", {"input": [1]}),
        ("/classify", {"input": [1]}),
        ("/embed", {"inputs": [[1]]}),
    ],
)
async def test_token_ids_are_refused_with_the_remedy(backend: PooledBackend, path: str, body: dict[str, Any]) -> None:
    connection = connected(backend, takes_token_ids=False)
    refused = await connection.post(path, body)
    assert refused.status in (400, 422)
    assert "check_embedding_ctx_length=False" in refused.body.decode()
    assert "--allow-token-ids" in refused.body.decode()
    assert not backend.pooled_streams
    await connection.end()


@pytest.mark.parametrize(
    ("path", "body", "forbidding"),
    [
        ("/v1/embeddings", {"input": ["a", LONG]}, None),
        ("/v1/embed", {"texts": ["a", LONG], "truncate": None}, {"truncate": "NONE"}),
        ("/embed", {"inputs": ["a", LONG]}, {"truncate": False}),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": [LONG]}}, None),
        ("/v1/rerank", {"query": "a", "documents": [LONG]}, {"truncate": False}),
        ("/rerank", {"query": "a", "texts": [LONG]}, {"truncate": False}),
        ("/score", {"text_1": "a", "text_2": LONG}, None),
    ],
)
async def test_long_inputs_are_truncated_where_the_server_says_so(
    backend: PooledBackend, path: str, body: dict[str, Any], forbidding: dict[str, Any] | None
) -> None:
    connection = connected(backend, truncates_inputs=True)
    answer = await connection.post(path, body)
    assert (answer.status, answer.headers.get("x-penstock-truncated")) == (200, "1")
    assert max(len(stream.request.token_ids) for stream in backend.pooled_streams) == LIMIT  # type: ignore[arg-type]
    if forbidding is not None:
        assert (await connection.post(path, body | forbidding)).status in (400, 413)
    await connection.end()


async def test_without_it_long_inputs_are_refused_and_short_ones_have_no_header(backend: PooledBackend) -> None:
    connection = connected(backend)
    assert len(token_ids(LONG)) > LIMIT
    assert (await connection.post("/v1/embeddings", {"input": LONG})).status == 400
    assert "x-penstock-truncated" not in (await connection.post("/v1/embeddings", {"input": "a"})).headers
    await connection.end()


@pytest.mark.parametrize(("files", "expected"), [({"max_seq_length": 256}, True), ({}, False), (None, False)])
def test_models_own_limit_is_that_of_sentence_transformers(
    tmp_path: Path, files: dict[str, Any] | None, expected: bool
) -> None:
    if files is not None:
        (tmp_path / "sentence_bert_config.json").write_text(json.dumps(files))
    assert PoolingFiles.load(tmp_path).has_own_limit == expected
