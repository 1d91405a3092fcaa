"""Has pictures decoded and processed by a child of this worker, in turns between tenants, and keeps the latest results.

The child forks for each picture. A fork that takes too much time or memory ends, and so does one whose picture nobody
waits for any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import subprocess
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

import msgspec

from penstock.frontend.pictures.messages import (
    CPU_TIME_S,
    MAX_MESSAGE_BYTES,
    MEMORY_BYTES,
    READY,
    PictureJob,
    PictureResult,
)
from penstock.frontend.transport.errors import ApiError, ErrorKind, invalid, retry_later
from penstock.process.admission import TenantPlaces
from penstock.process.risky_children import ChannelClosed, decode, send, start_child
from penstock.process.supervisor import describe_end

if TYPE_CHECKING:
    from penstock.frontend.pictures.remote import RemotePictures

logger = logging.getLogger("penstock.pictures")

_CHILD = "penstock.frontend.pictures.child"
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
_NUM_AT_ONCE = 4
_MAX_PER_TENANT = _NUM_AT_ONCE - 1
"""Forks that one tenant may keep busy."""
_MAX_WAITING = 128
"""Pictures of one tenant that are in work or wait; all tenants together have at most twice as many."""
_RETRY_AFTER_S = 2
_MAX_ATTEMPTS = 2
"""A picture whose child was killed from outside is tried once more."""
_KEPT_BYTES = 64 << 20
_OVER_LIMITS = (
    f"decoding it takes more than the limit of {CPU_TIME_S:g} s of CPU time or {MEMORY_BYTES >> 20} MiB of memory"
)


@dataclass(frozen=True, slots=True)
class EncodedPicture:
    """A picture as the client sends it, or as a host has answered."""

    path: str
    """The body's name of it, for errors."""
    data: bytes
    is_base64: bool
    media_type: str = ""


@dataclass(frozen=True, slots=True)
class ProcessedPicture:
    result: PictureResult
    pixels: bytes


