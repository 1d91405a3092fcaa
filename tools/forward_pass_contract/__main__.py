"""Runs the suite: python -m penstock.tools.forward_pass_contract pkg.module:Class [--model DIR] [pytest options]."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from penstock.tools.forward_pass_contract import options


def main(arguments: list[str]) -> int:
    """pytest's exit status; 2 when no forward pass is named."""
    if not arguments or arguments[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    suites = sorted(Path(__file__).parent.glob("test_*.py"))
    # Ignore the pytest configuration and cache of the project in the working directory: they are not for this suite.
    alone = ["-c", os.devnull, f"--rootdir={suites[0].parent}", "-p", "no:cacheprovider"]
    return pytest.main([*alone, *map(str, suites), "--forward-pass", *arguments], plugins=[options])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
