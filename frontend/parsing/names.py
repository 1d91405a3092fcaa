"""What parsers are called on the command line."""

from __future__ import annotations

from typing import Literal

ToolParserName = Literal["auto", "none", "hermes", "llama3_json", "mistral", "pythonic"]
ReasoningParserName = Literal["auto", "none", "think", "mistral"]
