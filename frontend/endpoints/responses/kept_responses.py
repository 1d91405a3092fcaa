"""Looks up a tenant's kept responses, and explains why a response is missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from penstock.frontend.endpoints.context import run_sized
from penstock.frontend.endpoints.responses.storage.store import ResponseStore, StoredResponse
from penstock.frontend.formats.responses import response_of_item
from penstock.frontend.schemas.responses import ResponseItem
from penstock.frontend.transport.errors import ApiError, ErrorKind, invalid, shorten

MAX_REFERENCED_BYTES = 16 << 20
"""Size of the items that one request refers to, counting each reference: otherwise a short request could ask for
gigabytes."""


class _Output(msgspec.Struct):
    """The part of a response object that items of later requests can refer to."""

    output: list[msgspec.Raw]


class _Referable(NamedTuple):
    item: ResponseItem
    num_bytes: int
    """Size as JSON."""


_output_decoder = msgspec.json.Decoder(_Output)
_item_decoder = msgspec.json.Decoder(ResponseItem)
_items_decoder = msgspec.json.Decoder(list[ResponseItem])


def _read_output(body: bytes) -> dict[str | None, _Referable]:
    """Return the output items of a response object, by id."""
    found = (_Referable(_item_decoder.decode(raw), len(memoryview(raw))) for raw in _output_decoder.decode(body).output)
    return {each.item.id: each for each in found}


class KeptResponses:
    """The responses of the store, by tenant and id. Methods raise ApiError: 404 (400 for a `previous_response_id`), and
    503 if the store fails."""

    def __init__(self, store: ResponseStore) -> None:
        self.store = store

    @property
    def id_prefix(self) -> str:
        """The prefix of the ids that this worker makes."""
        return f"resp_{self.store.tag}"

    async def find(self, tenant: bytes, response_id: str, param: str | None = None) -> StoredResponse:
        """Return the response; an error names param, the request's field that refers to it."""
        stored = await self.store.get(tenant, response_id)
        if stored is None:
            raise self._unknown(tenant, response_id, param)
        return stored

    async def input_items(self, tenant: bytes, response_id: str) -> Sequence[ResponseItem]:
        data = (await self.find(tenant, response_id)).input_items
        return await run_sized(len(data), _items_decoder.decode, data)

    async def remove(self, tenant: bytes, response_id: str) -> None:
        if not await self.store.remove(tenant, response_id):
            raise self._unknown(tenant, response_id, None)

    async def resolved(self, tenant: bytes, items: Sequence[ResponseItem]) -> tuple[list[ResponseItem], int]:
        """Replace references to outputs of kept responses by these outputs. Also return the size of all of them in
        bytes."""
        outputs: dict[str, dict[str | None, _Referable]] = {}
        resolved, num_bytes = [], 0
        for position, item in enumerate(items):
            if item.kind != "item_reference" or item.id is None:
                resolved.append(item)
                continue
            found = await self._referred(tenant, item.id, f"input[{position}].id", outputs)
            resolved.append(found.item)
            num_bytes += found.num_bytes
            if num_bytes > MAX_REFERENCED_BYTES:
                invalid("input", f"the items that it refers to take more than {MAX_REFERENCED_BYTES} bytes, the limit")
        return resolved, num_bytes

    async def _referred(
        self, tenant: bytes, item_id: str, param: str, outputs: dict[str, dict[str | None, _Referable]]
    ) -> _Referable:
        """outputs caches the decoded outputs by response id."""
        response_id = response_of_item(item_id)
        if response_id not in outputs:
            body = (await self.find(tenant, response_id, param)).body
            outputs[response_id] = await run_sized(len(body), _read_output, body)
        found = outputs[response_id].get(item_id)
        if found is None:
            invalid(param, f"{shorten(response_id)} has no item {shorten(item_id)}")
        return found

    def _unknown(self, tenant: bytes, response_id: str, param: str | None) -> ApiError:
        why = (
            f"it was deleted, was unused for {self.store.max_idle_s:g} s, was evicted for newer ones, or never "
            "existed. Send the whole conversation as input"
        )
        if (reason := self.store.why_unstored(tenant, response_id)) is not None:
            why = f"it was not stored: {reason}. Send the whole conversation as input"
        elif (
            not self.store.is_shared and response_id.startswith("resp_") and not response_id.startswith(self.id_prefix)
        ):
            why = (
                "another process made it, and without a state directory each worker keeps its own responses until it "
                "ends. Start the server with --state-dir, or send the whole conversation as input"
            )
        message = f"no response {shorten(response_id)} is kept here: {why}"
        # OpenAI's own: what a request continues is one of its parameters, not the resource that it asks for.
        kind = ErrorKind.UNKNOWN_PREVIOUS if param == "previous_response_id" else ErrorKind.UNKNOWN_RESPONSE
        return ApiError(kind, message, param=param)
