"""Bodies with an error anywhere in them, and what every answer to one must keep."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from tests.frontend.endpoints.invalid_bodies import DEEP, FORBIDDEN_IN_ERRORS, NOT_AN_OBJECT, NOT_JSON
from tests.frontend.harness import ClientConnection

if TYPE_CHECKING:
    from penstock.frontend.app import App

Body = dict[str, Any]
Place = tuple[str | int, ...]

_OWN_ADDRESS = "0x123456"
"""Looks like an internal that no error may show, but comes from the request."""
JUNK: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**65), 2**65),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["", "x" * 600, "\u0000", "\ud7ff", "user", "function", "猫"]),
    st.just(f"{_OWN_ADDRESS} object at Traceback"),
    st.sampled_from([[], [[]], {}, {"": {}}, {"type": "function"}, [None], ["x"] * 300, {"type": "text", "text": 1}]),
)


def places(value: Any, path: Place = ()) -> Iterator[Place]:
    """Yield the places in a body where a value can be replaced."""
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from places(item, (*path, key))


def mutated(body: Body, path: Place, junk: Any, *, is_removed: bool) -> Body:
    body = copy.deepcopy(body)
    holder: Any = body
    for key in path[:-1]:
        holder = holder[key]
    if is_removed:
        del holder[path[-1]]
    else:
        holder[path[-1]] = junk
    return body


@st.composite
def mutations(draw: st.DrawFn, body: Body) -> Body:
    """The body with one to three values replaced by junk or removed."""
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(list(places(body))))
        body = mutated(body, place, draw(JUNK), is_removed=draw(st.booleans()))
        if not body:
            break
    return body


class Sender:
    """Sends bodies to one path on one connection and checks each answer."""

    def __init__(self, app: App, path: str, max_error_bytes: int) -> None:
        self._connection = ClientConnection(app)
        self._path, self._max_error_bytes = path, max_error_bytes

    async def status(self, body: Any) -> int:
        """Return the answer's status, which is no server error. An error is short and shows no internals."""
        response = await self._connection.post(self._path, body)
        try:
            assert response.status in (200, 400, 404, 413, 422), response.body  # 413 and 422 are TEI's
            if response.status != 200:
                assert len(response.body) <= self._max_error_bytes
                if _OWN_ADDRESS not in json.dumps(str(body)):
                    assert not FORBIDDEN_IN_ERRORS.search(response.body.decode()), response.body
        except AssertionError as error:
            error.add_note(f"body: {body!r:.500}")
            raise
        return response.status

    async def check_not_objects(self) -> None:
        """Bodies that are not JSON objects, or are nested too deeply, are refused."""
        for data in (*NOT_JSON, *(json.dumps(value).encode() for value in NOT_AN_OBJECT), DEEP):
            assert await self.status(data) in (400, 422)

    async def __aenter__(self) -> Sender:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._connection.end()
