"""The wheel: installed elsewhere, beside foreign packages with the names of our folders, it serves the demo model."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.system.processes import REPOSITORY, Command, running

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the package as `pip install` leaves it, from a wheel of the repository."""
    # From a copy: setuptools leaves build/ in the source folder and takes stale files from it.
    source = tmp_path_factory.mktemp("source") / "penstock"
    source.mkdir()
    for name in ("penstock", "frontend", "backend", "shm", "tools"):
        shutil.copytree(REPOSITORY / name, source / name, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheels, site = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("site")
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(source)], check=True
    )
    (wheel,) = wheels.glob("penstock-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    return site


@pytest.fixture
def foreign_project(tmp_path: Path) -> Path:
    """A project with packages of its own that end the process when they are imported."""
    for name in ("frontend", "backend", "shm", "tools"):
        package = tmp_path / name
        package.mkdir()
        (package / "__init__.py").write_text(f'raise SystemExit("the foreign {name} was imported")\n')
    return tmp_path


def test_wheel_serves_the_demo_model_beside_foreign_packages_of_the_same_names(
    installed: Path, foreign_project: Path
) -> None:
    serve = Command(
        "penstock.main", "serve", "penstock-demo", "--gpu", "none", "--port", "0", "--kv-budget", "100MB",
        python_path=f"{foreign_project}:{installed}", cwd=foreign_project,
    )  # fmt: skip
    with running(serve):
        url = serve.wait_for(r"^Ready: (http://\S+)/v1$").group(1)
        body = {"model": "penstock-demo", "prompt": "import os", "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=30.0)
        page = httpx.get(f"{url}/docs", timeout=30.0)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] >= 1
    assert page.status_code == 200


def test_wheel_installs_no_top_level_package_except_penstock(installed: Path) -> None:
    packages = {path.name for path in installed.iterdir() if path.is_dir() and not path.name.endswith(".dist-info")}
    assert packages == {"penstock", "bin"}
