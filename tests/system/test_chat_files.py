"""Files that go with a message of the chat page, in a real Chromium."""

from __future__ import annotations

from typing import TYPE_CHECKING

from playwright.sync_api import Page, expect

from tests.system.conftest import needs_chromium
from tests.system.test_chat_page import answered, ask, page, set_field

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["page"]
pytestmark = needs_chromium

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
    set_field(page, "max_completion_tokens", "4")
    page.fill("#preset-name", "short")
    page.click("#preset-save")
    set_field(page, "max_completion_tokens", "9")
    page.select_option("#preset", "none")
    page.select_option("#preset", "short")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Sum up")
    body = sent.value.post_data_json
    assert body["messages"][0]["content"] == "Sum up\n\nFile notes.txt:\n```\nthe notes\n```" + PAPER
    assert body["max_completion_tokens"] == 4
    answered(page)
