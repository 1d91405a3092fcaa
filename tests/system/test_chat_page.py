"""The chat page in a real Chromium, on the demo model behind `penstock serve`."""

from __future__ import annotations

import json
import random
import re
from typing import TYPE_CHECKING, Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, Route, expect

from tests.system.conftest import needs_chromium

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = needs_chromium


@pytest.fixture
def page(open_page: Callable[[str], Page]) -> Page:
    page = open_page("/")
    page.locator("#model option").wait_for(state="attached")
    return page


def ask(page: Page, text: str) -> None:
    page.fill("#input", text)
    page.press("#input", "Enter")


def set_field(page: Page, name: str, value: str) -> None:
    page.fill(f"#fields [name={name}]", value)


def answered(page: Page, count: int = 1) -> None:
    """Wait until all answers have their figures."""
    expect(page.locator(".stats", has_text="prompt tokens")).to_have_count(count)


def test_answer_streams_and_stays_after_a_reload(page: Page) -> None:
    for field, default in (("temperature", "0.7"), ("top_p", "0.9"), ("top_k", "all")):
        expect(page.locator(f"#fields [name={field}]")).to_have_attribute("placeholder", default)
    set_field(page, "max_completion_tokens", "24")
    set_field(page, "temperature", "0")
    ask(page, "What does os.path.join do?")
    answered(page)
    stats = page.locator(".stats").inner_text()
    assert re.search(r"first token after \d+ ms · [\d.]+ tokens/s · \d+ prompt tokens, \d+ cached · \d+ tokens", stats)
    text = page.locator(".answer .body").last.inner_text()
    assert text.strip()
    page.reload()
    page.get_by_role("button", name="What does os.path.join do?", exact=True).click()
    assert page.locator(".answer .body").last.inner_text() == text
    assert page.locator("[name=temperature]").input_value() == "0"


def test_edited_message_replaces_what_followed_it(page: Page) -> None:
    set_field(page, "max_completion_tokens", "8")
    ask(page, "first")
    answered(page)
    ask(page, "second")
    answered(page, 2)
    page.get_by_role("button", name="Edit and send again").first.click()
    expect(page.locator("#input")).to_have_value("first")
    ask(page, "third")
    answered(page)
    assert page.locator(".user .text").all_inner_texts() == ["third"]


def test_answers_and_temperatures_stand_side_by_side(page: Page) -> None:
    for name, value in (
        ("max_completion_tokens", "8"),
        ("n", "2"),
        ("temperature", "0"),
        ("second_temperature", "1.5"),
    ):
        set_field(page, name, value)
    ask(page, "What is a heap?")
    answered(page, 4)
    assert page.locator(".answer .label").all_inner_texts() == ["temperature 0"] * 2 + ["temperature 1.5"] * 2
    for figures in page.locator(".stats").all_inner_texts():  # each answer has its own
        assert re.search(r"first token after \d+ ms · .*[^\d]8 tokens", figures)
    page.get_by_role("button", name="Continue with this one").nth(2).click()
    third = page.locator(".answer").nth(2)
    expect(third).to_have_class("answer chosen")
    for name, value in (("n", "1"), ("second_temperature", ""), ("system", "Answer briefly."), ("top_k", "5")):
        set_field(page, name, value)
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "And a queue?")
    body = sent.value.post_data_json
    assert [message["role"] for message in body["messages"]] == ["system", "user", "assistant", "user"]
    assert (body["messages"][0]["content"], body["top_k"], body["temperature"]) == ("Answer briefly.", 5, 0)
    assert body["messages"][2]["content"].strip() == third.locator(".body").last.inner_text().strip()
    answered(page, 5)


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


def test_stopped_answer_frees_its_sequence(page: Page, served_demo: str) -> None:
    set_field(page, "schema", '{"type": "array", "items": {"type": "string"}, "minItems": 500}')  # it does not end soon
    ask(page, "Count")
    expect(page.locator(".answer pre")).to_have_text(re.compile(r".{6,}", re.DOTALL))
    for _ in range(3):  # tokens that arrive at once have no rate
        expect(page.locator(".answer pre")).not_to_have_text(page.locator(".answer pre").inner_text())
    page.keyboard.press("Escape")
    expect(page.locator(".failure")).to_have_text("stopped")
    figures = re.compile(r"^stopped · first token after \d+ ms · [\d.]+ tokens/s · \d+ tokens$")
    expect(page.locator(".stats")).to_have_text(figures)
    load = page.context.request.get(f"{served_demo}/v1/load")
    while load.json()["running"]:
        load = page.context.request.get(f"{served_demo}/v1/load")
    expect(page.locator("#send")).to_be_visible()


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


