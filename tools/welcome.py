"""The text that `penstock serve` prints when it is ready: its address, and two examples that work unchanged."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass

_WILDCARDS = (("//0.0.0.0:", "//127.0.0.1:"), ("//[::]:", "//[::1]:"))
"""Addresses that a server can listen on but a client cannot connect to, each with one that works."""
_QUESTION = "What does os.path.join do?"
_MAX_TOKENS = 60


@dataclass(frozen=True, slots=True)
class Welcome:
    """address is http://HOST:PORT, https://HOST:PORT or unix:PATH, as the server listens on it."""

    address: str
    model: str
    tls: bool = False
    has_keys: bool = False

    def ready_line(self) -> str:
        shown = f"{self._reachable_address()} " if self._socket_path else ""
        return f"Ready: {shown}{self._url()}/v1"

    def examples(self) -> str:
        return "\n".join(f"  {line}" if line else "" for line in (self._curl(), "", *self._sdk()))

    @property
    def _socket_path(self) -> str:
        """Empty for a TCP port."""
        return self.address.removeprefix("unix:") if self.address.startswith("unix:") else ""

    def _reachable_address(self) -> str:
        address = self.address
        for wildcard, loopback in _WILDCARDS:
            address = address.replace(wildcard, loopback)
        return address

    def _url(self) -> str:
        return f"{'https' if self.tls else 'http'}://localhost" if self._socket_path else self._reachable_address()

    def _curl(self) -> str:
        body = {
            "model": self.model,
            "stream": True,
            "max_tokens": _MAX_TOKENS,
            "messages": [{"role": "user", "content": _QUESTION}],
        }
        socket = f"--unix-socket {shlex.quote(self._socket_path)} " if self._socket_path else ""
        key = ' -H "Authorization: Bearer $KEY"' if self.has_keys else ""
        data = shlex.quote(json.dumps(body))
        return f"curl -N {socket}{self._url()}/v1/chat/completions{key} -H 'Content-Type: application/json' -d {data}"

    def _sdk(self) -> list[str]:
        """Three lines for OpenAI's Python package."""
        client = f"base_url={_quoted(self._url() + '/v1')}, api_key={_quoted('YOUR_KEY' if self.has_keys else 'none')}"
        if self._socket_path:
            client += f", http_client=httpx.Client(transport=httpx.HTTPTransport(uds={_quoted(self._socket_path)}))"
        messages = f'[{{"role": "user", "content": {_quoted(_QUESTION)}}}]'
        request = f"model={_quoted(self.model)}, max_tokens={_MAX_TOKENS}, messages={messages}"
        return [
            "import httpx, openai" if self._socket_path else "import openai",
            f"client = openai.OpenAI({client})",
            f"print(client.chat.completions.create({request}).choices[0].message.content)",
        ]


def _quoted(text: str) -> str:
    """A Python string literal, in double quotes if possible."""
    return json.dumps(text) if text.isascii() else ascii(text)
