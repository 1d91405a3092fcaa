"""API keys: where they come from, which requests they allow, and their rate limits."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.frontend.access.admission import Admission
from penstock.frontend.access.api_keys import (
    MAX_LIMITED_KEYS,
    ApiKey,
    KeyFileError,
    KeyLimits,
    Keyring,
    named_keys,
    read_key_file,
)
from tests.frontend.access.keys import BODY, COMPLETIONS, bearer, limited
from tests.frontend.harness import ClientConnection, FakeBackend, make_app

# The file


def test_key_file_has_one_key_per_line_with_name_and_limits(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(
        "# ours\n\nsk-one\nsk-two name=alice weight=2.5 requests_in_flight=4\n"
        "  sk-three tokens_per_minute=90000 requests_per_minute=60 name=b.2_c-\n"
    )
    one, two, three = read_key_file(path)
    assert (one.secret, one.name, one.limits) == (b"sk-one", "line-3", KeyLimits())
    assert (two.name, two.limits) == ("alice", KeyLimits(requests_in_flight=4))
    assert (three.name, three.limits) == ("b.2_c-", KeyLimits(requests_per_minute=60, tokens_per_minute=90_000))
    assert [key.weight for key in (one, two, three)] == [1.0, 2.5, 1.0]
    assert "sk-" not in repr((one, two, three))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "contains no key"),
        ("# none\n", "contains no key"),
        ("sk-a,b\n", "line 1: a key must be 1 to 512"),
        ("x" * 513, "line 1: a key must be 1 to 512"),
        ("ok\nsk-secret requests_in_flight=0\n", "line 2: requests_in_flight must be a number of at least 1"),
        ("sk-secret tokens_per_minute=1e6\n", "line 1: tokens_per_minute must be a number of at least 1"),
        ("sk-secret name=a/b\n", "line 1: name must be up to 64"),
        ("sk-secret sk-other\n", "line 1: word 2 is unknown; use name=, weight=, admin=, requests_in_flight="),
        ("sk-secret weight=0\n", "line 1: weight must be a decimal number from 0.01 to 100"),
        ("sk-secret weight=100.1\n", "line 1: weight must be a decimal number from 0.01 to 100"),
        ("sk-secret weight=nan\n", "line 1: weight must be a decimal number from 0.01 to 100"),
        ("sk-secret admin=1\n", "line 1: admin must be yes or no"),
        ("sk-secret rpm=4\n", "line 1: word 2 is unknown"),
        ("sk-é\n", "printable ASCII"),
    ],
)
def test_invalid_line_is_reported_without_the_key(tmp_path: Path, content: str, expected: str) -> None:
    path = tmp_path / "keys"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(KeyFileError, match=re.escape(expected)) as raised:
        read_key_file(path)
    assert "sk-" not in str(raised.value)
    assert "\n" not in str(raised.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="none: No such file"):
        read_key_file(tmp_path / "none")


@given(st.binary(max_size=300))
def test_any_file_is_either_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any-keys"
    path.write_bytes(data)
    keys, message = [], ""
    try:
        keys = read_key_file(path)
    except KeyFileError as error:
        message = str(error)
    assert bool(keys) != bool(message)
    assert all(key.secret in data for key in keys)
    assert "\n" not in message


def test_duplicate_keys_are_refused_by_their_names() -> None:
    with pytest.raises(ValueError, match="the keys key-1 and key-3 are the same"):
        Keyring(named_keys(("a", "b", "a")))


def test_too_many_keys_with_limits_are_refused() -> None:
    keys = [limited(str(number), requests_in_flight=1) for number in range(MAX_LIMITED_KEYS + 1)]
    Keyring(keys[1:])
    with pytest.raises(ValueError, match=str(MAX_LIMITED_KEYS)):
        Keyring(keys)


# Checking a request


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (bearer("two"), 200),
        ([("authorization", "bearer   two ")], 200),
        ([("x-api-key", "two")], 200),
        ([("api-key", "two")], 200),
        ([("api-key", "x"), ("authorization", "Bearer two")], 401),
        ([("x-api-key", "two"), ("authorization", "Bearer x")], 200),
        ([("x-api-key", "x"), ("authorization", "Bearer two")], 401),
        ([], 401),
        (bearer("tw"), 401),
        (bearer("twos"), 401),
        (bearer(""), 401),
        (bearer("\xe9"), 401),
        ([("authorization", "Basic two")], 401),
        ([("authorization", "Bearer two"), ("authorization", "Bearer two")], 401),
    ],
)
async def test_only_a_valid_key_is_accepted(
    connect: Callable[..., ClientConnection], headers: Any, status: int
) -> None:
    response = await connect(api_keys=("one", "two", "three")).request("GET", "/v1/models", headers=headers)
    assert response.status == status
    assert (response.headers.get("www-authenticate") == "Bearer") == (status == 401)


async def test_log_line_names_the_key_and_never_shows_it(
    connect: Callable[..., ClientConnection], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "penstock")
    connection = connect(admission=Admission([ApiKey(b"sk-secret", "alice")]))
    await connection.request("POST", COMPLETIONS, BODY, bearer("sk-secret"))
    await connection.request("POST", COMPLETIONS, BODY, bearer("sk-guess"))
    (line,) = [record for record in caplog.records if record.name == "penstock.request"]
    assert line.fields["key"] == "alice"  # type: ignore[attr-defined]
    assert " key=alice " in line.getMessage()
    assert "sk-" not in caplog.text


async def test_replaced_keys_are_no_longer_accepted(backend: FakeBackend) -> None:
    admission = Admission(named_keys(("old", "both")))
    connection = ClientConnection(make_app(backend, admission=admission))

    async def status(key: str) -> int:
        return (await connection.request("GET", "/v1/models", headers=bearer(key))).status

    admission.set_keys(named_keys(("both", "new")))
    assert [await status(key) for key in ("old", "both", "new")] == [401, 200, 200]
    with pytest.raises(ValueError, match="the same"):
        admission.set_keys(named_keys(("x", "x")))
    assert await status("new") == 200
    await connection.end()
