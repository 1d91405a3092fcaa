"""The chat page in a real Chromium, on the demo model behind `penstock serve`."""

from __future__ import annotations

import json
import os
import re
import signal
from typing import TYPE_CHECKING, Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Route, expect

from penstock.tools.free_port import free_port
from tests.system.conftest import needs_chromium, take_picture
from tests.system.processes import Command, backends_of, running, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = needs_chromium


@pytest.fixture
def page(open_page: Callable[[str], Page]) -> Page:
    page = open_page("/")
    page.locator("#model option").wait_for(state="attached")
    set_field(page, "temperature", "0")  # what a sampled text renders to, and when it ends, would be luck
    return page


def ask(page: Page, text: str) -> None:
    page.fill("#input", text)
    page.press("#input", "Enter")


def set_field(page: Page, name: str, value: str) -> None:
    page.fill(f"#fields [name={name}]", value)


def answered(page: Page, count: int = 1) -> None:
    """Wait until all answers have their figures."""
    expect(page.locator(".stats", has_text="prompt tokens")).to_have_count(count)


def check_axe(page: Page) -> None:
    found = Axe().run(page, options={"rules": {"target-size": {"enabled": True}}})
    assert found.violations_count == 0, found.generate_report()


def test_answer_streams_and_stays_after_a_reload(page: Page) -> None:
    for field, default in (("temperature", "0.7"), ("top_p", "0.9"), ("top_k", "all"), ("min_p", "0")):
        expect(page.locator(f"#fields [name={field}]")).to_have_attribute("placeholder", default)
    set_field(page, "max_completion_tokens", "24")
    ask(page, "What does os.path.join do?")
    answered(page)
    stats = page.locator(".stats").inner_text()
    assert re.search(r"first token after \d+ ms · [\d.]+ tokens/s · \d+ prompt tokens, \d+ cached · \d+ tokens", stats)
    text = page.locator(".answer .body").last.inner_text()
    assert text.strip()
    page.fill("#input", "half a th")
    page.reload()
    expect(page.locator(".answer .body").last).to_have_text(text, use_inner_text=True)
    assert page.locator("#input").input_value() == "half a th"
    assert page.locator("[name=temperature]").input_value() == "0"


def grows(page: Page, before: str = "") -> str:
    """Wait until the last answer, which began as before, is longer; return it."""
    body = page.locator(".answer .body").last
    expect(body).to_have_text(re.compile(r".{6,}", re.DOTALL))
    shorter = body.inner_text()
    expect(body).not_to_have_text(shorter, use_inner_text=True)
    after = body.inner_text().strip()
    assert after.startswith(before)
    return after


def test_stream_outlives_page_tab_backend_and_server(browser: Browser) -> None:
    slow = ("--forward-pass", "tests.passes:SlowestFakePass", "--kv-budget", "64MB", "--state-dir", "none")
    command = ("penstock.main", "serve", *slow, "--port", str(free_port()))
    context = browser.new_context()
    page = context.new_page()
    with running(serve := Command(*command)):
        url = serve.wait_for(r"^Ready: (http://\S+)/v1$").group(1)
        page.goto(url)
        page.locator("#model option").first.wait_for(state="attached")
        ask(page, "Count")
        text = grows(page)
        page.get_by_role("button", name="New chat").first.click()
        set_field(page, "max_completion_tokens", "8")
        ask(page, "Another")
        answered(page)  # beside the first one
        page.get_by_role("button", name="Count", exact=True).click()
        text = grows(page, text)
        page.reload()
        text = grows(page, text)
        other = context.new_page()
        other.goto(url)
        text = grows(other, text)  # it shows what the first tab receives
        other.close()
        first, page = page, context.new_page()
        page.goto(url)
        grows(page)
        first.close()
        text = grows(page, text)  # the second tab reads the stream itself
        waiting = page.locator(".waiting")
        (backend,) = backends_of(serve)
        os.kill(backend, signal.SIGSTOP)  # a new one could begin before the page says so
        expect(waiting).to_contain_text("The model's process restarts. The answer goes on.")
        os.kill(backend, signal.SIGKILL)
        expect(waiting).to_be_hidden()
        text = grows(page, text)
        serve.kill()
        expect(waiting).to_contain_text("The server does not answer")
        page.get_by_role("button", name="Retry").click()
        expect(waiting).to_contain_text("The server does not answer")
        text = page.locator(".answer .body").last.inner_text().strip()
    with running(serve := Command(*command)):
        serve.wait_for(r"^Ready: ")
        expect(waiting).to_be_hidden()
        grows(page, text)
        page.keyboard.press("Escape")
        expect(page.locator(".failure")).to_have_text("stopped")
        wait_until(lambda: not context.request.get(f"{url}/v1/load").json()["running"], 60.0)
    context.close()


