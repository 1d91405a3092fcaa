"""Cancels requests over HTTP, with the server's admin key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx2

if TYPE_CHECKING:
    from penstock.commands.top.snapshot import Line

_TIMEOUT_S = 10.0
_MAX_MESSAGE = 200


@dataclass(frozen=True, slots=True)
class Operator:
    url: str
    """The server's address, without a path."""
    admin_key: str
    transport: httpx2.BaseTransport | None = None

    def cancel(self, line: Line) -> str:
        """Cancel the request of a line; return the result in one line."""
        if line.request is None:
            return "this sequence began before the recorder's first record, so its request is not known"
        frontend, request_id = line.request
        url = f"{self.url.rstrip('/')}/admin/requests/{frontend}.{request_id}/cancel"
        headers = {"authorization": f"Bearer {self.admin_key}"}
        try:
            with httpx2.Client(timeout=_TIMEOUT_S, transport=self.transport) as client:
                answer = client.post(url, headers=headers)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            return f"{line.name} is not cancelled: {error}"
        if answer.status_code == httpx2.codes.OK:
            return f"{line.name} is cancelled"
        return f"{line.name} is not cancelled: {_message(answer)}"


def _message(answer: httpx2.Response) -> str:
    try:
        message = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"the server at this address answers {answer.status_code}; is it Penstock?"
    return " ".join(message.split())[:_MAX_MESSAGE]
