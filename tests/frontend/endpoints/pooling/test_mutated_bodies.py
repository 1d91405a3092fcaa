"""Bodies of embedding, reranking and classification with an error anywhere in them."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.frontend.app import App
from tests.frontend.harness import make_app
from tests.frontend.mutated_bodies import Sender, mutations
from tests.frontend.pooled_backend import PooledBackend, encoder, encoder_card

MAX_ERROR_BYTES = 3000
TRUNCATED = {"truncate_prompt_tokens": -1, "truncation_side": "left", "timeout_ms": 5000, "model": "encoder"}
TEI = {"truncate": True, "truncation_direction": "Left", "model": "encoder"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": ["a", "b"], "dimensions": 4, "encoding_format": "base64", **TRUNCATED},
    "/v1/embed": {"texts": ["a", "b"], "truncate": "NONE", "priority": 1},
    "/v2/embed": {
        "inputs": [{"content": [{"type": "text", "text": "a"}]}],
        "input_type": "search_query",
        "embedding_types": ["int8", "binary"],
        "output_dimension": 4,
        "max_tokens": 3,
    },
    "/": {"query": "a", "texts": ["b"], "raw_scores": True, **TEI},
    "/v1/rerank": {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "max_tokens_per_doc": 3, **TRUNCATED},
    "/rerank": {"query": "a", "texts": ["b", "c"], "raw_scores": True, "return_text": True, **TEI},
    "/score": {"text_1": ["a", "b"], "text_2": ["c", "d"], "use_activation": False, **TRUNCATED},
    "/classify": {"input": [[1, 2], [3]], "use_activation": True, **TRUNCATED},
    "/pooling": {"input": "a", "task": "token_embed", "dimensions": 2, **TRUNCATED},
    "/embed": {"inputs": [1, 2, 3], "dimensions": 3, "normalize": False, **TEI},
    "/embed_sparse": {"inputs": ["a"], **TEI},
    "/similarity": {"inputs": {"source_sentence": "a", "sentences": ["b"]}, "parameters": {"truncate": True}},
    "/predict": {"inputs": [["a"], ["a", "b"]], "raw_scores": True, **TEI},
    "/tokenize": {"inputs": ["a", "b"], "add_special_tokens": False},
    "/decode": {"ids": [[1, 2], [3]], "skip_special_tokens": False},
}


@cache
def app() -> App:
    pooled = (("embed", 8), ("token_embed", 4), ("sparse", 300), ("classify", 1))
    backend = PooledBackend(model=encoder_card("encoder", *pooled, max_context_tokens=64))
    return make_app(backend, keeper=encoder(backend))


@pytest.mark.parametrize("path", BODIES)
async def test_body_with_every_field_is_answered(path: str) -> None:
    async with Sender(app(), path, MAX_ERROR_BYTES) as sender:
        assert await sender.status(BODIES[path]) == 200
        await sender.check_not_objects()


@settings(max_examples=150)
@given(st.data())
async def test_no_mutated_body_causes_a_server_error(data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(list(BODIES)))
    async with Sender(app(), path, MAX_ERROR_BYTES) as sender:
        await sender.status(data.draw(mutations(BODIES[path])))
