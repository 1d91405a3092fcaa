"""A hub for tests: a local HTTP server that speaks as much of the hub's API as huggingface_hub needs."""

from __future__ import annotations

import hashlib
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest
from huggingface_hub import constants

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COMMIT = "c0ffee" + "0" * 34


@dataclass
class LocalHub:
    """Repositories by id, each a dictionary of its files. Those in `gated` need the token `right`,
    those in `damaged` send other bytes than they should."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    damaged: set[str] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)
    """Repositories whose next file ends in its middle."""
    requests: list[str] = field(default_factory=list)
    sent: list[bytes] = field(default_factory=list)
    """Contents of files, or what was missing of them."""
    url: str = ""

    def downloads(self) -> list[str]:
        """The files that were sent, in order."""
        return [line.rpartition("/")[2] for line in self.requests if line.startswith("GET /") and "/resolve/" in line]

    def environment(self, cache: Path) -> dict[str, str]:
        """For a process that takes its models from here."""
        return {"HF_ENDPOINT": self.url, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "0"}

    def use(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        """Let this process take its models from here."""
        monkeypatch.setattr(constants, "ENDPOINT", self.url)
        template = f"{self.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))


class _Server(ThreadingHTTPServer):
    hub: LocalHub


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.server.hub
        hub.requests.append(f"{self.command} {self.path}")
        parts = self.path.partition("?")[0].strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        repository = "/".join(parts[2:4] if is_api else parts[:2])
        files = hub.repositories.get(repository)
        if files is None:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif repository in hub.gated and self.headers.get("Authorization") != "Bearer right":
            self._send(403, b"", {"X-Error-Code": "GatedRepo"})
        elif is_api:
            kind = "tree" if parts[4:5] == ["tree"] else "info"
            self._send(200, json.dumps(_listing(kind, repository, files)).encode(), {})
        else:
            self._send_file(files.get("/".join(parts[4:])), repository)

    def _send_file(self, content: bytes | None, repository: str) -> None:
        hub = self.server.hub
        if content is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        headers = {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": COMMIT}
        sent = content[::-1] if repository in hub.damaged else content
        first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        sent = sent[first:]
        if self.command == "GET":
            hub.sent.append(sent)
            if repository in hub.cut:
                hub.cut.remove(repository)
                self._send(200, sent, headers, num_sent=len(sent) // 2)
                self.close_connection = True
                return
        self._send(206 if first else 200, sent, headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str], num_sent: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:num_sent])

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def local_hub() -> Iterator[LocalHub]:
    server = _Server(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.hub = LocalHub(url=f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _listing(kind: str, repository: str, files: dict[str, bytes]) -> object:
    if kind == "tree":
        return [
            {"type": "file", "path": name, "size": len(content), "oid": _digest(content)}
            for name, content in files.items()
        ]
    siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
    return {"id": repository, "sha": COMMIT, "siblings": siblings}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
