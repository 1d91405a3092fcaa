"""Pictures from other hosts: which are fetched, and that no address of a private network can be reached."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from penstock.frontend.pictures import remote as remote_module
from penstock.frontend.pictures.remote import RemotePictures, is_public
from penstock.frontend.transport.errors import ApiError


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.215.14", True),
        ("2606:2800:21f:cb07:6820:80da:af6b:8b2c", True),
        ("::ffff:93.184.215.14", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),  # where clouds answer with secrets
        ("168.63.129.16", False),
        ("192.0.0.192", False),
        ("fec0::1", False),
        ("64:ff9b:1::a9fe:a9fe", False),
        ("::127.0.0.1", False),
        ("::ffff:0:127.0.0.1", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),  # noqa: S104
        ("224.0.0.1", False),
        ("::1", False),
        ("::", False),
        ("fe80::1%eth0", False),
        ("fc00::1", False),
        ("::ffff:127.0.0.1", False),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
    ],
)
def test_only_addresses_of_the_internet_are_public(address: str, public: bool) -> None:
    assert is_public(address) is public


Answer = Callable[[str], bytes]


@contextlib.asynccontextmanager
async def host(answer: Answer) -> AsyncIterator[tuple[str, list[str]]]:
    """A host that answers a request's head, or nothing; yield its address and the heads."""
    heads: list[str] = []
    tasks: list[asyncio.Task[Any]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        heads.append(head)
        with contextlib.suppress(ConnectionError):
            writer.write(answer(head))
            await reader.read() if not answer(head) else await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", heads
        await asyncio.gather(*tasks)


def ok(data: bytes, **headers: str) -> bytes:
    lines = {"content-type": "image/png", "content-length": str(len(data)), "connection": "close"} | headers
    return b"HTTP/1.1 200 OK\r\n" + "".join(f"{n}: {v}\r\n" for n, v in lines.items()).encode() + b"\r\n" + data


def redirect(to: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nlocation: {to}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode()


async def refusal(pictures: RemotePictures, url: str) -> str:
    with pytest.raises(ApiError) as refused:
        await pictures.fetch("image_url", url)
    assert refused.value.param == "image_url"
    return refused.value.message.removeprefix("image_url: ")


async def test_picture_of_an_allowed_host_is_fetched_through_redirects() -> None:
    def answer(head: str) -> bytes:
        return ok(b"pixels") if head.startswith("GET /b?c=d ") else redirect("/b?c=d")

    async with host(answer) as (address, heads):
        found = await RemotePictures((address,)).fetch("image_url", f"http://{address}/a")
    assert found == (b"pixels", "image/png")
    assert all(f"\r\nhost: {address}\r\n" in head.lower() for head in heads)
    assert not any("cookie" in head.lower() or "authorization" in head.lower() for head in heads)


async def test_other_hosts_and_what_redirects_to_them_are_refused() -> None:
    async with host(lambda _: redirect("http://localhost:1/x")) as (address, _):
        pictures = RemotePictures((address, "example.org", "*.example.net"))
        assert await refusal(pictures, f"http://{address}/") == (
            '"localhost:1" is not among the hosts of --allow-remote-images'
        )
    for url in ("http://example.com/", "http://example.net/", "https://example.org:444/", "http://a.example.org/"):
        assert "is not among the hosts of --allow-remote-images" in await refusal(pictures, url)
    for url in ("ftp://example.org/", "http://user@example.org/", "/etc/passwd", "http://", "http://[", "file:///x"):
        assert await refusal(pictures, url)


async def test_name_with_a_private_address_is_refused_and_the_checked_address_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    addresses = ["127.0.0.1"]
    asked: list[str] = []

    async def getaddrinfo(name: str, port: int, **_: Any) -> list[Any]:
        asked.append(name)
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, port)) for address in addresses]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    everywhere = RemotePictures(("*", "rebound.example"))
    for name in ("rebound.example", "other.example", "127.0.0.1", "2130706433"):
        assert "has an address of a private network" in await refusal(everywhere, f"http://{name}/")
    addresses = ["93.184.215.14", "10.0.0.1"]
    assert "has an address of a private network" in await refusal(everywhere, "http://rebound.example/")
    async with host(lambda _: ok(b"pixels")) as (address, heads):
        port = address.partition(":")[2]
        addresses = ["127.0.0.1"]
        monkeypatch.setattr(remote_module, "is_public", lambda _: True)
        asked.clear()
        await RemotePictures((f"rebound.example:{port}",)).fetch("image_url", f"http://rebound.example:{port}/")
    assert asked[0] == "rebound.example"
    assert set(asked[1:]) <= {"127.0.0.1"}  # the connection asks for no name again
    assert f"host: rebound.example:{port}" in heads[0].lower()


async def test_size_time_and_redirects_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_module, "MAX_REMOTE_BYTES", 1000)
    async with host(lambda _: ok(bytes(1001))) as (address, _):
        message = await refusal(RemotePictures((address,)), f"http://{address}/")
        assert message == "larger than 1000 bytes, the limit for pictures from other hosts"
    async with host(lambda _: b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n") as (address, _):
        assert await refusal(RemotePictures((address,)), f"http://{address}/") == "the host answers with status 404"
    async with host(lambda _: redirect("/")) as (address, heads):
        assert await refusal(RemotePictures((address,)), f"http://{address}/") == "more than 3 redirects, the limit"
        assert len(heads) == 4
    async with host(lambda _: b"") as (address, _):
        message = await refusal(RemotePictures((address,), timeout_s=0.2), f"http://{address}/")
    assert message == "the host takes longer than the limit of 0.2 s"
