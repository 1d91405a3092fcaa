"""The list of conversations on the chat page, and files of them, in a real Chromium."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from playwright.sync_api import Page, expect

from tests.system.conftest import needs_chromium
from tests.system.test_chat_page import answered, ask, page, set_field

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import FilePayload

__all__ = ["page"]
pytestmark = needs_chromium


def test_conversations_are_searched_renamed_deleted_exported_and_imported(page: Page, tmp_path: Path) -> None:
    set_field(page, "max_completion_tokens", "4")
    for text in ("Keep this", "Another"):
        page.get_by_role("button", name="New chat").first.click()
        ask(page, text)
        answered(page)
    rows = page.locator("#conversations li")
    expect(rows).to_have_text(["Another☆✎✕", "Keep this☆✎✕"])
    page.get_by_role("button", name="Pin Keep this").press("Enter")
    expect(rows).to_have_text(["Keep this★✎✕", "Another☆✎✕"])
    page.fill("#search", "KEEP")
    expect(page.locator("#conversations li")).to_have_count(1)
    page.fill("#search", "")
    page.get_by_role("button", name="Rename Another").click()
    page.keyboard.type("Other")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Other", exact=True)).to_be_visible()
    page.get_by_role("button", name="Delete Other").click()
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".user .text")).to_have_text("Another")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    kept = tmp_path / "kept.json"
    download.value.save_as(kept)
    for name in ("Other", "Keep this"):
        page.get_by_role("button", name=f"Delete {name}").click()
        expect(page.get_by_role("button", name=name, exact=True)).to_have_count(0)  # the list has moved
    expect(page.locator("#conversations li")).to_have_text("New chat☆✎✕")
    page.set_input_files("#import", kept)
    page.get_by_role("button", name="Keep this", exact=True).click()
    expect(page.locator(".user .text")).to_have_text("Keep this")
    old = [{"id": "1", "messages": [{"role": "user", "content": "Long ago"}]}]
    page.evaluate("(old) => localStorage.setItem('penstock.conversations', old)", json.dumps(old))
    page.reload()
    page.get_by_role("button", name="Long ago", exact=True).click()
    expect(page.locator(".user .text")).to_have_text("Long ago")
    page.set_input_files("#import", file_of([{"id": "1", "messages": [{"role": "assistant", "answers": [None]}]}]))
    expect(page.locator("#notice")).to_contain_text("holds no conversations that this page knows")


def file_of(*lines: Any) -> FilePayload:
    return {"name": "chats", "mimeType": "", "buffer": "\n".join(map(json.dumps, lines)).encode()}


CHATGPT = {
    "conversation_id": "g",
    "title": "From ChatGPT",
    "current_node": "c",
    "mapping": {
        "root": {"parent": None, "message": None},
        "s": {"parent": "root", "message": {"author": {"role": "system"}, "content": {"parts": ["x"]}}},
        "a": {"parent": "s", "message": {"author": {"role": "user"}, "content": {"parts": ["Question"]}}},
        "b": {"parent": "a", "message": {"author": {"role": "assistant"}, "content": {"parts": ["Other"]}}},
        "c": {"parent": "a", "message": {"author": {"role": "assistant"}, "content": {"parts": ["**Answer**", {}]}}},
        "lost": {"parent": "found", "message": {"author": {"role": "user"}, "content": {"parts": ["a circle"]}}},
        "found": {"parent": "lost", "message": {"author": {"role": "user"}, "content": {"parts": ["a circle"]}}},
    },
}
OPEN_WEBUI = {
    "id": "w",
    "title": "From Open WebUI",
    "updated_at": 1,
    "chat": {
        "history": {
            "currentId": "2",
            "messages": {
                "1": {"parentId": None, "role": "user", "content": "Question"},
                "2": {"parentId": "1", "role": "assistant", "content": "**Answer**", "model": "m"},
                "3": {"parentId": "1", "role": "assistant", "content": "Other", "model": "m"},
            },
        }
    },
}
LLAMA_CPP = (
    {"type": "session", "id": "l", "name": "From llama.cpp", "lastModified": 1, "currNode": "3"},
    {"type": "message", "message": {"id": "0", "parent": None, "role": "system", "content": ""}},
    {"type": "message", "message": {"id": "1", "parent": "0", "role": "user", "content": "Question"}},
    {"type": "message", "message": {"id": "2", "parent": "1", "role": "assistant", "content": "Other"}},
    {"type": "message", "message": {"id": "3", "parent": "1", "role": "assistant", "content": "**Answer**"}},
)


def test_exports_of_other_pages_are_imported_and_a_chat_becomes_markdown(page: Page) -> None:
    for name, lines in (
        ("From ChatGPT", [[CHATGPT]]),
        ("From Open WebUI", [[OPEN_WEBUI]]),
        ("From llama.cpp", LLAMA_CPP),
    ):
        page.set_input_files("#import", file_of(*lines))
        page.get_by_role("button", name=name, exact=True).click()
        expect(page.locator(".user .text")).to_have_text(["Question"])
        expect(page.locator(".answer strong")).to_have_text("Answer")
        expect(page.locator(".branches")).to_have_text(re.compile("[12] of 2"))
        with page.expect_download() as download:
            page.get_by_role("button", name="Save text").click()
        assert re.match(
            rf"# {name}\n\n## You\n\nQuestion\n\n## \S+\n\n\*\*Answer\*\*\n", download.value.path().read_text()
        )
