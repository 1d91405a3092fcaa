"""The engine page and the API page in a real Chromium, on the demo model behind `penstock serve`."""

from __future__ import annotations

import os
import re
import signal
from typing import TYPE_CHECKING

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, expect

from tests.system.conftest import needs_chromium, take_picture
from tests.system.processes import Command, backends_of, running, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


@pytest.fixture(scope="module")
def locked_server() -> Iterator[str]:
    """The URL of a server with a key."""
    serve = Command("penstock.main", "serve", "--forward-pass", "fake", "--port", "0", "--api-key", "sk-right")
    with running(serve):
        yield serve.wait_for(r"^Ready: (http://\S+)/v1$").group(1)


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


PAGES = """async () => {
  const { parts } = await import("/engine/pages.js");
  const counters = { pages_used: 34, pages_idle: 10, pages_total: 100 };
  const tenants = [[-1, 2, 1], [0, 10, 8], [1, 12, 9], [4, 8, 8]];
  return parts({ counters, tenants }, 1).filter(([, , count]) => count);
}"""


def test_map_of_pages_tells_tenants_apart(page: Page) -> None:
    assert page.evaluate(PAGES) == [
        ["decode", "yours, held and named", 9],
        ["prefill", "yours, held, not full", 3],
        ["other-1", "other 1, held and named", 8],
        ["other-1-part", "other 1, held, not full", 2],
        ["other-1", "other 5, held and named", 8],
        ["others", "further others, held and named", 1],
        ["restored", "further others, held, not full", 1],
        ["budget", "held otherwise", 2],
        ["idle", "idle, named, found again", 10],
        ["free", "free", 56],
    ]


def check_small_screen_and_axe(page: Page, name: str = "") -> None:
    for width, scheme in ((1280, "dark"), (1280, "light"), (360, "light")):
        page.set_viewport_size({"width": width, "height": 640})
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        found = Axe().run(page)
        assert found.violations_count == 0, found.generate_report()
        if name:
            take_picture(page, name if width > 360 else f"{name}-phone", in_dark=width > 360)


def test_small_screen_needs_no_sideways_scrolling_and_controls_have_names(page: Page) -> None:
    page.evaluate(LOAD)
    expect(page.locator("#running tbody tr")).to_have_count(2)
    page.get_by_role("button", name="Pause").click()
    check_small_screen_and_axe(page, "engine-page")
    page.evaluate(HANG_UP)


def test_restart_of_the_backend_is_an_event_and_the_page_goes_on(browser: Browser) -> None:
    serve = Command("penstock.main", "serve", "--forward-pass", "fake", "--port", "0", "--state-dir", "none")
    with running(serve):
        page = browser.new_page()
        page.goto(serve.wait_for(r"^Ready: (http://\S+)/v1$").group(1) + "/engine")
        expect(figure(page, "Generated tokens")).to_have_text("0")
        (backend,) = backends_of(serve)
        os.kill(backend, signal.SIGKILL)
        expect(page.locator("#events")).to_contain_text(re.compile(r"the model's process \d+ began"))
        page.evaluate(LOAD)
        expect(figure(page, "Generated tokens")).to_have_text(re.compile(r"[1-9]\d*"))
        page.evaluate(HANG_UP)
        page.close()


# The API page


def open_form(page: Page, operation: str) -> Locator:
    """Open an endpoint by the keyboard, and return its form."""
    page.locator(f"#{operation} > summary").press("Enter")
    return page.locator(f"#{operation} form.try")


