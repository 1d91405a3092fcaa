"""The wheel of the sdist, installed elsewhere, beside foreign packages with the names of our folders."""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import httpx
import pytest

from tests.system.processes import REPOSITORY, Command, running

if TYPE_CHECKING:
    from email.message import Message

_PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
_BUILD_SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


class Release(NamedTuple):
    sdist: Path
    environment: Path
    """A virtual environment with the wheel, which finds all other packages where this process does."""

    @property
    def site(self) -> Path:
        (site,) = self.environment.glob("lib/*/site-packages")
        return site


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    # From a copy: setuptools leaves build/ in the source folder and takes stale files from it.
    source, built = tmp_path_factory.mktemp("source") / "penstock", tmp_path_factory.mktemp("built")
    source.mkdir()
    for name in ("penstock", "frontend", "backend", "shm", "tools", "docs"):
        shutil.copytree(REPOSITORY / name, source / name, symlinks=True)
    for path in (path for path in REPOSITORY.iterdir() if path.is_file() and not path.name.startswith(".")):
        shutil.copy(path, source)
    subprocess.run([sys.executable, "-c", _BUILD_SDIST, str(built)], cwd=source, check=True, capture_output=True)
    (sdist,) = built.glob("penstock-*.tar.gz")
    subprocess.run(
        [*_PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(built), str(sdist)], check=True
    )
    (wheel,) = built.glob("penstock-*.whl")
    found = Release(sdist, built / "environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(found.environment)], check=True)
    others = (path for path in sys.path if Path(path).name == "site-packages")
    (found.site / "others.pth").write_text("\n".join(others))
    python = found.environment / "bin" / "python"
    subprocess.run([*_PIP, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)], check=True)
    return found


@pytest.fixture
def metadata(release: Release) -> Message:
    (directory,) = release.site.glob("penstock-*.dist-info")
    return email.message_from_string((directory / "METADATA").read_text(encoding="utf-8"))


@pytest.fixture
def foreign_project(tmp_path: Path) -> Path:
    """A project with packages of its own that end the process when they are imported."""
    for name in ("frontend", "backend", "shm", "tools"):
        package = tmp_path / name
        package.mkdir()
        (package / "__init__.py").write_text(f'raise SystemExit("the foreign {name} was imported")\n')
    return tmp_path


def test_wheel_serves_the_demo_model_beside_foreign_packages_of_the_same_names(
    release: Release, foreign_project: Path
) -> None:
    serve = Command(
        release.environment / "bin" / "penstock", "serve", "penstock-demo",
        "--gpu", "none", "--port", "0", "--kv-budget", "100MB",
        python_path=str(foreign_project), cwd=foreign_project,
    )  # fmt: skip
    with running(serve):
        url = serve.wait_for(r"^Ready: (http://\S+)/v1$").group(1)
        body = {"model": "penstock-demo", "prompt": "import os", "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=30.0)
        page = httpx.get(f"{url}/docs", timeout=30.0)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] >= 1
    assert page.status_code == 200


def test_wheel_installs_no_top_level_package_except_penstock_and_three_commands(release: Release) -> None:
    assert {path.name for path in release.site.glob("*/") if path.suffix != ".dist-info"} == {"penstock"}
    commands = {path.name for path in (release.environment / "bin").iterdir()}
    assert {name for name in commands if not re.match(r"python|activate", name, re.IGNORECASE)} == {
        "penstock",
        "backend",
        "frontend",
    }


def test_description_for_the_index_has_no_link_into_the_repository(metadata: Message) -> None:
    assert metadata["Description-Content-Type"] == "text/markdown"
    description = metadata.get_payload()
    assert isinstance(description, str)
    assert description.count("\n## ") == (REPOSITORY / "README.md").read_text().count("\n## ")
    targets = re.findall(r"\]\(([^)\s]+)|(?:src|srcset|href)=\"([^\"]+)", description)
    assert [target for pair in targets for target in pair if target and not re.match("https?:|#", target)] == []


def test_every_dependency_of_the_product_has_bounds(metadata: Message) -> None:
    required = [line for line in metadata.get_all("Requires-Dist", []) if 'extra == "dev"' not in line]
    assert len(required) > 20
    assert [line for line in required if ">=" not in line] == []
    # Both number their releases by years.
    assert [line.partition(">")[0] for line in required if "<" not in line] == ["packaging", "pip"]


def test_sdist_has_what_the_readme_and_make_use(release: Release) -> None:
    with tarfile.open(release.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", (REPOSITORY / "README.md").read_text())
    assert {"CHANGELOG.md", "constraints.txt", "setup.py", *links} <= names
