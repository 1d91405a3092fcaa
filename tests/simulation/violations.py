"""The simulator's own exceptions."""

from __future__ import annotations


class PlantedFault(Exception):
    """A step fails because the simulator wants it to."""


class Violation(AssertionError):
    """Something that must never happen has happened."""
