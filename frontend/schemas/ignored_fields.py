"""Reports unknown fields of a body to the client and the log, or refuses them under --strict."""

from __future__ import annotations

import logging
import re

from msgspec import Struct

from penstock.frontend.schemas.unknown_fields import UnknownField, find_unknown_fields
from penstock.frontend.transport.errors import ApiError, ErrorKind

logger = logging.getLogger("penstock.bodies")

IGNORED_HEADER = b"x-penstock-ignored"
_MAX_HEADER_BYTES = 1024
_MAX_LOGGED = 100
"""Fields logged for one key."""
_MAX_KEYS = 4096
"""More than a key file can have; keys may be replaced while a worker runs."""
_INDEX = re.compile(r"\[\d+\]")
_HEADER_ESCAPES = {ord(","): "\\u002c", 0x7F: "\\u007f"}

HARMLESS = frozenset({
    # Returned by servers, and sent back by clients with the history of a chat
    "annotations", "audio", "caller", "citations", "created_by", "data", "encrypted_content", "index", "logprobs",
    "namespace", "phase", "provider_specific_fields", "reasoning", "reasoning_details", "refusal", "signature",
    "status", "thought_signature",
    # Caching, transport and accounting at other servers
    "allowed_callers", "cache_control", "cache_prompt", "defer_loading", "eager_input_streaming", "id_slot",
    "input_examples", "keep_alive", "no_log", "prediction", "provider", "request_id", "rid", "title", "usage",
})  # fmt: skip
"""Names of fields, at any depth, that change no answer here."""


class IgnoredFields:
    """Checks the bodies of one worker."""

    def __init__(self, *, refuses: bool) -> None:
        """refuses: whether an unknown field is an error, harmless or not."""
        self._refuses = refuses
        self._logged: dict[str | None, set[str]] = {}
        """Paths of fields by the key's name."""

    async def check(self, data: bytes, body_type: type[Struct], key_name: str | None) -> bytes | None:
        """Return the value of the answer's header; None without unknown fields. data must be valid for body_type.

        Writes one log line for each key and field. If unknown fields are refused, raises ApiError for the first one.
        """
        unknown = await find_unknown_fields(data, body_type)
        if unknown and self._refuses:
            message = (
                f"{unknown[0].path}: unknown field{_suggestion(unknown[0])}; this server was started with --strict"
            )
            raise ApiError(ErrorKind.UNSUPPORTED_FIELD, message, param=unknown[0].path)
        reported = [field for field in unknown if field.name not in HARMLESS]
        for field in reported:
            self._log(field, key_name)
        return _header_value(reported) if reported else None

    def log_left_out(self, kinds: list[str], key_name: str | None) -> None:
        """Write one log line for each key and type of tool that is not offered to the model."""
        for kind in dict.fromkeys(kinds):
            self._log_once(f"tool of type {kind}", "this server does not carry it out", key_name)

    def _log(self, field: UnknownField, key_name: str | None) -> None:
        self._log_once(f"field {_INDEX.sub('[]', field.path)}", f"unknown{_suggestion(field)}", key_name)

    def _log_once(self, what: str, why: str, key_name: str | None) -> None:
        """The lines for each key are bounded, and so is the log: clients choose the names."""
        if key_name not in self._logged and len(self._logged) >= _MAX_KEYS:
            return
        logged = self._logged.setdefault(key_name, set())
        if what in logged or len(logged) > _MAX_LOGGED:
            return
        logged.add(what)
        sender = "a client" if key_name is None else f"key {key_name}"
        if len(logged) > _MAX_LOGGED:
            logger.info("%d fields sent by %s were ignored; further ones are not logged", _MAX_LOGGED, sender)
            return
        logger.info("ignored %s, sent by %s: %s", what, sender, why)


def _suggestion(field: UnknownField) -> str:
    return "" if field.nearest is None else f", did you mean {field.nearest}?"


def _header_value(fields: list[UnknownField]) -> bytes:
    """Return the paths, separated by commas, in ASCII; a final … stands for those that do not fit."""
    value = b""
    for field in fields:
        path = _INDEX.sub("[]", field.path).translate(_HEADER_ESCAPES).encode("ascii", "backslashreplace")
        longer = path if not value else b"%b, %b" % (value, path)
        if len(longer) > _MAX_HEADER_BYTES:
            return value + b", ..."
        value = longer
    return value
