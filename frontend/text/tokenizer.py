"""A checkpoint's tokenizer with its chat template: text to token ids and back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from penstock.frontend.text.chat_template import ChatTemplate, read_chat_template, read_template_file, special_tokens_of
from penstock.frontend.text.detokenizer import Detokenizer
from penstock.frontend.text.input_encoder import EncodedInput, InputEncoder, Truncation
from penstock.frontend.text.pooling_files import read_object
from penstock.frontend.text.spellings import Spellings
from penstock.frontend.text.token_bytes import BreakerSearch, TokenBytes
from penstock.frontend.transport.errors import ApiError, ErrorKind
from penstock.process.native_libraries import GuardedTokenizer, LibraryError
from penstock.shm.messages import MAX_BREAKER_BYTES

Result = TypeVar("Result")

logger = logging.getLogger("penstock.tokenizer")

_INLINE_CHARACTERS = 8192
"""Longer texts are encoded in a thread. At several MB/s, this much blocks the event loop for about 2 ms."""

_INLINE_TOKENS = 1024

_LONG_CHARACTERS = 256 << 10
_NUM_LONG_AT_ONCE = 2
"""Texts of more than _LONG_CHARACTERS that are encoded at a time. Encoding takes about 500 bytes of memory per
token."""

_NORMALIZER_SHRINKS = 4
"""Normalization (NFC) turns at most this many characters into one."""


_MAX_KEPT_BREAKERS = 64
_MAX_KEPT_WINDOWS = 4096
"""Of at most 17 tokens: about 2 MB."""


class ModelTokenizer:
    """The tokenizer of one model, with its chat template if it has one."""

    def __init__(
        self, tokenizer: GuardedTokenizer, chat_template: ChatTemplate | None, config: Mapping[str, Any] | None = None
    ) -> None:
        """config is tokenizer_config.json, with the special tokens of special_tokens_map.json."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._inputs = InputEncoder(tokenizer)
        self.chat_template = chat_template
        self.config = config or {}
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.added_tokens = {token.content: token_id for token_id, token in added.items()}
        """Tokens outside the vocabulary, special or not, by text. Such a text is always encoded as this one token."""
        self.special_tokens = [token.content for token in added.values() if token.special]
        template = chat_template
        own = {text for text in self.special_tokens if template is not None and template.takes_apart(text)}
        self._spellings = Spellings(self.special_tokens, own)
        self.token_bytes = TokenBytes(tokenizer)
        self._decode_window = lru_cache(_MAX_KEPT_WINDOWS)(lambda window: tokenizer.decode(list(window)))
        """For streams with the default settings: listeners of one sequence have the same windows."""
        self._breakers: dict[tuple[str, ...], bytes] = {}
        self._breaker_search: BreakerSearch | None = None
        self._long_texts = ThreadPoolExecutor(_NUM_LONG_AT_ONCE, "encode-long")
        self._most_characters_per_token = _NORMALIZER_SHRINKS * max(map(len, tokenizer.get_vocab()), default=1)

    def spellings(self) -> Spellings:
        """Return the texts of special tokens."""
        return self._spellings

    @classmethod
    def load(cls, model_dir: Path, template_file: Path | None = None) -> ModelTokenizer:
        """Read tokenizer.json, tokenizer_config.json and the chat template: the model's, or that of a file.

        Raises ValueError or OSError.
        """
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"no tokenizer.json in {model_dir}; copy it there from the model's page on the hub")
        # Old checkpoints name their special tokens in a file of their own.
        named = special_tokens_of(read_object(model_dir / "special_tokens_map.json"))
        config = named | read_object(model_dir / "tokenizer_config.json")
        if template_file is None:
            source = read_chat_template(model_dir, config)
            tool_source = read_chat_template(model_dir, config, "tool_use")
        else:
            source, tool_source = read_template_file(template_file), None
        template = ChatTemplate(source, special_tokens_of(config), tool_source) if source is not None else None
        if template is not None:
            template.check()
        return cls(GuardedTokenizer.from_file(path), template, config)

    def special_tokens_in(self, text: str, *, or_added: bool = False) -> list[int]:
        """Return the special tokens in the text. or_added: if there are none, another added token that begins it."""
        (ids,) = self._encode([text.lstrip()], add_special_tokens=False)
        special = [token_id for token_id in ids if token_id in self._special_ids]
        others = self.added_tokens.values() if or_added else ()
        return special or [token_id for token_id in ids[:1] if token_id in others]

    def min_num_tokens(self, text: str) -> int:
        """Return a lower bound of a text's tokens from its length alone: a cheap test of whether it can fit."""
        return len(text) // self._most_characters_per_token

    async def encode(self, texts: list[str], *, add_special_tokens: bool, mark: str = "") -> list[list[int]]:
        """Return the token ids of each text.

        add_special_tokens is for plain prompts; chat templates write their own special tokens. mark is the mark of
        texts that are marked.
        """
        return await self._run_sized(texts, partial(self._encode, texts, add_special_tokens, mark))

    async def _run_sized(self, texts: Iterable[str], work: Callable[[], Result]) -> Result:
        """Do the work on these texts; in a thread if they are long."""
        num_characters = sum(map(len, texts))
        if num_characters <= _INLINE_CHARACTERS:
            return work()
        executor = self._long_texts if num_characters > _LONG_CHARACTERS else None
        return await asyncio.get_running_loop().run_in_executor(executor, work)

    def _encode(self, texts: list[str], add_special_tokens: bool, mark: str = "") -> list[list[int]]:
        # encode() holds the GIL; the batch call releases it.
        with _splitting(texts):
            if mark:  # dropped by the places of tokens, which the fast call does not report
                encodings = self._tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
                return [
                    [
                        token_id
                        for token_id, (a, b) in zip(encoding.ids, encoding.offsets, strict=True)
                        if text[a:b] != mark
                    ]
                    for text, encoding in zip(texts, encodings, strict=True)
                ]
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    async def breaker_tokens(self, texts: tuple[str, ...]) -> bytes:
        """Return DRY's breakers, see `BreakerSearch.find`. The search takes no time of the event loop."""
        if (found := self._breakers.get(texts)) is None:
            found = await asyncio.get_running_loop().run_in_executor(self._long_texts, self._find_breakers, texts)
            if len(self._breakers) >= _MAX_KEPT_BREAKERS:
                self._breakers.clear()
            if len(found) <= MAX_BREAKER_BYTES:
                self._breakers[texts] = found
        return found

    def _find_breakers(self, texts: tuple[str, ...]) -> bytes:
        if self._breaker_search is None:
            tokens = self.token_bytes.all(1 + max(self._tokenizer.get_vocab().values(), default=0))
            self._breaker_search = BreakerSearch(tokens, lambda parts: self._encode(parts, add_special_tokens=False))
        return self._breaker_search.find(texts, MAX_BREAKER_BYTES)

    async def encode_as_text(
        self, texts: list[str], spellings: Spellings, *, add_special_tokens: bool = False
    ) -> list[list[int]]:
        """Return the token ids of texts in which no token is spelled. Raises ApiError."""

        def work() -> list[list[int]]:
            marked, mark = spellings.mark_texts(texts)
            return self._encode(marked, add_special_tokens, mark)

        return await self._run_sized(texts, work)

    async def encode_inputs(
        self, items: list[str] | list[str | tuple[str, str]], truncation: Truncation, *, add_special_tokens: bool
    ) -> list[EncodedInput]:
        """Return the tokens of texts and pairs of texts by the tokenizer's own template."""
        texts = [text for item in items for text in ((item,) if isinstance(item, str) else item)]
        encode = partial(self._inputs.encode, items, truncation, add_special_tokens=add_special_tokens)
        with _splitting(texts):
            return await self._run_sized(texts, encode)

    def located_tokens(self, text: str, *, add_special_tokens: bool) -> list[tuple[int, str, int | None, int | None]]:
        """Return each token's id, its part of the text, and the start and end of that part in characters.

        A special token has its own text and no place. Callable from any thread.
        """
        with _splitting([text]):
            (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        special = encoding.special_tokens_mask
        return [
            (token_id, token, None, None) if special[index] else (token_id, text[start:stop], start, stop)
            for index, (token_id, token, (start, stop)) in enumerate(
                zip(encoding.ids, encoding.tokens, encoding.offsets, strict=True)
            )
        ]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if len(token_ids) > _INLINE_TOKENS:
            # decode() holds the GIL; the batch call releases it.
            (text,) = self._tokenizer.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        else:
            text = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return str(text)

    def detokenizer(self, *, skip_special_tokens: bool = True, kept_ids: frozenset[int] = frozenset()) -> Detokenizer:
        """Return a detokenizer for one stream. kept_ids are special tokens that are never skipped."""
        if skip_special_tokens and not kept_ids:
            return Detokenizer(self._decode_window, self._special_ids)
        silent_ids = self._special_ids - kept_ids if skip_special_tokens else frozenset()
        return Detokenizer(partial(self.decode, skip_special_tokens=False), silent_ids)


@contextlib.contextmanager
def _splitting(texts: Sequence[str]) -> Iterator[None]:
    """Raises ApiError if the library gives up: an expression may take too long on a text."""
    try:
        yield
    except LibraryError as error:
        longest = max(map(len, texts), default=0)
        reason = str(error).partition(" of `")[0]  # what follows may be the text
        logger.warning("the tokenizer cannot split texts of up to %d characters: %s", longest, reason)
        message = f"the model's tokenizer cannot split a text: one of up to {longest} characters; change or shorten it"
        raise ApiError(ErrorKind.INVALID_VALUE, message) from None
