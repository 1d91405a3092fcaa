"""Hashes of page content. Each depends on all tokens up to the page's end, and on the tenant."""

from __future__ import annotations

import hashlib
import secrets
from array import array

_DIGEST_BYTES = 16
_secret = secrets.token_bytes(32)
"""Random for each process. Without it, nobody can construct two prompts with the same hash (see CVE-2025-25183)."""


def use_secret(secret: bytes) -> None:
    """Use the hash secret of the earlier processes whose pages are kept. Call it before the first hash is computed."""
    global _secret
    _secret = secret


def extend_page_hashes(
    page_hashes: list[bytes], tokens: array[int], num_tokens: int, page_size_tokens: int, salt: bytes
) -> None:
    """Append the hashes of the pages that the first num_tokens of tokens fill to page_hashes, in place.

    128 bits of keyed BLAKE2b (RFC 7693) over the previous page's hash and this page's tokens. The first page's parent
    is the salt, so sequences of different tenants never share a page.
    """
    for page in range(len(page_hashes), num_tokens // page_size_tokens):
        content = tokens[page * page_size_tokens : (page + 1) * page_size_tokens].tobytes()
        page_hashes.append(_digest(page_hashes[-1] if page_hashes else salt, content))


def partial_page_hash(parent_hash: bytes, content: bytes) -> bytes:
    """The hash of a page that is not full. It never equals the hash of a full page."""
    return _digest(parent_hash, content) + b"part"


def is_full_page_hash(page_hash: bytes) -> bool:
    return len(page_hash) == _DIGEST_BYTES


def _digest(parent_hash: bytes, content: bytes) -> bytes:
    digest = hashlib.blake2b(parent_hash, digest_size=_DIGEST_BYTES, key=_secret)
    digest.update(content)
    return digest.digest()
