"""The engine page in a real Chromium, on the demo model behind `penstock serve`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Locator, Page, expect

from tests.system.conftest import needs_chromium

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = needs_chromium

LOAD = """() => {
  window.controller = new AbortController();
  const { signal } = window.controller;
  const ask = async (number) => {
    const messages = [{ role: "user", content: `zanzibar ${number}` }];
    const body = JSON.stringify({ messages, stream: true, max_tokens: 1900, ignore_eos: true, temperature: 0 });
    const headers = { "Content-Type": "application/json" };
    while (!signal.aborted) {
      await fetch("/v1/chat/completions", { method: "POST", headers, body, signal }).then((answer) => answer.text());
    }
  };
  for (const number of [1, 1, 2, 2]) ask(number).catch(() => null);
}"""
"""Two pairs of equal streams, until HANG_UP."""
HANG_UP = "() => window.controller.abort()"


@pytest.fixture
def page(open_page: Callable[[str], Page]) -> Page:
    page = open_page("/engine")
    expect(page.locator("#model")).to_have_text("penstock-demo")
    return page


def figure(page: Page, name: str) -> Locator:
    return page.locator("#figures tr", has_text=name).locator("td")


def test_load_is_shown_live_and_a_request_is_followed_through_its_life(page: Page) -> None:
    expect(figure(page, "Cancelled")).to_have_text(re.compile(r"\d+, \d+, \d+, \d+"))
    coalesced, cancelled = (figure(page, name).inner_text() for name in ("Requests coalesced", "Cancelled"))
    page.evaluate(LOAD)
    expect(page.locator("#running tbody tr")).to_have_count(2)  # each pair shares a sequence
    expect(page.locator("#running")).to_contain_text(re.compile(r"you.*of at most", re.DOTALL))
    page.check("#all-events")
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("#place")).to_have_text(re.compile(r"Step \d+, \d+ steps behind"))
    page.locator("#events button").first.click()
    expect(page.locator("#life-events")).to_contain_text("arrived with")
    page.locator("#steps").focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#step")).to_contain_text("decode")
    page.get_by_role("button", name="Go on live").click()
    page.evaluate(HANG_UP)
    expect(page.locator("#events")).to_contain_text("cancelled")
    expect(page.locator("#running tbody tr")).to_have_count(0)
    expect(figure(page, "Cancelled")).not_to_have_text(cancelled)
    expect(figure(page, "Requests coalesced")).not_to_have_text(coalesced)
    assert "zanzibar" not in page.content()


def test_page_goes_on_after_a_reload_with_the_steps_before_it(page: Page) -> None:
    page.evaluate(LOAD)
    expect(page.locator("#place")).to_have_text(re.compile(r"Live, step \d+"))
    page.reload()
    expect(page.locator("#place")).to_have_text(re.compile(r"Live, step \d+"))
    assert int(page.locator("#back").get_attribute("max") or 0) > 0


def test_small_screen_needs_no_sideways_scrolling_and_controls_have_names(page: Page) -> None:
    page.evaluate(LOAD)
    expect(page.locator("#running tbody tr")).to_have_count(2)
    page.get_by_role("button", name="Pause").click()
    for width, scheme in ((1280, "light"), (1280, "dark"), (360, "light")):
        page.set_viewport_size({"width": width, "height": 640})
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        found = Axe().run(page)
        assert found.violations_count == 0, found.generate_report()
    page.evaluate(HANG_UP)
