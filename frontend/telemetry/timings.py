"""Timings of one request as its frontend measured them: llama.cpp's timings object and HTTP's Server-Timing header."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Timings:
    """Times are monotonic seconds. first_token_s is None before the first token; the backend reports queue_s."""

    received_s: float
    submitted_s: float
    first_token_s: float | None
    now_s: float
    queue_s: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    num_preemptions: int

    @property
    def ttft_s(self) -> float:
        """From the request's arrival to its first token."""
        return self._first_s - self.received_s

    @property
    def prefill_s(self) -> float:
        """From the first step to the first token, including the time of messages between the processes."""
        return max(0.0, self._first_s - self.submitted_s - self.queue_s)

    @property
    def decode_s(self) -> float:
        """Since the first token."""
        return self.now_s - self._first_s

    @property
    def _first_s(self) -> float:
        return self.now_s if self.first_token_s is None else self.first_token_s

    @property
    def tokens_per_s(self) -> float | None:
        """Rate after the first token, of all choices together."""
        return _rate(self.completion_tokens - 1, self.decode_s)

    def prompt_progress(self) -> dict[str, Any]:
        """Return llama.cpp's progress of a prompt that has been computed."""
        return prompt_progress(self.prompt_tokens, self.cached_tokens, self.prompt_tokens, self.prefill_s)

    def as_dict(self) -> dict[str, Any]:
        """Return llama.cpp's timings, followed by ours."""
        prompt_tokens = self.prompt_tokens - self.cached_tokens
        return {
            "cache_n": self.cached_tokens,
            "prompt_n": prompt_tokens,
            "prompt_ms": _ms(self.prefill_s),
            "prompt_per_token_ms": _ms(self.prefill_s / prompt_tokens) if prompt_tokens > 0 else None,
            "prompt_per_second": _rate(prompt_tokens, self.prefill_s),
            "predicted_n": self.completion_tokens,
            "predicted_ms": _ms(self.decode_s),
            "predicted_per_token_ms": _ms(self.decode_s / self.completion_tokens) if self.completion_tokens else None,
            "predicted_per_second": self.tokens_per_s,
            "queue_ms": _ms(self.queue_s),
            "ttft_ms": _ms(self.ttft_s),
            "total_ms": _ms(self.now_s - self.received_s),
            "preemptions": self.num_preemptions,
        }

    def server_timing(self, *, is_whole: bool) -> bytes:
        """Return the header's value; for an answer that has just begun, with the known values only."""
        spent_s = {
            "prepare": self.submitted_s - self.received_s,
            "queue": self.queue_s,
            "prefill": self.prefill_s,
            "ttft": self.ttft_s,
        }
        if is_whole:
            spent_s |= {"decode": self.decode_s, "total": self.now_s - self.received_s}
        entries = [f"{name};dur={_ms(duration_s)}" for name, duration_s in spent_s.items()]
        if is_whole:
            rate = self.tokens_per_s
            entries += [] if rate is None else [f'tps;desc="{rate}"']
            entries.append(f'preemptions;desc="{self.num_preemptions}"')
        return ", ".join(entries).encode()


def prompt_progress(num_tokens: int, num_cached: int, num_computed: int, spent_s: float) -> dict[str, Any]:
    """Return llama.cpp's object. num_computed includes the cached tokens; spent_s is since the first step."""
    return {"total": num_tokens, "cache": num_cached, "processed": num_computed, "time_ms": _ms(spent_s)}


def _ms(duration_s: float) -> float:
    return round(1000 * duration_s, 3)


def _rate(count: int, duration_s: float) -> float | None:
    return round(count / duration_s, 2) if count > 0 and duration_s > 0 else None
