"""A checkpoint's defaults for generation: the tokens that end a text, and sampling settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from penstock.backend.checkpoint.files.json_file import convert, read_json_object
from penstock.backend.checkpoint.files.layout import CONFIG_FILE, GENERATION_FILE
from penstock.backend.checkpoint.files.tokenizer_file import added_token_ids, end_of_text
from penstock.backend.sampling.defaults import given, sampling_struct
from penstock.shm.messages import Sampling

_SAMPLING_KEYS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "xtc_probability",
    "xtc_threshold",
)
_NOT_APPLIED = {"num_beams": 1, "no_repeat_ngram_size": 0, "sequence": None, "mirostat": None}
"""Settings of transformers and, from GGUF files, of llama.cpp that are not supported; each with the value that changes
nothing."""
_LEAST_TOP_P = 1e-6
"""Leaves the likeliest token alone, as top_p 0 does in transformers and llama.cpp. The sampler takes no 0."""

_EndToken = Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)]
"""A token id; -1 is none."""


class _EndTokens(Struct, frozen=True):
    eos_token_id: _EndToken | Annotated[tuple[_EndToken, ...], Meta(max_length=64)] | None = None

    def as_tuple(self) -> tuple[int, ...]:
        found = self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)
        return tuple(token_id for token_id in found if token_id is not None and token_id >= 0)


_SamplingSettings = sampling_struct(_SAMPLING_KEYS, is_strict=False)


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Defaults for requests."""

    eos_token_ids: tuple[int, ...]
    """End tokens that the files name. Frontends add those that the chat template shows."""
    sampling: Sampling
    not_applied: dict[str, Any]
    """Settings of the files that are not supported."""


def read_generation_defaults(model_dir: Path) -> GenerationDefaults:
    """Read generation_config.json, and the end tokens of config.json and of the tokenizer's files as well.

    do_sample is ignored: it sets the default of transformers' generate (greedy), while clients of this API expect
    temperature 1 unless the model's authors chose another. Raises StartupError naming field and value.
    """
    path = model_dir / GENERATION_FILE
    values: dict[str, Any] = read_json_object(path) if path.is_file() else {}
    if values.get("top_p") == 0:
        values["top_p"] = _LEAST_TOP_P
    sampling = Sampling(**given(convert(values, _SamplingSettings, path)))
    ends = _end_tokens(model_dir, convert(values, _EndTokens, path).as_tuple())
    not_applied = {key: values[key] for key, neutral in _NOT_APPLIED.items() if values.get(key) not in (None, neutral)}
    return GenerationDefaults(ends, sampling, not_applied)


def _end_tokens(model_dir: Path, generation: tuple[int, ...]) -> tuple[int, ...]:
    """The end tokens of generation_config.json, of the tokenizer and of config.json, without duplicates.

    config.json often keeps the default of its class, such as 2 for Llama, which in another vocabulary is a piece of
    ordinary text: beside others its ids count only if the tokenizer has them as added tokens.
    """
    path = model_dir / CONFIG_FILE
    added = added_token_ids(model_dir)
    own = end_of_text(model_dir, added)
    ends = generation if own is None else (*generation, own)
    configured = convert(read_json_object(path), _EndTokens, path).as_tuple()
    known = frozenset(added.values()) if ends and added else frozenset(configured)
    return tuple(dict.fromkeys((*ends, *(token_id for token_id in configured if token_id in known))))
