"""The chat page in Debian's Firefox: what a second engine may do otherwise than Chromium."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.system.firefox import FIREFOX, running_firefox

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(FIREFOX is None, reason="Firefox is not installed: apt-get install firefox-esr")

ENTER = "\ue007"
ANSWER = "document.querySelector('.answer > .body')?.innerText.trim()"
HOSTILE = """(async () => {
  const { MarkdownView } = await import("/page/markdown.js");
  const place = document.body.appendChild(document.createElement("div"));
  new MarkdownView(place).draw("<img src=x onerror='window.ran = 1'><script>window.ran = 1</script> **bold**", true);
  return `${place.textContent.trim()} ${place.querySelectorAll("img, script, [onerror]").length} ${window.ran}`;
})()"""


def test_stream_goes_on_after_a_reload_and_hostile_text_stays_text(served_endless: str, tmp_path: Path) -> None:
    with running_firefox(tmp_path) as firefox:
        firefox.open(f"{served_endless}/")
        firefox.wait_for("document.querySelector('#model option')?.value")
        firefox.evaluate("document.querySelector('#input').focus()")
        firefox.press(f"How do I sort a list?{ENTER}")
        began = firefox.wait_for(ANSWER)
        firefox.reload()
        grown = firefox.wait_for(f"{ANSWER}?.length > {len(began) + 20} && {ANSWER}")
        assert grown.startswith(began)
        assert not firefox.evaluate("document.querySelector('#stop').hidden")
        firefox.evaluate("document.querySelector('#stop').click()")
        firefox.wait_for("document.querySelector('#stop').hidden")
        assert firefox.evaluate(HOSTILE) == "bold 0 undefined"
        assert firefox.errors == []
