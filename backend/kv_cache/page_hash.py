"""Keys for the content of full pages: each depends on all tokens up to the page's end, and on the tenant."""

from __future__ import annotations

import hashlib
import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from array import array

_SECRET = secrets.token_bytes(32)
"""Of this process: nobody outside can construct two prompts with one key (CVE-2025-25183 was about a known hash)."""


def extend_page_hashes(
    keys: list[bytes], tokens: array[int], num_tokens: int, page_size_tokens: int, salt: bytes
) -> None:
    """Appends to keys, in place, those of the pages that the first num_tokens of tokens fill.

    128 bits of keyed BLAKE2b (RFC 7693) over the previous page's key and this page's tokens; the first page's over the
    salt, so that sequences of different tenants never share a page.
    """
    for page in range(len(keys), num_tokens // page_size_tokens):
        content = tokens[page * page_size_tokens : (page + 1) * page_size_tokens].tobytes()
        keys.append(_digest(keys[-1] if keys else salt, content))


def partial_page_hash(before: bytes, content: bytes) -> bytes:
    """A key for a page that is not full, after the page of key `before`; never that of a full one."""
    return _digest(before, content) + b"part"


def _digest(before: bytes, content: bytes) -> bytes:
    digest = hashlib.blake2b(before, digest_size=16, key=_SECRET)
    digest.update(content)
    return digest.digest()
