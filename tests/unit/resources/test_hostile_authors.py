"""Authors' code at its worst: whatever it raises or returns costs its call, at once, and is told with its cause."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

import pytest

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
        return str(self.act("tool", "dug"))

    def verify(self, state: Any, task: dict[str, Any], response: dict[str, Any]) -> Any:
        return self.act("verify", 1.0)

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
        return str(self.act("tool", "dug"))

    async def verify(self, state: Any, task: dict[str, Any], response: dict[str, Any]) -> Any:
        return self.act("verify", 1.0)

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
