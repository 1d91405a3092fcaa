"""Client libraries for embeddings and reranking, unchanged, on a real socket."""

from __future__ import annotations

import asyncio
import importlib
from array import array
from collections.abc import AsyncIterator
from typing import Any

import cohere
import huggingface_hub
import openai
import pytest

from penstock.frontend.generation.models.model_table import ServedModels
from tests.frontend.clients.test_openai_sdk import serving
from tests.frontend.harness import make_app, token_ids
from tests.frontend.pooled_backend import END, START, PooledBackend, encoder, encoder_card, normalized, vector_of

TEXTS = ["the cat", "sat on the mat"]
DOCUMENTS = ["the dog", "the cat", "the mat"]
QUERY = "which cat"


def expected(text: str) -> list[float]:
    return normalized(vector_of("embed", [START, *token_ids(text), END], 16))


def order() -> list[int]:
    pairs = [[START, *token_ids(QUERY), END, *token_ids(document), END] for document in DOCUMENTS]
    logits = [vector_of("classify", pair, 1)[0] for pair in pairs]
    return sorted(range(len(DOCUMENTS)), key=lambda index: -logits[index])


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without these settings litellm downloads a price table, and langchain sends telemetry."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setenv("LANGSMITH_TRACING", "false")


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """A server of an embedding model and a reranker."""
    embedder = PooledBackend(model=encoder_card("bert", ("embed", 16)))
    reranker = PooledBackend(model=encoder_card("reranker", ("classify", 1)))
    models = ServedModels(encoder(embedder), rerank=encoder(reranker))
    async with serving(make_app(embedder, models=models)) as url:
        yield url.removesuffix("/v1")


async def test_openai_embeds_by_base64_and_by_floats(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for options in ({}, {"encoding_format": "float"}):
            answer = await client.embeddings.create(model="bert", input=TEXTS, **options)  # type: ignore[call-overload]
            assert [list(array("f", item.embedding)) for item in answer.data] == [expected(text) for text in TEXTS]
        assert answer.usage.total_tokens == sum(len(token_ids(text)) + 2 for text in TEXTS)
        with pytest.raises(openai.BadRequestError, match="16 values"):
            await client.embeddings.create(model="bert", input="x", dimensions=17)


async def test_langchain_embeds_documents_and_queries(url: str) -> None:
    embeddings = importlib.import_module("langchain_openai").OpenAIEmbeddings(
        model="bert", base_url=f"{url}/v1", api_key="none", check_embedding_ctx_length=False
    )
    # Not its asynchronous methods: it leaves their client to the garbage collector.
    documents = await asyncio.to_thread(embeddings.embed_documents, TEXTS)
    assert [list(array("f", vector)) for vector in documents] == [expected(text) for text in TEXTS]
    assert list(array("f", await asyncio.to_thread(embeddings.embed_query, QUERY))) == expected(QUERY)


@pytest.fixture
def litellm() -> Any:
    litellm = importlib.import_module("litellm")
    litellm.telemetry, litellm.suppress_debug_info = False, True
    return litellm


LITELLM_WARNINGS = pytest.mark.filterwarnings("ignore::DeprecationWarning:litellm", "ignore::UserWarning:pydantic")


@LITELLM_WARNINGS
async def test_litellm_embeds_by_each_providers_api(url: str, litellm: Any) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        answers = [
            await litellm.aembedding(
                model=f"{provider}/bert", input=TEXTS, api_base=f"{url}{path}", api_key="none", **more
            )
            for provider, path, more in (
                ("openai", "/v1", {"client": client}),
                ("hosted_vllm", "/v1", {}),
                ("infinity", "/v1", {}),
                ("jina_ai", "/v1", {}),
                ("cohere", "/v2/embed", {}),
            )
        ]
    for answer in answers:
        assert [list(array("f", item["embedding"])) for item in answer.data] == [expected(text) for text in TEXTS]


@LITELLM_WARNINGS
@pytest.mark.parametrize("provider", ["cohere", "jina_ai", "hosted_vllm", "infinity", "huggingface"])
async def test_litellm_reranks_by_each_providers_api(url: str, litellm: Any, provider: str) -> None:
    """huggingface sends TEI's body."""
    asked = {"query": QUERY, "documents": DOCUMENTS, "api_base": url, "api_key": "none"}
    answer = await litellm.arerank(model=f"{provider}/reranker", **asked)
    assert [result["index"] for result in answer.results] == order()
    scores = [result["relevance_score"] for result in answer.results]
    assert scores == sorted(scores, reverse=True)
    assert all(0 < score < 1 for score in scores)


async def test_cohere_reranks_by_both_versions(url: str) -> None:
    rerankers: dict[str, Any] = {"api_key": "none", "base_url": url}
    async with cohere.AsyncClientV2(**rerankers) as client:
        second = await client.rerank(model="reranker", query=QUERY, documents=DOCUMENTS, top_n=2)
    assert [result.index for result in second.results] == order()[:2]
    assert all(0 < result.relevance_score < 1 for result in second.results)
    async with cohere.AsyncClient(**rerankers) as client:
        first = await client.rerank(model="reranker", query=QUERY, documents=DOCUMENTS, return_documents=True)
        assert [result.index for result in first.results] == order()
        assert [result.document.text for result in first.results] == [DOCUMENTS[index] for index in order()]
        alike = await client.rerank(model="bert", query=DOCUMENTS[1], documents=DOCUMENTS)  # by an embedding model
        assert (alike.results[0].index, alike.results[0].relevance_score) == (1, pytest.approx(1.0))


async def test_cohere_embeds_by_both_versions(url: str) -> None:
    options: dict[str, Any] = {"api_key": "none", "base_url": url}
    async with cohere.AsyncClientV2(**options) as client:
        types = ["float", "int8", "ubinary", "base64"]
        second = await client.embed(model="bert", texts=TEXTS, input_type="search_document", embedding_types=types)
    assert second.embeddings.float_ is not None
    assert [list(array("f", vector)) for vector in second.embeddings.float_] == [expected(text) for text in TEXTS]
    assert second.embeddings.int8 == [[round(127 * value) for value in expected(text)] for text in TEXTS]
    assert [len(vector) for vector in second.embeddings.ubinary or []] == [2, 2]
    async with cohere.AsyncClient(**options) as client:
        first = await client.embed(model="bert", texts=TEXTS, input_type="search_query", truncate="END")
        assert [list(array("f", vector)) for vector in first.embeddings] == [expected(text) for text in TEXTS]
        with pytest.raises(cohere.errors.BadRequestError, match="an empty text"):
            await client.embed(model="bert", texts=[""])


async def test_hugging_face_client_reads_teis_endpoints(url: str) -> None:
    async with huggingface_hub.AsyncInferenceClient(token="none") as client:
        vectors = await client.feature_extraction(TEXTS, model=f"{url}/embed", normalize=True, truncate=True)
        assert [list(array("f", row)) for row in vectors.tolist()] == [expected(text) for text in TEXTS]
        similarities = await client.sentence_similarity(QUERY, DOCUMENTS, model=f"{url}/similarity")
        assert len(similarities) == len(DOCUMENTS)
        with pytest.raises(huggingface_hub.errors.HfHubHTTPError, match="is not a prompt of this model"):
            await client.feature_extraction("x", model=f"{url}/embed", prompt_name="none")
