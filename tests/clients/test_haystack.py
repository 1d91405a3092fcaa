"""Haystack: embedders by OpenAI's endpoint and by TEI's, and TEI's ranker."""

from __future__ import annotations

import pytest
from demo_models import EMBEDDING, QUESTION, TEXTS
from haystack import Document
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.utils import Secret
from haystack_integrations.components.embedders.huggingface_api import (
    HuggingFaceAPIDocumentEmbedder,
    HuggingFaceAPITextEmbedder,
)
from haystack_integrations.components.rankers.huggingface_api import HuggingFaceTEIRanker

KEY = Secret.from_token("none")


def test_openai_and_tei_embedders_agree(server_url: str) -> None:
    openai = {"api_key": KEY, "api_base_url": f"{server_url}/v1", "model": EMBEDDING}
    tei = {"api_type": "text_embeddings_inference", "api_params": {"url": f"{server_url}/embed"}, "token": KEY}
    tei["normalize"] = True  # it sends false unless it is told
    documents = [Document(content=text) for text in TEXTS]
    embedders = (
        OpenAIDocumentEmbedder(**openai, progress_bar=False),
        HuggingFaceAPIDocumentEmbedder(**tei, progress_bar=False),
    )
    found = [[each.embedding for each in embedder.run(documents)["documents"]] for embedder in embedders]
    for one, other in zip(*found, strict=True):
        assert one == pytest.approx(other, abs=1e-6)
    queries = [OpenAITextEmbedder(**openai), HuggingFaceAPITextEmbedder(**tei)]
    one, other = (embedder.run(QUESTION)["embedding"] for embedder in queries)
    assert one == pytest.approx(other, abs=1e-6)


def test_tei_ranker_orders_documents_by_score(server_url: str) -> None:
    ranker = HuggingFaceTEIRanker(url=server_url, top_k=2, token=KEY)
    ranked = ranker.run(QUESTION, [Document(content=text) for text in TEXTS])["documents"]
    assert len(ranked) == 2
    assert ranked[0].score >= ranked[1].score
