"""Files that go with a message of the chat page, in a real Chromium."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import TYPE_CHECKING, Any

from playwright.sync_api import Page, Route, expect

from tests.system.conftest import needs_chromium
from tests.system.test_chat_page import answered, ask, check_axe, events, page, set_field

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import FilePayload

__all__ = ["page"]
pytestmark = needs_chromium

PASTE = """(text) => {
  const clipboardData = new DataTransfer();
  clipboardData.setData("text/plain", text);
  document.getElementById("input").dispatchEvent(new ClipboardEvent("paste", { clipboardData, cancelable: true }));
}"""
KEPT_FILES = """() => new Promise((found) => {
  const opening = indexedDB.open("penstock");
  opening.onsuccess = () => {
    const drafts = opening.result.transaction("drafts").objectStore("drafts").getAll();
    drafts.onsuccess = () => found(drafts.result.some((draft) => draft.files.length === 3));
    opening.result.close();
  };
})"""
PAPER = "\n\nFile paper.pdf:\n```\nOf lists\n\nAnd of sets\n```"


def pdf(*pages: str) -> bytes:
    """A document of these texts, one a page, in Helvetica."""
    kids = " ".join(f"{3 + 2 * number} 0 R" for number in range(len(pages)))
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", f"<< /Type /Pages /Count {len(pages)} /Kids [{kids}] >>"]
    for text in pages:
        drawn = f"BT /F 12 Tf 72 700 Td ({text}) Tj ET"
        font = "<< /Font << /F << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >>"
        contents = f"{len(objects) + 2} 0 R"
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources {font} /Contents {contents} >>"
        )
        objects.append(f"<< /Length {len(drawn)} >> stream\n{drawn}\nendstream")
    written, offsets = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, start=1):
        offsets.append(len(written))
        written += f"{number} 0 obj {content} endobj\n".encode()
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    size = len(objects) + 1
    trailer = f"trailer << /Size {size} /Root 1 0 R >>\nstartxref\n{len(written)}\n%%EOF"
    return written + f"xref\n0 {size}\n0000000000 65535 f \n{table}{trailer}".encode()


def test_file_goes_with_the_message_and_presets_keep_settings(page: Page, tmp_path: Path, errors: list[str]) -> None:
    (tmp_path / "notes.txt").write_text("the notes")
    (tmp_path / "picture.bin").write_bytes(bytes(range(256)))
    (tmp_path / "cut.pdf").write_bytes(pdf("cut")[:60])
    (tmp_path / "scan.pdf").write_bytes(pdf(""))
    (tmp_path / "paper.pdf").write_bytes(pdf("Of lists", "And of sets"))
    for name, problem in (
        ("picture.bin", "picture.bin is not a text file in UTF-8"),
        ("cut.pdf", "cut.pdf: Invalid PDF structure."),
        ("scan.pdf", "scan.pdf: it has no text, only pictures"),
    ):
        page.set_input_files("#attach", tmp_path / name)
        expect(page.locator("#notice")).to_have_text(problem)
    page.set_input_files("#attach", [tmp_path / "notes.txt", tmp_path / "paper.pdf"])
    expect(page.locator("#files li")).to_have_count(2)
    page.fill("#input", "Sum up")
    page.evaluate(PASTE, "long " * 1000)
    page.wait_for_function(KEPT_FILES)  # a page that ends may lose what it has not yet written
    page.reload()
    expect(page.locator("#files li")).to_have_count(3)
    expect(page.locator("#input")).to_have_value("Sum up")
    page.get_by_role("button", name="Remove pasted 3.txt").click()
    page.reload()
    expect(page.locator("#files li")).to_have_text(["notes.txt✕", "paper.pdf✕"])
    set_field(page, "max_completion_tokens", "4")
    page.fill("#preset-name", "short")
    page.click("#preset-save")
    set_field(page, "max_completion_tokens", "9")
    page.select_option("#preset", "none")
    page.select_option("#preset", "short")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.press("#input", "Enter")
    body = sent.value.post_data_json
    assert body["messages"][0]["content"] == "Sum up\n\nFile notes.txt:\n```\nthe notes\n```" + PAPER
    assert body["max_completion_tokens"] == 4
    answered(page)
    assert page.evaluate("import('/page/database.js').then((it) => it.allOf('drafts'))") == []
    page.reload()
    expect(page.locator(".file")).to_have_count(2)
    expect(page.locator("#files li")).to_have_count(0)
    expect(page.locator("#input")).to_have_value("")


def png() -> bytes:
    """One red pixel."""
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"\0\xff\0\0")),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )


def add_pictures(route: Route) -> None:
    """Answer for a server whose first model takes pictures."""
    models = route.fetch().json()
    models["data"][0]["input_modalities"] = ["text", "image"]
    route.fulfill(json=models)


def test_pictures_go_to_models_that_take_them_and_stay(page: Page) -> None:
    files: list[FilePayload] = [
        {"name": "red.png", "mimeType": "image/png", "buffer": png()},
        {"name": "cut.png", "mimeType": "image/png", "buffer": png()[:20]},
    ]
    page.set_input_files("#attach", files[0])
    expect(page.locator("#notice")).to_have_text("penstock-demo takes only text, no pictures such as red.png.")
    page.route("**/v1/models", add_pictures)
    bodies: list[Any] = []

    def answer(route: Route) -> None:
        bodies.append(route.request.post_data_json)
        route.fulfill(content_type="text/event-stream", body=events("Red.", usage={"prompt_tokens": 9}))

    page.route("**/v1/chat/completions", answer)
    with page.expect_response("**/v1/models"):
        page.reload()
    page.locator("#model option").wait_for(state="attached")
    page.set_input_files("#attach", files)
    expect(page.locator("#notice")).to_have_text("cut.png is not a picture that this browser can show")
    page.reload()
    expect(page.locator("#files img")).to_have_js_property("naturalWidth", 1)
    page.locator("#model option").wait_for(state="attached")
    ask(page, "Which colour?")
    answered(page)
    picture, text = bodies[0]["messages"][0]["content"]
    uri = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    assert (picture, text) == (
        {"type": "image_url", "image_url": {"url": uri}},
        {"type": "text", "text": "Which colour?"},
    )
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    page.get_by_role("button", name="Delete Which colour?").click()
    expect(page.locator(".user")).to_have_count(0)
    page.set_input_files("#import", download.value.path())
    page.get_by_role("button", name="Which colour?", exact=True).click()
    expect(page.locator(".user img")).to_have_js_property("naturalWidth", 1)
    page.get_by_role("button", name="red.png").press("Enter")
    check_axe(page)
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".branches")).to_have_text("‹ 2 of 2 ›")
    answered(page)
    assert bodies[1]["messages"] == bodies[0]["messages"]
    page.unroute("**/v1/models")
    page.reload()
    page.locator("#model option").wait_for(state="attached")
    ask(page, "And now?")
    expect(page.locator("#notice")).to_contain_text("no pictures such as red.png")
    expect(page.locator("#input")).to_have_value("And now?")
