"""The site that `make docs` builds from docs/: its links and anchors, and how a server shows it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urljoin

import pytest

from penstock.frontend.endpoints import static_files
from tests.frontend.harness import ClientConnection

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("endpoints")
    # --strict: a link to an anchor that does not exist fails the build.
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder / "manual")],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (built.returncode, built.stderr) == (0, "")
    (folder / "chat_page").mkdir()
    return folder


async def test_server_shows_the_built_site_and_loads_nothing_from_others(
    connect: Callable[..., ClientConnection], site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged = static_files.files
    monkeypatch.setattr(
        static_files, "files", lambda name: site if name == "penstock.frontend.endpoints" else packaged(name)
    )
    connection = connect()
    for path in ("/manual/", "/manual/operations/models.html"):
        page = await connection.request("GET", path)
        assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        loaded = re.findall(r'<(?:script|link|img)[^>]* (?:src|href)="([^"#]*)"', page.body.decode())
        assert len(loaded) > 3
        for link in loaded:
            assert (await connection.request("GET", urljoin(path, link))).status == 200, link
    assert b"--kv-budget" in (await connection.request("GET", "/manual/search/search_index.json")).body
