"""The chat templates of the peers' sources, and the syntax that is found for each."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from penstock.frontend.parsing.syntax.model_syntax import ModelSyntax, choose_model_syntax
from penstock.frontend.text.chat_template import ChatTemplate
from tests.real_models import LLAMA_CPP, VLLM, fixture_file

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = ("<|tool_call_start|>", "<|tool_call_end|>")
"""Tokens of LFM2, whose templates do not show them."""


@cache
def peers_templates() -> dict[str, Path]:
    """The templates by their names. Skips the test if they cannot be downloaded."""
    paths = [path for sources in (LLAMA_CPP, VLLM) for path in sorted(fixture_file(sources).glob("*.jinja"))]
    return {path.stem.removeprefix("tool_chat_template_"): path for path in paths}


@cache
def template_of(path: Path) -> ChatTemplate:
    return ChatTemplate(path.read_text(encoding="utf-8"), {"bos_token": "<BOS>", "eos_token": "<EOS>"})


@cache
def syntax_of(path: Path) -> ModelSyntax:
    tokens = TOKENS if path.name.startswith("LFM2") else ()
    return choose_model_syntax(template_of(path), dict.fromkeys(tokens, 1))
