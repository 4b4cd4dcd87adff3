"""Whose call it is where the path does not say: the configured other places of an identity.

The path decides. Where it has no key, the configured places are asked in order; a value that stands there and is no
capture key is refused, never rewritten. Left to others: the prefix itself (`toprope.http.rollout_layer`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from toprope.correlation.context import RolloutContext
from toprope.correlation.ids import parse_capture_key
from toprope.errors.tree import BadPath, ConfigError
from toprope.http.request import Request
from toprope.protocol.headers import CLIENT_SESSION

Place = Literal["header", "api_key", "session_path"]
SESSION_ROUTE = "/sessions/{session_key}"


class IdentityPlaces:
    """The places where one model server looks. Raises `ConfigError` for an unknown place."""

    def __init__(self, places: Sequence[str], *, capture: bool) -> None:
        known = get_args(Place)
        for place in places:
            if place not in known:
                raise ConfigError(f"identity: {place!r} is not accepted; expected any of {', '.join(known)}")
        self._places = tuple(places)
        self._capture = capture

    @property
    def session_path(self) -> bool:
        """Whether `/sessions/<key>/v1/...` is served."""
        return "session_path" in self._places

    def of(self, request: Request) -> RolloutContext | None:
        """The identity of a request, or None. Raises `BadPath` (400) for a value that is no capture key."""
        if request.rollout is not None or not self._places:
            return request.rollout
        for place in self._places:
            value = _value(place, request)
            if not value:
                continue
            try:
                parse_capture_key(value)
            except ValueError as error:
                # A key to an API is a secret: what it says is not repeated.
                shown = "the API key is no capture key" if place == "api_key" else str(error)
                raise BadPath(f"identity from {place}: {shown}") from None
            return RolloutContext(value, self._capture)
        return None


def _value(place: str, request: Request) -> str | None:
    if place == "header":
        return request.headers.get(CLIENT_SESSION)
    if place == "api_key":
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        return (token.strip() if scheme.lower() == "bearer" else "") or request.headers.get("x-api-key")
    if "session_key" not in request.path_params:
        return None
    raw: bytes = request.scope.get("raw_path") or request.path.encode()
    return raw.decode("latin-1").split("/", 3)[2]  # undecoded, so that no escape can change a key
