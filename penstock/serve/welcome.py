"""The text that `penstock serve` prints when it is ready: its address, and examples that work unchanged."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from penstock.backend.model_names import SHIPPED_MODELS

_WILDCARDS = (("//0.0.0.0:", "//127.0.0.1:"), ("//[::]:", "//[::1]:"))
"""Addresses that a server can listen on but a client cannot connect to, each with one that works."""
_QUESTION = "What is the capital of Japan?"
_DOCUMENTS = ["Tokyo is the capital of Japan.", "Rice is a grain."]
_DEMO_QUESTION = "How do I sort a list?"
_DEMO_DOCUMENTS = ["Sorts a list.", "Returns the time."]
"""The demo models know Python's standard library."""
_MAX_TOKENS = 60
_WHOLE_RATES_FROM = 20
"""Rates from here on are shown without decimals."""


Use: TypeAlias = Literal["chat", "embeddings", "rerank", "classify"]


@dataclass(frozen=True, slots=True)
class ShownModel:
    """A model of /v1/models. None means unknown or absent, such as an encoder's KV cache."""

    name: str
    use: Use = "chat"
    quantization: str = "none"
    context_tokens: int | None = None
    kv_tokens: int | None = None
    tokens_per_s: float | None = None
    """The most that a single request gets, without the cost of delivery."""

    def request(self) -> tuple[str, dict[str, Any]]:
        """Return the path and the body of an example."""
        question, documents = self._question_and_documents()
        if self.use == "embeddings":
            return "/v1/embeddings", {"model": self.name, "input": [question]}
        if self.use == "rerank":
            return "/v1/rerank", {"model": self.name, "query": question, "documents": documents}
        if self.use == "classify":
            return "/classify", {"model": self.name, "input": [question]}
        messages = [{"role": "user", "content": question}]
        body = {"model": self.name, "stream": True, "max_tokens": _MAX_TOKENS, "messages": messages}
        return "/v1/chat/completions", body

    def sdk_call(self) -> str | None:
        """Return a line for OpenAI's Python package; None if it lacks the endpoint."""
        question, _ = self._question_and_documents()
        if self.use == "embeddings":
            request = f"model={_quoted(self.name)}, input=[{_quoted(question)}]"
            return f"print(client.embeddings.create({request}).data[0].embedding[:4])"
        if self.use != "chat":
            return None
        messages = f'[{{"role": "user", "content": {_quoted(question)}}}]'
        request = f"model={_quoted(self.name)}, max_tokens={_MAX_TOKENS}, messages={messages}"
        return f"print(client.chat.completions.create({request}).choices[0].message.content)"

    def _question_and_documents(self) -> tuple[str, list[str]]:
        return (_DEMO_QUESTION, _DEMO_DOCUMENTS) if self.name in SHIPPED_MODELS else (_QUESTION, _DOCUMENTS)


@dataclass(frozen=True, slots=True)
class Welcome:
    """The greeting. address is http://HOST:PORT, https://HOST:PORT or unix:PATH, as the server listens on it."""

    address: str
    models: tuple[ShownModel, ...]
    tls: bool = False
    has_keys: bool = False

    def ready_line(self) -> str:
        shown = f"{self.reachable_address()} " if self._socket_path else ""
        return f"Ready: {shown}{self._url()}/v1"

    def summary(self) -> str:
        """Return the address of the page, and each model with its context, KV cache and expected speed."""
        url = self._url()
        rows = (
            [] if self._socket_path else [("Page", f"{url}/ (chat; {url}/engine shows the engine, {url}/docs the API)")]
        )
        for model in self.models:
            form = "" if model.quantization == "none" else f" ({model.quantization})"
            rows.append(("Model", f"{model.name}{form}"))
            if model.context_tokens is not None:
                cache = f"; the KV cache holds {model.kv_tokens:,} of all requests" if model.kv_tokens else ""
                rows.append(("Context", f"{model.context_tokens:,} tokens{cache}"))
            if model.tokens_per_s is not None:
                rate = f"{model.tokens_per_s:.{0 if model.tokens_per_s >= _WHOLE_RATES_FROM else 1}f}"
                rows.append(
                    (
                        "Speed",
                        f"at most about {rate} tokens/s for one request (one step timed at start, without delivery)",
                    )
                )
        return "\n".join(f"  {name:<9}{text}" for name, text in rows)

    def examples(self) -> str:
        """Return a request of each model by curl, the first also with OpenAI's package."""
        first, *others = self.models
        lines = [self._curl(first), *self._sdk(first)]
        for model in others:
            lines += ["", self._curl(model)]
        return "\n".join(f"  {line}" if line else "" for line in lines)

    @property
    def _socket_path(self) -> str:
        """Empty for a TCP port."""
        return self.address.removeprefix("unix:") if self.address.startswith("unix:") else ""

    def reachable_address(self) -> str:
        address = self.address
        for wildcard, loopback in _WILDCARDS:
            address = address.replace(wildcard, loopback)
        return address

    def _url(self) -> str:
        return f"{'https' if self.tls else 'http'}://localhost" if self._socket_path else self.reachable_address()

    def _curl(self, model: ShownModel) -> str:
        path, body = model.request()
        socket = f"--unix-socket {shlex.quote(self._socket_path)} " if self._socket_path else ""
        key = ' -H "Authorization: Bearer $KEY"' if self.has_keys else ""
        data = shlex.quote(json.dumps(body))
        return f"curl -N {socket}{self._url()}{path}{key} -H 'Content-Type: application/json' -d {data}"

    def _sdk(self, model: ShownModel) -> list[str]:
        """An empty line and three for OpenAI's Python package, or nothing."""
        call = model.sdk_call()
        if call is None:
            return []
        client = f"base_url={_quoted(self._url() + '/v1')}, api_key={_quoted('YOUR_KEY' if self.has_keys else 'none')}"
        if self._socket_path:
            client += f", http_client=httpx.Client(transport=httpx.HTTPTransport(uds={_quoted(self._socket_path)}))"
        return [
            "",
            "import httpx, openai" if self._socket_path else "import openai",
            f"client = openai.OpenAI({client})",
            call,
        ]


def _quoted(text: str) -> str:
    """A Python string literal, in double quotes if possible."""
    return json.dumps(text) if text.isascii() else ascii(text)
