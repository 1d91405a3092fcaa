"""From texts, pairs of texts and token ids to inputs of a model that computes vectors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from penstock.frontend.generation.models.served_model import ServedModel
from penstock.frontend.text.input_encoder import EncodedInput, Truncation
from penstock.frontend.text.pooling_files import PairTemplate, PoolingFiles
from penstock.frontend.transport.errors import ApiError, ErrorKind, invalid, shorten

Name: TypeAlias = Callable[[int], str]

Item: TypeAlias = str | list[int] | tuple[str, str]

PIECE_TOKENS = 1 << 16
"""Token ids that are checked in one turn of the event loop."""
_PIECE_CHARACTERS = 256 << 10
"""Texts that are encoded in one call. Between the calls other requests get their turn."""


@dataclass(frozen=True, slots=True)
class InputRules:
    """How an endpoint's inputs become tokens."""

    name: Name
    """The body's name of the input with this index, for errors."""
    truncation: Truncation = Truncation()  # noqa: RUF009 - frozen
    """Without a limit, an input that is too long is refused, or truncated if the operator or the model says so."""
    add_special_tokens: bool = True
    prompt: str = ""
    """Goes before each text."""
    how_to_truncate: str = ""
    """A hint for errors: the field that allows truncation."""
    may_truncate: bool = True
    """False if the request forbids it."""

    def of_model(self, served: ServedModel) -> InputRules:
        truncation = self.truncation
        if truncation.max_tokens is not None or not (self.may_truncate and served.truncates_inputs):
            return self
        return replace(self, truncation=replace(truncation, max_tokens=served.card.max_context_tokens))


@dataclass(slots=True)
class _Pieces:
    """Texts in pieces of bounded size."""

    pieces: list[list[str | tuple[str, str]]] = field(default_factory=list)
    num_characters: int = 0

    def add(self, item: str | tuple[str, str]) -> None:
        length = len(item) if isinstance(item, str) else len(item[0]) + len(item[1])
        if not self.pieces or self.num_characters + length > _PIECE_CHARACTERS:
            self.pieces.append([])
            self.num_characters = 0
        self.pieces[-1].append(item)
        self.num_characters += length


async def encode_inputs(items: Sequence[Item], rules: InputRules, served: ServedModel) -> list[EncodedInput]:
    """Return the tokens of each item. Raises ApiError for an item that is too long or has an unknown token."""
    rules = rules.of_model(served)
    texts = _Pieces()
    for index, item in enumerate(items):
        if not isinstance(item, list):
            _check_least(index, item, rules, served)
            texts.add(rules.prompt + item if isinstance(item, str) else item)
    encoded: list[EncodedInput] = []
    for number, piece in enumerate(texts.pieces):
        if number:
            await asyncio.sleep(0)
        encoded += await served.tokenizer.encode_inputs(
            piece, rules.truncation, add_special_tokens=rules.add_special_tokens
        )
    in_order = iter(encoded)
    found = []
    num_checked = 0
    for index, item in enumerate(items):
        each = _truncated(item, rules) if isinstance(item, list) else next(in_order)
        _check_length(index, each, rules, served)
        if isinstance(item, list):
            _check_ids(index, each.token_ids, rules, served)
            num_checked += len(each.token_ids)
        found.append(each)
        if num_checked > PIECE_TOKENS:
            num_checked = 0
            await asyncio.sleep(0)
    return found


async def encode_templated(
    pairs: Sequence[tuple[str, str]],
    template: PairTemplate,
    instruction: str | None,
    rules: InputRules,
    served: ServedModel,
) -> list[EncodedInput]:
    """Return the tokens of pairs for a reranker that is a decoder, with a template around each.

    The template is never truncated. Raises ApiError.
    """
    rules = rules.of_model(served)
    no_limit = Truncation()
    ends = [template.prefix, template.suffix]
    prefix, suffix = await served.tokenizer.encode_inputs(ends, no_limit, add_special_tokens=False)
    num_fixed = len(prefix.token_ids) + len(suffix.token_ids)
    limit = rules.truncation.max_tokens
    truncation = Truncation(None if limit is None else max(1, limit - num_fixed), rules.truncation.side)
    texts = [template.text(query, document, instruction) for query, document in pairs]
    pieces = _Pieces()
    for index, text in enumerate(texts):
        _check_least(index, text, rules, served)
        pieces.add(text)
    found = []
    for piece in pieces.pieces:
        for each in await served.tokenizer.encode_inputs(piece, truncation, add_special_tokens=False):
            token_ids = prefix.token_ids + each.token_ids + suffix.token_ids
            found.append(EncodedInput(token_ids, 0, each.num_whole_tokens + num_fixed))
        await asyncio.sleep(0)
    for index, each in enumerate(found):
        _check_length(index, each, rules, served)
    return found


def prompt_text(files: PoolingFiles, requested: str | None) -> str:
    """Return the text before each input: the requested prompt's, or that of the model's default prompt.

    Raises ApiError.
    """
    name = files.default_prompt_name if requested is None else requested
    if name is None:
        return ""
    if name not in files.prompts:
        invalid("prompt_name", f"{shorten(name)} is not a prompt of this model; it has {_names(files.prompts)}")
    return files.prompts[name]


def _names(prompts: Mapping[str, str]) -> str:
    return ", ".join(shorten(name) for name in prompts) or "none"


def _truncated(token_ids: list[int], rules: InputRules) -> EncodedInput:
    """Return the token ids that the client has sent, truncated."""
    limit, kept = rules.truncation.max_tokens, token_ids
    if limit is not None and len(token_ids) > limit:
        kept = token_ids[:limit] if rules.truncation.side == "right" else token_ids[-limit:]
    return EncodedInput(kept, 0, len(token_ids))


def _check_ids(index: int, token_ids: list[int], rules: InputRules, served: ServedModel) -> None:
    if not served.takes_token_ids:
        message = (
            "token ids are refused: those of another tokenizer would give vectors of other words. Send texts "
            "(LangChain: check_embedding_ctx_length=False), or start the server with --allow-token-ids"
        )
        raise ApiError(ErrorKind.UNSUPPORTED_FIELD, f"{rules.name(index)}: {message}", param=rules.name(index))
    largest = max(token_ids)
    if largest >= served.card.vocab_size:
        invalid(rules.name(index), f"token id {largest} is outside the vocabulary of {served.card.vocab_size}")


def _check_least(index: int, item: str | tuple[str, str], rules: InputRules, served: ServedModel) -> None:
    """Refuse a text by its length alone, before it is encoded. Raises ApiError."""
    if rules.truncation.max_tokens is None:
        texts = (item,) if isinstance(item, str) else item
        least = sum(map(served.tokenizer.min_num_tokens, texts))
        if least > served.card.max_context_tokens:
            raise _too_long(index, f"at least {least}", rules, served)


def _check_length(index: int, encoded: EncodedInput, rules: InputRules, served: ServedModel) -> None:
    if not encoded.token_ids:
        invalid(rules.name(index), "no tokens; this model needs at least one")
    if len(encoded.token_ids) > served.card.max_context_tokens:
        raise _too_long(index, str(encoded.num_whole_tokens), rules, served)


def _too_long(index: int, num_tokens: str, rules: InputRules, served: ServedModel) -> ApiError:
    name, limit = rules.name(index), served.card.max_context_tokens
    remedy = f"; {rules.how_to_truncate}" if rules.how_to_truncate else ""
    message = f"{name}: {num_tokens} tokens, but the limit of this model is {limit} tokens{remedy}"
    return ApiError(ErrorKind.CONTEXT_TOO_LONG, message, param=name)
