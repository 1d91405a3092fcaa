"""POST /v1/score and /score with label_token_ids, as in SGLang. Each token is scored as the end of its prompt."""

from __future__ import annotations

import math
import re

from penstock.frontend.endpoints.answering import AnswerStyle, answer_prompts, refuse_if_full
from penstock.frontend.endpoints.chat_translation import renamed
from penstock.frontend.endpoints.context import EndpointContext
from penstock.frontend.endpoints.pooling import vllm_scores
from penstock.frontend.endpoints.prompts import encode_prompts
from penstock.frontend.formats.base import Identity, StreamUsageOptions, Usage, WholeFormat, encode
from penstock.frontend.generation.answer_rules.chat_rules import AnswerRules
from penstock.frontend.generation.models.model_table import Task
from penstock.frontend.generation.models.served_model import ServedModel
from penstock.frontend.generation.submission.submit import PreparedRequest
from penstock.frontend.parsing.blocks import ChoiceOutput
from penstock.frontend.schemas.completion import CompletionBody
from penstock.frontend.schemas.pooling.sglang import LabelScoreBody, decode_label_score, is_label_score
from penstock.frontend.schemas.pooling.vllm import ScoreBody, decode_score
from penstock.frontend.transport.errors import invalid
from penstock.frontend.transport.exchange import Exchange


class LabelScoresFormat(WholeFormat):
    """Implements `Format`. Each output is a prompt that ends with a label; the labels of an item are consecutive."""

    def __init__(self, identity: Identity, usage: Usage, num_labels: int, *, is_softmax: bool) -> None:
        """is_softmax: the scores of an item add up to 1; otherwise they are the model's probabilities."""
        self._identity = identity
        self._usage = usage
        self._num_labels = num_labels
        self._is_softmax = is_softmax

    def whole(self, outputs: list[ChoiceOutput]) -> bytes:
        logprobs = [_last_logprob(output) for output in outputs]
        starts = range(0, len(logprobs), self._num_labels)
        num_tokens = self._usage.prompt_tokens
        return encode(
            {
                "id": self._identity.response_id,
                "object": "scoring",
                "model": self._identity.model,
                "scores": [self._scores(logprobs[start : start + self._num_labels]) for start in starts],
                "usage": {"prompt_tokens": num_tokens, "completion_tokens": 0, "total_tokens": num_tokens},
            }
        )

    def _scores(self, logprobs: list[float]) -> list[float]:
        highest = max(logprobs) if self._is_softmax else 0.0
        if highest == -math.inf:
            return [1.0 / len(logprobs)] * len(logprobs)
        likelihoods = [math.exp(logprob - highest) for logprob in logprobs]
        total = sum(likelihoods) if self._is_softmax else 1.0
        return [likelihood / total for likelihood in likelihoods]


def _last_logprob(output: ChoiceOutput) -> float:
    scored = output.prompt_logprobs or ()
    logprob = scored[-1].logprob if scored else None
    if logprob is None:
        raise ValueError("a prompt of one token has no log probability")
    return logprob


_RENAMED = ((re.compile(r"^(prompt|prompt_logprobs|max_tokens)\b.*"), "items"),)


async def score(exchange: Exchange, context: EndpointContext) -> None:
    """POST /v1/score and /score. Raises ApiError, ClientGoneError."""

    def decode(data: bytes) -> ScoreBody | LabelScoreBody:
        return decode_label_score(data) if is_label_score(data) else decode_score(data)

    def task_of(body: ScoreBody | LabelScoreBody) -> Task:
        return "generate" if isinstance(body, LabelScoreBody) else "score"

    body, served, _ = await context.receive_body(exchange, decode, task_of)
    if isinstance(body, LabelScoreBody):
        await _answer(exchange, body, served)
    else:
        await vllm_scores.answer_score(exchange, body, served)


async def _answer(exchange: Exchange, body: LabelScoreBody, served: ServedModel) -> None:
    labels = body.label_token_ids
    for position, token_id in enumerate(labels):
        if token_id >= served.card.vocab_size:
            message = f"{token_id} is outside the vocabulary of {served.card.vocab_size}"
            invalid(f"label_token_ids[{position}]", message)

    def make_format(identity: Identity, usage: Usage, _: StreamUsageOptions) -> LabelScoresFormat:
        return LabelScoresFormat(identity, usage, len(labels), is_softmax=body.apply_softmax is True)

    completion = CompletionBody(
        prompt=body.prompts(), prompt_logprobs=0, max_tokens=1, temperature=0.0, model=body.model,
        priority=body.priority, timeout_ms=body.timeout_ms, cache_salt=body.cache_salt,
    )  # fmt: skip
    with renamed(_RENAMED):
        refuse_if_full(exchange, completion, served)
        async with exchange.cancelled_on_disconnect():
            prompts = await encode_prompts(completion, served)
        for position, prompt in enumerate(prompts):
            if not prompt:
                invalid(f"items[{position}]", "no tokens with the query; a label is scored after at least one")
        prompts = [[*prompt, label] for prompt in prompts for label in labels]
        request = PreparedRequest(completion, prompts, AnswerRules())
        await answer_prompts(exchange, request, served, AnswerStyle("score-", make_format))
