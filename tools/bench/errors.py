"""The error that ends a benchmark with one line."""

from __future__ import annotations

COMMAND = "penstock bench"
"""Begins each line that explains a failure."""


class BenchError(Exception):
    """The measurement cannot continue. The message is one line for the user; a server's last log lines may
    follow it."""
