"""One `penstock serve` on a node of the cluster, and its actor's report. Knows nothing of Ray."""

from __future__ import annotations

import functools
import http.client
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.process.children import module_argv, stop_with_parent
from penstock.serve.fleet.cluster import Phase, Report, Server

_READY = re.compile(r"Ready: http://\S+:(\d{1,5})/v1\s*")
_CHECK_EVERY_S = 1.0
_CHECK_TIMEOUT_S = 2.0
UNREADY_LIMIT_S = 600.0
"""`penstock serve` replaces processes that die or hang, and a model may take minutes to load.

After this time without /ready it is considered hung as a whole.
"""
_RESTART_STATUS = 1


class _Counts(msgspec.Struct):
    """The part of /ready's body that is needed here."""

    running: int = 0
    waiting: int = 0


class ServerProcess:
    """A server's process. It belongs to an actor.

    Create it in the actor's main thread: when that ends, the server is killed. If the server dies after it was ready,
    or is hung, the actor's process ends, and Ray starts it again.
    """

    def __init__(
        self, number: int, options: Sequence[str], environment: Mapping[str, str], *, host: str, node_id: str
    ) -> None:
        """options are those of `penstock serve`; host is the node's address, on which the server listens."""
        self._number, self._host, self._node_id = number, host, node_id
        self._server: Server | None = None
        self._num_open = 0
        self._is_told_to_end = False
        self._last_line = ""
        own = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}  # Ray sets it to 1
        number_option = ("--server-number", str(number))
        self._process = subprocess.Popen(
            module_argv("penstock.main", ["serve", "--host", host, *number_option, *options]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=own | dict(environment),
            preexec_fn=functools.partial(stop_with_parent, signal.SIGKILL),
        )
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._read_errors, self._read_output, self._check)
        ]
        for thread in self._threads:
            thread.start()

    def report(self) -> dict[str, Any]:
        """Return a Report in plain types."""
        ended = self._process.poll() is not None
        if self._is_told_to_end:
            phase = Phase.ENDED if ended else Phase.DRAINING
        elif ended:
            phase = Phase.FAILED
        else:
            phase = Phase.STARTING if self._server is None else Phase.UP
        report = Report(phase, self._node_id, self._server, self._num_open, self._last_line if ended else "")
        plain: dict[str, Any] = msgspec.to_builtins(report)
        return plain

    def drain(self) -> None:
        """Let the server finish its streams and end."""
        self._is_told_to_end = True
        self._process.terminate()

    def kill(self) -> None:
        self._is_told_to_end = True
        self._process.kill()

    def _read_errors(self) -> None:
        """Pass the server's log on to the actor's, which Ray keeps."""
        assert self._process.stderr is not None  # noqa: S101 - a pipe was asked for
        with self._process.stderr as lines:
            for line in lines:
                self._last_line = line.strip() or self._last_line
                sys.stderr.write(line)

    def _read_output(self) -> None:
        assert self._process.stdout is not None  # noqa: S101 - a pipe was asked for
        with self._process.stdout as lines:
            for line in lines:
                if self._server is None and (found := _READY.fullmatch(line)):
                    self._server = Server(self._number, self._host, int(found[1]))
        self._threads[0].join()  # so that the last line is known when the end is
        self._process.wait()
        if self._server is not None and not self._is_told_to_end:
            print(
                f"server {self._number} has ended with status {self._process.returncode}", file=sys.stderr, flush=True
            )
            os._exit(_RESTART_STATUS)

    def _check(self) -> None:
        ready_s = time.monotonic()
        while self._process.poll() is None:
            time.sleep(_CHECK_EVERY_S)
            if self._server is None:
                ready_s = time.monotonic()
            elif (counts := _ask(self._server)) is not None:
                ready_s, self._num_open = time.monotonic(), counts.running + counts.waiting
            elif time.monotonic() - ready_s > UNREADY_LIMIT_S and not self._is_told_to_end:
                print(
                    f"server {self._number} has not been ready for {UNREADY_LIMIT_S:.0f} s", file=sys.stderr, flush=True
                )
                os._exit(_RESTART_STATUS)


def _ask(server: Server) -> _Counts | None:
    """Return the body of /ready; None unless it is green."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=_CHECK_TIMEOUT_S)
    try:
        connection.request("GET", "/ready")
        response = connection.getresponse()
        return msgspec.json.decode(response.read(), type=_Counts) if response.status == 200 else None
    except (OSError, http.client.HTTPException, msgspec.MsgspecError):
        return None
    finally:
        connection.close()
