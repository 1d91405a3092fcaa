from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.frontend.generation.models.model_table import ServedModels
from penstock.frontend.text.pooling_files import PoolingFiles
from tests.frontend.harness import ClientConnection, FakeBackend, make_app, model_card, model_keeper
from tests.frontend.pooled_backend import PooledBackend, encoder, encoder_card

MAX_TOKENS = 64
EMBEDDING_FILES = PoolingFiles(prompts={"query": "query: ", "passage": "passage: "})
CLASSIFIER_FILES = PoolingFiles(labels=("bad", "fair", "good"))


@pytest.fixture
def embedder() -> PooledBackend:
    kinds = (("embed", 8), ("token_embed", 4), ("sparse", 300))
    return PooledBackend(model=encoder_card("bert", *kinds, max_context_tokens=MAX_TOKENS))


@pytest.fixture
def reranker() -> PooledBackend:
    return PooledBackend(model=encoder_card("reranker", ("classify", 1), max_context_tokens=MAX_TOKENS))


@pytest.fixture
def models(embedder: PooledBackend, reranker: PooledBackend) -> ServedModels:
    llm = FakeBackend(model=model_card(model_id="llm"))
    return ServedModels(model_keeper(llm), embedding=encoder(embedder, EMBEDDING_FILES), rerank=encoder(reranker))


@pytest.fixture
async def connect(embedder: PooledBackend, models: ServedModels) -> Callable[..., ClientConnection]:
    """Open connections to a server of a language model, an embedding model and a reranker."""
    return lambda **options: ClientConnection(make_app(embedder, models=models, **options))


@pytest.fixture
async def connection(connect: Callable[..., ClientConnection]) -> ClientConnection:
    return connect()


@pytest.fixture
def classifier() -> PooledBackend:
    return PooledBackend(model=encoder_card("classifier", ("classify", 3), ("token_classify", 3)))


@pytest.fixture
async def classifying(classifier: PooledBackend) -> ClientConnection:
    """A connection to a server of a classifier alone."""
    models = ServedModels(encoder(classifier, CLASSIFIER_FILES))
    return ClientConnection(make_app(classifier, models=models))