class PictureWorkshop:
    """One per worker. The child starts with the first picture, and stays."""

    def __init__(self, remote: RemotePictures | None = None) -> None:
        """remote fetches pictures from other hosts; without it these are refused."""
        self._remote = remote
        self._child: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._is_ready: asyncio.Task[bytes] | None = None
        """Ends when the child has done its imports."""
        self._places = TenantPlaces(_MAX_WAITING)
        self._turns, self._fetching = _Turns(), _Turns()
        self._kept: OrderedDict[bytes, ProcessedPicture] = OrderedDict()
        """The latest results, oldest first: a conversation sends its pictures again with each turn."""
        self._kept_bytes = 0

    @contextlib.contextmanager
    def place(self, path: str, tenant: bytes) -> Iterator[None]:
        """Hold a place among the pictures that are in work or wait. Raises ApiError."""
        if not self._places.has(tenant):
            message = f"{path}: {_MAX_WAITING} pictures are waiting, the limit; retry later"
            raise retry_later(ErrorKind.OVERLOADED, message, _RETRY_AFTER_S)
        self._places.take(tenant)
        try:
            yield
        finally:
            self._places.release(tenant)

    def fetching(self, tenant: bytes) -> AbstractAsyncContextManager[None]:
        """Wait for a turn to fetch a picture and to have it processed: so few fetched files wait to be decoded."""
        return self._fetching.of(tenant)

    async def fetch(self, path: str, url: str) -> tuple[bytes, str]:
        """Return the bytes and the media type of a picture elsewhere. Raises ApiError."""
        if self._remote is None:
            kind = url.partition("://")[0].lower()
            if kind not in ("http", "https"):
                invalid(path, "must be a data URI, such as data:image/png;base64,…")
            message = "pictures from other hosts are refused; send a data URI, or start the server with"
            raise ApiError(ErrorKind.UNSUPPORTED_FIELD, f"{path}: {message} --allow-remote-images HOST", param=path)
        return await self._remote.fetch(path, url)

    async def process(self, picture: EncodedPicture, job: PictureJob, tenant: bytes) -> ProcessedPicture:
        """Raises ApiError."""
        key = await asyncio.to_thread(_key, picture, job, tenant)
        if (kept := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return kept
        async with self._turns.of(tenant):
            processed = await self._run(picture, job)
        self._keep(key, processed)
        return processed

    def close(self) -> None:
        """Kill the child, and with it its forks."""
        if self._child is not None:
            process, channel = self._child
            channel.close()
            process.kill()
            process.wait()
            self._child = None

    async def _run(self, picture: EncodedPicture, job: PictureJob) -> ProcessedPicture:
        result, memory = await self._result(picture, job)
        if result.error and result.is_client_fault:
            invalid(picture.path, result.error)
        num_bytes = math.prod(result.shape)
        pixels = await asyncio.to_thread(memory.read, num_bytes)
        if result.error or len(pixels) != num_bytes:
            raise _unable(picture.path, result.error or "a fork has written too few pixels")
        return ProcessedPicture(result, pixels)

    async def _result(self, picture: EncodedPicture, job: PictureJob) -> tuple[PictureResult, _Memory]:
        reason = ""
        for _ in range(_MAX_ATTEMPTS):
            try:
                memory = _Memory()
                await asyncio.to_thread(memory.write, picture.data)
                child, channel = self._living_child()
                if self._is_ready is not None:
                    await asyncio.shield(self._is_ready)
                data = await self._exchange(channel, job, memory.fd)
                if data:
                    return decode(data, PictureResult, MAX_MESSAGE_BYTES), memory
                if child.poll() is None:
                    return PictureResult(_OVER_LIMITS), memory
                reason = f"the child {describe_end(child.returncode)}"
            except (ChannelClosed, OSError) as error:
                reason = str(error)
        raise _unable(picture.path, reason)

    @staticmethod
    async def _exchange(channel: socket.socket, job: PictureJob, memory: int) -> bytes:
        """Return the encoded result; empty if the fork has ended without one. Cancelling it ends the fork. Raises
        ChannelClosed."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                send(channel, job, (memory, theirs.fileno()))
            ours.setblocking(False)
            return await asyncio.get_running_loop().sock_recv(ours, MAX_MESSAGE_BYTES + 1)

    def _living_child(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Return the child and its socket; start a child if there is none. Raises OSError."""
        if self._child is None or self._child[0].poll() is not None:
            self.close()
            self._child = start_child(_CHILD, _ENVIRONMENT)
            channel = self._child[1]
            channel.setblocking(False)
            self._is_ready = asyncio.create_task(_read_packet(channel))
        return self._child

    def _keep(self, key: bytes, processed: ProcessedPicture) -> None:
        self._kept_bytes += len(processed.pixels)
        if (before := self._kept.pop(key, None)) is not None:  # processed twice at the same time
            self._kept_bytes -= len(before.pixels)
        self._kept[key] = processed
        while self._kept_bytes > _KEPT_BYTES:
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= len(oldest.pixels)


class _Memory:
    """Shared with a fork. It is closed with the last reference: a thread may use it longer than the task."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("penstock-picture")

    def __del__(self) -> None:
        os.close(self.fd)

    def write(self, data: bytes) -> None:
        os.pwrite(self.fd, data, 0)

    def read(self, num_bytes: int) -> bytes:
        return os.pread(self.fd, num_bytes, 0)


async def _read_packet(channel: socket.socket) -> bytes:
    return await asyncio.get_running_loop().sock_recv(channel, len(READY))


def _unable(path: str, reason: str) -> ApiError:
    logger.error("cannot process pictures: %s", reason)
    return ApiError(ErrorKind.INTERNAL, f"{path}: this server cannot process pictures; its log says why")


def _key(picture: EncodedPicture, job: PictureJob, tenant: bytes) -> bytes:
    """Tenants share no results: a time of answering would tell one what another has sent."""
    return sha256(b"%b%b%b" % (msgspec.msgpack.encode((tenant, job)), b"\0", picture.data)).digest()


class _Turns:
    """Lets tenants work in turns, each with up to _MAX_PER_TENANT pictures at a time."""

    def __init__(self) -> None:
        self._num_running: Counter[bytes] = Counter()
        self._waiting: OrderedDict[bytes, deque[asyncio.Future[None]]] = OrderedDict()
        """Tenants with waiting pictures; the next in turn is first."""

    @contextlib.asynccontextmanager
    async def of(self, tenant: bytes) -> AsyncIterator[None]:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        self._begin()
        try:
            await turn
            yield
        finally:
            if not turn.cancelled():  # it had begun
                self._num_running[tenant] -= 1
            self._begin()

    def _begin(self) -> None:
        while self._num_running.total() < _NUM_AT_ONCE and (tenant := self._next()) is not None:
            self._num_running[tenant] += 1
            self._waiting[tenant].popleft().set_result(None)
            self._waiting.move_to_end(tenant)
        self._num_running += Counter()  # forgets those without any

    def _next(self) -> bytes | None:
        for tenant, queue in list(self._waiting.items()):
            while queue and queue[0].done():  # cancelled
                queue.popleft()
            if not queue:
                del self._waiting[tenant]
            elif self._num_running[tenant] < _MAX_PER_TENANT:
                return tenant
        return None
