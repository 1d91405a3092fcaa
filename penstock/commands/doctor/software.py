"""Python and the installed packages."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Iterator

from packaging.requirements import Requirement

from penstock.commands.doctor.finding import Finding, Level


def examine_software() -> Iterator[Finding]:
    yield Finding(Level.OK, "Python", f"{platform.python_version()} at {sys.executable}")
    yield packages(importlib.metadata.requires("penstock") or [])


def packages(requirements: list[str]) -> Finding:
    """Compare the requirements, as a package's metadata lists them, with what is installed."""
    wrong = []
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is not installed")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} is {version}, not {requirement.specifier}")
    if wrong:
        return Finding(Level.ERROR, "packages", "; ".join(wrong), "pip install penstock")
    torch = importlib.metadata.version("torch")
    return Finding(Level.OK, "packages", f"all are installed; torch is {torch}")
