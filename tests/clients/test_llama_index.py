"""LlamaIndex: embeddings by OpenAI's endpoint and by TEI's, and TEI's reranker."""

from __future__ import annotations

import pytest
from demo_models import EMBEDDING, QUESTION, TEXTS
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference as TeiRerank


def nearest(query: list[float], vectors: list[list[float]]) -> int:
    return max(range(len(vectors)), key=lambda index: sum(a * b for a, b in zip(query, vectors[index], strict=True)))


def test_both_kinds_of_embeddings_are_equal_and_rank_the_answer_first(server_url: str) -> None:
    openai_like = OpenAILikeEmbedding(model_name=EMBEDDING, api_base=f"{server_url}/v1", api_key="none")
    tei = TextEmbeddingsInference(model_name=EMBEDDING, base_url=server_url, query_instruction="", text_instruction="")
    found = [client.get_text_embedding_batch(TEXTS) for client in (openai_like, tei)]
    for one, other in zip(*found, strict=True):
        assert one == pytest.approx(other, abs=1e-6)
    assert nearest(tei.get_query_embedding(QUESTION), found[1]) == 0
    assert nearest(openai_like.get_query_embedding(QUESTION), found[0]) == 0


def test_tei_reranker_orders_nodes_by_score(server_url: str) -> None:
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in TEXTS]
    ranked = TeiRerank(base_url=server_url, top_n=2).postprocess_nodes(nodes, QueryBundle(QUESTION))
    scores = [node.score for node in ranked]
    assert len(ranked) == 2
    assert all(score is not None and 0 < score < 1 for score in scores)
    assert scores == sorted(scores, reverse=True)
