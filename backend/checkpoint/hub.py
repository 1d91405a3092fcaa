"""Resolves --model to a directory: a path is used as it is; a hub id is downloaded into the hub's cache."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from penstock.backend.checkpoint.files.json_file import shorten
from penstock.backend.checkpoint.files.layout import (
    CONFIG_FILE,
    GENERATION_FILE,
    GGUF_SUFFIX,
    INDEX_FILE,
    SINGLE_FILE,
    SPECIAL_TOKENS_FILE,
    TEMPLATES,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    shard_names,
)
from penstock.backend.checkpoint.files.progress import logged_downloads
from penstock.backend.checkpoint.formats.quant_method import OWN_FILE
from penstock.backend.checkpoint.other_layouts.directory import (
    TOKENIZER_SETTINGS,
    TOKENIZER_SOURCES,
    complete_directory,
)
from penstock.backend.checkpoint.other_layouts.mistral_layout import CONSOLIDATED_FILE, PARAMS_FILE
from penstock.backend.errors import StartupError

CONFIG_FILES = (CONFIG_FILE, "modules.json", "sentence_*_config.json", "[0-9]_*/config.json")
"""Files that determine a model's computation: its config.json, and the modules of sentence-transformers."""
SMALL_FILES = (
    *CONFIG_FILES,
    OWN_FILE,
    "config_sentence_transformers.json",
    INDEX_FILE,
    GENERATION_FILE,
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    SPECIAL_TOKENS_FILE,
    *TEMPLATES,
)

ADAPTER_FILE = "adapter_config.json"
_MODULE_WEIGHTS = "[0-9]_*/model.safetensors"
_SHARDS = "model-[0-9]*-of-[0-9]*.safetensors"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]{0,95}(?:/[\w.\-]{1,96})?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


def resolve_model(model: str, revision: str | None = None, config_dir: Path | None = None) -> Path:
    """The checkpoint's directory: model itself if it is one, else the hub's snapshot of that id.

    config_dir is the result of `resolve_config`, if it was called before: the same commit is used. Downloads use
    huggingface_hub with its cache, progress bars (log lines without a terminal), HF_HUB_OFFLINE and HF_TOKEN. The small
    files come first, because the index among them names the weight files; nothing else is downloaded. Raises
    StartupError in one line.
    """
    if (path := _local_directory(model, revision)) is not None:
        return path
    if config_dir is not None:
        revision = _pinned(revision, config_dir)
    snapshot = _download_small_files(model, revision)
    index = snapshot / INDEX_FILE
    if not (snapshot / CONFIG_FILE).is_file():
        weight_files: tuple[str, ...] = (CONSOLIDATED_FILE,)
    else:
        weight_files = shard_names(index) if index.is_file() else (SINGLE_FILE, _SHARDS)
    files = (*SMALL_FILES, *weight_files, _MODULE_WEIGHTS)
    return complete_directory(_download(model, _pinned(revision, snapshot), files))


def resolve_config(model: str, revision: str | None = None) -> Path:
    """Like `resolve_model`, but downloads only CONFIG_FILES."""
    if (path := _local_directory(model, revision)) is not None:
        return path
    snapshot = _download_with_config(model, revision, CONFIG_FILES)
    return snapshot if (snapshot / CONFIG_FILE).is_file() else resolve_small_files(model, revision)


def resolve_small_files(model: str, revision: str | None = None) -> Path:
    """Like `resolve_model`, but downloads no weights."""
    return _local_directory(model, revision) or complete_directory(_download_small_files(model, revision))


def _pinned(revision: str | None, snapshot: Path) -> str | None:
    """The revision for further downloads: the snapshot's own commit, whatever has been pushed since."""
    return snapshot.name if _COMMIT.fullmatch(snapshot.name) else revision


def _local_directory(model: str, revision: str | None) -> Path | None:
    """The model's directory; None if model can only be a hub id. Raises StartupError."""
    path = Path(model).expanduser()
    if model and path.is_dir():
        if not (path / CONFIG_FILE).is_file() and not (path / PARAMS_FILE).is_file():
            raise StartupError(f"the model directory {path} has no {CONFIG_FILE}{_found_instead(path)}")
        if revision is not None:
            raise StartupError(
                f"--revision is {shorten(revision)}; the model {path} is a directory, which has none: remove --revision"
            )
        return complete_directory(path)
    if path.is_file():
        if path.suffix != GGUF_SUFFIX:
            raise StartupError(
                f"the model {path} is a file; give the directory that holds its {CONFIG_FILE}, or a GGUF"
            )
        if revision is not None:
            raise StartupError(f"--revision is {shorten(revision)}; the model {path} is a file: remove --revision")
        # Imported here: it imports torch, which takes a second and is not needed to find other models.
        from penstock.backend.checkpoint.gguf.directory import gguf_directory

        return gguf_directory(path)
    if not _HUB_ID.fullmatch(model):
        raise StartupError(f"the model directory {model!r} does not exist")
    return None


def _found_instead(directory: Path) -> str:
    """Describe what a directory without a model contains, and say what to do."""
    if (directory / ADAPTER_FILE).is_file():
        return (
            f": it is a LoRA adapter ({ADAPTER_FILE}). Give its base model as --model, and the adapter as "
            f"--lora-modules {directory.resolve().name}={directory}"
        )
    ggufs = sorted(path.name for path in directory.glob(f"*{GGUF_SUFFIX}"))
    return f"; it has {len(ggufs)} GGUF file(s): give one, such as {directory / ggufs[0]}" if ggufs else ""


def _download_small_files(model: str, revision: str | None) -> Path:
    snapshot = _download_with_config(model, revision, SMALL_FILES)
    if (snapshot / TOKENIZER_FILE).is_file():
        return snapshot
    return _download(model, _pinned(revision, snapshot), (*TOKENIZER_SOURCES, *TOKENIZER_SETTINGS))


def _download_with_config(model: str, revision: str | None, files: tuple[str, ...]) -> Path:
    """files with config.json, or Mistral's params.json."""
    snapshot = _download(model, revision, (*files, PARAMS_FILE))
    if not (snapshot / CONFIG_FILE).is_file() and not (snapshot / PARAMS_FILE).is_file():
        raise StartupError(f"the hub's model {model} has no {CONFIG_FILE}")
    return snapshot


def _download(model: str, revision: str | None, files: tuple[str, ...]) -> Path:
    # Imported here: the import takes 0.3 s, and a local directory does not need it.
    import httpx2
    from huggingface_hub import errors, snapshot_download

    at = f"{model} at revision {revision}" if revision else model
    try:
        bar = None if sys.stderr.isatty() else logged_downloads(at)
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(files), tqdm_class=bar))
    except errors.GatedRepoError:
        reason = "access to it must be granted on the hub, and HF_TOKEN set"
    except errors.RevisionNotFoundError:
        reason = "the hub has no such revision"
    except errors.RepositoryNotFoundError:
        reason = "there is no such directory here and no such model on the hub (a private one needs HF_TOKEN)"
    except errors.LocalEntryNotFoundError:
        reason = "there is no such directory here, it is not in the hub's cache, and the hub cannot be reached"
    except (errors.HfHubHTTPError, errors.HFValidationError, httpx2.HTTPError, OSError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
    raise StartupError(f"the model {at} cannot be loaded: {reason}")
