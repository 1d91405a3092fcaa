"""Answers of the endpoints of this package, for the OpenAPI document. Formats write them as bytes."""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType

Number: TypeAlias = float


class ApiVersion(Struct):
    version: str


class PooledUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class Embedding(Struct):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    """Text is base64 of little-endian float32."""


class EmbeddingsAnswer(Struct):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: PooledUsage


class CohereEmbeddings(Struct):
    """Embeddings of the types that the request asks for."""

    float: list[list[Number]] | UnsetType = UNSET
    int8: list[list[int]] | UnsetType = UNSET
    uint8: list[list[int]] | UnsetType = UNSET
    binary: list[list[int]] | UnsetType = UNSET
    ubinary: list[list[int]] | UnsetType = UNSET
    base64: list[str] | UnsetType = UNSET


class BilledUnits(Struct):
    input_tokens: int


class CohereEmbedMeta(Struct):
    api_version: ApiVersion
    billed_units: BilledUnits


class CohereEmbedAnswer(Struct):
    id: str
    response_type: Literal["embeddings_by_type", "embeddings_floats"]
    embeddings: CohereEmbeddings | list[list[Number]]
    """/v1 answers a list if the request has no embedding_types."""
    texts: list[str]
    meta: CohereEmbedMeta


class RankedDocument(Struct):
    text: str


class RerankResult(Struct):
    index: int
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class ScoredTokens(Struct):
    input_tokens: int


class RerankMeta(Struct):
    api_version: ApiVersion
    tokens: ScoredTokens


class RerankAnswer(Struct):
    id: str
    object: Literal["list"]
    model: str
    results: list[RerankResult]
    usage: PooledUsage
    meta: RerankMeta


class Score(Struct):
    index: int
    object: Literal["score"]
    score: float


class LabelScoresAnswer(Struct):
    """SGLang's: for each item a score of each label."""

    id: str
    object: Literal["scoring"]
    model: str
    scores: list[list[float]]
    usage: dict[str, int]


class ScoreAnswer(Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: PooledUsage


class Classification(Struct):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyAnswer(Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Classification]
    usage: PooledUsage


class PoolingItem(Struct):
    index: int
    object: Literal["pooling"]
    data: list[float | list[float]] | str


class PoolingAnswer(Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PoolingItem]
    usage: PooledUsage


class SparseValue(Struct):
    index: int
    value: float


class Prediction(Struct):
    score: float
    label: str


class Rank(Struct):
    index: int
    score: float
    text: str | UnsetType = UNSET


class LocatedToken(Struct):
    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class InfoAnswer(Struct):
    model_id: str
    max_concurrent_requests: int
    max_input_length: int
    max_client_batch_size: int
    auto_truncate: bool
    version: str


class CohereErrorAnswer(Struct):
    id: str
    message: str
    detail: str


class TeiErrorAnswer(Struct):
    error: str
    error_type: Literal["Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"]
