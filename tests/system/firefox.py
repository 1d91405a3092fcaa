"""Firefox without a driver: it speaks WebDriver BiDi (W3C) itself, over a WebSocket."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import subprocess
from typing import TYPE_CHECKING, Any

from websockets.sync.client import ClientConnection, connect

from penstock.process.children import find_program

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FIREFOX = find_program("firefox-esr")
_LISTENS = re.compile(r"WebDriver BiDi listening on (ws://\S+)")
_TIMEOUT_S = 60.0


class Firefox:
    """One tab."""

    def __init__(self, socket: ClientConnection) -> None:
        self.errors: list[str] = []
        """What the console of the page shows as errors."""
        self._socket = socket
        self._ids = itertools.count(1)
        self._call("session.new", capabilities={})
        self._call("session.subscribe", events=["log.entryAdded"])
        self._tab = self._call("browsingContext.getTree")["contexts"][0]["context"]

    def open(self, url: str) -> None:
        self._call("browsingContext.navigate", context=self._tab, url=url, wait="complete")

    def reload(self) -> None:
        self._call("browsingContext.reload", context=self._tab, wait="complete")

    def press(self, keys: str) -> None:
        """Type on the keyboard, into what has the focus."""
        strokes = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._call("input.performActions", context=self._tab, actions=[{"type": "key", "id": "k", "actions": strokes}])

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of strings, numbers and truths, or of a promise of one."""
        answer = self._call("script.evaluate", expression=expression, target={"context": self._tab}, awaitPromise=True)
        assert answer["type"] == "success", answer["exceptionDetails"]["text"]
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Wait until the expression has a value that is true; return it."""
        look = f"const look = () => {{ const value = {expression}; value ? resolve(value) : setTimeout(look, 20); }};"
        return self.evaluate(f"new Promise((resolve) => {{ {look} look(); }})")

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=_TIMEOUT_S))
            if message.get("method") == "log.entryAdded" and message["params"]["level"] == "error":
                self.errors.append(message["params"]["text"])
            if message.get("id") == number:
                assert message["type"] == "success", message
                return dict(message["result"])


@contextlib.contextmanager
def running_firefox(profile: Path) -> Iterator[Firefox]:
    assert FIREFOX is not None
    argv = [FIREFOX, "--headless", "--no-remote", "--profile", str(profile), "--remote-debugging-port", "0"]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stderr is not None
            found = next(match for line in process.stderr if (match := _LISTENS.search(line)))
            with connect(f"{found[1]}/session", max_size=None) as socket:
                yield Firefox(socket)
        finally:
            process.kill()
