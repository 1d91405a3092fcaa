"""API keys and requests for tests of access."""

from __future__ import annotations

from penstock.frontend.access.api_keys import ApiKey, KeyLimits

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "the cat", "max_tokens": 3}


def limited(name: str = "a", **limits: int) -> ApiKey:
    return ApiKey(f"secret-{name}".encode(), name, KeyLimits(**limits))


def bearer(key: str) -> list[tuple[str, str]]:
    """Return the header with which a client sends its key."""
    return [("authorization", f"Bearer {key}")]