def test_answers_and_edits_are_branches(page: Page) -> None:
    set_field(page, "max_completion_tokens", "8")
    ask(page, "What is a list?")
    answered(page)
    first = page.locator(".answer .body").last.inner_text()
    page.get_by_role("button", name="Continue", exact=True).click()  # it was cut at its limit
    expect(page.locator(".answer .body").last).not_to_have_text(first)
    answered(page)
    assert page.locator(".answer .body").last.inner_text().startswith(first)
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".branches")).to_have_text("‹ 2 of 2 ›")
    answered(page)
    page.get_by_role("button", name="Earlier branch").click()
    expect(page.locator(".branches")).to_have_text("‹ 1 of 2 ›")
    expect(page.locator(".answer .body").last).to_contain_text(first)  # an earlier branch is rendered a frame later
    page.get_by_role("button", name="Edit and send again").first.click()
    expect(page.locator("#input")).to_have_value("What is a list?")
    ask(page, "third")
    answered(page)
    assert page.locator(".user .text").all_inner_texts() == ["third"]
    page.get_by_role("button", name="Earlier branch").click()
    assert page.locator(".user .text").all_inner_texts() == ["What is a list?"]


def test_answers_and_temperatures_stand_side_by_side(page: Page) -> None:
    for name, value in (
        ("max_completion_tokens", "8"),
        ("n", "2"),
        ("temperature", "0"),
        ("second_temperature", "1.5"),
    ):
        set_field(page, name, value)
    ask(page, "What is a tuple?")
    answered(page, 4)
    assert page.locator(".answer .label").all_inner_texts() == ["temperature 0"] * 2 + ["temperature 1.5"] * 2
    for figures in page.locator(".stats").all_inner_texts():  # each answer has its own
        assert re.search(r"first token after \d+ ms · .*[^\d]8 tokens", figures)
    page.get_by_role("button", name="Continue with this one").nth(2).click()
    expect(page.locator(".answer").nth(2)).to_have_class("answer chosen")
    answers = page.evaluate("import('/page/database.js').then((it) => it.allOf('messages'))")
    (third,) = (each["answers"][2]["content"] for each in answers if each["role"] == "assistant")
    for name, value in (("n", "1"), ("second_temperature", ""), ("system", "Answer briefly."), ("top_k", "5")):
        set_field(page, name, value)
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "And a queue?")
    body = sent.value.post_data_json
    assert [message["role"] for message in body["messages"]] == ["system", "user", "assistant", "user"]
    assert (body["messages"][0]["content"], body["top_k"], body["temperature"]) == ("Answer briefly.", 5, 0)
    assert body["messages"][2]["content"] == third
    answered(page, 5)
    set_field(page, "second_system", "Be long.")
    read = "import('/page/settings.js').then((it) => it.read('m').requests.map((each) => [each.label, each.system]))"
    assert page.evaluate(read) == [["first system text", "Answer briefly."], ["second system text", "Be long."]]


