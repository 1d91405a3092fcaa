"""CORS headers, as the Fetch standard defines them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.frontend.access.admission import Admission
from penstock.frontend.main import read_access
from penstock.frontend.options import FrontendOptions
from tests.frontend.harness import ClientConnection, Response

CHAT = "/v1/chat/completions"
OURS, THEIRS = "https://chat.example.org", "https://evil.example.org"
BODY = {"messages": [{"role": "user", "content": "x"}]}


def allowed(response: Response) -> dict[str, str]:
    prefix = "access-control-"
    return {name.removeprefix(prefix): value for name, value in response.headers.items() if name.startswith(prefix)}


def preflight(origin: str, method: str = "POST", **more: str) -> list[tuple[str, str]]:
    headers = [("origin", origin), ("access-control-request-method", method)]
    return headers + [(f"access-control-request-{name}", value) for name, value in more.items()]


@pytest.mark.parametrize(
    ("origin", "is_one"),
    [
        ("*", True),
        (OURS, True),
        ("http://localhost:3000", True),
        ("https://xn--bcher-kva.example", True),
        ("http://[::1]:8080", True),
        ("chrome-extension://nkbihfbeogaeaoehlefnkodbefgpgknn", True),
        ("null", False),
        ("chat.example.org", False),
        (OURS + "/", False),
        (OURS.upper(), False),
        ("https://Chat.example.org", False),
        ("https://a.example,https://b.example", False),
        ("https://*.example.org", False),
        ("https://a b", False),
        ("https://a\r\nx: y", False),
    ],
)
def test_origin_that_no_browser_sends_is_refused_at_start(
    origin: str, is_one: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    options = FrontendOptions(cors_allow_origin=(origin,))
    if is_one:
        assert read_access(options, "frontend").cors_origins == (origin,)
        return
    with pytest.raises(SystemExit):
        read_access(options, "frontend")
    assert "is not an origin" in capsys.readouterr().err


async def test_without_allowed_origins_answers_have_no_cors_headers(connect: Callable[..., ClientConnection]) -> None:
    connection = connect()
    answer = await connection.request("GET", "/v1/models", headers=[("origin", OURS)])
    assert (answer.status, allowed(answer), "vary" in answer.headers) == (200, {}, False)
    refused = await connection.request("OPTIONS", CHAT, headers=preflight(OURS))
    assert (refused.status, allowed(refused)) == (405, {})


async def test_page_of_an_allowed_origin_may_read_answers_and_errors(
    connect: Callable[..., ClientConnection],
) -> None:
    connection = connect(admission=Admission(cors_origins=(OURS, "http://localhost:3000")))
    for origin in (OURS, "http://localhost:3000"):
        for path, status in (("/v1/models", 200), ("/none", 404)):
            answer = await connection.request("GET", path, headers=[("origin", origin)])
            assert answer.status == status
            assert allowed(answer)["allow-origin"] == origin
            assert "x-request-id" in allowed(answer)["expose-headers"]
            assert "allow-credentials" not in allowed(answer)
            assert answer.headers["vary"] == "origin"
    stream = await connection.request("POST", CHAT, {**BODY, "stream": True}, [("origin", OURS)])
    assert (stream.events()[-1], allowed(stream)["allow-origin"]) == ("[DONE]", OURS)


@pytest.mark.parametrize("origin", [THEIRS, "null", OURS + "x", OURS.upper(), "http://chat.example.org", ""])
async def test_page_of_another_origin_may_not_read_answers(
    connect: Callable[..., ClientConnection], origin: str
) -> None:
    connection = connect(admission=Admission(cors_origins=(OURS,)))
    answer = await connection.request("GET", "/v1/models", headers=[("origin", origin)])
    assert (answer.status, allowed(answer), answer.headers["vary"]) == (200, {}, "origin")
    assert (await connection.request("OPTIONS", CHAT, headers=preflight(origin))).status == 405


async def test_preflight_is_answered_before_any_key(connect: Callable[..., ClientConnection]) -> None:
    connection = connect(admission=Admission(cors_origins=(OURS,)))
    requested = "authorization,content-type, x-stainless-lang"
    answer = await connection.request("OPTIONS", CHAT, headers=preflight(OURS, headers=requested))
    assert (answer.status, answer.body) == (204, b"")
    assert allowed(answer) == {
        "allow-origin": OURS,
        "allow-methods": "POST",
        "allow-headers": requested,
        "max-age": "600",
        "expose-headers": allowed(answer)["expose-headers"],
    }
    unknown = await connection.request("OPTIONS", "/none", headers=preflight(OURS))
    assert (unknown.status, allowed(unknown)["allow-origin"]) == (404, OURS)
    plain = await connection.request("OPTIONS", CHAT, headers=[("origin", OURS)])
    assert plain.status == 405


@pytest.mark.parametrize("requested", ["x" * 2049, "a:b", "x\x7f"])
async def test_strange_header_names_are_not_echoed(connect: Callable[..., ClientConnection], requested: str) -> None:
    connection = connect(admission=Admission(cors_origins=(OURS,)))
    answer = await connection.request("OPTIONS", CHAT, headers=preflight(OURS, headers=requested))
    assert answer.status == 400 or "allow-headers" not in allowed(answer)


@pytest.mark.parametrize("origin", [THEIRS, "null"])
async def test_star_allows_every_origin(connect: Callable[..., ClientConnection], origin: Any) -> None:
    connection = connect(admission=Admission(cors_origins=("*",)))
    answer = await connection.request("POST", CHAT, BODY, [("origin", origin)])
    assert (answer.status, allowed(answer)["allow-origin"]) == (200, "*")
    assert (await connection.request("OPTIONS", CHAT, headers=preflight(origin))).status == 204
