"""The chat page with a real model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.real_models import download_timeout
from tests.system.conftest import needs_chromium, take_picture
from tests.system.processes import Command, running
from tests.system.test_chat_page import answered, ask, set_field

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def served_demo(real_gguf: Path) -> Iterator[str]:
    """In place of the demo model's server."""
    serve = Command("penstock.main", "serve", "--model", str(real_gguf), "--gpu", "none", "--port", "0")
    with running(serve):
        yield serve.wait_for(r"^Ready: (http://\S+)/v1$").group(1)


@download_timeout
def test_two_temperatures_answer_side_by_side_with_shaded_tokens(open_page: Callable[[str], Page]) -> None:
    page = open_page("/")
    page.locator("#model option").first.wait_for(state="attached")
    for name, value in (("temperature", "0"), ("second_temperature", "1"), ("seed", "7")):
        set_field(page, name, value)
    page.check("[name=logprobs]")
    ask(page, "What is the capital of Japan?")
    answered(page, 2)
    first, second = (page.locator(".answer").nth(number).locator(".tokens") for number in (0, 1))
    assert first.inner_text().strip().startswith("The capital of Japan is Tokyo.")
    assert second.locator("span").count() > 1
    take_picture(page, "chat-page")
