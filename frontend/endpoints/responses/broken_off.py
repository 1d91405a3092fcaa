"""Ends the response object of a worker that died while it generated it."""

from __future__ import annotations

from typing import Any

import msgspec

_ERROR = {
    "code": "server_error",
    "message": "the worker that generated this response died; what it had generated is kept. Send the request again",
}


def broken_off(body: bytes, num_events: int) -> tuple[bytes, bytes]:
    """Return the response object as failed, and the event that says so, which is number num_events."""
    response: dict[str, Any] = msgspec.json.decode(body)
    response["status"], response["error"] = "failed", _ERROR
    for item in response["output"]:
        if item.get("status") == "in_progress":
            item["status"] = "incomplete"
    data = msgspec.json.encode({"type": "response.failed", "response": response, "sequence_number": num_events})
    return msgspec.json.encode(response), b"event: response.failed\ndata: %b\n\n" % data
