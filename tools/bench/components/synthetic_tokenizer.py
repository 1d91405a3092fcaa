"""A synthetic tokenizer of any size, because the cost of a mask depends on the vocabulary.

Its tokens resemble those of a large model: words and parts of words in Latin, Cyrillic and Chinese letters, with and
without a space before them, numbers of up to three digits, runs of white space and of punctuation. It has no merges,
so it serves only readers that work on the bytes of tokens, as grammars do.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec

END = "<|end|>"
_ONSETS = [*"bcdfghjklmnprstvwz", "br", "ch", "cl", "cr", "dr", "fl", "gr", "pl", "pr", "sh", "st", "th", "tr"]
_VOWELS = [*"aeiou", "ai", "ea", "ee", "io", "ou"]
_CODAS = ["", "n", "r", "s", "t", "l", "nd", "st", "ng"]
_CYRILLIC = [chr(code) for code in range(0x430, 0x450)]
_CHINESE = [chr(code) for code in range(0x4E00, 0x6000)]
_PUNCTUATION = """!"#$%&'()*+,-./:;<=>?@[]^_`{|}~"""


def write_tokenizer(path: Path, vocab_size: int, seed: int) -> int:
    """Write a tokenizer.json and return the id of END, the last one. The same seed gives the same file.

    vocab_size is at least 2,000: bytes and numbers alone are 1,256.
    """
    tokens = _tokens(vocab_size - 1, random.Random(seed))  # noqa: S311 - a workload, not a secret
    letters = _byte_letters()
    vocab = {"".join(letters[byte] for byte in token): index for index, token in enumerate(tokens)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    end = {"id": vocab_size - 1, "content": END, "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [end | flags],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab | {END: vocab_size - 1}, "merges": []},
    }
    path.write_bytes(msgspec.json.encode(tokenizer))
    return vocab_size - 1


def _tokens(count: int, rng: random.Random) -> list[bytes]:
    """Return distinct tokens, among them every single byte."""
    tokens = dict.fromkeys(bytes([byte]) for byte in range(256))
    tokens |= dict.fromkeys(str(number).encode() for number in range(1000))
    texts = _texts(rng)
    while len(tokens) < count:
        tokens[next(texts).encode()] = None
    return list(tokens)


def _texts(rng: random.Random) -> Iterator[str]:
    syllables = [onset + vowel + coda for onset in _ONSETS for vowel in _VOWELS for coda in _CODAS]
    while True:
        draw = rng.random()
        if draw < 0.03:
            yield "".join(rng.choices(_PUNCTUATION, k=rng.randint(2, 3)))
        elif draw < 0.04:
            yield rng.choice(" \t\n") * rng.randint(2, 64)
        elif draw < 0.1:
            yield "".join(rng.choices(_CHINESE, k=rng.randint(1, 3)))
        else:
            letters = _CYRILLIC if draw < 0.2 else syllables
            word = "".join(rng.choices(letters, k=rng.randint(1, 4)))
            yield rng.choice(("", " ")) + (word.capitalize() if rng.random() < 0.3 else word)


def _byte_letters() -> list[str]:
    """Return the letter that stands for each byte in a byte-level vocabulary.

    It is the byte's own character if that is visible, else the next one from U+0100 (OpenAI's GPT-2, encoder.py).
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]