def test_log_probabilities_are_shades_with_alternatives(page: Page) -> None:
    set_field(page, "max_completion_tokens", "6")
    page.check("[name=logprobs]")
    ask(page, "What is a list?")
    answered(page)
    shades = page.locator(".tokens span")
    assert shades.count() == 6
    assert re.match(r'[\d.]+ %\n".*" [\d.]+ %\n', shades.first.get_attribute("title") or "")
    detail = page.locator(".alternatives")
    shades.nth(2).click()
    expect(detail).to_have_text(re.compile(r'^".*": [\d.]+ % · ".*" [\d.]+ % · '))
    third = detail.inner_text()
    page.keyboard.press("ArrowRight")
    expect(detail).not_to_have_text(third)
    page.keyboard.press("ArrowLeft")
    expect(detail).to_have_text(third)
    expect(page.locator(".tokens .chosen")).to_have_count(1)


def test_schema_makes_json_with_a_mark_and_a_bad_one_is_explained(page: Page) -> None:
    set_field(page, "schema", '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]')
    ask(page, "Choose")
    expect(page.locator("#notice")).to_contain_text("JSON schema is not JSON")
    expect(page.locator("#input")).to_have_value("Choose")
    set_field(page, "schema", '{"enum": ["yes", "no"]}')
    page.press("#input", "Enter")
    answered(page)
    assert json.loads(page.locator(".answer pre").inner_text()) in ("yes", "no")
    expect(page.locator(".mark")).to_have_text("valid JSON ✓")


