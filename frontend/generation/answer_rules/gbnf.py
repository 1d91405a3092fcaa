"""Translates GBNF, the grammars of llama.cpp and XGrammar's EBNF, to llguidance's Lark."""

from __future__ import annotations

import re

from penstock.frontend.transport.errors import invalid

_LARK_MARK = "%llguidance"
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_MAX_SHOWN_CHARACTERS = 200
_SURROGATES = range(0xD800, 0xE000)


def is_gbnf(text: str) -> bool:
    """Whether a grammar is in GBNF.

    Lark has "::=" only in strings, and llama.cpp accepts Lark only with this mark.
    """
    return "::=" in text and not text.lstrip().startswith(_LARK_MARK)


def to_lark(field: str, text: str) -> str:
    """Return the grammar in Lark. Raises ApiError with the field's name if it is not GBNF.

    Rules without recursion become terminals, so that each is matched as one regular expression.
    """
    if text.lstrip().startswith(_LARK_MARK):
        return text
    from llguidance.gbnf_to_lark import gbnf_to_lark  # 50 ms, for few requests

    try:
        return str(gbnf_to_lark(_ESCAPE.sub(_unescaped, text)))
    except IndexError:
        invalid(field, "not a grammar in GBNF: it ends within an escape")
    except RecursionError:
        invalid(field, "nested too deeply")
    except Exception as error:  # noqa: BLE001 - the translator raises plain Exception for a rule that is missing
        reason = " ".join(str(error).split())[:_MAX_SHOWN_CHARACTERS]
        invalid(field, f"not a grammar in GBNF: {reason}")


def _unescaped(match: re.Match[str]) -> str:
    """Write a character's number as the character: Lark has no escapes of that many digits."""
    digits = match[1] or match[2] or match[3]
    if digits is None:
        return match[0]
    code = int(digits, 16)
    if code > 0x10FFFF or code in _SURROGATES:
        return match[0]
    character = chr(code)
    return character if character.isalnum() or code >= 0xA0 else f"\\x{code:02x}"
