"""Limits of API keys: per minute and in flight, reserved before and settled after, over workers and reloads."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.frontend.access.admission import Admission
from penstock.frontend.access.api_keys import MAX_LIMITED_KEYS, ApiKey
from penstock.frontend.access.rate_limits import Account, RateLimiter
from penstock.frontend.access.usage_table import UsageTable
from penstock.frontend.transport.errors import ApiError
from penstock.shm.messages import Finish
from tests.frontend.access.keys import BODY, COMPLETIONS, bearer, limited
from tests.frontend.harness import ClientConnection, FakeBackend, Response, make_app, request_bytes, says, silent


class Clock:
    def __init__(self) -> None:
        self.now_s = 6000.0

    def __call__(self) -> float:
        return self.now_s


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

    async def ask(max_tokens: int, *, stream: bool) -> Response:
        body = {"prompt": prompt, "max_tokens": max_tokens, "stream": stream}
        return await connection.request("POST", COMPLETIONS, body, bearer("secret-a"))

    # A whole answer's headers count what it used, a stream's what it may use.
    whole, stream, refused = await ask(5, stream=False), await ask(5, stream=True), await ask(3, stream=False)
    assert [ratelimit(response)["remaining-tokens"] for response in (whole, stream)] == ["12", "2"]
    assert (refused.status, refused.error["message"]) == (
        429,
        "this request may use 8 tokens, but this key has 4 left of its limit of 20 per minute; retry later",
    )
    assert ratelimit(refused)["remaining-tokens"] == "4"
    # In the next minute half of the 16 tokens count once half of it has passed, as retry-after said.
    assert refused.headers["retry-after"] == "75"
    clock.now_s += 74
    assert (await ask(3, stream=False)).status == 429
    clock.now_s += 1
    assert (await ask(3, stream=False)).status == 200
    await connection.end()


async def test_request_over_the_keys_whole_limit_is_refused_for_good(backend: FakeBackend) -> None:
    keys = [limited(tokens_per_minute=20), limited("b", requests_in_flight=3)]
    connection = ClientConnection(make_app(backend, admission=Admission(keys, clock=Clock())))
    cases = [
        (
            "a",
            {"prompt": [1] * 10, "max_tokens": 11},
            "max_tokens: 21 tokens with the prompt; the limit of this key is 20",
        ),
        ("a", {"prompt": [[1] * 6, [2] * 6], "n": 2, "max_tokens": 3}, "max_tokens: 24 tokens with the prompt"),
        ("a", {"prompt": [1] * 20, "max_tokens": None}, "prompt: 21 tokens with the prompt"),
        ("b", {"prompt": "x", "n": 4}, "n: 4 choices over all prompts; the limit of this key is 3 in flight"),
        ("b", {"prompt": "x", "n": 1, "best_of": 4}, "best_of: 4 choices"),
        ("b", {"prompt": ["x"] * 4}, "prompt: 4 choices"),
    ]
    for name, body, message in cases:
        refused = await connection.request("POST", COMPLETIONS, body, bearer(f"secret-{name}"))
        assert (refused.status, refused.error["code"]) == (400, "invalid_value")
        assert refused.error["message"].startswith(message)
        assert refused.error["param"] == message.partition(":")[0]
    assert not backend.streams
    for name in "ab":
        taken = await connection.request("POST", COMPLETIONS, BODY, bearer(f"secret-{name}"))
        assert taken.status == 200
    await connection.end()


async def test_burst_without_max_tokens_reserves_what_is_left_and_counts_the_rest_as_it_comes(
    backend: FakeBackend,
) -> None:
    backend.script = silent
    app = make_app(backend, admission=Admission([limited(tokens_per_minute=100)], clock=Clock()))
    first, second = ClientConnection(app), ClientConnection(app)
    first.send(request({"prompt": [1] * 40, "stream": True}))
    await backend.submitted.wait()
    second.send(request({"prompt": [1] * 40, "stream": True}))
    refused = await second.response()
    assert (refused.status, ratelimit(refused)["remaining-tokens"]) == (429, "0")
    stream = backend.streams[0]
    stream.push(*[2] * 30)
    await first.output(b"data: ")
    stream.push(*[2] * 60, finish=Finish.LENGTH)
    assert (await first.response()).status == 200
    # 130 were used, so nothing is left in this minute.
    second.send(request())
    refused = await second.response()
    assert (refused.status, refused.error["message"]) == (
        429,
        "this key has used up its limit of 100 tokens per minute; retry later",
    )
    for connection in (first, second):
        await connection.end()


@pytest.mark.parametrize("ends", ["cancelled", "refused"])
async def test_cancelled_request_pays_for_what_came_and_a_refused_one_for_nothing(
    backend: FakeBackend, ends: str
) -> None:
    backend.script = silent
    app = make_app(backend, admission=Admission([limited(tokens_per_minute=100)], clock=Clock()))
    connection, other = ClientConnection(app), ClientConnection(app)
    connection.send(request({"prompt": [[1] * 5, [2] * 5], "n": 2, "max_tokens": 20, "stream": True}))
    while len(backend.streams) < 4:
        backend.submitted.clear()
        await backend.submitted.wait()
    for number, stream in enumerate(backend.streams if ends == "cancelled" else ()):
        stream.push(*[2] * number)
    if ends == "cancelled":
        await asyncio.sleep(0)
        connection.transport.reset()
    else:
        for stream in backend.streams:
            stream.push(finish=Finish.REJECTED)
        assert (await connection.response()).status == 500
    await connection.idle()
    backend.script = says("abc")
    other.send(request())
    used = 10 + 0 + 1 + 2 + 3 if ends == "cancelled" else 0
    response = await other.response()
    assert int(ratelimit(response)["remaining-tokens"]) == 100 - used - response.json()["usage"]["total_tokens"]
    await other.end()


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
    assert (await ask([1] * 17)).status == 503
    backend.ready = True
    taken = await ask([1] * 10)
    assert (taken.status, ratelimit(taken)["remaining-tokens"]) == (200, "7")
    assert ratelimit(await ask([1]))["remaining-tokens"] == "3"
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
    waiting.send(request(n=2))
    refused = await waiting.response()
    assert (refused.status, refused.error["message"]) == (
        429,
        "this key has 2 requests in flight with this one, whose choices need 1 more; its limit is 2",
    )
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


@pytest.mark.parametrize("stream", [False, True])
async def test_background_response_is_one_in_flight_until_it_ends(backend: FakeBackend, stream: bool) -> None:
    backend.script = silent
    admission = Admission([limited(requests_in_flight=1, tokens_per_minute=1000)], clock=Clock())
    app = make_app(backend, admission=admission)
    creator, other = ClientConnection(app), ClientConnection(app)
    creator.send(
        request_bytes(
            "POST",
            "/v1/responses",
            {"input": "hi", "background": True, "stream": stream, "max_output_tokens": 10},
            bearer("secret-a"),
        )
    )
    await backend.submitted.wait()
    if stream:
        creator.transport.reset()
    else:
        assert (await creator.response()).status == 200
    await creator.idle()
    other.send(request())
    assert (await other.response()).status == 429
    backend.streams[0].push(5, finish=Finish.LENGTH)
    backend.script = says("x")
    for _ in range(20):
        await asyncio.sleep(0)
    other.send(request())
    taken = await other.response()
    assert taken.status == 200
    used = len(backend.streams[0].request.token_ids) + 1 + taken.json()["usage"]["total_tokens"]
    assert int(ratelimit(taken)["remaining-tokens"]) == 1000 - used
    for connection in (creator, other):
        await connection.end()


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
    limiter = RateLimiter(UsageTable.alone(), [old, other], clock)
    account = limiter.account(old.salt)
    assert account is not None
    claim = account.admit()
    limiter.set_keys([limited(requests_per_minute=2)])
    assert limiter.account(other.salt) is None
    assert limiter.account(old.salt) is account
    assert dict(account.headers())[b"x-ratelimit-remaining-requests"] == b"1"
    claim.release()


@given(
    st.integers(1, 50),
    st.lists(st.tuples(st.floats(0, 200), st.booleans()), min_size=1, max_size=80),
)
def test_no_minute_exceeds_twice_the_limit_and_retry_after_is_right(
    limit: int, steps: list[tuple[float, bool]]
) -> None:
    clock = Clock()
    account = Account(limited(requests_per_minute=limit), UsageTable.alone(), clock)
    admitted: list[float] = []
    for pause_s, obeys in steps:
        clock.now_s += pause_s
        after_s = 0
        try:
            account.admit().release()
        except ApiError as error:
            after_s = int(dict(error.headers)[b"retry-after"])
        if after_s and obeys:
            clock.now_s += after_s
            account.admit().release()
        if obeys or not after_s:
            admitted.append(clock.now_s)
        assert after_s <= 120
        recent = [moment for moment in admitted if clock.now_s - moment < 60]
        assert len(recent) <= 2 * limit


def test_maximum_number_of_keys_are_counted_separately() -> None:
    table, clock = UsageTable.alone(), Clock()
    keys = [limited(str(number), requests_per_minute=MAX_LIMITED_KEYS) for number in range(MAX_LIMITED_KEYS)]
    limiter = RateLimiter(table, keys, clock)
    for number, key in enumerate(keys):
        account = limiter.account(key.salt)
        assert account is not None
        account.admit().settle(number)
    for key in keys:
        account = limiter.account(key.salt)
        assert account is not None
        assert dict(account.headers())[b"x-ratelimit-remaining-requests"] == b"%d" % (MAX_LIMITED_KEYS - 1)
