"""Tells routers which pages of the KV cache hold which tokens, in the format of vLLM's KV events.

Each message has three frames: topic, sequence number (8 bytes, big-endian), and a msgpack array of time, events and
rank. llm-d's indexer and other cache-aware routers subscribe. See
https://docs.vllm.ai/en/latest/api/vllm/distributed/kv_events.html.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable

import msgspec
import zmq
from msgspec import Struct

_MAX_QUEUED_MESSAGES = 1000
"""Messages that wait for a slow subscriber. It misses those beyond, and sees the gap in their numbers."""
_HASH_BYTES = 8
"""Bytes of a page's hash that are sent: the format's integers have 64 bits."""


class _Stored(Struct, frozen=True, array_like=True, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: array[int]
    block_size: int
    lora_id: None
    medium: str


class _Removed(Struct, frozen=True, array_like=True, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str


class CannotPublish(Exception):
    """The endpoint cannot be used. The message names it and says why."""


class KvEventPublisher:
    """Collects events and sends those of a turn in one message. Used by one thread; sending never waits."""

    def __init__(
        self, endpoint: str, topic: str, page_size_tokens: int, *, medium: str, clock: Callable[[], float] = time.time
    ) -> None:
        """endpoint is a ZeroMQ address to bind, such as tcp://*:5557. medium is "CPU" or "GPU". Raises
        CannotPublish."""
        self._topic = topic.encode()
        self._page_size_tokens = page_size_tokens
        self._medium = medium
        self._clock = clock
        self._events: list[_Stored | _Removed] = []
        self._next_number = 0
        self._encoder = msgspec.msgpack.Encoder(enc_hook=list)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, _MAX_QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise CannotPublish(f"{endpoint} cannot be used: {error.strerror or error}") from error

    @property
    def endpoint(self) -> str:
        """The bound endpoint, with the port that the system chose if none was given."""
        return str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def note_stored(self, page_hash: bytes, parent_hash: bytes, salt: bytes, content: bytes) -> None:
        """Note that a full page can be found from now on.

        parent_hash is the hash of the page before it, or the salt for a first page. content is the page's tokens
        (int32).
        """
        parent = None if parent_hash == salt else _number(parent_hash)
        tokens = array("i", content)
        last = self._events[-1] if self._events else None
        if isinstance(last, _Stored) and last.block_hashes[-1] == parent:
            last.block_hashes.append(_number(page_hash))
            last.token_ids.extend(tokens)
        else:
            stored = _Stored([_number(page_hash)], parent, tokens, self._page_size_tokens, None, self._medium)
            self._events.append(stored)

    def note_removed(self, page_hash: bytes) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, _Removed):
            last.block_hashes.append(_number(page_hash))
        else:
            self._events.append(_Removed([_number(page_hash)], self._medium))

    def publish(self) -> None:
        """Send the events since the last call, if there are any."""
        if not self._events:
            return
        payload = self._encoder.encode((self._clock(), self._events, 0))
        self._events = []
        # A PUB socket drops what a slow subscriber has no room for, so this returns at once.
        self._socket.send_multipart((self._topic, self._next_number.to_bytes(8, "big"), payload), flags=zmq.NOBLOCK)
        self._next_number += 1

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def _number(page_hash: bytes) -> int:
    return int.from_bytes(page_hash[:_HASH_BYTES], "big")
