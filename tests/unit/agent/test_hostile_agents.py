"""Agents whose answers are code: they cost their activation, and neither the server nor the close of the session."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from datetime import datetime, timedelta, tzinfo
from typing import Any, NoReturn

import pytest

from toprope.errors.tree import TopropeError
from toprope.servers.agent.agent import Activation, Agent

ASK = {"input": "go"}


class Zone(tzinfo):
    """A time zone that ends the process when a time is written."""

    def utcoffset(self, when: datetime | None) -> timedelta:
        sys.exit(3)

    def dst(self, when: datetime | None) -> timedelta:
        sys.exit(3)

    def tzname(self, when: datetime | None) -> str:
        sys.exit(3)


NOON = datetime(2026, 1, 1, tzinfo=Zone())


class Loud:
    """A value whose text ends the process."""

    def __str__(self) -> str:
        raise SystemExit(3)


class Silent(dict[str, Any]):
    """A dict that ends the process when it is asked."""

    def get(self, *_: Any) -> NoReturn:
        sys.exit(3)


class Acts(Agent):
    """Does what its test wants."""

    def __init__(self, act: Callable[[Activation], Any]) -> None:
        self.act = act

    async def respond(self, activation: Activation) -> dict[str, Any]:
        found = self.act(activation)
        return await found if asyncio.iscoroutine(found) else found  # type: ignore[no-any-return]


def _raise(**said: Any) -> NoReturn:
    raise TopropeError("no", **said)


def _raise_code(_: Activation) -> NoReturn:
    words = property(lambda _: sys.exit(3), lambda _, value: None)
    raise type("Odd", (TopropeError,), {"message": words})("no")


@pytest.mark.promise("EP-9")
@pytest.mark.parametrize(
    ("act", "kind", "said"),
    [
        (lambda _: Silent(output=[]), "agent_failed", "SystemExit: 3"),
        (lambda _: {"output": [], "status": Loud()}, "agent_failed", "SystemExit: 3"),
        (lambda _: {"output": [{"at": NOON}]}, "agent_failed", "SystemExit: 3"),
        (lambda _: {"output": [object()]}, "agent_failed", "object"),
        (lambda _: {"output": [float("nan")]}, "agent_failed", "nan"),
        (_raise_code, "agent_failed", "SystemExit: 3"),
        (lambda _: _raise(kind=7), "solver:7", "no"),
        (lambda _: _raise(status="x"), "internal", "no"),
    ],
)
async def test_an_agent_whose_answer_is_code_ends_its_activation_only(
    make_house: Any, act: Callable[[Activation], Any], kind: str, said: str
) -> None:
    house = await make_house(agent=Acts(act), allow_sessionless=True)
    await house.seed()
    for session in ("a1", None):
        reply = await house.activate(ASK, session=session)
        assert reply.status >= 500
        assert (reply.error_info().kind, said in reply.error_info().message) == (kind, True)
    assert (await house.close()).json()["outcome"] == "closed"


@pytest.mark.promise("EP-10")
async def test_records_that_cannot_be_written_are_gaps_and_the_rest_is_told(make_house: Any) -> None:
    def act(activation: Activation) -> dict[str, Any]:
        activation.invocation["when"] = NOON
        activation.observations.record("tool_call", name=object())
        activation.observations.record("tool_call", name="fine")
        activation.observations.gap(Loud())  # type: ignore[arg-type]
        activation.observations.gap("plain")
        activation.model = None  # type: ignore[assignment]
        return {"output": []}

    house = await make_house(agent=Acts(act))
    await house.seed()
    assert (await house.activate(ASK)).status == 200
    closed = (await house.close()).json()
    assert closed["outcome"] == "closed"
    assert closed["agent_observations"]["records"] == [{"kind": "tool_call", "name": "fine"}]
    one, two, three, four = closed["agent_observations"]["gaps"]
    assert one == "a record of what the agent did could not be written: Escaped: SystemExit: 3"
    assert two.startswith("a record of what the agent did could not be written: TypeError")
    assert three == "a gap could not be told: Escaped: SystemExit: 3"
    assert four == "plain"


@pytest.mark.promise("EP-10")
async def test_a_partial_response_that_is_code_is_a_gap(make_house: Any) -> None:
    entered = asyncio.Event()

    async def wait(activation: Activation) -> None:
        activation.partial = lambda: {"output": [{"at": NOON}]}
        entered.set()
        await asyncio.Event().wait()

    house = await make_house(agent=Acts(wait))
    await house.seed()
    running = asyncio.create_task(house.activate(ASK))
    await entered.wait()
    closed = (await house.close()).json()
    assert closed["outcome"] == "closed"
    assert closed["agent_observations"]["gaps"] == ["the partial response could not be had: Escaped: SystemExit: 3"]
    assert (await running).error_info().kind == "cancelled"
