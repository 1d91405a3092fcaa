"""LangChain's Cohere package: embeddings and the reranker."""

from __future__ import annotations

from demo_models import EMBEDDING, QUESTION, RERANK, TEXTS
from langchain_cohere import CohereEmbeddings, CohereRerank


def test_embeddings_rank_the_answer_first(server_url: str) -> None:
    embeddings = CohereEmbeddings(model=EMBEDDING, base_url=server_url, cohere_api_key="none")
    vectors, query = embeddings.embed_documents(TEXTS), embeddings.embed_query(QUESTION)
    scores = [sum(a * b for a, b in zip(query, vector, strict=True)) for vector in vectors]
    assert scores.index(max(scores)) == 0


def test_reranker_orders_documents_by_score(server_url: str) -> None:
    reranker = CohereRerank(model=RERANK, base_url=server_url, cohere_api_key="none", top_n=2)
    scores = [result["relevance_score"] for result in reranker.rerank(TEXTS, QUESTION)]
    assert len(scores) == 2
    assert scores == sorted(scores, reverse=True)
