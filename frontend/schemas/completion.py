"""POST /v1/completions, and llama.cpp's /completion and /infill."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Raw, Struct

from penstock.frontend.schemas.generation import ABSENT, MAX_CHOICES, GenerationBody, MaxTokens, ShortText, limit_of
from penstock.frontend.transport.errors import invalid
from penstock.shm.messages import MAX_CONTEXT_TOKENS, MAX_LOGPROBS, TokenId


class CompletionBody(GenerationBody, kw_only=True):
    """A text completion. max_tokens 0 is allowed with `echo`: the answer is the prompt alone."""

    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    max_tokens: MaxTokens | None = None
    best_of: Annotated[int, Meta(ge=1, le=16)] | None = None
    echo: bool | None = None
    suffix: str | None = None  # type: ignore[assignment]  # refused elsewhere
    """The text after the answer, which fills in what is between; empty is not given."""
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    return_progress: bool | None = None
    """llama.cpp's: a stream reports how much of the prompt is computed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.max_tokens = limit_of(self.max_tokens)

    @property
    def num_logprobs(self) -> int:
        return -1 if self.logprobs is None else self.logprobs

    @property
    def num_prompt_logprobs(self) -> int:
        requested = super().num_prompt_logprobs
        return max(requested, self.num_logprobs) if self.echo else requested

    @property
    def requested_max_tokens(self) -> tuple[str, int | None]:
        return "max_tokens", None if self.max_tokens is None else max(1, self.max_tokens)

    @property
    def prompt_field(self) -> str:
        return "prompt"

    @property
    def is_prompt_only(self) -> bool:
        return self.max_tokens == 0

    @property
    def num_candidates(self) -> int:
        return max(self.n or 1, self.best_of or 1)

    def has_several_prompts(self) -> bool:
        return isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)

    def prompts(self) -> list[str | list[int]]:
        """Return one entry per prompt."""
        prompts: list[Any] = [self.prompt]
        if isinstance(self.prompt, list) and self.has_several_prompts():
            prompts = self.prompt
        return prompts


def _check_prompt(body: CompletionBody) -> None:
    num_prompts = len(body.prompts())
    if num_prompts > MAX_CHOICES:
        invalid("prompt", f"at most {MAX_CHOICES} prompts in one request, got {num_prompts}")
    if not isinstance(body.prompt, str):
        check_unmixed("prompt", body.prompt)


def check_unmixed(field: str, prompts: list[str | int | list[int]]) -> None:
    """Raises ApiError if texts and token ids are mixed."""
    first = type(prompts[0])
    if len(set(map(type, prompts))) > 1:
        odd = next(position for position, item in enumerate(prompts) if type(item) is not first)
        invalid(f"{field}[{odd}]", "a list holds texts, token ids or lists of token ids, not a mix")
    if first is list and [] in prompts:
        invalid(f"{field}[{prompts.index([])}]", "an empty list of token ids")


def check_completion(body: CompletionBody) -> None:
    """Check rules that the types of single fields cannot express. Raises ApiError."""
    _check_prompt(body)
    num_choices = body.num_candidates * len(body.prompts())
    if num_choices > MAX_CHOICES:
        field = "n" if body.num_candidates == body.n else "best_of"
        invalid(field, f"at most {MAX_CHOICES} choices in one request (prompts × {field}), got {num_choices}")
    if body.best_of is not None and body.n is not None and body.best_of < body.n:
        invalid("best_of", f"must be at least n, which is {body.n}, got {body.best_of}")
    if body.best_of is not None and body.best_of > (body.n or 1) and body.stream:
        invalid("best_of", "cannot be more than n when stream is true: the best are known only at the end")
    if body.max_tokens == 0 and not body.echo:
        invalid("max_tokens", "must be at least 1, got 0; 0 is allowed only with echo")
    for field in ("echo", "truncate_prompt_tokens") if body.suffix else ():
        if getattr(body, field) not in (None, False):
            invalid(field, "cannot be combined with suffix")


MEDIA_MARKER = "<__media__>"


class PromptObject(Struct, frozen=True):
    prompt_string: str
    multimodal_data: list[str] | None = None
    """Pictures in base64, for each MEDIA_MARKER in the text."""


class ExtraText(Struct, frozen=True):
    """A further file for /infill."""

    text: str
    filename: ShortText = "tmp"


class NativeBody(GenerationBody, kw_only=True):
    """llama.cpp's options that the other endpoints do not have, or under another name."""

    n_predict: Annotated[int, Meta(ge=-2, le=MAX_CONTEXT_TOKENS)] | None = None
    """Below 0: up to the context's end; 0: the prompt is only computed, for the cache."""
    n_cmpl: Annotated[int, Meta(ge=1, le=16)] | None = None
    n_probs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    return_tokens: bool | None = None
    return_progress: bool | None = None
    response_fields: Annotated[list[ShortText], Meta(max_length=64)] | None = None
    """Fields of the answer, and of objects in it as object/field; empty is all."""

    post_sampling_probs: Raw = ABSENT


UNSUPPORTED_NATIVE = ("prompt_logprobs", "stream_options")
"""Fields of other endpoints for which llama.cpp's answers have no place."""
UNSUPPORTED_INFILL = (*UNSUPPORTED_NATIVE, "truncate_prompt_tokens")
"""A cut at either end would lose the tokens around the gap."""

Segments = list[str | TokenId]


class NativeCompletionBody(NativeBody, kw_only=True):
    """POST /completion."""

    prompt: str | PromptObject | Annotated[list[str | TokenId | PromptObject | Segments], Meta(min_length=1)]

    def prompts(self) -> list[Segments]:
        """Return each prompt as texts and token ids that follow one another. Raises ApiError."""
        if not isinstance(self.prompt, list):
            return [_segments(self.prompt)]
        flat = [item for item in self.prompt if isinstance(item, str | int)]
        if len(flat) == len(self.prompt) and any(isinstance(item, int) for item in flat):
            return [flat]
        if any(isinstance(item, PromptObject) and item.multimodal_data for item in self.prompt):
            invalid("prompt.multimodal_data", "not available in a list of prompts; send one prompt")
        prompts = [_segments(item) for item in self.prompt]
        num_choices = len(prompts) * (self.n_cmpl or self.n or 1)
        if num_choices > MAX_CHOICES:
            invalid("prompt", f"prompts × n_cmpl is {num_choices}; the limit is {MAX_CHOICES}")
        return prompts


def _segments(prompt: str | int | PromptObject | Segments) -> Segments:
    if isinstance(prompt, PromptObject):
        return [prompt.prompt_string]
    return prompt if isinstance(prompt, list) else [prompt]


class InfillBody(NativeBody, kw_only=True):
    """POST /infill. prompt is the beginning of what is filled in."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Annotated[tuple[ExtraText, ...], Meta(max_length=256)] = ()
    prompt: str = ""