def events(*texts: str, usage: dict[str, Any] | None = None, **delta: Any) -> str:
    """A stream of one choice with these texts, then the delta, then the usage. All but the first have two tokens."""
    deltas: list[dict[str, Any]] = [{"role": "assistant"}, *({"content": text} for text in texts), delta]
    chunks = [
        {"choices": [{"index": 0, "delta": each, "finish_reason": None, "token_ids": [1, 2] if number else []}]}
        for number, each in enumerate(deltas)
    ]
    chunks += [] if usage is None else [{"choices": [], "usage": usage}]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def test_reasoning_is_folded_and_calls_and_coalescing_are_shown(page: Page) -> None:
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "heap"}'}}

    usage = {"prompt_tokens": 9, "completion_tokens": 4, "penstock": {"coalesced": True}}

    def answer(route: Route) -> None:
        body = events("Done.", usage=usage, reasoning_content="I think.", tool_calls=[call])
        route.fulfill(content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", answer)
    ask(page, "Think")
    expect(page.locator(".calls")).to_have_text('look_up({"word": "heap"})')
    expect(page.locator(".stats")).to_contain_text("9 prompt tokens, 0 cached · 4 tokens, coalesced")
    reasoning = page.locator(".reasoning")
    assert reasoning.get_attribute("open") is None
    reasoning.locator("summary").click()
    expect(reasoning.locator(".body")).to_have_text("I think.")
    page.get_by_label("Result of look_up").fill("a tree")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Send results").click()
    *_, called, result = sent.value.post_data_json["messages"]
    assert called["tool_calls"][0]["id"] == result["tool_call_id"] == "c"
    assert (result["role"], result["content"]) == ("tool", "a tree")


def test_broken_stream_says_so(page: Page) -> None:
    body = events("Half of").removesuffix("data: [DONE]\n\n")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    ask(page, "Go on")
    expect(page.locator(".failure")).to_have_text("the connection broke before the answer's end")


def test_page_follows_an_answer_until_the_reader_scrolls_away_and_stops_it(
    open_page: Callable[[str], Page], served_endless: str
) -> None:
    page = open_page(served_endless)
    page.locator("#model option").wait_for(state="attached")
    page.set_viewport_size({"width": 900, "height": 240})
    ask(page, "Count")
    at_end = "scrollY > 20 && scrollY + innerHeight >= document.documentElement.scrollHeight - 1"
    page.wait_for_function(at_end)
    page.mouse.wheel(0, -200)
    expect(page.get_by_role("button", name="To the end")).to_be_visible()
    grows(page)
    assert not page.evaluate(at_end)
    page.get_by_role("button", name="To the end").click()
    page.wait_for_function(at_end)
    page.keyboard.press("Escape")
    expect(page.locator(".failure")).to_have_text("stopped")
    figures = re.compile(r"^stopped · first token after \d+ ms · [\d.]+ tokens/s · \d+ tokens$")
    expect(page.locator(".stats")).to_have_text(figures)
    wait_until(lambda: not page.context.request.get(f"{served_endless}/v1/load").json()["running"], 60.0)
    expect(page.locator("#send")).to_be_visible()


def test_answer_says_why_it_is_and_comes_again(page: Page) -> None:
    set_field(page, "max_completion_tokens", "8")
    ask(page, "What is a dict?")
    answered(page)
    page.get_by_role("button", name="How this answer came about").press("Enter")
    why = page.get_by_role("dialog")
    *parts, total = (float(cell.removesuffix(" s")) for cell in why.locator("td").all_inner_texts())
    assert abs(sum(parts) - total) < 0.001 * (len(parts) + 1)  # each is rounded
    expect(why).to_contain_text(re.compile(r"arrived with \d+ tokens.*started, \d+ tokens cached.*ended", re.DOTALL))
    why.get_by_role("button", name="Repeat exactly").click()
    expect(why).to_contain_text("The same 8 tokens came again.")
    expect(why.locator(".tokens span")).to_have_count(8)
    check_axe(page)
    page.set_viewport_size({"width": 800, "height": 700})
    take_picture(page, "chat-page-why")
    why.get_by_role("link").click()
    expect(page.locator("#life-events")).to_contain_text("arrived with")


def test_small_screen_and_keyboard_reach_everything(page: Page) -> None:
    set_field(page, "max_completion_tokens", "8")
    page.check("[name=logprobs]")
    ask(page, "What is a tuple?")
    answered(page)
    page.locator(".tokens span").first.click()
    for width, scheme in ((1280, "light"), (1280, "dark"), (360, "light")):
        page.set_viewport_size({"width": width, "height": 640})
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        check_axe(page)
    page.get_by_text("Settings", exact=True).click()
    page.evaluate("scrollTo(0, 0)")
    take_picture(page, "chat-page-phone", in_dark=False)
    expect(page.locator("#conversations")).to_be_hidden()
    page.keyboard.press("Control+k")
    expect(page.locator("#search")).to_be_focused()
    expect(page.locator("#conversations")).to_be_visible()
    check_axe(page)
    page.get_by_role("button", name="Delete What is a tuple?").press("Enter")
    expect(page.get_by_role("button", name="Undo")).to_be_visible()
    page.get_by_role("button", name="Chats").press("Enter")
    expect(page.locator("#conversations")).to_be_hidden()
    page.keyboard.press("Control+Shift+o")
    expect(page.locator("#conversations")).to_be_hidden()
    page.keyboard.type("What is a class?")
    page.keyboard.press("Enter")
    answered(page)
    for key, asked in (("ArrowUp", "What is a class?"), ("ArrowDown", "")):
        page.keyboard.press(key)
        expect(page.locator("#input")).to_have_value(asked)
    page.keyboard.press("Control+/")
    expect(page.get_by_role("dialog")).to_be_visible()
    check_axe(page)
    page.keyboard.press("Escape")
    expect(page.locator("#input")).to_be_focused()
    for key, name in (("Tab", "Send"), ("Tab", "Attach")):
        page.keyboard.press(key)
        assert name in page.evaluate("document.activeElement.closest('label, button').textContent")
    page.keyboard.press("Shift+Tab")
    page.get_by_role("button", name="Regenerate").wait_for()
    while page.evaluate("document.activeElement.textContent") != "Regenerate":
        page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.locator(".branches")).to_have_text("‹ 2 of 2 ›")
