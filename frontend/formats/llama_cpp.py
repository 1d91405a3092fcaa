"""POST /completion and /infill: llama.cpp's answer, whole or as events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.frontend.formats.base import Format, Identity, Usage, encode
from penstock.frontend.parsing.blocks import ChoiceOutput
from penstock.frontend.parsing.deltas import Delta, ScoredToken
from penstock.frontend.transport.errors import ApiError, llama_cpp_error

_MIN_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class NativeAnswer:
    """What an answer repeats of its request."""

    settings: dict[str, Any]
    """generation_settings."""
    prompts: list[str]
    prompt_tokens: list[int]
    """Number of tokens of each prompt."""
    num_candidates: int
    max_context_tokens: int
    returns_tokens: bool
    has_timings_per_token: bool
    fields: list[str]
    """response_fields."""


@dataclass(slots=True)
class _Choice:
    """A choice of a stream."""

    num_tokens: int = 0
    unsent: list[int] = field(default_factory=list)
    """Tokens whose text is held back."""
    has_new_line: bool = False


class LlamaCppFormat(Format):
    def __init__(self, identity: Identity, usage: Usage, answer: NativeAnswer) -> None:
        self._identity = identity
        self._usage = usage
        self._answer = answer
        self._choices: dict[int, _Choice] = {}

    def opening(self, index: int, prompt_token_ids: Sequence[int] = ()) -> bytes:  # noqa: ARG002 - they are not reported
        return b"" if self._usage.progress is None or index else self._piece(index, Delta(has_progress=True))

    def delta(self, index: int, delta: Delta) -> bytes:
        return self._piece(index, delta)

    def closing(self, index: int, finish_reason: str, stopped_by: str | int | None) -> bytes:
        choice = self._choices.setdefault(index, _Choice())
        tokens, choice.unsent = choice.unsent, []
        last = self._last(index, "", tokens, choice.num_tokens, finish_reason, stopped_by)
        return _event(self._selected(last | {"has_new_line": choice.has_new_line}))

    def end(self) -> bytes:
        return b""

    def failure(self, error: ApiError) -> bytes:
        return b"data: %b\n\n" % llama_cpp_error(error, "")[1]

    def whole(self, outputs: list[ChoiceOutput]) -> bytes:
        results = []
        for index, output in enumerate(outputs):
            tokens = output.token_ids if self._answer.returns_tokens else []
            result = self._last(
                index, output.text, tokens, len(output.token_ids), output.finish_reason, output.stopped_by
            )
            if output.logprobs:
                result["completion_probabilities"] = _probabilities(output.logprobs)
            results.append(self._selected(result))
        return encode(results if len(results) > 1 else results[0])

    def _piece(self, index: int, delta: Delta) -> bytes:
        choice = self._choices.setdefault(index, _Choice())
        choice.num_tokens += len(delta.token_ids)
        choice.unsent += delta.token_ids
        choice.has_new_line |= "\n" in delta.text
        if not (delta.text or delta.logprobs or delta.has_progress):
            return b""
        tokens, choice.unsent = choice.unsent, []
        piece: dict[str, Any] = {
            "index": index,
            "content": delta.text,
            "tokens": tokens,
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": choice.num_tokens,
            "tokens_evaluated": self._prompt_tokens(index),
        }
        if delta.logprobs:
            piece["completion_probabilities"] = _probabilities(delta.logprobs)
        if self._answer.has_timings_per_token and self._usage.timings is not None:
            piece["timings"] = self._usage.timings()
        if delta.has_progress and self._usage.progress is not None:
            piece["prompt_progress"] = self._usage.progress()
        return _event(piece)

    def _prompt_tokens(self, index: int) -> int:
        return self._answer.prompt_tokens[index // self._answer.num_candidates]

    def _last(
        self,
        index: int,
        content: str,
        tokens: list[int],
        num_predicted: int,
        finish_reason: str,
        stopped_by: str | int | None,
    ) -> dict[str, Any]:
        answer, num_evaluated = self._answer, self._prompt_tokens(index)
        is_limit = finish_reason == "length"
        word = stopped_by if isinstance(stopped_by, str) else ""
        return {
            "index": index,
            "content": content,
            "tokens": tokens,
            "id_slot": -1,
            "stop": True,
            "model": self._identity.model,
            "tokens_predicted": num_predicted,
            "tokens_evaluated": num_evaluated,
            "generation_settings": answer.settings,
            "prompt": answer.prompts[index // answer.num_candidates],
            "has_new_line": "\n" in content,
            "truncated": is_limit and num_evaluated + num_predicted >= answer.max_context_tokens,
            "stop_type": "limit" if is_limit else "word" if word else "eos",
            "stopping_word": word,
            "tokens_cached": self._usage.cached_tokens,
            "timings": {} if self._usage.timings is None else self._usage.timings(),
        }

    def _selected(self, result: dict[str, Any]) -> dict[str, Any]:
        """Return the fields that the request asks for, each under the whole name that it gives."""
        if not self._answer.fields:
            return result
        selected = {}
        for path in self._answer.fields:
            value: Any = result
            for name in path.split("/"):
                value = value.get(name) if isinstance(value, dict) else None
            if value is not None:
                selected[path] = value
        return selected


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % encode(fields)


def _probabilities(tokens: Sequence[ScoredToken]) -> list[dict[str, Any]]:
    return [{**_scored(token), "top_logprobs": [_scored(top) for top in token.top]} for token in tokens]


def _scored(token: ScoredToken) -> dict[str, Any]:
    logprob = _MIN_LOGPROB if token.logprob is None else max(token.logprob, _MIN_LOGPROB)
    return {"id": token.token_id, "token": token.text, "bytes": list(token.raw), "logprob": logprob}
