"""The table of endpoints: which handler answers which path and method."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from penstock.frontend.endpoints.context import EndpointContext
from penstock.frontend.transport.errors import ApiError, ErrorKind, shorten
from penstock.frontend.transport.exchange import Exchange

Handler = Callable[[Exchange, EndpointContext], Awaitable[None]]

Methods = dict[str, "Route"]


@dataclass(frozen=True, slots=True)
class EndpointDoc:
    """Documentation of one endpoint. answer is the type of a JSON value, or another content type."""

    tag: str
    summary: str
    answer: Any
    body: type[Struct] | None = None
    events: type[Struct] | None = None
    """Type of a stream's events; None for an endpoint that cannot stream."""
    query: tuple[tuple[str, type, str], ...] = ()
    """Query parameters: name, type and meaning."""
    other: tuple[type[Struct], Any] | None = None
    """A second API's body and answer at the same path."""
    can_be_missing: bool = False
    """The path may name something that does not exist (404)."""


@dataclass(frozen=True, slots=True)
class Route:
    """One endpoint's handler. It raises ApiError, or ClientGoneError."""

    handler: Handler
    doc: EndpointDoc
    needs_key: bool = True


def get(handler: Handler, doc: EndpointDoc, *, needs_key: bool = True) -> Methods:
    """Return the routes of GET and HEAD."""
    return dict.fromkeys(("GET", "HEAD"), Route(handler, doc, needs_key))


def post(handler: Handler, doc: EndpointDoc, *, needs_key: bool = True) -> Methods:
    return {"POST": Route(handler, doc, needs_key)}


def delete(handler: Handler, doc: EndpointDoc) -> Methods:
    return {"DELETE": Route(handler, doc)}


class RouteTable:
    """Finds the route of a request. Paths name parameters in braces."""

    def __init__(self, routes: dict[str, Methods]) -> None:
        self._routes = routes
        self._patterns = [
            (matcher, methods) for path, methods in routes.items() if (matcher := _pattern(path)) is not None
        ]

    def methods(self, path: str) -> Methods:
        """Return the routes of a path by method. Raises ApiError: 404."""
        methods = self._routes.get(path)
        if methods is None:
            methods = next((methods for matcher, methods in self._patterns if matcher.fullmatch(path)), None)
        if methods is None:
            meant = self._meant(path)
            hint = "/docs lists the endpoints" if meant is None else f"did you mean {shorten(meant)}?"
            raise ApiError(ErrorKind.UNKNOWN_PATH, f"no such path: {shorten(path)}; {hint}")
        return methods

    def _meant(self, path: str) -> str | None:
        """Return the path that a client with a wrong base URL intends: with /v1 once, and without a slash
        at the end."""
        bare = path.rstrip("/")
        for known in (bare, f"/v1{bare}", bare[bare.find("/v1") :], bare.replace("/v1", "", 1)):
            if known in self._routes and known != path:
                return known
        return None


def select(methods: Methods, method: str) -> Route:
    """Return the route of a method. Raises ApiError: 405."""
    route = methods.get(method)
    if route is None:
        allowed = ", ".join(methods)
        raise ApiError(
            ErrorKind.WRONG_METHOD,
            f"{method[:20]} is not allowed here; allowed: {allowed}",
            headers=((b"allow", allowed.encode()),),
        )
    return route


def _pattern(path: str) -> re.Pattern[str] | None:
    """Return the pattern of a path with parameters; None for a path without. A model's name may contain slashes."""
    if "{" not in path:
        return None
    anything = {"{model}": ".+"}
    parts = [anything.get(part, "[^/]+") if part.startswith("{") else re.escape(part) for part in path.split("/")]
    return re.compile("/".join(parts))
