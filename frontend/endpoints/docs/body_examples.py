"""One example of each body. The page at /docs adds the model's name, and asks for a stream where there can be one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.frontend.schemas.chat import ChatBody
from penstock.frontend.schemas.completion import CompletionBody
from penstock.frontend.schemas.messages import CountTokensBody, MessagesBody
from penstock.frontend.schemas.pooling import tei
from penstock.frontend.schemas.pooling.cohere import CohereEmbedBody
from penstock.frontend.schemas.pooling.openai import EmbeddingsBody
from penstock.frontend.schemas.pooling.rerank import RerankBody
from penstock.frontend.schemas.pooling.sglang import LabelScoreBody
from penstock.frontend.schemas.pooling.vllm import ClassifyBody, PoolingBody, ScoreBody
from penstock.frontend.schemas.responses import ResponsesBody
from penstock.frontend.schemas.utilities import DetokenizeBody, ModelCommandBody, TokenizeBody

if TYPE_CHECKING:
    from msgspec import Struct

_QUESTION = "What does os.path.join do?"
_TEXTS = ["Joins parts of a path.", "Returns the time."]
_MESSAGES = [{"role": "user", "content": _QUESTION}]
_TOKENS = [1, 2, 3]

BODY_EXAMPLES: dict[type[Struct], dict[str, Any]] = {
    ChatBody: {"messages": _MESSAGES, "max_completion_tokens": 60, "temperature": 0.7},
    CompletionBody: {"prompt": "def join(path, *paths):", "max_tokens": 60, "temperature": 0.7},
    MessagesBody: {"messages": _MESSAGES, "max_tokens": 60},
    CountTokensBody: {"messages": _MESSAGES},
    ResponsesBody: {"input": _QUESTION, "max_output_tokens": 60},
    TokenizeBody: {"prompt": _QUESTION, "return_token_strs": True},
    tei.TeiTokenizeBody: {"inputs": [_QUESTION]},
    DetokenizeBody: {"tokens": _TOKENS},
    tei.DecodeBody: {"ids": _TOKENS},
    ModelCommandBody: {"model": "a-model"},
    EmbeddingsBody: {"input": _TEXTS},
    CohereEmbedBody: {"texts": _TEXTS, "input_type": "search_document", "embedding_types": ["float"]},
    PoolingBody: {"input": _TEXTS},
    tei.EmbedBody: {"inputs": _TEXTS},
    tei.EmbedPlainBody: {"inputs": _TEXTS},
    tei.SimilarityBody: {"inputs": {"source_sentence": _QUESTION, "sentences": _TEXTS}},
    RerankBody: {"query": _QUESTION, "documents": _TEXTS, "return_documents": True},
    tei.TeiRerankBody: {"query": _QUESTION, "texts": _TEXTS, "return_text": True},
    ScoreBody: {"text_1": _QUESTION, "text_2": _TEXTS},
    LabelScoreBody: {"query": _QUESTION, "items": _TEXTS, "label_token_ids": _TOKENS},
    ClassifyBody: {"input": _TEXTS},
    tei.PredictBody: {"inputs": _TEXTS},
}
