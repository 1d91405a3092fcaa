"""Damages one file of a good model: JSON by its tree, tensors by their header, any file by its bytes."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.tools.chaos.bad_models.gguf_file import damage_gguf
from penstock.tools.chaos.bad_models.good_models import GGUF, TOKENIZER, GoodModel

TEMPLATE = "chat_template.jinja"
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 7, 255, 65_537, 2**31, 2**32, 2**63, 2**64, 10**40, -(2**63)),
    *(0.5, -0.0, 1e308, 1e-320, float("nan"), float("inf"), float("-inf")),
    *("", "x", "<script>", "9" * 5000, "\0\n\x1b[31m", "../../etc/passwd", "é" * 300, "\ud800"),
    *([], {}, [[]], [None], [0] * 10_000, {"a": {}}, [0, 0], [2**62, 2**62], [-1, 4]),
    *("F64", "I64", "BF16", "F8_E4M3", "F4", "U8", "linear", "yarn", "gptq", "nf4", "LORA"),
)
_SHARE_OF_BYTES = 0.12
_DEEP = 100_000


@dataclass(frozen=True, slots=True)
class Sample:
    """A damaged model."""

    index: int
    told: str
    """What is damaged, in one line."""
    files: dict[str, bytes]
    """Contents by path; one of them is GGUF, or they are a directory, perhaps with an adapter in it."""


def draw_sample(seed: int, index: int, models: list[GoodModel]) -> Sample:
    """The same for the same seed and index: the models themselves in their order, known attacks, then damage."""
    if index < len(models):
        model = models[index]
        return Sample(index, f"{model.name}: undamaged", _files(model))
    attacks = index - len(models)
    if attacks < len(_ATTACKS):
        told, name, damage = _ATTACKS[attacks]
        model = models[0]
        return Sample(index, told, _files(model) | {name: damage(model.files.get(name, b""))})
    rng = random.Random(f"bad model {seed} {index}")
    model = rng.choices(models, [3 if model.name in ("llama", "gguf") else 1 for model in models])[0]
    name = rng.choice(model.targets)
    told, content = _damage(rng, model, name)
    return Sample(index, f"{model.name}: {name}: {told}", _files(model) | {name: content})


def _files(model: GoodModel) -> dict[str, bytes]:
    return model.files if model.gguf is None else {GGUF: bytes(model.gguf)}


def _damage(rng: random.Random, model: GoodModel, name: str) -> tuple[str, bytes]:
    if rng.random() < _SHARE_OF_BYTES:
        return _damage_bytes(rng, _files(model)[name])
    if model.gguf is not None:
        return damage_gguf(rng, model.gguf)
    content = model.files[name]
    return _damage_json(rng, content) if name.endswith(".json") else _damage_tensors(rng, content)


def _damage_bytes(rng: random.Random, content: bytes) -> tuple[str, bytes]:
    place = rng.randrange(min(len(content), 4096) if rng.random() < 0.5 else len(content))
    size = rng.choice((1, 2, 8, 64))
    before, after = content[:place], content[place + size :]
    match rng.randrange(6):
        case 0:
            return f"ends after {place} bytes", content[:place]
        case 1:
            return f"{size} bytes are missing at {place}", before + after
        case 2:
            return f"{size} bytes at {place} are random", content[:place] + rng.randbytes(size) + content[
                place + size :
            ]
        case 3:
            return f"{size} bytes are repeated at {place}", content[: place + size] + content[place:]
        case 4:
            return "has no bytes", b""
        case _:
            bit = 1 << rng.randrange(8)
            return f"bit {bit} at {place} is flipped", content[:place] + bytes([content[place] ^ bit]) + content[
                place + 1 :
            ]


def _damage_json(rng: random.Random, content: bytes) -> tuple[str, bytes]:
    tree = json.loads(content)
    told = damage_tree(rng, tree)
    text = json.dumps(tree)
    if rng.random() < 0.04:
        bracket = rng.choice(("[", '{"a":'))
        text, told = text.replace("{", f'{{"deep": {bracket * _DEEP}', 1), f"{bracket} is nested {_DEEP} times"
    return told, text.encode()


def damage_tree(rng: random.Random, tree: Any) -> str:
    """Replace, remove or double one value of a JSON document. Return what was changed."""
    path, parent = "", tree
    while True:
        key = rng.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        path += f"[{key!r:.40}]"
        child = parent[key]
        if not isinstance(child, dict | list) or not child or rng.random() < 0.3:
            break
        parent = child
    match rng.randrange(8):
        case 0:
            del parent[key]
            return f"{path} is missing"
        case 1 if isinstance(parent, dict):
            parent[f"{key}2"] = child
            return f"{path} is there twice"
        case 2 if isinstance(child, int | float):
            parent[key] = child * rng.choice((2, -1, 1000, 2**32)) + rng.choice((0, 1))
        case _:
            parent[key] = rng.choice(_VALUES)
    return f"{path} = {json.dumps(parent[key])[:60]}"


def _damage_tensors(rng: random.Random, content: bytes) -> tuple[str, bytes]:
    """Damage a safetensors file: 8 bytes for the header's length, the header in JSON, the data."""
    (length,) = struct.unpack_from("<Q", content)
    tree, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    claim = None
    match rng.randrange(7):
        case 0:
            claim = rng.choice((0, 1, length - 1, length + 1, len(content), 1 << 31, 1 << 63, (1 << 64) - 1))
            told = f"the header's length is {claim} instead of {length}"
        case 1:
            first, second = rng.sample(sorted(tree), 2)
            tree[first], told = tree[second], f"{first} is in the place of {second}"
        case 2:
            place, junk = rng.randrange(len(data)), rng.choice((b"\xff", b"\x00\x7c", b"\x80\x7f")) * 64
            data = data[:place] + junk[: len(data) - place] + data[place + len(junk) :]
            told = f"the data have {junk[:2].hex()} at {place}"
        case 3:
            empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
            count = rng.choice((1, 100_000))
            tree |= {f"empty{number}": empty for number in range(count)}
            told = f"{count} empty tensors more"
        case _:
            told = damage_tree(rng, tree)
    header = json.dumps(tree).encode()
    if claim is None and rng.random() < 0.05:
        header = header[:-1] + b"," + header[1:]
        told = "every tensor is there twice"
    return told, struct.pack("<Q", len(header) if claim is None else claim) + header + data


