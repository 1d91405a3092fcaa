"""Another user of the machine, for tests that check what such a user can do."""

from __future__ import annotations

import os

import pytest

NOBODY = 65534
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 and not os.environ.get("CI"), reason="run as root: only root can act as another user"
)
"""Skips the test without root; never in CI, which runs as root and sets CI: there it fails instead."""
