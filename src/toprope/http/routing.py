"""Which handler a request belongs to: exact paths by one look-up, patterns in the order they were given."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.convertors import Convertor
from starlette.routing import compile_path

from toprope.errors.tree import NotFound
from toprope.http.reply import Reply
from toprope.http.request import Request

Handler = Callable[[Request], Awaitable[Reply]]


@dataclass(frozen=True, slots=True)
class Route:
    """One method and path (`/sessions/{id}`, `{n:int}`, `{rest:path}`) and its handler.

    `detached`: the handler runs to its end also when the client leaves; a callable decides it for each request.
    `drained`: the client's leaving cancels the handler, but stop() lets it run to the drain bound; likewise.
    """

    method: str
    path: str
    handler: Handler
    detached: bool | Callable[[Request], bool] = False
    drained: bool | Callable[[Request], bool] = False


@dataclass(frozen=True, slots=True)
class _Pattern:
    regex: re.Pattern[str]
    convertors: dict[str, Convertor[Any]]
    methods: dict[str, Route]


class Router:
    """The routes of one server. Raises `ValueError` on construction for a method and path given twice."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._exact: dict[str, dict[str, Route]] = {}
        self._patterns: dict[str, _Pattern] = {}
        for route in routes:
            self._add(route)

    def _add(self, route: Route) -> None:
        method = route.method.upper()
        if "{" in route.path:
            if route.path not in self._patterns:
                regex, _, convertors = compile_path(route.path)
                self._patterns[route.path] = _Pattern(regex, convertors, {})
            methods = self._patterns[route.path].methods
        else:
            methods = self._exact.setdefault(route.path, {})
        if method in methods:
            raise ValueError(f"route {method} {route.path} is given twice")
        methods[method] = route

    def find(self, request: Request) -> Route:
        """The route, with `request.path_params` set. Raises `NotFound`: 404, or 405 with `allow`."""
        exact = self._exact.get(request.path)
        if exact is not None and (route := _pick(exact, request.method)) is not None:
            return route
        allowed: set[str] = set(exact or ())
        for pattern in self._patterns.values():
            match = pattern.regex.match(request.path)
            if match is None:
                continue
            if (route := _pick(pattern.methods, request.method)) is not None:
                found = match.groupdict().items()
                request.path_params = {name: pattern.convertors[name].convert(value) for name, value in found}
                return route
            allowed |= set(pattern.methods)
        if allowed:
            accepted = ", ".join(sorted(allowed))
            raise NotFound(
                f"{request.method} {request.path}: this path takes {accepted}", status=405, headers={"allow": accepted}
            )
        raise NotFound(f"{request.method} {request.path}: no such route on this server")


def _pick(methods: dict[str, Route], method: str) -> Route | None:
    route = methods.get(method)
    return methods.get("GET") if route is None and method == "HEAD" else route
