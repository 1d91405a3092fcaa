"""The tokens that tokenizer_config.json and added_tokens.json add to a vocabulary, or rename in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.backend.checkpoint.files.json_file import read_json_object, shorten
from penstock.backend.errors import StartupError

_MAX_TOKENS = 1 << 24
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
_PREFIX = "tokenizer.ggml."


@dataclass(frozen=True, slots=True)
class AddedTokens:
    """Id → (text, whether it is special)."""

    by_id: dict[int, tuple[str, bool]] = field(default_factory=dict)

    @classmethod
    def read(cls, model_dir: Path, config: Mapping[str, Any]) -> AddedTokens:
        """Raises StartupError."""
        found: dict[int, tuple[str, bool]] = {}
        path = model_dir / "added_tokens.json"
        for text, index in (read_json_object(path) if path.is_file() else {}).items():
            found[_checked(index, "added_tokens.json")] = (text, True)
        for index, token in (config.get("added_tokens_decoder") or {}).items():
            if not isinstance(token, dict) or not isinstance(token.get("content"), str):
                raise StartupError(f"added_tokens_decoder has {shorten(token)} for {shorten(index)}; expected content")
            number = int(index) if str(index).isdecimal() else -1
            found[_checked(number, "added_tokens_decoder")] = (token["content"], token.get("special") is not False)
        return cls(found)


def _checked(index: object, where: str) -> int:
    if not isinstance(index, int) or not 0 <= index < _MAX_TOKENS:
        raise StartupError(f"{where} has the token id {shorten(index)}; ids are 0 to {_MAX_TOKENS - 1}")
    return index


def metadata_of(tokens: list[str], kinds: list[int], config: Mapping[str, Any], added: AddedTokens) -> dict[str, Any]:
    """A vocabulary with its added tokens as the metadata of a GGUF file, of which `GgufTokenizer` makes tokenizer.json.

    bos and eos are those of config, which also says whether texts get them: tokens and kinds may be changed.
    """
    for index in range(len(tokens), max(added.by_id, default=-1) + 1):
        tokens.append(f"<|reserved_token_{index}|>")
        kinds.append(_UNUSED)
    for index, (text, is_special) in added.by_id.items():
        tokens[index] = text
        kinds[index] = _CONTROL if is_special else _USER_DEFINED
    metadata: dict[str, Any] = {f"{_PREFIX}tokens": tokens, f"{_PREFIX}token_type": kinds}
    for name in ("bos", "eos"):
        token = token_text(config, f"{name}_token")
        metadata[f"{_PREFIX}add_{name}_token"] = config.get(f"add_{name}_token") is True
        if token in tokens:
            metadata[f"{_PREFIX}{name}_token_id"] = tokens.index(token)
    return metadata


def token_text(config: Mapping[str, Any], name: str) -> str:
    """A token such as eos_token, which is a text or an object with one; empty if there is none."""
    value = config.get(name)
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""
