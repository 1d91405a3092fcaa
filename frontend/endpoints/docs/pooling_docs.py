"""Descriptions of the endpoints for embeddings, reranking and classification."""

from __future__ import annotations

from typing import Any

from penstock.frontend.endpoints.routes import EndpointDoc
from penstock.frontend.schemas.pooling import answers, tei
from penstock.frontend.schemas.pooling.cohere import CohereEmbedBody
from penstock.frontend.schemas.pooling.openai import EmbeddingsBody
from penstock.frontend.schemas.pooling.rerank import RerankBody
from penstock.frontend.schemas.pooling.sglang import LabelScoreBody
from penstock.frontend.schemas.pooling.vllm import ClassifyBody, PoolingBody, ScoreBody

_EMBEDDINGS, _SCORES = "Embeddings", "Reranking and classification"
_Vector = list[float]

EMBEDDINGS = EndpointDoc(_EMBEDDINGS, "Computes an embedding of each input.", answers.EmbeddingsAnswer, EmbeddingsBody)
COHERE_EMBED = EndpointDoc(
    _EMBEDDINGS, "Computes an embedding of each text (Cohere's).", answers.CohereEmbedAnswer, CohereEmbedBody
)
POOLING = EndpointDoc(
    _EMBEDDINGS, "Computes what the model has: vectors or scores (vLLM's).", answers.PoolingAnswer, PoolingBody
)
EMBED = EndpointDoc(_EMBEDDINGS, "Computes an embedding of each input (TEI's).", list[_Vector], tei.EmbedBody)
ROOT = EndpointDoc(
    _EMBEDDINGS,
    "Does what the model is for: /embed, /embed_sparse, /predict or /rerank (TEI's).",
    list[Any],
    tei.EmbedBody,
    other=(tei.TeiRerankBody, list[answers.Rank]),
)
EMBED_ALL = EndpointDoc(
    _EMBEDDINGS, "Computes an embedding of each token of each input (TEI's).", list[list[_Vector]], tei.EmbedPlainBody
)
EMBED_SPARSE = EndpointDoc(
    _EMBEDDINGS,
    "Computes a sparse embedding of each input (TEI's).",
    list[list[answers.SparseValue]],
    tei.EmbedPlainBody,
)
SIMILARITY = EndpointDoc(_EMBEDDINGS, "Compares sentences with a source sentence (TEI's).", _Vector, tei.SimilarityBody)
RERANK = EndpointDoc(
    _SCORES, "Ranks documents by their relevance to a query (Cohere's and Jina's).", answers.RerankAnswer, RerankBody
)
RERANK_EITHER = EndpointDoc(
    _SCORES,
    "Ranks documents (Cohere's and Jina's), or with texts as TEI does.",
    answers.RerankAnswer,
    RerankBody,
    other=(tei.TeiRerankBody, list[answers.Rank]),
)
SCORE = EndpointDoc(
    _SCORES,
    "Scores pairs of texts (vLLM's), or with label_token_ids the next token of each item (SGLang's).",
    answers.ScoreAnswer,
    ScoreBody,
    other=(LabelScoreBody, answers.LabelScoresAnswer),
)
CLASSIFY = EndpointDoc(_SCORES, "Classifies each input (vLLM's).", answers.ClassifyAnswer, ClassifyBody)
PREDICT = EndpointDoc(
    _SCORES,
    "Classifies texts and pairs, the likeliest class first (TEI's).",
    list[answers.Prediction | list[answers.Prediction]],
    tei.PredictBody,
)
DECODE = EndpointDoc("Tokens", "Returns the text of each list of token ids (TEI's).", list[str], tei.DecodeBody)
INFO = EndpointDoc("Server", "Describes the model that embeds or scores (TEI's).", answers.InfoAnswer)