def _in_tokenizer(key: str, value: Any) -> Callable[[bytes], bytes]:
    return lambda content: json.dumps(json.loads(content) | {key: value}).encode()


def _text(text: str) -> Callable[[bytes], bytes]:
    return lambda _content: text.encode()


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_NESTED: dict[str, Any] = {"type": "Lowercase"}
for _ in range(100):
    _NESTED = {"type": "Sequence", "normalizers": [_NESTED]}
_CHAR_MAP = {"type": "Precompiled", "precompiled_charsmap": "////"}
_PADDING: dict[str, Any] = {
    "strategy": {"Fixed": 10**12},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_token": "x",
}
_PADDING |= {"pad_id": 0, "pad_type_id": 0}
_HUGE_ID = {"id": 2**32 - 1, "content": "<|x|>", "special": True}
_LOOP = "{% for a in range(99999) %}"
_FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
_ATTACKS: tuple[tuple[str, str, Callable[[bytes], bytes]], ...] = (
    ("tokenizer: a character map of 3 bytes", TOKENIZER, _in_tokenizer("normalizer", _CHAR_MAP)),
    ("tokenizer: an expression with a syntax error", TOKENIZER, _in_tokenizer("pre_tokenizer", _split("("))),
    ("tokenizer: an expression that backtracks", TOKENIZER, _in_tokenizer("pre_tokenizer", _split("(a|aa)+$"))),
    ("tokenizer: 100 nested normalizers", TOKENIZER, _in_tokenizer("normalizer", _NESTED)),
    ("tokenizer: padding to 10^12 tokens", TOKENIZER, _in_tokenizer("padding", _PADDING)),
    ("tokenizer: an added token with id 2^32 - 1", TOKENIZER, _in_tokenizer("added_tokens", [_HUGE_ID | _FLAGS])),
    ("template: a power of powers", TEMPLATE, _text("{{ 9 ** (9 ** 9) }}{{ messages[0].content }}")),
    ("template: a text of 3 GB", TEMPLATE, _text('{{ "x" * 3000000000 }}')),
    ("template: several such constants", TEMPLATE, _text('{{ 9 ** (9 ** 8) }}{{ "x" * 2000000000 }}' * 20)),
    (
        "template: nested loops",
        TEMPLATE,
        _text(_LOOP * 2 + "x" + "{% endfor %}" * 2),
    ),
    ("template: lipsum", TEMPLATE, _text("{{ lipsum(n=100000) }}")),
    ("template: centred in 3 GB", TEMPLATE, _text("{{ 'a'|center(3000000000) }}")),
    ("template: 5,000 parentheses", TEMPLATE, _text("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}")),
    ("template: 2,000 nested conditions", TEMPLATE, _text("{% if a %}" * 2000 + "{% endif %}" * 2000)),
    ("template: a sum of 20,000 terms", TEMPLATE, _text("{{ " + "+".join(["1"] * 20_000) + " }}")),
    ("template: an include", TEMPLATE, _text("{% include '/etc/passwd' %}")),
    ("template: a filter that does not exist", TEMPLATE, _text("{{ messages|nothing }}")),
    ("template: not UTF-8", TEMPLATE, lambda _content: b"\xff\xfe{{"),
)
"""Attacks that security reviews found, and their like, on the first model."""
