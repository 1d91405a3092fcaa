"""Accepts connections from the listening socket that workers share, in turns that `accept_table` decides."""

from __future__ import annotations

import asyncio
import errno
import logging
import select
import socket
from collections.abc import Callable

from penstock.frontend.transport.serving.accept_table import AcceptTable
from penstock.frontend.transport.serving.listening import BACKLOG

logger = logging.getLogger("penstock.acceptor")

_LOOKS_AGAIN_AFTER_S = 0.001
_WAITS_AT_MOST_S = 0.005
"""A connection is left this long for a worker with fewer connections. Then it is taken, and the next one is left."""
_MAX_AT_ONCE = 8
"""Connections accepted in a turn of the event loop.

Refused connections keep their descriptors for some more turns: together they must fit `connections.RESERVED_FDS`.
"""
_PAUSE_S = 0.1
"""Pause after the system has refused to accept, for lack of file descriptors or memory."""
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class SharedAcceptor:
    """Replaces an `asyncio.Server`. The listening socket wakes every worker; those with more connections leave it alone
    for some milliseconds."""

    def __init__(
        self, listening: socket.socket, table: AcceptTable, new_connection: Callable[[], asyncio.Protocol]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listening = listening
        self._table = table
        self._new_connection = new_connection
        self._left_since_s = 0.0
        """The time since which a connection is left for another worker; 0 while none is."""
        self._timer: asyncio.TimerHandle | None = None
        self._starting: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._poll = select.poll()
        self._poll.register(listening, select.POLLIN)
        listening.setblocking(False)

    def start(self) -> None:
        self._table.open()
        self._loop.add_reader(self._listening, self._look)

    def close(self) -> None:
        """Stop accepting.

        Waiting connections stay in the socket for other workers. The last worker takes them, because the kernel resets
        connections that wait in a closed socket.
        """
        if not self._is_closed:
            self._is_closed = True
            self._table.close()
            if not self._table.has_others:
                self._accept_all()
            self._loop.remove_reader(self._listening)
            if self._timer is not None:
                self._timer.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._starting, return_exceptions=True)

    def _look(self) -> None:
        """Accept the connections that wait, as long as it is this worker's turn."""
        for _ in range(_MAX_AT_ONCE):
            if not self._table.may_accept():
                now_s = self._loop.time()
                self._left_since_s = self._left_since_s or now_s
                if now_s - self._left_since_s < _WAITS_AT_MOST_S:
                    self._look_later(_LOOKS_AGAIN_AFTER_S)
                    return
                self._table.note_wait_in_vain()
            self._left_since_s = 0.0
            if not self._accept():
                return

    def _accept_all(self) -> None:
        for _ in range(BACKLOG):
            if not self._accept():
                return

    def _look_later(self, delay_s: float) -> None:
        self._loop.remove_reader(self._listening)
        self._timer = self._loop.call_later(delay_s, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        if self._poll.poll(0):
            self._look()
        else:
            self._left_since_s = 0.0
        if self._timer is None and not self._is_closed:
            self._loop.add_reader(self._listening, self._look)

    def _accept(self) -> bool:
        """Accept a connection. Return whether another may be accepted at once."""
        try:
            connection, _ = self._listening.accept()
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            if error.errno not in _SCARCE:
                logger.debug("a connection ended before it was accepted: %s", error)
                return True
            logger.error("cannot accept connections: %s; trying again in %g s", error.strerror, _PAUSE_S)
            self._look_later(_PAUSE_S)
            return False
        connection.setblocking(False)
        self._table.add_starting(1)
        task = self._loop.create_task(self._begin(connection))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)
        return True

    async def _begin(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._new_connection, connection)
        except OSError as error:  # the client has closed it already
            connection.close()
            logger.debug("a connection ended before it began: %s", error)
        finally:
            self._table.add_starting(-1)
