"""Presents a model without config.json or tokenizer.json as a checkpoint directory that has them."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

from penstock.backend.checkpoint.files.layout import (
    CONFIG_FILE,
    GGUF_SUFFIX,
    INDEX_FILE,
    SINGLE_FILE,
    TEMPLATES,
    TOKENIZER_FILE,
)
from penstock.backend.checkpoint.gguf.cached_directories import cached_directory
from penstock.backend.checkpoint.other_layouts.mistral_layout import CONSOLIDATED_FILE, PARAMS_FILE, write_config
from penstock.backend.errors import StartupError
from penstock.process.children import module_argv
from penstock.process.private_directory import UnsafeDirectory
from penstock.process.supervisor import describe_end

logger = logging.getLogger("penstock.backend")

FILES_OF_CLASSES = {
    "sentencepiece.bpe.model": ("XLMRobertaTokenizer", "CamembertTokenizer"),
    "spm.model": ("DebertaV2Tokenizer",),
    "vocab.txt": ("BertTokenizer", "DistilBertTokenizer", "MPNetTokenizer"),
    "vocab.json": ("RobertaTokenizer", "Qwen2Tokenizer"),
}
"""Files that say too little, and the classes of transformers that say the rest for all their models."""
TOKENIZER_SOURCES = ("tekken.json", "tokenizer.model", "tiktoken.model", "*.tiktoken", *FILES_OF_CLASSES)
"""The first one that exists counts."""
TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt")
_FORMAT = "1"
"""Increase it when the generated files change."""
_TIMEOUT_S = 300.0


def complete_directory(model_dir: Path) -> Path:
    """model_dir, or the directory in the cache that adds the missing files. Raises StartupError.

    A directory without a config.json, and one without any tokenizer, may stay so.
    """
    is_mistral = _has_only_mistral_weights(model_dir)
    source = None if (model_dir / TOKENIZER_FILE).is_file() else _find_source(model_dir)
    if not is_mistral and (source is None or not (model_dir / CONFIG_FILE).is_file()):
        return model_dir
    model_dir = model_dir.resolve()
    read = [model_dir / PARAMS_FILE] if is_mistral else []
    if source is not None:
        names = (*TOKENIZER_SETTINGS, *TEMPLATES, *((CONFIG_FILE,) if source in FILES_OF_CLASSES else ()))
        settings = (model_dir / name for name in names)
        read += [model_dir / source, *(path for path in settings if path.is_file())]
    # With mistral_common there is a chat template: a directory that was made without it is not used any more.
    version = f"{_FORMAT} {source} {find_spec('mistral_common') is not None}"

    def fill(directory: Path) -> None:
        if is_mistral:
            write_config(model_dir / PARAMS_FILE, directory / CONFIG_FILE)
        if source is not None:
            logger.info("making %s from %s, once", TOKENIZER_FILE, model_dir / source)
            _make_tokenizer(model_dir / source, directory)

    try:
        directory = cached_directory("layouts", model_dir.name, read, version, fill)
        _link_files(model_dir, directory, is_mistral=is_mistral)
    except (OSError, UnsafeDirectory) as error:
        raise StartupError(f"the files that {model_dir} lacks cannot be made or kept: {error}") from None
    return directory


def _has_only_mistral_weights(model_dir: Path) -> bool:
    """Whether params.json describes the weights. Of a hub model they may come later."""
    if not (model_dir / PARAMS_FILE).is_file():
        return False
    has_others = any((model_dir / name).exists() for name in (SINGLE_FILE, INDEX_FILE))
    return not (model_dir / CONFIG_FILE).is_file() or (not has_others and (model_dir / CONSOLIDATED_FILE).exists())


def _find_source(model_dir: Path) -> str | None:
    """The name of the file that a tokenizer.json can be made of."""
    return next((path.name for name in TOKENIZER_SOURCES for path in sorted(model_dir.glob(name))), None)


def _make_tokenizer(source: Path, directory: Path) -> None:
    """A process of its own: the file may make the libraries use any amount of time and memory."""
    module = "penstock.backend.checkpoint.other_layouts.make_tokenizer"
    quiet = {"TRANSFORMERS_VERBOSITY": "critical", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    # tiktoken would keep a copy of the file, and read that one when the file has changed.
    quiet |= {"TIKTOKEN_CACHE_DIR": ""}
    try:
        done = subprocess.run(
            module_argv(module, (str(source), str(directory))),
            env=os.environ | quiet, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise StartupError(f"{source}: no {TOKENIZER_FILE} was made of it within {_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        last = (done.stdout or done.stderr).strip().splitlines()[-1:]
        raise StartupError(f"{source}: {last[0] if last else f'its conversion {describe_end(done.returncode)}'}")
    for line in done.stdout.splitlines():
        logger.warning("%s: %s", source, line)


def _link_files(model_dir: Path, directory: Path, *, is_mistral: bool) -> None:
    """Link what is in model_dir now, but for what was made in its place."""
    paths = {path.name: path for path in model_dir.iterdir() if path.suffix != GGUF_SUFFIX}
    if is_mistral and CONSOLIDATED_FILE in paths:
        paths[SINGLE_FILE] = paths.pop(CONSOLIDATED_FILE)
    for name, path in paths.items():
        with contextlib.suppress(FileExistsError):
            (directory / name).symlink_to(path)
    for link in directory.iterdir():
        if link.is_symlink() and not link.exists():
            link.unlink(missing_ok=True)