def test_broken_stream_says_so(page: Page) -> None:
    body = events("Half of").removesuffix("data: [DONE]\n\n")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    ask(page, "Go on")
    expect(page.locator(".failure")).to_have_text("the connection broke before the answer's end")


ATTACKS = (
    "<script>window.hit=1</script>",
    "<img src=x onerror='window.hit=1'>",
    "<svg/onload=window.hit=1>",
    "<iframe srcdoc='<script>parent.hit=1</script>'></iframe>",
    "[a](javascript:window.hit=1)",
    '![a](x" onerror="window.hit=1)',
    "<a href='data:text/html,<script>window.hit=1</script>'>a</a>",
    "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src=1 onerror=window.hit=1&gt;'>",
    "<form action='javascript:window.hit=1'><button autofocus onfocus=window.hit=1>x</button></form>",
    "<style>@import 'http://example.org/x.css'</style>",
    "<base href='http://example.org/'><meta http-equiv=refresh content='0;url=http://example.org'>",
    "<details open ontoggle=window.hit=1><input id=messages name=body>",
    "```html\n<script>window.hit=1</script>\n```",
)
ALLOWED = re.compile(
    "A|ABBR|B|BLOCKQUOTE|BR|CODE|DD|DEL|DETAILS|DIV|DL|DT|EM|H[1-6]|HR|I|KBD|LI|OL|P|PRE|S|SPAN|STRONG|SUB|SUMMARY|SUP"
    "|TABLE|TBODY|TD|TFOOT|TH|THEAD|TR|UL"
)
DESCRIBE = """async (texts) => {
  const { renderMarkdown } = await import("/page/markdown.js");
  const host = document.createElement("div");
  document.body.append(host);
  const found = { tags: [], attributes: [], links: [] };
  for (const text of texts) {
    host.replaceChildren(renderMarkdown(text));
    for (const node of host.querySelectorAll("*")) {
      found.tags.push(node.tagName);
      for (const { name } of node.attributes) found.attributes.push(name);
      if (node.href) found.links.push(node.protocol);
    }
  }
  host.remove();
  await new Promise((resolve) => setTimeout(resolve));
  return { ...found, hit: window.hit ?? null };
}"""


def test_no_text_of_a_model_becomes_a_script_or_loads_anything(page: Page, errors: list[str]) -> None:
    chosen = random.Random(1)
    pieces = [*ATTACKS, "**", "`", "<", ">", '"', "'", "\n\n", "| a | b |\n|---|---|\n", "<!--", "]]>", "&lt;", "\\"]
    mixed = ["".join(chosen.choices(pieces, k=chosen.randint(2, 6))) for _ in range(400)]
    cut = [attack[: chosen.randint(1, len(attack))] + chosen.choice(pieces) for attack in ATTACKS for _ in range(10)]
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    found = page.evaluate(DESCRIBE, [*ATTACKS, *mixed, *cut])
    assert found["hit"] is None
    assert not [tag for tag in set(found["tags"]) if not ALLOWED.fullmatch(tag)]
    assert set(found["links"]) <= {"http:", "https:", "mailto:"}
    assert not {name for name in found["attributes"] if name.startswith("on") or name in ("style", "src", "id", "name")}
    assert all(url.endswith((".js", ".css")) for url in requests), requests
    # The sanitizer parses the text in a document that runs nothing; Chromium says so for each handler in it.
    errors[:] = [error for error in errors if "The action has been blocked." not in error]


def test_conversations_are_exported_and_imported(page: Page, tmp_path: Path) -> None:
    set_field(page, "max_completion_tokens", "4")
    ask(page, "Keep this")
    answered(page)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    kept = tmp_path / "kept.json"
    download.value.save_as(kept)
    page.get_by_role("button", name="Delete Keep this").click()
    expect(page.locator("#conversations li")).to_have_count(1)
    page.set_input_files("#import", kept)
    expect(page.get_by_role("button", name="Keep this", exact=True)).to_be_visible()
    (tmp_path / "wrong.json").write_text('[{"id": "1", "messages": [{"role": "assistant", "answers": [null]}]}]')
    page.set_input_files("#import", tmp_path / "wrong.json")
    expect(page.locator("#notice")).to_contain_text("holds no conversations of this page")


def test_small_screen_needs_no_sideways_scrolling_and_controls_have_names(page: Page) -> None:
    set_field(page, "max_completion_tokens", "8")
    page.check("[name=logprobs]")
    ask(page, "What is a tuple?")
    answered(page)
    page.locator(".tokens span").first.click()
    for width, scheme in ((1280, "light"), (1280, "dark"), (360, "light")):
        page.set_viewport_size({"width": width, "height": 640})
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        found = Axe().run(page)
        assert found.violations_count == 0, found.generate_report()
