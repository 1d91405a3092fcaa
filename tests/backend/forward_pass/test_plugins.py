from __future__ import annotations

import pytest

from penstock.backend.errors import StartupError
from penstock.backend.forward_pass.plugins import find_forward_pass
from penstock.backend.passes.fake import FakePass


def test_pass_is_found_by_its_installed_name_and_by_import_string() -> None:
    assert find_forward_pass("fake") is FakePass
    assert find_forward_pass("penstock.backend.passes.fake:FakePass") is FakePass


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nonesuch", "not installed.*decoder"),
        ("no.such.module:Class", "cannot be imported"),
        ("penstock.backend.passes.fake:Missing", "cannot be imported"),
        ("penstock.backend.errors:StartupError", "is not a forward pass: it has no describe, load"),
        (":Class", "cannot be imported: ValueError"),
        ("..relative:Class", "cannot be imported: TypeError"),
    ],
)
def test_name_that_is_not_a_forward_pass_is_refused(name: str, message: str) -> None:
    with pytest.raises(StartupError, match=message):
        find_forward_pass(name)
