"""The error that ends a benchmark with one line."""

from __future__ import annotations

COMMAND = "penstock bench"
"""Begins each line that says why it failed."""


class BenchError(Exception):
    """The measurement cannot go on. The message is one line for the user; a server's last log lines may follow it."""
