"""One server for all tests of the demo model behind `penstock serve`, and a real Chromium for its pages."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.process.children import find_program
from tests.system.processes import Command, running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from playwright.sync_api import Browser, Page

SERVE = ("serve", "penstock-demo", "--gpu", "none", "--port", "0", "--kv-budget", "200MB", "--tool-parser", "hermes")
CHROMIUM = find_program("chromium")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium")
_TIMEOUT_MS = 60_000
_EQUAL_SEEDS = "let drawn = 1; Math.random = () => (drawn = (drawn * 48271) % 2147483647) / 2147483647;"
"""The page draws a seed for each request: with this it asks for the same answers in each run of a test."""


def take_picture(page: Page, name: str, *, in_dark: bool = True) -> None:
    """Save what the page shows to the folder PENSTOCK_PICTURES, such as docs/, if the environment names one."""
    if folder := os.environ.get("PENSTOCK_PICTURES"):
        if in_dark:
            page.emulate_media(color_scheme="dark")
            page.screenshot(path=Path(folder) / f"{name}-dark.png")
        page.emulate_media(color_scheme="light")
        page.screenshot(path=Path(folder) / f"{name}.png")


@pytest.fixture(scope="session")
def served_demo() -> Iterator[str]:
    """The server's URL. It computes in fp32, where greedy tokens do not depend on the number of rows."""
    serve = Command("penstock.main", *SERVE, "--dtype", "fp32")
    with running(serve):
        yield serve.wait_for(r"^Ready: (http://\S+)/v1$").group(1)


@pytest.fixture(scope="module")
def served_endless() -> Iterator[str]:
    """The URL of a server whose streams last longer than a test: the demo model writes 5,000 tokens/s."""
    endless = ("--forward-pass", "penstock.backend.passes.fake:PacedFakePass", "--kv-budget", "64MB")
    serve = Command("penstock.main", "serve", *endless, "--port", "0", "--state-dir", "none")
    with running(serve):
        yield serve.wait_for(r"^Ready: (http://\S+)/v1$").group(1)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import expect, sync_playwright

    with sync_playwright() as playwright:
        # As root Chromium runs only without its sandbox; it opens nothing but our own pages.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        expect.set_options(timeout=_TIMEOUT_MS)
        yield browser
        browser.close()


@pytest.fixture
def errors() -> Iterator[list[str]]:
    """Errors in a page's console; empty at the end of the test."""
    errors: list[str] = []
    yield errors
    assert errors == []


@pytest.fixture
def open_page(browser: Browser, served_demo: str, errors: list[str]) -> Iterator[Callable[[str], Page]]:
    """Opens a URL, or a path of the demo model's server, in a window of its own."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, accept_downloads=True)
    context.add_init_script(_EQUAL_SEEDS)

    def open_path(url: str) -> Page:
        page = context.new_page()
        page.set_default_timeout(_TIMEOUT_MS)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.goto(url if "://" in url else served_demo + url)
        return page

    yield open_path
    context.close()
