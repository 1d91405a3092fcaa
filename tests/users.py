"""Another user of the machine, for tests that check what such a user can do."""

from __future__ import annotations

import os

import pytest

NOBODY = 65534
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 and "TESTS_REQUIRE_ROOT" not in os.environ,
    reason="run as root: only root can act as another user",
)
"""Skips the test without root; not in CI, which sets TESTS_REQUIRE_ROOT: there the test fails instead."""
