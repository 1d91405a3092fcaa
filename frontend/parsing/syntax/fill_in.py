"""Finds the tokens with which a model fills in code between a prefix and a suffix ("fill in the middle")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.frontend.text.spellings import Spellings
from penstock.frontend.text.tokenizer import ModelTokenizer

_FORMS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen Coder, CodeGemma, Granite from 3.3
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite Code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<PRE>", "<SUF>", "<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4
)
_SUFFIX_FIRST = ("[PREFIX]", "[SUFFIX]")
"""Codestral writes the suffix first, and nothing marks the middle (mistral-common)."""
_REPOSITORY = ("<|repo_name|>", "<|reponame|>", "<repo_name>", "<reponame>")
_FILE = ("<|file_sep|>", "<|file_separator|>", "<file_sep>", "<|filename|>", "<filename>")
_ENDS = (
    "<|fim_pad|>", "<fim_pad>", "<fim-pad>", "▁<EOT>", "<EOT>", "<|endoftext|>", "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FillInTokens:
    """The order is prefix, suffix, middle; without a middle token the suffix comes first."""

    prefix: int
    suffix: int
    middle: int | None
    repository: int | None
    """Before a repository's name; None if the model has no form for several files."""
    file: int | None
    """Before a file's name."""
    ends: tuple[int, ...]
    """Tokens that end what is filled in, besides the model's end tokens."""
    spellings: Spellings
    """Texts of tokens, which stay texts in a client's code."""

    def around(self, prefix: Sequence[int], suffix: Sequence[int]) -> list[int]:
        """Return the prompt of a prefix and a suffix."""
        if self.middle is None:
            return [self.suffix, *suffix, self.prefix, *prefix]
        return [self.prefix, *prefix, self.suffix, *suffix, self.middle]


def find_fill_in(tokenizer: ModelTokenizer) -> FillInTokens | None:
    """Return None for a model without such tokens. A GGUF file names ids, in fim_token_ids of its configuration."""
    added, named = tokenizer.added_tokens, tokenizer.config.get("fim_token_ids")
    ids: dict[str, int] = {}
    if isinstance(named, dict):
        ids = {name: each for name, each in named.items() if isinstance(each, int) and tokenizer.token_bytes(each)}
    middle: int | None
    if ids.keys() >= {"prefix", "suffix", "middle"}:
        prefix, suffix, middle = ids["prefix"], ids["suffix"], ids["middle"]
    elif (form := next((form for form in _FORMS if added.keys() >= set(form)), None)) is not None:
        prefix, suffix, middle = (added[text] for text in form)
    elif added.keys() >= set(_SUFFIX_FIRST):
        prefix, suffix, middle = *(added[text] for text in _SUFFIX_FIRST), None
    else:
        return None
    repository, file = ids.get("repository", _first(_REPOSITORY, added)), ids.get("file", _first(_FILE, added))
    found = [token_id for token_id in (prefix, suffix, middle, repository, file) if token_id is not None]
    ends = dict.fromkeys([*found, *(added[text] for text in _ENDS if text in added)])
    spellings = Spellings([*tokenizer.special_tokens, *(text for text, each in added.items() if each in ends)])
    return FillInTokens(prefix, suffix, middle, repository, file, tuple(ends), spellings)


def _first(texts: Sequence[str], added_tokens: Mapping[str, int]) -> int | None:
    return next((added_tokens[text] for text in texts if text in added_tokens), None)
