"""Qdrant: vectors of OpenAI's endpoint, as its documentation does it. Its client has no embedder that calls one."""

from __future__ import annotations

import openai
from demo_models import EMBEDDING, QUESTION, TEXTS
from qdrant_client import QdrantClient
from qdrant_client.models import Distance, PointStruct, VectorParams


def test_a_collection_finds_the_nearest_document(server_url: str) -> None:
    embedder = openai.OpenAI(base_url=f"{server_url}/v1", api_key="none")
    embedded = embedder.embeddings.create(model=EMBEDDING, input=TEXTS).data
    client = QdrantClient(":memory:")
    client.create_collection("texts", VectorParams(size=len(embedded[0].embedding), distance=Distance.COSINE))
    points = [
        PointStruct(id=each.index, vector=each.embedding, payload={"text": text})
        for each, text in zip(embedded, TEXTS, strict=True)
    ]
    client.upsert("texts", points)
    (asked,) = embedder.embeddings.create(model=EMBEDDING, input=QUESTION).data
    (found,) = client.query_points("texts", query=asked.embedding, limit=1).points
    assert found.payload == {"text": TEXTS[0]}
