"""Looks up a tenant's kept responses, and explains why a response is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.frontend.formats.responses import response_of_item
from penstock.frontend.schemas.responses import ResponseItem
from penstock.frontend.transport.errors import ApiError, ErrorKind, invalid, shorten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.frontend.endpoints.responses.store import ResponseStore, StoredResponse


class _Output(msgspec.Struct):
    """The part of a response object that items of later requests can refer to."""

    output: list[ResponseItem]


_output_decoder = msgspec.json.Decoder(_Output)
_items_decoder = msgspec.json.Decoder(list[ResponseItem])


class KeptResponses:
    """The finished responses of one worker, by tenant and id. Methods raise ApiError: 404."""

    def __init__(self, store: ResponseStore) -> None:
        self.store = store

    @property
    def id_prefix(self) -> str:
        """Begins the ids of this worker's responses."""
        return f"resp_{self.store.tag}"

    def find(self, tenant: bytes, response_id: str, param: str | None = None) -> StoredResponse:
        """Return the response; an error names param, the request's field that refers to it."""
        stored = self.store.get(tenant, response_id)
        if stored is None:
            raise self._unknown(response_id, param)
        return stored

    def input_items(self, tenant: bytes, response_id: str) -> Sequence[ResponseItem]:
        return _items_decoder.decode(self.find(tenant, response_id).input_items)

    def remove(self, tenant: bytes, response_id: str) -> None:
        if not self.store.remove(tenant, response_id):
            raise self._unknown(response_id, None)

    def resolved(self, tenant: bytes, items: Sequence[ResponseItem]) -> list[ResponseItem]:
        """Replace references to outputs of kept responses by these outputs."""
        outputs: dict[str, dict[str | None, ResponseItem]] = {}
        return [self._resolved(tenant, position, item, outputs) for position, item in enumerate(items)]

    def _resolved(
        self, tenant: bytes, position: int, item: ResponseItem, outputs: dict[str, dict[str | None, ResponseItem]]
    ) -> ResponseItem:
        """outputs caches the decoded outputs by response id."""
        if item.kind != "item_reference" or item.id is None:
            return item
        param, response_id = f"input[{position}].id", response_of_item(item.id)
        if response_id not in outputs:
            output = _output_decoder.decode(self.find(tenant, response_id, param).body).output
            outputs[response_id] = {other.id: other for other in output}
        found = outputs[response_id].get(item.id)
        if found is None:
            invalid(param, f"{shorten(response_id)} has no item {shorten(item.id)}")
        return found

    def _unknown(self, response_id: str, param: str | None) -> ApiError:
        if response_id.startswith("resp_") and not response_id.startswith(self.id_prefix):
            why = (
                "another process made it: each worker keeps its own responses and loses them when it ends. "
                "Run one worker, route a conversation to one, or send the whole conversation as input"
            )
        else:
            why = (
                f"it was deleted, was unused for {self.store.max_idle_s:g} s, was evicted for newer ones, or never "
                "existed. Send the whole conversation as input"
            )
        message = f"no response {shorten(response_id)} is kept here: {why}"
        return ApiError(ErrorKind.UNKNOWN_RESPONSE, message, param=param)
