"""A model's text on the chat page: Markdown that grows, in a real Chromium, and hostile texts."""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from tests.system.conftest import needs_chromium

if TYPE_CHECKING:
    from collections.abc import Callable

    from playwright.sync_api import Page

pytestmark = needs_chromium


@pytest.fixture
def page(open_page: Callable[[str], Page]) -> Page:
    page = open_page("/")
    page.locator("#model option").first.wait_for(state="attached")
    return page


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
  const { MarkdownView } = await import("/page/markdown.js");
  const host = document.createElement("div");
  document.body.append(host);
  const found = { tags: [], attributes: [], links: [] };
  for (const text of texts) {
    const view = new MarkdownView(host);
    for (const part of [0.5, 1]) view.draw(text.slice(0, part * text.length), part === 1);
    for (const node of host.querySelectorAll(":not(.code-bar, .code-bar *, .rest, code span)")) {
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
    assert all(url.endswith((".js", ".css", "/icon.svg")) for url in requests), requests
    # The sanitizer parses the text in a document that runs nothing; Chromium says so for each handler in it.
    errors[:] = [error for error in errors if "The action has been blocked." not in error]


DRAW_IN_PIECES = """async (text) => {
  const { MarkdownView } = await import("/page/markdown.js");
  const made = () => {
    const host = document.createElement("div");
    host.className = "body";
    document.querySelector("main").append(host);
    return [host, new MarkdownView(host)];
  };
  const [whole, wholeView] = made();
  const [grown, grownView] = made();
  let first = null;
  for (let end = 0; end < text.length; end += 3) {
    grownView.draw(text.slice(0, end), false);
    if (grown.childElementCount > 1) first ??= grown.querySelector("h1");
  }
  const isKept = first !== null && first === grown.querySelector("h1");
  grownView.draw(text, true);
  wholeView.draw(text, true);
  await Promise.all([import("/page/vendor/katex.js"), import("/page/vendor/highlight.js")]);
  await new Promise((resolve) => setTimeout(resolve));
  return [isKept, whole.innerText === grown.innerText];
}"""
MARKDOWN = """# Title

Costs $5 and $6. The sum $x^2$ and \\(y\\) and

$$\\int_0^1 f$$

| a | b |
|:--|--:|
| 1 | 2 |

- [x] done
- [ ] open

```python
def f(): return "a"
```

The end."""


def test_growing_markdown_has_code_formulas_tables_and_tasks(page: Page) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    assert page.evaluate(DRAW_IN_PIECES, MARKDOWN) == [True, True]
    body = page.locator(".body").last
    expect(body.locator("math")).to_have_count(3)
    assert "Costs $5 and $6." in body.inner_text()
    assert body.locator("td").last.evaluate("(cell) => getComputedStyle(cell).textAlign") in ("right", "-webkit-right")
    assert [task.get_attribute("aria-label") for task in body.get_by_role("img").all()] == ["done", "open"]
    expect(body.locator(".hljs-keyword").first).to_have_text("def")
    body.get_by_role("button", name="Copy this code").click()
    expect(body.get_by_role("button", name="Copy this code")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()").strip() == 'def f(): return "a"'
