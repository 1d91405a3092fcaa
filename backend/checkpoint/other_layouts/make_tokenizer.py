"""The child process that makes tokenizer.json: SOURCE, the file that the model has instead, and the TARGET directory.

Lines on stdout are for the log; of a failure the last one says what is wrong.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.backend.checkpoint.files.json_file import read_bytes, read_json_object, shorten
from penstock.backend.checkpoint.files.layout import TOKENIZER_FILE
from penstock.backend.checkpoint.gguf.tokenizer import check_tokenizer
from penstock.backend.checkpoint.other_layouts.added_tokens import AddedTokens
from penstock.backend.checkpoint.other_layouts.directory import FILES_OF_CLASSES
from penstock.backend.checkpoint.other_layouts.rank_files import convert_tekken, convert_tiktoken, is_rank_file
from penstock.backend.checkpoint.other_layouts.sentencepiece_file import convert_sentencepiece, read_normalizer
from penstock.backend.errors import StartupError
from penstock.process.native_libraries import guarded


def convert_by_class(source: Path, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tokenizer.json, and the model's own special tokens, such as cls_token.

    Raises StartupError, and whatever the library raises.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, local_files_only=True, trust_remote_code=False)
    found, named = type(tokenizer).__name__, config.get("tokenizer_class")
    known = FILES_OF_CLASSES[source.name]
    if found not in known or (isinstance(named, str) and named.removesuffix("Fast") != found):
        raise StartupError(
            f"tokenizer_class is {shorten(named)}, which transformers reads as {found}; known are {', '.join(known)}"
        )
    made: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
    if source.suffix == ".model":
        # DeBERTa's class leaves the model's own normalizer out.
        own = made["normalizer"] or {}
        lowercase = [each for each in own.get("normalizers", [own]) if each.get("type") == "Lowercase"]
        made["normalizer"] = {"type": "Sequence", "normalizers": lowercase + read_normalizer(source)}
    return made, {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}


_MAX_MEMORY_BYTES = 8 << 30
_CONFIG_FILE = "tokenizer_config.json"
_MISTRAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def main(source: Path, target: Path) -> str | None:
    """Return what is wrong."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    try:
        for name, text in guarded(make_files)(source).items():
            (target / name).write_text(text, encoding="utf-8")
    except ModuleNotFoundError as error:
        return f"it needs {error.name}: pip install 'penstock[tokenizers]'"
    except ImportError:  # transformers, of a tekken.json without a list of its special tokens
        return "it needs mistral-common, which knows its special tokens: pip install mistral-common"
    except StartupError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - the libraries raise anything for a damaged file
        return f"it cannot be used ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    return None


def make_files(source: Path) -> dict[str, str]:
    """The text of each file. Raises StartupError, and whatever the libraries raise."""
    read_bytes(source)
    own: Mapping[str, Any]
    config = _tokenizer_config(source.parent)
    added = AddedTokens.read(source.parent, config)
    if source.name == "tekken.json":
        made, own = convert_tekken(source), _MISTRAL_TOKENS
    elif source.name in FILES_OF_CLASSES:
        made, own = convert_by_class(source, config)
    elif source.name == "tokenizer.model" and not is_rank_file(source):
        made, own = convert_sentencepiece(source, config, added)
    else:
        made, own = convert_tiktoken(source, config, added)
    config = dict(own) | config
    if source.name == "tekken.json" and not _has_template(source.parent, config):
        config |= _made_template(source)
    return {
        TOKENIZER_FILE: check_tokenizer(made),
        _CONFIG_FILE: json.dumps(config, ensure_ascii=False),
    }


def _tokenizer_config(model_dir: Path) -> dict[str, Any]:
    """tokenizer_config.json over the tokens of special_tokens_map.json, as transformers reads them."""
    found: dict[str, Any] = {}
    for name in ("special_tokens_map.json", _CONFIG_FILE):
        if (model_dir / name).is_file():
            found |= {key: value for key, value in read_json_object(model_dir / name).items() if value is not None}
    return found


def _has_template(model_dir: Path, config: dict[str, Any]) -> bool:
    return "chat_template" in config or any(
        (model_dir / f"chat_template.{kind}").is_file() for kind in ("jinja", "json")
    )


def _made_template(source: Path) -> dict[str, str]:
    """mistral-common's chat template for this tokenizer, or a line that says how to get one."""
    if find_spec("mistral_common") is None:
        print(
            "the model has no chat template: pip install mistral-common, which makes one, or give --chat-template FILE"
        )
        return {}
    from mistral_common.integrations.chat_templates.chat_templates import convert_tokenizer_to_chat_template

    return {"chat_template": convert_tokenizer_to_chat_template(source)}


if __name__ == "__main__":
    problem = main(Path(sys.argv[1]), Path(sys.argv[2]))
    if problem is not None:
        print(problem)
        sys.exit(1)
