"""Chroma: a collection whose embeddings come from OpenAI's endpoint or from TEI's."""

from __future__ import annotations

import chromadb
import pytest
from chromadb.utils.embedding_functions import HuggingFaceEmbeddingServer, OpenAIEmbeddingFunction
from demo_models import EMBEDDING, QUESTION, TEXTS


@pytest.mark.parametrize("kind", ["openai", "tei", "tei-root"])
def test_a_collection_finds_the_nearest_document(server_url: str, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv("PENSTOCK_TEST_KEY", "none")
    if kind == "openai":
        function = OpenAIEmbeddingFunction(
            api_key_env_var="PENSTOCK_TEST_KEY", api_base=f"{server_url}/v1", model_name=EMBEDDING
        )
    else:
        function = HuggingFaceEmbeddingServer(url=f"{server_url}/embed" if kind == "tei" else f"{server_url}/")
    client = chromadb.EphemeralClient(chromadb.Settings(anonymized_telemetry=False))
    collection = client.create_collection(f"texts-{kind}", embedding_function=function)
    collection.add(ids=["a", "b", "c"], documents=TEXTS)
    found = collection.query(query_texts=[QUESTION], n_results=1)
    assert found["ids"] == [["a"]]
