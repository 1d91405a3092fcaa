"""Damages one file of a good model: JSON by its tree, tensors by their header, GGUF by its fields, any by its bytes."""

from __future__ import annotations

import json
import random
import struct
import tempfile
from dataclasses import dataclass
from typing import Any

import gguf

from penstock.tools.chaos.bad_models.good_models import TOKENIZER, GoodModel

TEMPLATE = "chat_template.jinja"
_SIZES = (0, 1, 3, 7, 255, 65_537, 2**31 - 1, 2**31, 2**32, 2**40, 2**63, 2**64 - 1)
_VALUES: tuple[Any, ...] = (
    *(*_SIZES, None, True, False, -1, 2**64, 10**40, -(2**63), 0.5, -0.0, 1e308, 1e-320),
    *(float("nan"), float("inf"), "", "x", "<script>", "9" * 5000, "\0\n\x1b[31m", "../../etc/passwd", "\ud800"),
    *([], {}, [[]], [None], [0] * 10_000, {"a": {}}, [0, 0], [2**62, 2**62], [-1, 4]),
    *("F64", "I64", "BF16", "F8_E4M3", "F4", "U8", "linear", "yarn", "gptq", "nf4", "LORA"),
)
_TEXTS = (b"mamba", b"\0\n\x1b[31m", b"\xff\xfe", b"{{ 9 ** (9 ** 9) }}", b"../../")
_JUNK = (b"\xff", b"\x00\x7c", b"\x80\x7f")
"""NaN and infinity in several types."""
_SHARE_OF_BYTES = 0.12
_DEEP = 100_000


@dataclass(frozen=True, slots=True)
class Sample:
    """A damaged model: what is damaged, in one line, and its files as of `GoodModel`."""

    index: int
    told: str
    files: dict[str, bytes]


def draw_sample(seed: int, index: int, models: list[GoodModel]) -> Sample:
    """The same for the same seed and index: the models themselves in their order, known attacks, then damage."""
    if index < len(models):
        return Sample(index, f"{models[index].name}: undamaged", models[index].files)
    if index - len(models) < len(ATTACKS):
        told, name, change = ATTACKS[index - len(models)]
        files = models[0].files
        content = change.encode() if isinstance(change, str) else json.dumps(json.loads(files[name]) | change).encode()
        return Sample(index, told, files | {name: content})
    rng = random.Random(f"bad model {seed} {index}")
    model = rng.choices(models, [3 if model.name in ("llama", "gguf") else 1 for model in models])[0]
    name = rng.choice(model.targets)
    kind = "bytes" if rng.random() < _SHARE_OF_BYTES else name.rpartition(".")[2]
    told, content = _DAMAGES[kind](rng, model.files[name])
    return Sample(index, f"{model.name}: {name}: {told}", model.files | {name: content})


def _damage_bytes(rng: random.Random, content: bytes) -> tuple[str, bytes]:
    place = rng.randrange(min(len(content), 4096) if rng.random() < 0.5 else len(content))
    size = rng.choice((1, 2, 8, 64))
    before, after = content[:place], content[place + size :]
    ways = {
        f"ends after {place} bytes": before,
        f"{size} bytes are missing at {place}": before + after,
        f"{size} bytes at {place} are random": before + rng.randbytes(size) + after,
        f"{size} bytes are there twice at {place}": content[: place + size] + content[place:],
        f"the bits of the byte at {place} are inverted": before + bytes([255 - content[place]]) + content[place + 1 :],
        "has no bytes": b"",
    }
    return rng.choice(list(ways.items()))


def _damage_json(rng: random.Random, content: bytes) -> tuple[str, bytes]:
    told = _damage_tree(rng, tree := json.loads(content))
    text = json.dumps(tree)
    if rng.random() < 0.04:
        bracket = rng.choice(("[", '{"a":'))
        text, told = text.replace("{", f'{{"deep": {bracket * _DEEP}', 1), f"{bracket} is nested {_DEEP} times"
    return told, text.encode()


