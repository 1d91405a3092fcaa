"""The package index's description: README.md without pictures and links into the repository, which are dead there.

All else is in pyproject.toml.
"""

import re
from pathlib import Path

from setuptools import setup

_INSIDE = r"\((?!https?:|#)[^)]*\)"
readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
readme = re.sub(rf"!\[[^\]]*\]{_INSIDE}\n*", "", readme)
setup(
    long_description=re.sub(rf"\[([^\]]+)\]{_INSIDE}", r"\1", readme),
    long_description_content_type="text/markdown",
)
