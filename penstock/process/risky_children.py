"""Children that do risky work: they may be killed at any time.

Each message to and from them is one packet of a SOCK_SEQPACKET socket, and they end when it closes.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec
from msgspec import Struct

from penstock.process.children import module_argv, stop_with_parent

_encoder = msgspec.msgpack.Encoder()
Message = TypeVar("Message", bound=Struct)


class ChannelClosed(Exception):
    """The other process has ended, or sent a message that was not expected."""


def start_child(
    module: str, environment: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a module of ours, with variables beside those of this process; return it with the socket to it.

    Raises OSError.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # Without preexec_fn this is a vfork: nothing of CUDA or torch runs in the child before exec.
        process = subprocess.Popen(
            module_argv(module, (str(theirs.fileno()), str(os.getpid()))),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            process_group=0,  # a terminal's Ctrl-C is for the parent
            env=None if environment is None else {**os.environ, **environment},
        )
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
    return process, ours


def begin_child(arguments: Sequence[str]) -> socket.socket:
    """Return a child's socket. arguments are its command line's: the socket's fd and the parent's process id."""
    stop_with_parent(signal.SIGKILL, int(arguments[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return socket.socket(fileno=int(arguments[0]))


def limit(kind: int, soft: int) -> None:
    """Set the soft limit, or the hard one if the process began with a lower one."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def send(channel: socket.socket, message: Struct, fds: Sequence[int] = ()) -> None:
    """Raises ChannelClosed; TimeoutError if the channel has a timeout."""
    try:
        if fds:
            socket.send_fds(channel, [_encoder.encode(message)], fds)
        else:
            channel.sendall(_encoder.encode(message))
    except TimeoutError:
        raise
    except OSError as error:
        raise ChannelClosed(str(error)) from None


def receive(channel: socket.socket, kind: type[Message], max_bytes: int) -> Message:
    """Raises ChannelClosed; TimeoutError if the channel has a timeout."""
    return receive_with_fds(channel, kind, max_bytes, 0)[0]


def receive_with_fds(
    channel: socket.socket, kind: type[Message], max_bytes: int, num_fds: int
) -> tuple[Message, list[int]]:
    """Return a message and the fds that came with it. Raises like `receive`."""
    try:
        data, fds, _, _ = socket.recv_fds(channel, max_bytes + 1, num_fds)
    except TimeoutError:
        raise
    except OSError as error:
        raise ChannelClosed(str(error)) from None
    return decode(data, kind, max_bytes), fds


def decode(data: bytes, kind: type[Message], max_bytes: int) -> Message:
    """Return the message in a packet. Raises ChannelClosed."""
    if not 0 < len(data) <= max_bytes:
        raise ChannelClosed("the end, or a message that is too long")
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ChannelClosed(f"not a {kind.__name__}: {error}") from None