def _damage_tree(rng: random.Random, tree: Any) -> str:
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
            claim = rng.choice((*_SIZES, length - 1, length + 1, len(content)))
            told = f"the header's length is {claim} instead of {length}"
        case 1:
            first, second = rng.sample(sorted(tree), 2)
            tree[first], told = tree[second], f"{first} is in the place of {second}"
        case 2:
            place, junk = rng.randrange(len(data)), rng.choice(_JUNK) * 64
            data, told = data[:place] + junk + data[place + len(junk) :], f"the data have {junk[:2].hex()} at {place}"
        case 3:
            empty, count = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}, rng.choice((1, 20_000))
            tree |= {f"empty{number}": empty for number in range(count)}
            told = f"{count} empty tensors more"
        case _:
            told = _damage_tree(rng, tree)
    header = json.dumps(tree).encode()
    if rng.random() < 0.05:
        header, told = header[:-1] + b"," + header[1:], "every tensor is there twice"
    return told, struct.pack("<Q", len(header) if claim is None else claim) + header + data


def _damage_gguf(rng: random.Random, content: bytes) -> tuple[str, bytes]:
    """Overwrite one field of the header: a count, a length, a type, a name, a value, a dimension, an offset."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        reader = gguf.GGUFReader(file.name)
        fields = [*reader.fields.values(), *(tensor.field for tensor in reader.tensors)]
        field = rng.choice(fields)
        number = rng.randrange(min(len(field.parts), 12)) if rng.random() < 0.8 else rng.randrange(len(field.parts))
        place = field.offset + sum(part.nbytes for part in field.parts[:number])
        part = field.parts[number]
        size, name = part.nbytes, field.name
        is_text, width = part.dtype == "uint8", part.itemsize
    if is_text:
        new = (rng.choice(_TEXTS) * size)[:size]
    else:
        value = rng.choice((*_SIZES, rng.randrange(64), rng.randrange(1 << 16)))
        new = rng.choice(((value % (1 << 8 * width)).to_bytes(width, "little"), (rng.choice(_JUNK) * width)[:width]))
        size = width
    told = f"part {number} of {name}, {size} bytes at {place}, is {new[:20]!r}"
    return told, content[:place] + new + content[place + size :]


_DAMAGES = {"bytes": _damage_bytes, "json": _damage_json, "safetensors": _damage_tensors, "gguf": _damage_gguf}

_NESTED: dict[str, Any] = {"type": "Lowercase"}
for _ in range(100):
    _NESTED = {"type": "Sequence", "normalizers": [_NESTED]}
_SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
_PADDING = {"direction": "Right", "pad_to_multiple_of": None, "pad_token": "x", "pad_id": 0, "pad_type_id": 0}
_TOKEN = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"content": "<|x|>", "special": True}
_LOOP = "{% for a in range(99999) %}"
ATTACKS: tuple[tuple[str, str, dict[str, Any] | str], ...] = (
    ("a map of 3 bytes", TOKENIZER, {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "////"}}),
    ("an expression with an error", TOKENIZER, {"pre_tokenizer": _SPLIT | {"pattern": {"Regex": "("}}}),
    ("an expression that backtracks", TOKENIZER, {"pre_tokenizer": _SPLIT | {"pattern": {"Regex": "(a|aa)+$"}}}),
    ("100 nested normalizers", TOKENIZER, {"normalizer": _NESTED}),
    ("padding to 10^12 tokens", TOKENIZER, {"padding": _PADDING | {"strategy": {"Fixed": 10**12}}}),
    ("an added token with id 2^32 - 1", TOKENIZER, {"added_tokens": [_TOKEN | {"id": 2**32 - 1}]}),
    ("a power of powers", TEMPLATE, "{{ 9 ** (9 ** 9) }}{{ messages[0].content }}"),
    ("a text of 3 GB", TEMPLATE, '{{ "x" * 3000000000 }}'),
    ("several such constants", TEMPLATE, '{{ 9 ** (9 ** 8) }}{{ "x" * 2000000000 }}' * 20),
    ("nested loops", TEMPLATE, _LOOP * 2 + "x" + "{% endfor %}" * 2),
    ("lipsum", TEMPLATE, "{{ lipsum(n=100000) }}"),
    ("a letter centred in 3 GB", TEMPLATE, "{{ 'a'|center(3000000000) }}"),
    ("5,000 parentheses", TEMPLATE, "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"),
    ("2,000 nested conditions", TEMPLATE, "{% if a %}" * 2000 + "{% endif %}" * 2000),
    ("a sum of 20,000 terms", TEMPLATE, "{{ " + "+".join(["1"] * 20_000) + " }}"),
    ("an include", TEMPLATE, "{% include '/etc/passwd' %}"),
    ("a filter that does not exist", TEMPLATE, "{{ messages|nothing }}"),
)
"""What is wrong, the file, and its text or changed keys: attacks that security reviews found, and their like, on the
first model."""
