"""The frontend of 100 streams is killed, and their clients read every byte at another one."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import httpx
import msgspec

from tests.system.completions import body, client, metric
from tests.system.processes import Frontend, running, start_backend, wait_until

if TYPE_CHECKING:
    from pathlib import Path

NUM_STREAMS = 100
NUM_TOKENS = 30


class Reader:
    """One client. It keeps whole events only, as clients of event streams do."""

    def __init__(self, http: httpx.AsyncClient, number: int) -> None:
        self.http = http
        self.request = body([5, number], NUM_TOKENS, seed=number, temperature=1.0, stream=True)
        self.stream = ""
        self.events: list[bytes] = []
        self.has_begun = asyncio.Event()
        self.is_cut = False

    async def begin(self, url: str) -> None:
        """Read until the connection breaks, or to the end."""
        headers = {"X-Penstock-Linger": "60"}
        try:
            async with self.http.stream(
                "POST", f"{url}/v1/completions", json=self.request, headers=headers
            ) as response:
                self.stream = response.headers["x-penstock-stream"]
                await self._read(response)
        except httpx.TransportError:
            self.is_cut = True

    async def go_on(self, url: str) -> None:
        last = self.events[-1].split(b"\n")[0].removeprefix(b"id: ").decode()
        async with self.http.stream(
            "GET", f"{url}/v1/streams/{self.stream}", headers={"Last-Event-ID": last}
        ) as response:
            assert response.status_code == 200, await response.aread()
            await self._read(response)

    async def _read(self, response: httpx.Response) -> None:
        unread = b""
        async for data in response.aiter_raw():
            *whole, unread = (unread + data).split(b"\n\n")
            self.events += [event for event in whole if not event.startswith(b":")]
            if len(self.events) > 5:
                self.has_begun.set()


async def test_killed_frontend_costs_its_clients_no_byte(tmp_path: Path) -> None:
    socket = tmp_path / "private" / "backend.sock"
    slow = ("--forward-pass", "tests.passes:SlowestFakePass", "--kv-budget", "64MB")
    backend = start_backend(socket, *slow, "--max-running", "128")
    doomed, other = Frontend(socket), Frontend(socket)
    with running(doomed, other, backend):
        for frontend in (doomed, other):
            await asyncio.to_thread(frontend.wait_ready)
        async with client() as http:
            readers = [Reader(http, number) for number in range(NUM_STREAMS)]
            reading = [asyncio.create_task(reader.begin(doomed.url)) for reader in readers]
            for reader in readers:
                await reader.has_begun.wait()
            doomed.kill()
            await asyncio.gather(*reading)
            assert any(reader.is_cut for reader in readers)
            await asyncio.gather(*(reader.go_on(other.url) for reader in readers))
            for reader in readers:  # the whole stream again, from its beginning: nothing undisturbed is different
                whole = await http.get(f"{other.url}/v1/streams/{reader.stream}")
                assert whole.content == b"".join(event + b"\n\n" for event in reader.events)
                assert reader.events[-1].endswith(b"data: [DONE]")
            fresh = [await http.post(f"{other.url}/v1/completions", json=reader.request) for reader in readers[:3]]
            for reader, response in zip(readers, fresh, strict=False):
                assert _text(response.content.split(b"\n\n")) == _text(reader.events)
            assert metric(other, "penstock_streams_reattached_total") == 2 * NUM_STREAMS
            stranger = await http.get(f"{other.url}/v1/streams/{readers[0].stream[:-1]}")
            assert stranger.status_code == 404
            for reader in readers:
                dropped = await http.delete(f"{other.url}/v1/streams/{reader.stream}")
                assert dropped.status_code == 200
            await asyncio.to_thread(wait_until, lambda: metric(other, "penstock_lingering_streams") == 0, 20.0)
            await asyncio.to_thread(other.wait_idle)


def _text(events: list[bytes]) -> str:
    """The answer's text, however many tokens an event has."""
    data = [event.partition(b"data: ")[2] for event in events]
    chunks = [msgspec.json.decode(line) for line in data if line.startswith(b"{")]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)
