"""The table in docs/api/parameters.md: what each endpoint does with each parameter, made from the bodies' types."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from msgspec import Raw, Struct

from penstock.frontend.schemas import messages, responses
from penstock.frontend.schemas.chat import ChatBody
from penstock.frontend.schemas.completion import UNSUPPORTED_NATIVE, CompletionBody, NativeCompletionBody
from penstock.frontend.schemas.messages import MessagesBody
from penstock.frontend.schemas.responses import ResponsesBody

BODIES: dict[str, type[Struct]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/completion": NativeCompletionBody,
}
_UNSUPPORTED: dict[type[Struct], Collection[str]] = {
    ResponsesBody: responses.UNSUPPORTED_FIELDS,
    MessagesBody: messages.UNSUPPORTED_FIELDS,
    NativeCompletionBody: UNSUPPORTED_NATIVE,
}
_NO_EFFECT = {
    "user",
    "safety_identifier",
    "prompt_cache_key",
    "metadata",
    "service_tier",
    "store",
    "spaces_between_special_tokens",
}
_NO_EFFECT_BY_BODY = {
    ResponsesBody: {"max_tool_calls", "prompt_cache_options", "prompt_cache_retention"},
    MessagesBody: {"cache_control", "context_management", "inference_geo", "speed"},
}
_REPEATED = {ResponsesBody: {"metadata", "store", "user", "safety_identifier", "prompt_cache_key"}}
"""Repeated in a response; other endpoints accept them without effect."""


def cell(body: type[Struct], field: str) -> str:
    declared = {each.name: each.type for each in msgspec.structs.fields(body)}
    if field not in declared:
        return "–"
    if declared[field] is Raw or field in _UNSUPPORTED.get(body, ()):
        return "refused"
    ignored = (_NO_EFFECT | _NO_EFFECT_BY_BODY.get(body, set())) - _REPEATED.get(body, set())
    return "ignored" if field in ignored else "yes"


def table() -> str:
    """One row for all parameters that the endpoints treat alike; the rows with the most endpoints first."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for field in sorted({field.name for body in BODIES.values() for field in msgspec.structs.fields(body)}):
        groups.setdefault(tuple(cell(body, field) for body in BODIES.values()), []).append(f"`{field}`")
    lines = [f"| parameters | {' | '.join(f'`{path}`' for path in BODIES)} |", "|---|" + "---|" * len(BODIES)]
    for cells, fields in sorted(groups.items(), key=lambda group: (group[0].count("–"), -group[0].count("yes"))):
        lines.append(f"| {', '.join(fields)} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
