"""Lists and downloads files of the hub. huggingface_hub resumes, checks and locks them, and keeps them in its cache."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

from penstock.backend.checkpoint.files.progress import logged_downloads
from penstock.backend.errors import StartupError
from penstock.process.options import format_size

logger = logging.getLogger("penstock.backend")

OFFLINE_VARIABLE = "HF_HUB_OFFLINE"
_DIGEST = re.compile(r"[0-9a-f]{64}")


def go_offline() -> None:
    """Let this process and its children download nothing. Call it before huggingface_hub is imported."""
    os.environ[OFFLINE_VARIABLE] = "1"


def is_offline() -> bool:
    return os.environ.get(OFFLINE_VARIABLE, "").upper() in {"1", "ON", "YES", "TRUE"}


def list_sizes(repository: str, revision: str | None) -> dict[str, int]:
    """Return the sizes of a repository's files by name; without network, those in the cache. Raises StartupError."""
    import httpx2
    from huggingface_hub import HfApi, errors, snapshot_download

    unreachable = (errors.HfHubHTTPError, errors.OfflineModeIsEnabled, httpx2.ConnectError, httpx2.TimeoutException)
    with _told(repository, revision):
        try:
            info = HfApi().model_info(repository, revision=revision, files_metadata=True)
            return {file.rfilename: file.size or 0 for file in info.siblings or ()}
        except unreachable as error:
            try:
                cached = Path(
                    snapshot_download(repository, revision=revision, allow_patterns=[], local_files_only=True)
                )
            except errors.LocalEntryNotFoundError:
                if isinstance(error, errors.HfHubHTTPError):
                    raise error from None
                raise
    return {str(path.relative_to(cached)): path.stat().st_size for path in cached.rglob("*") if path.is_file()}


def download(
    repository: str, revision: str | None, patterns: Sequence[str], sizes: Mapping[str, int] | None = None
) -> Path:
    """Return the snapshot's directory, with the files that match. Raises StartupError.

    With the sizes of the repository's files the size of a download is logged before it starts, and what has come is
    compared with the hub's SHA-256.
    """
    # Imported here: the import takes 0.3 s, and a local directory does not need it.
    from huggingface_hub import constants, snapshot_download

    with _told(repository, revision):
        missing = _find_missing(repository, revision, patterns, sizes or {})
        if missing and not is_offline():
            size, where = format_size(sum(missing.values())), constants.HF_HUB_CACHE
            logger.info("Downloading %s: %s in %d file(s), into %s", repository, size, len(missing), where)
        bar = None if sys.stderr.isatty() else logged_downloads(repository)
        path = Path(snapshot_download(repository, revision=revision, allow_patterns=list(patterns), tqdm_class=bar))
    for name in missing:
        _check(path / name)
    return path


def _find_missing(
    repository: str, revision: str | None, patterns: Sequence[str], sizes: Mapping[str, int]
) -> dict[str, int]:
    from huggingface_hub import try_to_load_from_cache

    return {
        name: num_bytes
        for name, num_bytes in sizes.items()
        if any(fnmatch(name, pattern) for pattern in patterns)
        and not isinstance(try_to_load_from_cache(repository, name, revision=revision), str)
    }


def _check(path: Path) -> None:
    """Compare a downloaded file with its name in the cache, which for large files is its SHA-256. Raises
    StartupError."""
    blob = path.resolve()
    if not _DIGEST.fullmatch(blob.name):
        return
    with blob.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != blob.name:
        blob.unlink()
        raise StartupError(f"{path.name} has the SHA-256 {found}, not {blob.name}: it is damaged; download it again")


@contextlib.contextmanager
def _told(repository: str, revision: str | None) -> Iterator[None]:
    """Turn failures of the hub into a StartupError of one line."""
    import httpx2
    from huggingface_hub import errors

    at = f"{repository} at revision {revision}" if revision else repository
    try:
        yield
        return
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