def test_chat_example_streams_and_can_be_stopped(
    open_page: Callable[[str], Page], served_endless: str, errors: list[str]
) -> None:
    page = open_page("/docs")
    page.get_by_role("link", name="Engine").wait_for()
    form = open_form(page, "post_v1_chat_completions")
    body, status = form.get_by_label("Body", exact=True), form.get_by_role("status")
    expect(body).to_have_value(re.compile('"model": "penstock-demo"'))
    body.press("Control+Enter")
    expect(status).to_have_text(re.compile(r"^200 OK · ended after \d+ ms, first event after \d+ ms, \d+ events$"))
    assert form.get_by_role("region", name="Text of the answer").inner_text().strip()
    expect(form.get_by_role("region", name="Answer", exact=True)).to_contain_text("data: [DONE]")
    assert {"content-type", "x-request-id", "server-timing"} <= set(form.locator(".headers dt").all_inner_texts())
    page.set_viewport_size({"width": 360, "height": 640})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360

    form.get_by_text("Headers").click()
    form.get_by_label("X-Request-Id").fill("mine-1")
    body.fill('{"messages": [{"role": "user", "content": "x"}], "temperature": 9}')
    form.get_by_role("button", name="Send").press("Enter")
    expect(status).to_have_text(re.compile("^400 Bad Request"))
    expect(form.get_by_role("region", name="Answer", exact=True)).to_contain_text('"param": "temperature"')
    expect(form.locator(".headers")).to_contain_text("mine-1")
    errors[:] = [error for error in errors if "status of 400" not in error]

    page = open_page(f"{served_endless}/docs")
    form = open_form(page, "post_v1_chat_completions")
    body, status = form.get_by_label("Body", exact=True), form.get_by_role("status")
    body.fill(
        '{"messages": [{"role": "user", "content": "x"}], "max_tokens": 9000, "ignore_eos": true, "stream": true}'
    )
    form.get_by_role("button", name="Send").press("Enter")
    expect(form.get_by_role("region", name="Text of the answer")).to_be_visible()
    form.get_by_role("button", name="Stop").press("Enter")
    expect(status).to_have_text(re.compile(r"^200 OK · stopped after \d+ ms$"))
    wait_until(lambda: not page.context.request.get(f"{served_endless}/v1/load").json()["running"], 60.0)


def test_endpoint_with_parameters_is_found_and_tried(open_page: Callable[[str], Page], errors: list[str]) -> None:
    page = open_page("/docs#get_v1_models_by_model")
    form = page.locator("#get_v1_models_by_model form.try")
    expect(form.get_by_label("model")).to_have_value("penstock-demo")
    form.get_by_role("button", name="Send").click()
    expect(form.get_by_role("region", name="Answer", exact=True)).to_contain_text('"id": "penstock-demo"')
    form = open_form(page, "get_tokenizer_info")
    form.get_by_label("model").fill("another & more")
    with page.expect_request("**/tokenizer_info?model=another+%26+more"):
        form.get_by_label("model").press("Enter")
    expect(form.get_by_role("status")).to_have_text(re.compile("^404 Not Found"))
    errors[:] = [error for error in errors if "status of 404" not in error]
    form = open_form(page, "post_tokenize")
    form.get_by_label("Example").select_option("TeiTokenizeBody")
    expect(form.get_by_label("Body", exact=True)).to_have_value(re.compile('"inputs"'))
    page.fill("#filter", "tokens of a text or a chat")  # axe takes its time for each endpoint that is shown
    expect(page.locator(".endpoint:visible")).to_have_count(1)
    check_small_screen_and_axe(page)


# Keys


@pytest.mark.parametrize(("path", "shown"), [("/", "#model option"), ("/engine", "#sums:not(:empty)")])
def test_page_of_a_server_with_keys_asks_for_one(browser: Browser, locked_server: str, path: str, shown: str) -> None:
    page = browser.new_page()
    page.goto(locked_server + path)
    for key, notice in (("sk-wrong", "missing or wrong"), ("sk-right", "")):
        expect(page.locator("#key-form")).to_be_visible()
        page.fill("#key", key)
        page.keyboard.press("Enter")
        expect(page.locator("#notice")).to_have_text(re.compile(f".*{notice}.*"))
    page.locator(shown).wait_for(state="attached")
    expect(page.locator("#key-form")).to_be_hidden()
    page.close()


def test_missing_key_is_explained_where_a_request_is_tried(browser: Browser, locked_server: str) -> None:
    page = browser.new_page()
    page.goto(f"{locked_server}/docs#post_tokenize")
    expect(page.locator("#notice")).to_contain_text("missing or wrong")
    form = page.locator("#post_tokenize form.try")
    form.get_by_role("button", name="Send").click()
    expect(form.get_by_role("status")).to_have_text(re.compile("^401 Unauthorized: the API key is missing or wrong"))
    expect(page.locator("#key")).to_be_focused()
    for key, notice in (("sk-wrong", "missing or wrong"), ("sk-right", "")):
        page.fill("#key", key)
        page.keyboard.press("Enter")
        expect(page.locator("#notice")).to_have_text(re.compile(f".*{notice}.*"))
    expect(page.locator("#model")).not_to_be_empty()
    form.get_by_role("button", name="Send").click()
    expect(form.get_by_role("status")).to_have_text(re.compile("^200 OK"))
    assert page.evaluate("[localStorage.length, sessionStorage.length]") == [0, 1]
    page.close()
