"""`penstock chat`: a conversation in the terminal, with this server or any other that has OpenAI's API."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx2
from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import Console

from penstock.process.failure import fail
from penstock.process.options import from_environment

_COMMAND = "penstock chat"
_CONNECT_TIMEOUT_S = 10.0
_HELP = """\
/new           forget the conversation
/retry         answer the last message again
/system TEXT   set the system text; without a text, remove it
/save FILE     write the conversation as JSON
/quit          end (or Ctrl-D)
A line that ends with \\ goes on in the next one. Ctrl-C stops an answer."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Where the server is, and what each request asks for."""

    url: Annotated[str, from_environment("--url")] = "http://127.0.0.1:8000/v1"
    """The server's base URL, as OpenAI's clients take it. Without a path, /v1 is meant."""
    model: str | None = None
    """Default: the first model that the server lists."""
    api_key: Annotated[str | None, from_environment("--api-key")] = None
    """Key of the server."""
    system: str | None = None
    """System text."""
    temperature: Annotated[float | None, Parameter(validator=Number(gte=0.0, lte=2.0))] = None
    """Default: the server's."""
    max_tokens: Annotated[int | None, Parameter(validator=Number(gte=1))] = None
    """Most tokens of an answer."""


class ChatError(Exception):
    """The server refuses, or cannot be reached. The message is one line."""


class Conversation:
    """Messages so far, and the server that answers them."""

    def __init__(self, client: httpx2.Client, model: str, system: str | None, fields: dict[str, Any]) -> None:
        """fields are those of each request."""
        self.system = system
        self.messages: list[dict[str, str]] = []
        self._client = client
        self._model = model
        self._fields = fields

    def ask(self, text: str) -> Iterator[str]:
        """Add the message, and yield its answer in pieces. The received part is kept, however it ends.

        Raises ChatError; then the message is forgotten, unless part of the answer has come.
        """
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        try:
            for piece in self._stream():
                pieces.append(piece)
                yield piece
        finally:
            if pieces:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self.messages.pop()

    def take_back(self) -> str | None:
        """Forget the last message and its answer. Return the message; None if there is none."""
        while self.messages:
            last = self.messages.pop()
            if last["role"] == "user":
                return last["content"]
        return None

    def as_json(self) -> str:
        return json.dumps(self._all_messages(), ensure_ascii=False, indent=1) + "\n"

    def _all_messages(self) -> list[dict[str, str]]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.messages]

    def _stream(self) -> Iterator[str]:
        body = {"model": self._model, "messages": self._all_messages(), "stream": True, **self._fields}
        try:
            with self._client.stream("POST", "chat/completions", json=body) as response:
                _check(response)
                for line in response.iter_lines():
                    if not line.startswith("data: "):
                        continue
                    if line == "data: [DONE]":
                        return
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise ChatError(event["error"]["message"])
                    yield from _texts(event)
        except httpx2.HTTPError as error:
            raise ChatError(f"the connection failed: {error or type(error).__name__}") from error
        raise ChatError("the connection broke before the answer's end")


def chat(
    prompt: Annotated[str | None, Parameter(show_env_var=False)] = None,
    /,
    *,
    options: ChatOptions = ChatOptions(),
) -> int:
    """Talk until the input ends. The exit status is 1 if the server cannot be used.

    Parameters
    ----------
    prompt
        One question: its answer ends the command.
    """
    headers = {} if options.api_key is None else {"Authorization": f"Bearer {options.api_key}"}
    timeout = httpx2.Timeout(None, connect=_CONNECT_TIMEOUT_S)
    url = options.url.rstrip("/")
    if "/" not in url.partition("://")[2]:
        url += "/v1"
    with httpx2.Client(base_url=url + "/", headers=headers, timeout=timeout) as client:
        try:
            model = options.model or _first_model(client)
        except ChatError as error:
            fail(_COMMAND, str(error))
        named = {"temperature": options.temperature, "max_tokens": options.max_tokens}
        fields = {name: value for name, value in named.items() if value is not None}
        console = Console(highlight=False)
        conversation = Conversation(client, model, options.system, fields)
        if prompt is not None:
            return 0 if _answer(conversation, prompt, console) else 1
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - gives input() a history and line editing
            console.print(f"{model} at {url}; /help lists the commands", style="dim")
        _talk(conversation, console)
    return 0


def _talk(conversation: Conversation, console: Console) -> None:
    for line in _lines():
        command, _, rest = line.partition(" ")
        match command:
            case "/quit":
                return
            case "/help":
                console.print(_HELP, markup=False)
            case "/new":
                conversation.messages.clear()
            case "/system":
                conversation.system = rest or None
            case "/save":
                _save(conversation, rest, console)
            case "/retry":
                if (text := conversation.take_back()) is not None:
                    _answer(conversation, text, console)
            case _ if command.startswith("/"):
                console.print(f"no such command: {command}; /help lists them", style="red", markup=False)
            case _ if line:
                _answer(conversation, line, console)


def _lines() -> Iterator[str]:
    """Yield what the user enters, until the end of the input or Ctrl-C."""
    prompt = "> " if sys.stdin.isatty() else ""
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            line = input(prompt)
            while line.endswith("\\"):
                line = line.removesuffix("\\") + "\n" + input(". " if prompt else "")
            yield line.strip()


def _answer(conversation: Conversation, text: str, console: Console) -> bool:
    """Print the answer as it comes. Ctrl-C ends it, and the server frees it. Return whether it came to its end."""
    started_s, first_s, num_pieces = time.monotonic(), None, 0
    pieces = conversation.ask(text)
    try:
        for piece in pieces:
            first_s = first_s or time.monotonic()
            num_pieces += 1
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pieces.close()  # type: ignore[attr-defined]
        console.print("\nstopped", style="dim")
        return False
    except ChatError as error:
        console.print(f"{'' if first_s is None else chr(10)}{error}", style="red", markup=False)
        return False
    print(flush=True)
    if first_s is not None and sys.stdout.isatty():
        rate = num_pieces / max(time.monotonic() - first_s, 1e-9)
        console.print(f"first piece after {1000 * (first_s - started_s):.0f} ms, {rate:.1f} pieces/s", style="dim")
    return True


def _save(conversation: Conversation, name: str, console: Console) -> None:
    if not name:
        console.print("/save needs the name of a file", style="red")
        return
    try:
        Path(name).expanduser().write_text(conversation.as_json(), encoding="utf-8")
    except OSError as error:
        console.print(f"{name} cannot be written: {error.strerror}", style="red", markup=False)


def _first_model(client: httpx2.Client) -> str:
    """Raises ChatError."""
    try:
        response = client.get("models")
        _check(response)
        models = response.json()["data"]
    except httpx2.HTTPError as error:
        raise ChatError(
            f"no server at {client.base_url}: {error}; start one with penstock serve, or give --url"
        ) from error
    except (ValueError, KeyError) as error:
        raise ChatError(f"{client.base_url} does not answer as OpenAI's API does") from error
    for model in models:
        if model.get("capabilities", {}).get("structured_output", True):
            return str(model["id"])
    raise ChatError(f"{client.base_url} has no model that writes text")


def _check(response: httpx2.Response) -> None:
    """Raises ChatError with the server's message for any status but 200."""
    if response.status_code == 200:
        return
    response.read()
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:200]
    raise ChatError(f"the server answers with status {response.status_code}: {message}")


def _texts(event: dict[str, Any]) -> Iterator[str]:
    for choice in event["choices"]:
        delta = choice["delta"]
        for text in (delta.get("reasoning_content"), delta.get("content")):
            if text:
                yield text
