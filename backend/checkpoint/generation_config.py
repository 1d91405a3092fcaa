"""A checkpoint's defaults for generation: the tokens that end a text, and sampling settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct

from penstock.backend.checkpoint.json_file import convert, read_json_object
from penstock.backend.checkpoint.layout import CONFIG_FILE, GENERATION_FILE
from penstock.backend.sampling_defaults import given, sampling_struct
from penstock.shm.messages import Sampling, TokenId

if TYPE_CHECKING:
    from pathlib import Path


_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class _EndTokens(Struct, frozen=True):
    eos_token_id: TokenId | Annotated[tuple[TokenId, ...], Meta(max_length=64)] | None = None

    def as_tuple(self) -> tuple[int, ...]:
        match self.eos_token_id:
            case None:
                return ()
            case int(token_id):
                return (token_id,)
            case token_ids:
                return tuple(dict.fromkeys(token_ids))


_SamplingSettings = sampling_struct(_SAMPLING_KEYS, is_strict=False)


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Defaults for requests."""

    eos_token_ids: tuple[int, ...]
    sampling: Sampling


def read_generation_defaults(model_dir: Path) -> GenerationDefaults:
    """Read generation_config.json. End tokens come from config.json if that file names none or is missing.

    do_sample is ignored: it sets the default of transformers' generate (greedy), while clients of this API expect
    temperature 1 unless the model's authors chose another. Raises StartupError naming field and value.
    """
    path = model_dir / GENERATION_FILE
    values: dict[str, Any] = read_json_object(path) if path.is_file() else {}
    end_tokens = convert(values, _EndTokens, path).as_tuple()
    if not end_tokens:
        config_path = model_dir / CONFIG_FILE
        end_tokens = convert(read_json_object(config_path), _EndTokens, config_path).as_tuple()
    return GenerationDefaults(end_tokens, Sampling(**given(convert(values, _SamplingSettings, path))))
