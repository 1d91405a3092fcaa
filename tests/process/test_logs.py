"""Lines of a fault that comes again and again."""

from __future__ import annotations

import logging

import pytest

from penstock.process.logs import RareLine


def test_repeated_line_is_logged_every_ten_seconds_with_the_number_left_out(caplog: pytest.LogCaptureFixture) -> None:
    now_s = [100.0]
    line = RareLine(logging.getLogger("penstock.test"), logging.ERROR, lambda: now_s[0])
    for now_s[0] in (100.0, 100.5, 109.9, 110.0, 110.1, 130.0):
        line.log("*** in database\nTree 5: page 3")
    assert [record.getMessage() for record in caplog.records] == [
        "*** in database Tree 5: page 3",
        "*** in database Tree 5: page 3 (2 more like this since the last such line)",
        "*** in database Tree 5: page 3 (1 more like this since the last such line)",
    ]
