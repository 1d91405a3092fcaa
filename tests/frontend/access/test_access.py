"""API keys: where they come from, which requests they allow, and their rate limits."""

from __future__ import annotations

import asyncio
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
from penstock.frontend.access.rate_limits import Account, RateLimiter, UsageTable
from penstock.frontend.transport.errors import ApiError
from penstock.shm.messages import Finish
from tests.frontend.harness import ClientConnection, FakeBackend, Response, make_app, request_bytes, says, silent

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "the cat", "max_tokens": 3}


def limited(name: str = "a", **limits: int) -> ApiKey:
    return ApiKey(f"secret-{name}".encode(), name, KeyLimits(**limits))


def bearer(key: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {key}")]


class Clock:
    def __init__(self) -> None:
        self.now_s = 6000.0

    def __call__(self) -> float:
        return self.now_s


# The file


def test_key_file_has_one_key_per_line_with_name_and_limits(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(
        "# ours\n\nsk-one\nsk-two name=alice requests_in_flight=4\n"
        "  sk-three tokens_per_minute=90000 requests_per_minute=60 name=b.2_c-\n"
    )
    one, two, three = read_key_file(path)
    assert (one.secret, one.name, one.limits) == (b"sk-one", "line-3", KeyLimits())
    assert (two.name, two.limits) == ("alice", KeyLimits(requests_in_flight=4))
    assert (three.name, three.limits) == ("b.2_c-", KeyLimits(requests_per_minute=60, tokens_per_minute=90_000))
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
        ("sk-secret sk-other\n", "line 1: word 2 is unknown; use name=, requests_in_flight="),
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


# Limits


def ratelimit(response: Response) -> dict[str, str]:
    prefix = "x-ratelimit-"
    return {name.removeprefix(prefix): value for name, value in response.headers.items() if name.startswith(prefix)}


async def test_requests_per_minute_are_limited_and_reported(backend: FakeBackend) -> None:
    clock = Clock()
    admission = Admission([limited(requests_per_minute=2), ApiKey(b"free", "free")], clock=clock)
    connection = ClientConnection(make_app(backend, admission=admission))

    async def ask(key: str = "secret-a", body: Any = BODY) -> Response:
        return await connection.request("POST", COMPLETIONS, body, bearer(key))

    first, second = await ask(), await ask(body={"prompt": "x", "n": 99})
    assert (first.status, second.status) == (200, 400)
    assert ratelimit(first) == {"limit-requests": "2", "remaining-requests": "1", "reset-requests": "2m0s"}
    assert ratelimit(second)["remaining-requests"] == "0"
    refused = await ask()
    assert (refused.status, refused.error["code"], refused.error["type"]) == (
        429,
        "rate_limit_exceeded",
        "rate_limit_error",
    )
    assert refused.error["message"] == "this key has used up its limit of 2 requests per minute; retry later"
    assert ratelimit(refused)["remaining-requests"] == "0"
    assert len(backend.streams) == 1
    free = await ask("free")
    assert (free.status, ratelimit(free)) == (200, {})
    assert (await connection.request("GET", "/v1/models", headers=bearer("secret-a"))).status == 200
    # Half of the limit is available again in the middle of the next minute, as retry-after said.
    assert refused.headers["retry-after"] == "90"
    clock.now_s += 89
    assert (await ask()).status == 429
    clock.now_s += 1
    assert (await ask()).status == 200
    assert (await ask()).status == 429
    clock.now_s += 120
    assert ratelimit(await ask())["remaining-requests"] == "1"
    await connection.end()


async def test_tokens_of_prompts_and_answers_are_charged_streamed_or_not(backend: FakeBackend) -> None:
    clock = Clock()
    backend.script = says("abc", batch_size=2, finish=Finish.LENGTH)
    connection = ClientConnection(make_app(backend, admission=Admission([limited(tokens_per_minute=20)], clock=clock)))
    prompt = [1, 2, 3, 4, 5]
    remaining = []
    for stream in (False, True, False):
        body = {"prompt": prompt, "max_tokens": 3, "stream": stream}
        response = await connection.request("POST", COMPLETIONS, body, bearer("secret-a"))
        assert response.status == 200
        remaining.append(int(ratelimit(response)["remaining-tokens"]))
    # The headers count the prompt; generated tokens are counted at the end.
    assert remaining == [20 - 5, 20 - 8 - 5, 0]
    refused = await connection.request("POST", COMPLETIONS, BODY, bearer("secret-a"))
    assert (refused.status, refused.error["message"]) == (
        429,
        "this key has used up its limit of 20 tokens per minute; retry later",
    )
    await connection.end()


async def test_refused_request_uses_no_tokens(backend: FakeBackend) -> None:
    backend.script = says("abc", finish=Finish.LENGTH)
    connection = ClientConnection(
        make_app(backend, admission=Admission([limited(tokens_per_minute=20)], clock=Clock()))
    )

    async def ask(prompt: list[int]) -> Response:
        return await connection.request("POST", COMPLETIONS, {"prompt": prompt, "max_tokens": 3}, bearer("secret-a"))

    too_long = await ask([1] * 5000)
    assert (too_long.status, too_long.error["code"]) == (400, "context_length_exceeded")
    backend.ready = False
    assert (await ask([1] * 19)).status == 503
    backend.ready = True
    taken = await ask([1] * 10)
    assert (taken.status, ratelimit(taken)["remaining-tokens"]) == (200, "10")
    assert ratelimit(await ask([1]))["remaining-tokens"] == "6"
    await connection.end()


async def test_request_counts_as_in_flight_until_it_ends_in_any_way(backend: FakeBackend) -> None:
    backend.script = silent
    app = make_app(backend, admission=Admission([limited(requests_in_flight=2)]))
    running = [ClientConnection(app) for _ in range(2)]
    for connection in running:
        backend.submitted.clear()
        connection.send(request(stream=True))
        await backend.submitted.wait()
    waiting = ClientConnection(app)
    waiting.send(request())
    refused = await waiting.response()
    assert (refused.status, refused.error["message"]) == (
        429,
        "this key has 2 requests in flight; its limit is 2",
    )
    assert refused.headers["retry-after"] == "1"
    running[0].transport.reset()
    await running[0].idle()
    backend.script = says("x")
    waiting.send(request())
    assert (await waiting.response()).status == 200
    waiting.send(request(body={"n": "x"}))
    assert (await waiting.response()).status == 400
    waiting.send(request())
    assert (await waiting.response()).status == 200
    backend.streams[1].push(5, finish=Finish.LENGTH)
    assert (await running[1].response()).status == 200
    for connection in (*running[1:], waiting):
        await connection.end()


def request(body: Any = None, **fields: Any) -> bytes:
    return request_bytes("POST", COMPLETIONS, body or {**BODY, **fields}, bearer("secret-a"))


async def test_request_whose_body_is_arriving_counts_as_in_flight(backend: FakeBackend) -> None:
    app = make_app(backend, admission=Admission([limited(requests_in_flight=1)]))
    slow, other = ClientConnection(app), ClientConnection(app)
    whole = request()
    slow.send(whole[:-3])
    await asyncio.sleep(0)
    other.send(request())
    assert (await other.response()).status == 429
    slow.send(whole[-3:])
    assert (await slow.response()).status == 200
    other.send(request())
    assert (await other.response()).status == 200
    for connection in (slow, other):
        await connection.end()


def test_workers_count_together_and_a_restarted_one_starts_from_zero() -> None:
    clock, key = Clock(), limited(requests_per_minute=3, requests_in_flight=3)
    fd = UsageTable.create_fd(2)
    accounts = [Account(key, UsageTable.attach(fd, 2, worker), clock) for worker in range(2)]
    for account in (accounts[0], accounts[1], accounts[1]):
        account.admit()
    for account in accounts:
        assert dict(account.headers())[b"x-ratelimit-remaining-requests"] == b"0"
        with pytest.raises(ApiError, match="3 requests in flight"):
            account.admit()
    # Requests of a worker that died are no longer in flight.
    restarted = Account(key, UsageTable.attach(fd, 2, 1), clock)
    restarted.admit()
    assert dict(accounts[0].headers())[b"x-ratelimit-remaining-requests"] == b"1"


def test_new_limits_apply_at_once_and_usage_stays() -> None:
    clock = Clock()
    old, other = limited(requests_per_minute=5), limited("b", requests_per_minute=5)
    limiter = RateLimiter(UsageTable.private(), [old, other], clock)
    account = limiter.account(old.salt)
    assert account is not None
    account.admit()
    limiter.set_keys([limited(requests_per_minute=2)])
    assert limiter.account(other.salt) is None
    assert limiter.account(old.salt) is account
    assert dict(account.headers())[b"x-ratelimit-remaining-requests"] == b"1"
    account.release()


@given(
    st.integers(1, 50),
    st.lists(st.tuples(st.floats(0, 200), st.booleans()), min_size=1, max_size=80),
)
def test_no_minute_exceeds_twice_the_limit_and_retry_after_is_right(
    limit: int, steps: list[tuple[float, bool]]
) -> None:
    clock = Clock()
    account = Account(limited(requests_per_minute=limit), UsageTable.private(), clock)
    admitted: list[float] = []
    for pause_s, obeys in steps:
        clock.now_s += pause_s
        try:
            account.admit()
        except ApiError as error:
            after_s = int(dict(error.headers)[b"retry-after"])
        else:
            after_s = 0
        if after_s and obeys:
            clock.now_s += after_s
            account.admit()
        if obeys or not after_s:
            admitted.append(clock.now_s)
        assert after_s <= 120
        account.release()
        recent = [moment for moment in admitted if clock.now_s - moment < 60]
        assert len(recent) <= 2 * limit


def test_maximum_number_of_keys_are_counted_separately() -> None:
    table, clock = UsageTable.private(), Clock()
    keys = [limited(str(number), requests_per_minute=MAX_LIMITED_KEYS) for number in range(MAX_LIMITED_KEYS)]
    limiter = RateLimiter(table, keys, clock)
    for number, key in enumerate(keys):
        account = limiter.account(key.salt)
        assert account is not None
        account.charge(number)
        account.admit()
    for key in keys:
        account = limiter.account(key.salt)
        assert account is not None
        assert dict(account.headers())[b"x-ratelimit-remaining-requests"] == b"%d" % (MAX_LIMITED_KEYS - 1)
