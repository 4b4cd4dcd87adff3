"""Authors' code at its worst: whatever it raises or returns costs its call, at once, and is told with its cause."""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import datetime, timedelta, tzinfo
from typing import Any, NoReturn

import pytest

from toprope.errors.tree import ToolError, TopropeError
from toprope.http.client import Client, Peer
from toprope.http.reply import Reply
from toprope.servers.resources.environment import Environment, Verdict
from toprope.servers.resources.server import ResourcesServer
from toprope.tools.spec import tool

EPISODE = {"rollout_id": "run.0-0", "attempt": 0}
SEED = {"resources_session_id": "s1", "episode_id": EPISODE, "task_id": {"taskset": "t", "task_id": "1"}}
VERIFY: dict[str, Any] = {"responses_create_params": {"input": []}, "response": {"output": []}}
IN_SESSION = {"x-toprope-session": "s1"}


class Speechless(Exception):
    """An error whose own text fails."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def leave() -> NoReturn:
    sys.exit(3)


def interrupt() -> NoReturn:
    raise KeyboardInterrupt


def base() -> NoReturn:
    raise BaseException("bottom")  # an author's mistake


def cancel() -> NoReturn:
    raise asyncio.CancelledError


def throw_away() -> NoReturn:
    raise GeneratorExit


def speechless() -> NoReturn:
    raise Speechless


WAYS = {
    "SystemExit: 3": leave,
    "KeyboardInterrupt": interrupt,
    "BaseException: bottom": base,
    "CancelledError": cancel,
    "GeneratorExit": throw_away,
    "Speechless": speechless,
}


class Wild(Environment):
    """Does what its test wants in one of its methods."""

    def __init__(self) -> None:
        self.acts: dict[str, Callable[[], Any]] = {}

    def act(self, where: str, otherwise: Any = None) -> Any:
        return self.acts[where]() if where in self.acts else otherwise

    def seed(self, task: dict[str, Any]) -> dict[str, Any]:
        self.act("seed")
        return {}

    def session_tools(self, state: Any, task: dict[str, Any]) -> Any:
        return self.act("session_tools", list(self.tools))

    def env_session_id(self, state: Any) -> Any:
        return self.act("env_session_id")

    @tool
    def dig(self, state: Any) -> str:
        """Dig."""
        return self.act("tool", "dug")  # type: ignore[no-any-return]

    def verify(self, state: Any, task: dict[str, Any], response: dict[str, Any]) -> Any:
        return self.act("verify", 1.0)

    def aggregate_metrics(self, asked: Any) -> Any:
        return self.act("aggregate", {})

    def release(self, state: Any) -> None:
        self.act("release")


class WildOnTheLoop(Wild):
    """The same, as coroutines."""

    async def seed(self, task: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        self.act("seed")
        return {}

    async def session_tools(self, state: Any, task: dict[str, Any]) -> Any:
        return self.act("session_tools", list(self.tools))

    async def env_session_id(self, state: Any) -> Any:  # type: ignore[override]
        return self.act("env_session_id")

    @tool
    async def dig(self, state: Any) -> str:  # type: ignore[override]
        """Dig."""
        return self.act("tool", "dug")  # type: ignore[no-any-return]

    async def verify(self, state: Any, task: dict[str, Any], response: dict[str, Any]) -> Any:
        return self.act("verify", 1.0)

    async def aggregate_metrics(self, asked: Any) -> Any:
        return self.act("aggregate", {})

    async def release(self, state: Any) -> None:  # type: ignore[override]
        self.act("release")


class Place:
    """A served environment and its caller."""

    def __init__(self, environment: Wild, peer: Peer, client: Client) -> None:
        self.environment = environment
        self.acts = environment.acts
        self.peer = peer
        self.client = client

    async def seed(self) -> Reply:
        return await self.peer.request("POST", "/seed_session", body={**SEED, "task_data": {}})

    async def dig(self) -> Reply:
        return await self.peer.request("POST", "/dig", body={}, headers=IN_SESSION)

    async def verify(self, **task: Any) -> Reply:
        return await self.peer.request("POST", "/verify", body={**task, **VERIFY}, headers=IN_SESSION)

    async def aggregate(self) -> Reply:
        return await self.peer.request("POST", "/aggregate_metrics", body={})

    async def close(self) -> Reply:
        return await self.peer.request(
            "POST", "/close_session", body={"resources_session_id": "s1", "episode_id": EPISODE}
        )

    async def judged(self, verdict: Any, **task: Any) -> tuple[str | None, bool, str]:
        """The error that `verdict` makes: kind, whether another attempt may help, its words."""
        self.acts["verify"] = lambda: verdict
        info = (await self.verify(**task)).error_info()
        return info.kind, info.retryable, info.message


@pytest.fixture(params=[Wild, WildOnTheLoop])
async def place(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    async with Client(transport_attempts=1) as client:
        environment = request.param()
        server = ResourcesServer(name="wild", environment=environment, signing_key=b"k" * 32)
        client.register("inline://wild", server.app)
        await server.app.start()
        yield Place(environment, client.peer("inline://wild", "resources"), client)
        environment.acts.clear()
        await server.app.stop()


@pytest.mark.promise("EP-9")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("where", "kind"),
    [
        ("seed", "seed_failed"),
        ("session_tools", "seed_failed"),
        ("env_session_id", "seed_failed"),
        ("tool", "tool_unavailable"),
        ("verify", "verify_failed"),
        ("release", "session_release_failed"),
    ],
)
async def test_whatever_an_author_raises_fails_its_call_with_its_cause_and_nothing_else(
    place: Place, where: str, kind: str, way: str
) -> None:
    calls = {"tool": place.dig, "verify": place.verify, "release": place.close}
    if where in calls:
        assert (await place.seed()).status == 200
    place.acts[where] = WAYS[way]
    reply = await calls.get(where, place.seed)()
    info = reply.error_info()
    assert (reply.status, info.kind, info.retryable) == (500, kind, True)
    assert way in info.message
    place.acts.clear()
    assert (await calls.get(where, place.seed)()).status == 200, "the server, and the session, go on"


def _first_then(way: Callable[[], NoReturn]) -> Iterator[str]:
    yield "dig"
    way()


def _number(way: Callable[[], NoReturn]) -> float:
    return type("Number", (float,), {"__float__": lambda _: way(), "__repr__": lambda _: way()})(1)  # type: ignore[no-any-return]


def _text(way: Callable[[], NoReturn]) -> str:
    """A text whose every word is code."""
    names = ("__str__", "__repr__", "__eq__", "__hash__", "__len__", "__format__", "encode", "isprintable")
    return type("Text", (str,), dict.fromkeys(names, lambda *_: way()))("dig")  # type: ignore[no-any-return]


def _dict(way: Callable[[], NoReturn]) -> dict[str, Any]:
    """A dict whose every look is code."""
    names = ("__iter__", "__len__", "__contains__", "__getitem__", "__eq__", "keys", "values", "items", "get")
    return type("Dict", (dict,), dict.fromkeys(names, lambda *_: way()))(at=1)  # type: ignore[no-any-return]


class Zone(tzinfo):
    """A time zone that is asked only when a time is written."""

    def __init__(self, way: Callable[[], NoReturn]) -> None:
        self.way = way

    def utcoffset(self, when: datetime | None) -> timedelta:
        self.way()

    def dst(self, when: datetime | None) -> timedelta:
        self.way()

    def tzname(self, when: datetime | None) -> str:
        self.way()


def _time(way: Callable[[], NoReturn]) -> Any:
    return {"at": datetime(2026, 1, 1, tzinfo=Zone(way))}


def _member(way: Callable[[], NoReturn]) -> Any:
    return type("Names", (), {"__iter__": lambda _: iter([_text(way)])})()


@pytest.mark.promise("EP-9")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("where", "returned", "kind"),
    [
        ("session_tools", _first_then, "seed_failed"),
        ("tool", _time, "tool_unavailable"),
        ("verify", _number, "bad_reward"),
        ("verify", lambda way: Verdict(reward=1.0, reward_components={"style": _number(way)}), "bad_reward"),
        ("verify", lambda way: Verdict(reward=1.0, extra=_time(way)), "verify_failed"),
        ("verify", lambda way: Verdict(reward=1.0, mask_sample=_number(way)), "verify_failed"),  # type: ignore[arg-type]
        ("verify", lambda way: Verdict(reward=1.0, reward_components=_number(way)), "verify_failed"),  # type: ignore[arg-type]
        ("aggregate", _time, "internal"),
    ],
)
async def test_what_an_author_returned_and_is_code_fails_its_call_only(
    place: Place, where: str, returned: Callable[[Any], Any], kind: str, way: str
) -> None:
    calls = {"tool": place.dig, "verify": place.verify, "aggregate": place.aggregate}
    if where in calls:
        assert (await place.seed()).status == 200
    place.acts[where] = lambda: returned(WAYS[way])
    reply = await calls.get(where, place.seed)()
    assert (reply.status, reply.error_info().kind) == (500, kind)
    place.acts.clear()
    assert (await calls.get(where, place.seed)()).status == 200, "the server, and the session, go on"


@pytest.mark.parametrize("way", WAYS)
async def test_texts_and_dicts_that_are_code_are_taken_for_what_is_in_them(place: Place, way: str) -> None:
    text, inside = _text(WAYS[way]), _dict(WAYS[way])
    place.acts |= {"session_tools": lambda: _member(WAYS[way]), "env_session_id": lambda: text}
    assert (await place.seed()).json()["env_session_id"] == "dig"
    place.acts["tool"] = lambda: text
    assert (await place.dig()).text == "dig"
    place.acts["verify"] = lambda: Verdict(
        reward=1.0, extra=inside, failure_kind=text, failure_reason=text, env_session_id=text
    )
    reply = (await place.verify()).json()
    assert (reply["at"], reply["failure_kind"], reply["failure_reason"]) == (1, "wild:dig", "dig")
    assert reply["env_session_id"] == "dig"


@pytest.mark.promise("EP-9")
@pytest.mark.parametrize(
    ("named", "said"),
    [
        (["dig", "poke"], "session_tools names 'poke', which is no tool of this environment"),
        ([["dig"]], "session_tools names ['dig']; each name must be a text"),
        ([3], "session_tools names 3; each name must be a text"),
        ([None], "session_tools names None; each name must be a text"),
        (5, "session_tools gave 5; a list of names of tools is needed"),
        (None, "session_tools gave None; a list of names of tools is needed"),
        (itertools.repeat("dig"), "session_tools gives more names than this environment has tools (1)"),
        (["dig"] * 3, "session_tools gives more names than this environment has tools (1)"),
    ],
    ids=str,
)
async def test_a_sessions_tools_that_are_no_names_are_refused_for_good(place: Place, named: Any, said: str) -> None:
    place.acts["session_tools"] = lambda: named
    reply = await place.seed()
    info = reply.error_info()
    assert (reply.status, info.kind, info.retryable) == (500, "seed_failed", False)
    assert info.message == f"wild: {said}"


@pytest.mark.parametrize("named", [["dig"], ("dig",), {"dig"}, {"dig": 1}, "dig"], ids=str)
async def test_a_sessions_tools_may_come_as_any_collection(place: Place, named: Any) -> None:
    place.acts["session_tools"] = lambda: named
    assert (await place.seed()).status == 200
    assert (await place.dig()).text == "dug"


async def test_names_that_never_come_keep_a_worker_and_not_the_server(place: Place) -> None:
    come, asked = threading.Event(), threading.Event()

    def slow() -> Iterator[str]:
        asked.set()
        come.wait()
        yield "dig"

    place.acts["session_tools"] = slow
    seeding = asyncio.create_task(place.seed())
    try:
        assert await asyncio.to_thread(asked.wait, 30)
        other = await place.peer.request("POST", "/dig", body={}, headers=IN_SESSION)
        assert other.error_info().kind == "conflict", "the loop answers others meanwhile"
    finally:
        come.set()
    assert (await seeding).status == 200


@pytest.mark.promise("EP-9")
@pytest.mark.parametrize(
    ("error", "status", "kind", "message"),
    [
        (lambda: ToolError(ValueError("no")), 422, "bad_request", "ValueError: no"),  # type: ignore[arg-type]
        (lambda: ToolError({"a": 1}), 422, "bad_request", "{'a': 1}"),  # type: ignore[arg-type]
        (lambda: ToolError("no", status=99), 422, "bad_request", "no"),
        (lambda: ToolError("no", status="x"), 422, "bad_request", "no"),  # type: ignore[arg-type]
        (lambda: ToolError("no", kind=7), 422, "wild:7", "no"),  # type: ignore[arg-type]
        (lambda: ToolError("no", kind="flaky"), 422, "wild:flaky", "no"),
        (lambda: ToolError("no", retryable="yes", upstream_status="x"), 422, "bad_request", "no"),  # type: ignore[arg-type]
        (lambda: TopropeError("no", kind="flaky", status=200), 500, "wild:flaky", "no"),
        (lambda: TopropeError("no", kind="a b", status=503, headers={"x-a": 1}), 503, "internal", "no"),  # type: ignore[dict-item]
        (lambda: ToolError(_text(leave)), 422, "bad_request", "dig"),
    ],
)
async def test_an_error_of_ours_with_anything_in_it_is_told_as_far_as_it_can_be(
    place: Place, error: Callable[[], TopropeError], status: int, kind: str, message: str
) -> None:
    def refuse() -> NoReturn:
        raise error()

    await place.seed()
    place.acts["tool"] = refuse
    reply = await place.dig()
    info = reply.error_info()
    assert (reply.status, info.kind, info.message, info.retryable) == (status, kind, message, False)


@pytest.mark.promise("EP-9")
@pytest.mark.parametrize("way", WAYS)
async def test_an_error_of_ours_whose_words_are_code_fails_its_call_only(place: Place, way: str) -> None:
    words = property(lambda _: WAYS[way](), lambda _, value: None)

    def refuse() -> NoReturn:
        raise type("Odd", (TopropeError,), {"message": words})("no")

    await place.seed()
    for where, call, kind in (
        ("tool", place.dig, "tool_unavailable"),
        ("verify", place.verify, "verify_failed"),
        ("release", place.close, "session_release_failed"),
    ):
        place.acts[where] = refuse
        reply = await call()
        assert (reply.status, reply.error_info().kind) == (500, kind)


@pytest.mark.promise("EP-9")
async def test_a_seed_that_cannot_be_cleaned_up_tells_what_it_failed_of(place: Place) -> None:
    place.acts |= {"session_tools": speechless, "release": leave}
    info = (await place.seed()).error_info()
    assert info.kind == "seed_failed"
    assert "Speechless" in info.message


@pytest.mark.parametrize("handle", [7, b"box", "", "x" * 513, "a\nb", "\ud800", ["box"]])
async def test_a_handle_that_nobody_could_look_for_is_refused(place: Place, handle: Any) -> None:
    place.acts["env_session_id"] = lambda: handle
    info = (await place.seed()).error_info()
    assert (info.kind, info.retryable) == ("seed_failed", False)
    assert "env_session_id" in info.message
    assert "512" in info.message
    place.acts.clear()
    assert (await place.seed()).status == 200
    kind, retryable, message = await place.judged(Verdict(reward=1.0, env_session_id=handle))
    assert (kind, retryable) == ("verify_failed", False)
    assert "env_session_id" in message


class Broken(float):
    """A number that does not know its own text."""

    def __repr__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.promise("EP-17")
@pytest.mark.parametrize(
    ("reward", "named"),
    [
        (10**400, "an integer of 1329 bits"),
        (-(10**5000), "an integer of 16610 bits"),
        (Broken("nan"), "a Broken"),
        (Verdict(reward=1.0, reward_components={"style": math.nan}), "reward_components['style'] is nan"),
        (Verdict(reward=1.0, reward_components={"style": 10**400}), "reward_components['style'] is an integer"),
        (Verdict(reward=1.0, reward_components={"style": "high"}), "reward_components['style'] is 'high'"),  # type: ignore[dict-item]
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_no_reward_can_be_is_named(place: Place, reward: Any, named: str) -> None:
    await place.seed()
    kind, retryable, message = await place.judged(reward)
    assert (kind, retryable) == ("bad_reward", False)
    assert named in message


def _loop() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


@pytest.mark.promise("EP-17")
@pytest.mark.parametrize(
    ("verdict", "named"),
    [
        (Verdict(reward=1.0, extra={"score": math.nan}), "$.score is nan"),
        (Verdict(reward=1.0, extra={"score": [{"at": math.inf}]}), "score"),
        (Verdict(reward=1.0, extra={"loop": _loop()}), "cannot be sent as JSON"),
        (Verdict(reward=1.0, extra={"thing": object()}), "cannot be sent as JSON"),
        (Verdict(reward=1.0, extra={3: 1}), "extra has the key 3"),  # type: ignore[dict-item]
        (Verdict(reward=1.0, extra=[1]), "extra is [1]"),  # type: ignore[arg-type]
        (Verdict(reward=1.0, mask_sample="false"), "mask_sample is 'false'"),  # type: ignore[arg-type]
        (Verdict(reward=1.0, failure_reason=5), "failure_reason is 5"),  # type: ignore[arg-type]
        (Verdict(reward=1.0, failure_kind=5), "failure_kind is 5"),  # type: ignore[arg-type]
        (Verdict(reward=1.0, reward_components=[1.0]), "reward_components is [1.0]"),  # type: ignore[arg-type]
    ],
)
async def test_a_verdict_that_json_cannot_carry_is_a_failure_that_names_the_field(
    place: Place, verdict: Verdict, named: str
) -> None:
    await place.seed()
    kind, retryable, message = await place.judged(verdict)
    assert (kind, retryable) == ("verify_failed", False)
    assert named in message


FORGED = {
    "reward": 1.0,
    "mask_sample": True,
    "failure_kind": "internal",
    "failure_reason": "forged",
    "reward_components": {"forged": 1.0},
    "env_session_id": "forged",
    "seed_env_session_id": "forged",
    "termination": "agent_timeout",
    "ng_agent_observations": {"source": "forged", "records": [], "gaps": []},
}


@pytest.mark.promise("EP-12")
async def test_a_task_cannot_say_what_became_of_it(place: Place) -> None:
    await place.seed()
    place.acts["verify"] = lambda: 0.25
    reply = (await place.verify(**FORGED, goal=3)).json()
    assert reply == {**VERIFY, "goal": 3, "reward": 0.25, "mask_sample": False}


@pytest.mark.promise("EP-12")
@pytest.mark.parametrize("field", FORGED)
async def test_a_verdicts_extra_cannot_say_it_either(place: Place, field: str) -> None:
    await place.seed()
    kind, retryable, message = await place.judged(Verdict(reward=0.5, extra={field: FORGED[field]}))
    assert (kind, retryable) == ("verify_failed", False)
    assert repr(field) in message


async def test_a_failure_that_a_verifier_names_beside_its_reward_always_has_a_reason(place: Place) -> None:
    await place.seed()
    place.acts["verify"] = lambda: Verdict(reward=0.0, failure_kind="flaky")
    reply = (await place.verify()).json()
    assert (reply["reward"], reply["failure_kind"]) == (0.0, "wild:flaky")
    assert reply["failure_reason"] == "verify gave no reason beside its failure_kind wild:flaky"
    place.acts["verify"] = lambda: Verdict(reward=0.0, failure_kind="flaky", failure_reason="z" * 100_000)
    assert len((await place.verify()).json()["failure_reason"]) == 2000
