"""The examples of docs/works-with.md."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "works-with.md"
ADDRESS = "http://127.0.0.1:8000"
_BLOCK = re.compile(r"^([^\n]*)\n\n```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def examples(language: str) -> dict[str, str]:
    """Code of the page by the name before it: {"OpenAI": "from openai import …"}."""
    found = {}
    for introduction, kind, code in _BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if kind == language:
            name = re.split(r"'s(?=[,:])|[,;:]| \(", introduction)[0]
            assert name not in found
            found[name] = code
    return found
