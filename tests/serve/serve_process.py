"""`penstock serve` as a process of a test."""

from __future__ import annotations

import http.client
import json
import queue
import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

from penstock.tools.processes import descendants, module_of


class Lines:
    """A pipe, read in the background so that its writer never blocks on the test."""

    def __init__(self, pipe: IO[str]) -> None:
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, args=(pipe,))
        self._thread.start()

    def _read(self, pipe: IO[str]) -> None:
        for line in pipe:
            self._lines.put(line)
        self._lines.put(None)

    def wait_for(self, text: str) -> None:
        seen = []
        while (line := self._lines.get()) is not None:
            seen.append(line)
            if text in line:
                return
        raise AssertionError(f"it ended without {text!r}: {''.join(seen)}")

    def next_nonempty(self, start: str = "") -> str:
        while (line := self._lines.get()) is not None:
            if (text := line.strip()) and text.startswith(start):
                return text
        raise AssertionError("it ended")

    def rest(self) -> str:
        """Wait for the end; return the lines that nobody has read yet."""
        return "".join(iter(self._lines.get, None))

    def join(self) -> None:
        self._thread.join()


@dataclass
class Serve:
    process: subprocess.Popen[str]
    port: int
    output: Lines
    errors: Lines

    def wait_until_ready(self) -> None:
        try:
            self.output.wait_for("Ready: ")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.errors.rest()}") from None

    def stop(self, signal_number: int = signal.SIGTERM) -> int:
        self.process.send_signal(signal_number)
        return self.process.wait()

    def pids(self, module: str) -> list[int]:
        return [pid for pid in descendants(self.process.pid) if module_of(pid) == module]

    def complete(self, key: str = "none") -> tuple[int, str]:
        """Return the status and text of one greedy completion."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
            body = {"model": "penstock-demo", "prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            reply = connection.getresponse()
            answer = json.loads(reply.read())
            return reply.status, answer["choices"][0]["text"] if reply.status == 200 else answer["error"]["code"]
        finally:
            connection.close()

    def complete_when_back(self) -> str:
        """Return the text once a process that has just died is back; until then requests may be refused or cut."""
        while True:
            try:
                status, text = self.complete()
            except (OSError, http.client.HTTPException):
                continue
            if status == 200:
                return text
            assert (status, text) == (503, "backend_unavailable")


Start = Callable[..., Serve]
