"""What a trainer tells a model server while a run goes on: which weights are loaded now, which rollouts are stale.

    POST /admin/weights {"version": "7"}               -> {"version": "7", "previous": "6", "in_flight": 3}
    POST /admin/abort   {"rollouts": ["4-0", ...]}     -> {"aborted": 2}

Both need the server's admin key, as `x-toprope-admin-key`: whoever reaches the model can otherwise not stop other
people's rollouts. Without a configured key they are refused. An abort is written down in the capture store, also one
that comes before the rollout's first call, so that other workers and a restarted server refuse its captured calls too.
"""

from __future__ import annotations

import hmac
from collections import OrderedDict
from collections.abc import Callable
from typing import Annotated

import msgspec

from toprope.capture.protocols import GIVEN_UP
from toprope.capture.recorder import Recorder
from toprope.correlation.ids import mint_model_call_id, parse_capture_key
from toprope.errors.kinds import Kind
from toprope.errors.tree import BadRequest, CaptureClosed, Forbidden
from toprope.http.reply import Reply, json_reply
from toprope.http.request import Request
from toprope.http.routing import Route
from toprope.protocol.headers import ADMIN_KEY
from toprope.servers.model.call import ModelCall
from toprope.servers.model.weights import WeightVersions

_MAX_STALE = 65_536
"""Aborted rollouts that are remembered. Their calls end within minutes; one that is forgotten is served."""


class WeightsBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /admin/weights`."""

    version: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class AbortBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /admin/abort`: capture keys."""

    rollouts: Annotated[list[str], msgspec.Meta(min_length=1, max_length=10_000)]


class StaleRollouts:
    """The rollouts that a trainer gave up. Their next model call is refused, and so is every later one.

    `recorder` is where aborts are written down and those of other workers found; None where nobody may abort.
    """

    def __init__(self, recorder: Recorder | None) -> None:
        self._recorder = recorder
        self._keys: OrderedDict[str, None] = OrderedDict()

    async def abort(self, key: str) -> None:
        """On return calls of `key` are refused here, and captured ones elsewhere too."""
        self._keys[key] = None
        if len(self._keys) > _MAX_STALE:
            self._keys.popitem(last=False)
        if self._recorder is None:
            return
        call_id = mint_model_call_id()
        try:
            await self._recorder.begin(key, call_id)
        except CaptureClosed:
            return  # it was delivered already
        await self._recorder.abort(key, call_id, GIVEN_UP)

    async def check(self, call: ModelCall) -> None:
        """Raises `Forbidden` of kind `stale` for a call of a rollout that was given up."""
        key = call.rollout_id
        if key is None:
            return
        others = self._recorder is not None and call.captured and self._recorder.shares(key)
        if key not in self._keys and others and await self._is_marked(key):
            self._keys[key] = None
        if key in self._keys:
            raise Forbidden(
                "this rollout is stale: its trainer gave it up, and nothing more is sampled", kind=Kind.STALE
            )

    async def _is_marked(self, key: str) -> bool:
        assert self._recorder is not None
        return any(each.abort == GIVEN_UP for each in await self._recorder.journal(key))


class Admin:
    """The two routes of one server. `in_flight` counts the calls that are under way."""

    def __init__(
        self, key: str | None, *, weights: WeightVersions, stale: StaleRollouts, in_flight: Callable[[], int]
    ) -> None:
        self._key = key
        self._weights = weights
        self._stale = stale
        self._in_flight = in_flight

    def routes(self) -> list[Route]:
        """To be served without a rollout prefix."""
        return [Route("POST", "/admin/weights", self.set_weights), Route("POST", "/admin/abort", self.abort)]

    async def set_weights(self, request: Request) -> Reply:
        """`POST /admin/weights`: calls that begin from now on are sampled under `version`."""
        self._admit(request)
        version = (await request.decode(WeightsBody)).version
        in_flight = self._in_flight()
        return json_reply({"version": version, "previous": self._weights.loaded(version), "in_flight": in_flight})

    async def abort(self, request: Request) -> Reply:
        """`POST /admin/abort`: the next model call of each rollout, and every later one, is refused as `stale`."""
        self._admit(request)
        keys = (await request.decode(AbortBody)).rollouts
        for key in keys:
            try:
                parse_capture_key(key)
            except ValueError as error:
                raise BadRequest(f"rollouts: {error}") from None
        for key in keys:
            await self._stale.abort(key)
        return json_reply({"aborted": len(keys)})

    def _admit(self, request: Request) -> None:
        if self._key is None:
            raise Forbidden("this server has no admin key (`admin_key`), so nobody may use its admin routes")
        given = request.headers.get(ADMIN_KEY, "")
        if not hmac.compare_digest(given.encode(), self._key.encode()):
            raise Forbidden(f"the admin routes of this server want its admin key, as `{ADMIN_KEY}`", status=401)
