"""API keys: reading them, and finding a request's key without leaking anything about the others."""

from __future__ import annotations

import hmac
import re
import secrets
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from msgspec import Struct

from penstock.frontend.transport.errors import ApiError, ErrorKind
from penstock.shm.messages import MAX_WEIGHT, MIN_WEIGHT

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from penstock.frontend.transport.exchange import Exchange

MAX_KEYS = 4096
MAX_LIMITED_KEYS = 512
_MAX_FILE_BYTES = 1 << 20
_KEY = re.compile(r"[!-~]{1,512}")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_COUNT = re.compile(r"[1-9]\d{0,11}")
_WEIGHT = re.compile(r"\d{1,3}(\.\d{1,6})?")
_RULES = {
    "name": "up to 64 letters, digits and _.-",
    "weight": f"a decimal number from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}",
    "admin": "yes or no",
}
"""The settings of a key's line that are not limits."""
_SALT_CONTEXT = b"penstock: the tenant of an API key"
_SALT_BYTES = 16


class KeyFileError(ValueError):
    """A key file cannot be used. The message is one line and shows no key."""


class KeyLimits(Struct, frozen=True):
    """Limits of one key; None is no limit."""

    requests_in_flight: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    def __bool__(self) -> bool:
        return self != KeyLimits()


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key. The name is for logs; the salt identifies its owner to the backend."""

    secret: bytes
    name: str
    limits: KeyLimits = KeyLimits()  # noqa: RUF009 - frozen
    weight: float = 1.0
    """Its owner's share of the device, relative to the other keys'."""
    is_admin: bool = False
    """It may load and unload models."""

    def __repr__(self) -> str:
        return f"ApiKey({self.name})"

    @property
    def salt(self) -> bytes:
        return tenant_salt(self.secret)


def tenant_salt(api_key: bytes) -> bytes:
    """Return 16 bytes that are the same for this key in every frontend and do not reveal the key."""
    return blake2b(api_key, digest_size=_SALT_BYTES, key=_SALT_CONTEXT).digest()


def named_keys(secrets_: Iterable[str]) -> list[ApiKey]:
    """Return the keys, named key-1, key-2, …"""
    return [ApiKey(secret.encode(), f"key-{number}") for number, secret in enumerate(secrets_, start=1)]


def read_key_file(path: Path) -> list[ApiKey]:
    """Return the keys of a file with one key per line: `KEY [name=NAME] [weight=W] [admin=yes]
    [requests_in_flight=N] [requests_per_minute=N] [tokens_per_minute=N]`.

    Empty lines and lines that begin with # are skipped; a key without a name is named line-N. Raises KeyFileError.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
        text = data.decode("ascii")
    except OSError as error:
        raise KeyFileError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise KeyFileError(f"{path}: keys and names must be printable ASCII") from None
    if len(data) > _MAX_FILE_BYTES:
        raise KeyFileError(f"{path}: the file is larger than the limit of {_MAX_FILE_BYTES} bytes")
    keys = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if words and not words[0].startswith("#"):
            try:
                keys.append(_read_line(words, number))
            except ValueError as error:
                raise KeyFileError(f"{path}, line {number}: {error}") from None
    if not keys:
        raise KeyFileError(f"{path}: the file contains no key; write one per line")
    return keys


def _read_line(words: Sequence[str], number: int) -> ApiKey:
    """Raises ValueError."""
    if not _KEY.fullmatch(words[0]) or "," in words[0]:
        raise ValueError("a key must be 1 to 512 printable characters without a comma")
    name, weight, is_admin = f"line-{number}", 1.0, False
    limits: dict[str, int] = {}
    for word in words[1:]:
        field, equals, value = word.partition("=")
        if field == "name" and _NAME.fullmatch(value):
            name = value
        elif field == "weight" and _WEIGHT.fullmatch(value) and MIN_WEIGHT <= float(value) <= MAX_WEIGHT:
            weight = float(value)
        elif field == "admin" and value in ("yes", "no"):
            is_admin = value == "yes"
        elif field in KeyLimits.__struct_fields__ and _COUNT.fullmatch(value):
            limits[field] = int(value)
        elif equals and field in (*_RULES, *KeyLimits.__struct_fields__):
            raise ValueError(f"{field} must be {_RULES.get(field, 'a number of at least 1')}")
        else:
            known = ", ".join(f"{known}=" for known in (*_RULES, *KeyLimits.__struct_fields__))
            raise ValueError(f"word {words.index(word) + 1} is unknown; use {known}")
    return ApiKey(words[0].encode(), name, KeyLimits(**limits), weight, is_admin)


class Keyring:
    """The keys that requests may use; without any, no key is needed.

    A client's key is looked up by a keyed digest, which the client cannot predict, and compared in constant time. So
    the response time reveals nothing about any key.
    """

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        """Raises ValueError for a duplicate key and for too many keys."""
        self._digest_key = secrets.token_bytes(32)
        self._by_digest: dict[bytes, ApiKey] = {}
        for key in keys:
            digest = self._digest(key.secret)
            if (other := self._by_digest.setdefault(digest, key)) is not key:
                raise ValueError(f"the keys {other.name} and {key.name} are the same")
        if len(self._by_digest) > MAX_KEYS:
            raise ValueError(f"{len(self._by_digest)} API keys; the limit is {MAX_KEYS}")
        if len(self.limited) > MAX_LIMITED_KEYS:
            raise ValueError(f"{len(self.limited)} API keys with rate limits; the limit is {MAX_LIMITED_KEYS}")

    def __bool__(self) -> bool:
        return bool(self._by_digest)

    @property
    def limited(self) -> list[ApiKey]:
        return [key for key in self._by_digest.values() if key.limits]

    def _digest(self, secret: bytes) -> bytes:
        return blake2b(secret, key=self._digest_key).digest()

    def check(self, exchange: Exchange) -> ApiKey | None:
        """Return the key of the request, from `Authorization: Bearer KEY`, `x-api-key: KEY` or `api-key: KEY`;
        None when no key is needed. Raises ApiError."""
        if not self._by_digest:
            return None
        key = self.find(exchange)
        if key is None:
            raise ApiError(
                ErrorKind.BAD_KEY,
                "the API key is missing or wrong; send it as Authorization: Bearer KEY, or as X-API-Key",
                headers=((b"www-authenticate", b"Bearer"),),
            )
        return key

    def find(self, exchange: Exchange) -> ApiKey | None:
        """Return the key that the request has, if it is one of these."""
        # Clients of Anthropic and of Azure have headers of their own.
        given = exchange.header(b"x-api-key") or exchange.header(b"api-key")
        if given is None:
            scheme, _, given = (exchange.header(b"authorization") or b"").partition(b" ")
            given = given if scheme.lower() == b"bearer" else b""
        digest = self._digest(given.strip())
        key = self._by_digest.get(digest)
        return key if key is not None and hmac.compare_digest(digest, self._digest(key.secret)) else None
