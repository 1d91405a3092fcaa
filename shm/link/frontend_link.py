"""The frontend's end of the link: sends requests, receives StepOutputs."""

from __future__ import annotations

import os
from contextlib import ExitStack

import zmq

from penstock.shm.link.listening_address import connectable_path
from penstock.shm.link.zmq_sockets import MAX_REQUESTS_IN_FLIGHT, new_socket, receive
from penstock.shm.messages import (
    MAX_TO_FRONTEND_BYTES,
    StepOutputs,
    ToBackend,
    Welcome,
    WireError,
    decode_to_frontend,
    encode,
)

_ONE_PART = 1


class LinkBroken(Exception):
    """The backend's messages are inconsistent: one is missing, malformed or has too many parts."""


class FrontendLink:
    """Watch `fd` for reading and `drain` at each wake: the fd is edge-triggered.

    ZMQ_IMMEDIATE is off: with it, a disconnection discards messages that are received but not read yet. Without it,
    messages to a dead backend queue up here until the control socket ends and the link is closed.
    """

    def __init__(self, welcome: Welcome, message_socket_fd: int) -> None:
        """Begin to connect. The fd (O_PATH) stays the caller's, and may be closed. Raises OSError."""
        self._next_sequence = 0
        self._has_sent = False  # since the last drain
        with ExitStack() as opened:
            # ZeroMQ's thread connects, now or later, so the fd lives as long as the context.
            fd = os.dup(message_socket_fd)
            opened.callback(os.close, fd)
            context = zmq.Context()
            opened.callback(context.term)
            try:
                self._socket = new_socket(
                    context,
                    zmq.DEALER,
                    max_unsent=MAX_REQUESTS_IN_FLIGHT,
                    max_unread=4 * welcome.credit,
                    max_message_bytes=MAX_TO_FRONTEND_BYTES,
                )
                opened.callback(self._socket.close)
                self._socket.setsockopt(zmq.IDENTITY, welcome.identity)
                self._socket.connect(f"ipc://{connectable_path(fd)}")
            except zmq.ZMQError as error:
                raise OSError(error.errno, str(error)) from None
            self._opened = opened.pop_all()
        self.fd = int(self._socket.getsockopt(zmq.FD))

    def send(self, message: ToBackend) -> bool:
        """False while the link is full; `fd` wakes when that changes. Check `needs_drain` afterwards."""
        self._has_sent = True
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    @property
    def needs_drain(self) -> bool:
        """Messages are waiting and a send may have consumed the fd's wake-up. Check after each send.

        Without a send since the last `drain` the fd still wakes, and the check, which takes 3 µs, is skipped.
        """
        return self._has_sent and bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def drain(self, max_messages: int | None = None) -> list[StepOutputs]:
        """All messages that have arrived, or the first max_messages; then call again, because `fd` does not wake.

        Raises LinkBroken; then the link is unusable.
        """
        outputs: list[StepOutputs] = []
        while len(outputs) != max_messages:
            if (parts := receive(self._socket, _ONE_PART)) is None:
                self._has_sent = False
                break
            if len(parts) != _ONE_PART:
                raise LinkBroken(f"a message of {len(parts)} parts, expected 1")
            try:
                output = decode_to_frontend(parts[0])
            except WireError as error:
                raise LinkBroken(str(error)) from None
            if output.sequence != self._next_sequence:
                raise LinkBroken(f"message {output.sequence} arrived, expected {self._next_sequence}")
            self._next_sequence += 1
            outputs.append(output)
        return outputs

    def close(self) -> None:
        self._opened.close()
