"""What the conformance suite for environments works with: one served environment, watched, and a caller of it.

Left to others: what is checked (`environment_suite`).
"""

from __future__ import annotations

import asyncio
import inspect
import json
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

from toprope.correlation.context import rollout_context
from toprope.http.client import Client, Peer
from toprope.http.reply import Reply
from toprope.protocol.headers import CLOSE_TOKEN, SESSION
from toprope.sandbox.desk import SandboxDesk
from toprope.servers.environment.turns import TurnInput
from toprope.servers.resources.environment import Environment
from toprope.servers.resources.server import ResourcesServer
from toprope.tools.spec import TOOL_ERROR_TYPE
from toprope.tools.workers import Escaped, WorkerThreads, contained

NOTHING_SAID: Mapping[str, Any] = {"id": "resp_0", "object": "response", "status": "completed", "output": []}
"""The response of an agent that did nothing."""

WATCHED = ("seed", "verify", "release")


class Nonconforming(AssertionError):
    """The environment breaks a promise; the message says how, and what would keep it."""


def must(held: bool, promise: str) -> None:
    """Raises `Nonconforming` unless `held`."""
    if not held:
        raise Nonconforming(promise)


@dataclass(frozen=True, slots=True)
class Subject:
    """What is checked: the environment, its tasks, how many sessions at once, and where its sandboxes come from."""

    environment: Environment
    tasks: Sequence[TurnInput]
    sessions: int
    sandboxes: SandboxDesk | None
    call_timeout_s: float = 30.0
    stuck: list[str] = field(default_factory=list)
    """What never ended, in words: set by the check that found it, since what comes after it may never end either."""

    @property
    def deterministic(self) -> bool:
        """Whether equal sessions are declared to give equal replies."""
        return self.environment.deterministic

    @property
    def releases(self) -> bool:
        """Whether the environment frees anything."""
        return type(self.environment).release is not Environment.release


@dataclass(slots=True)
class Watch:
    """What was seen of the author's code: the states that `seed` gave, and those that `release` was given.

    `entered` has an event for each of seed, verify and release, set when it is called; while `hold` has one of them it
    waits there. The next `fail_releases` releases fail.
    """

    seeded: list[Any] = field(default_factory=list)
    released: list[Any] = field(default_factory=list)
    fail_releases: int = 0
    entered: dict[str, asyncio.Event] = field(default_factory=lambda: {name: asyncio.Event() for name in WATCHED})
    hold: dict[str, asyncio.Event] = field(default_factory=dict)

    @contextmanager
    def over(self, environment: Environment) -> Iterator[None]:
        """Inside, calls of `seed`, `verify` and `release` of this instance are seen."""
        seed, verify, release = environment.seed, environment.verify, environment.release

        async def enter(name: str) -> None:
            self.entered[name].set()
            if name in self.hold:
                await self.hold[name].wait()

        async def watched_seed(task: dict[str, Any], **own: Any) -> Any:
            await enter("seed")
            state = await run(seed, task, **own)
            self.seeded.append(state)
            return state

        async def watched_verify(state: Any, task: dict[str, Any], response: dict[str, Any]) -> Any:
            await enter("verify")
            return await run(verify, state, task, response)

        async def watched_release(state: Any) -> None:
            await enter("release")
            if self.fail_releases:
                self.fail_releases -= 1
                raise ConnectionError("a release that fails, by the conformance suite")
            self.released.append(state)
            await run(release, state)

        vars(environment).update(seed=watched_seed, verify=watched_verify, release=watched_release)
        try:
            yield
        finally:
            for name in WATCHED:
                vars(environment).pop(name, None)


async def run(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call the author's function as the server does: a plain one in a thread.

    One that never ends is left to itself when the caller is cancelled: no check, and no end of the process, waits for
    it.
    """
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **named)
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    context = copy_context()

    def settle(outcome: Any, failure: BaseException | None) -> None:
        if done.done():
            return
        if failure is not None:
            done.set_exception(failure if isinstance(failure, Exception) else Escaped(failure))
        else:
            done.set_result(outcome)

    def work() -> None:
        outcome: Any = None
        failure: BaseException | None = None
        try:
            outcome = context.run(function, *arguments, **named)
        except StopIteration as error:  # a future cannot carry it
            failure = RuntimeError(f"the function raised {type(error).__name__}")
        except BaseException as error:  # goes to whoever awaits the call, whatever it is
            failure = error
        with suppress(RuntimeError):  # the loop is gone, and with it everybody who waited
            loop.call_soon_threadsafe(settle, outcome, failure)

    threading.Thread(target=work, name="toprope-check", daemon=True).start()
    result = await done
    return await result if inspect.isawaitable(result) else result


class _LeftToThemselves(WorkerThreads):
    """Worker threads that nobody waits for once their caller is gone."""

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await contained(run(function, *args, **kwargs))


@dataclass(slots=True)
class Caller:
    """One session of the served environment, as its owner sees it."""

    peer: Peer
    rollout_id: str
    given: TurnInput
    session_id: str = field(default_factory=lambda: f"check-{secrets.token_hex(6)}")
    token: str = field(default_factory=lambda: secrets.token_urlsafe(16))

    async def post(self, path: str, body: Any, *, token: str | None = None, named: bool = True) -> Reply:
        """`POST path` for this session's rollout."""
        headers = {SESSION: self.session_id} if named else {}
        if token is not None:
            headers[CLOSE_TOKEN] = token
        with rollout_context(self.rollout_id):
            return await self.peer.request("POST", path, body=body, headers=headers)

    async def seed(self, *, task_data: Mapping[str, Any] | None = None) -> Reply:
        """Seed, or send the same seed again."""
        body = {
            "resources_session_id": self.session_id,
            "episode_id": {"rollout_id": self.rollout_id, "attempt": 0},
            "task_id": {"taskset": "conformance", "task_id": "0"},
            "task_data": dict(self.given.task_data if task_data is None else task_data),
        }
        return await self.post("/seed_session", body, token=self.token, named=False)

    async def opened(self) -> Caller:
        """Seed; raises `Nonconforming` where that fails."""
        reply = await self.seed()
        must(reply.status == 200, f"seed answered {reply.status}: {said(reply)}")
        return self

    async def verify(self, *, token: str | None = None) -> Reply:
        """Verify a response in which nothing was said."""
        body = {
            **self.given.task_data,
            "responses_create_params": self.given.responses_create_params,
            "response": dict(NOTHING_SAID),
        }
        return await self.post("/verify", body, token=self.token if token is None else token)

    async def close(self, *, token: str | None = None) -> Reply:
        """Close."""
        body = {"resources_session_id": self.session_id, "episode_id": {"rollout_id": self.rollout_id, "attempt": 0}}
        return await self.post("/close_session", body, token=self.token if token is None else token, named=False)


@dataclass(slots=True)
class House:
    """A served environment."""

    subject: Subject
    server: ResourcesServer
    client: Client
    watch: Watch
    _count: int = 0

    def caller(self, task: int = 0) -> Caller:
        """A session that is not seeded yet, for one of the tasks."""
        self._count += 1
        given = self.subject.tasks[task % len(self.subject.tasks)]
        return Caller(self.client.peer("inline://environment", "resources"), f"check.{self._count}-0", given)

    def nothing_is_open(self) -> None:
        """Raises `Nonconforming` where a session is left, or a state was not released exactly once."""
        must(len(self.server.sessions) == 0, f"{len(self.server.sessions)} sessions are left open")
        if self.subject.releases and self.subject.environment.stateful:
            seeded, released = map(id, self.watch.seeded), map(id, self.watch.released)
            must(
                sorted(seeded) == sorted(released),
                f"{len(self.watch.seeded)} states were made, {len(self.watch.released)} released",
            )


@asynccontextmanager
async def served(subject: Subject) -> AsyncIterator[House]:
    """The environment behind a real resources server, watched."""
    watch = Watch()
    async with Client() as client:
        with watch.over(subject.environment):
            server = ResourcesServer(
                name="environment",
                environment=subject.environment,
                signing_key=secrets.token_bytes(32),
                sandboxes=subject.sandboxes,
            )
            server.workers = _LeftToThemselves(subject.environment.worker_threads)
            client.register("inline://environment", server.app)
            await server.app.start()
            try:
                yield House(subject, server, client, watch)
            finally:
                await server.app.stop(drain_s=0)


def said(reply: Reply) -> str:
    """The words of a reply, cut."""
    return reply.error_info().message[:500] if reply.status >= 400 else reply.text[:500]


def is_tool_error(reply: Reply) -> bool:
    """Whether a tool said no in words that a model can read."""
    try:
        return bool(reply.status < 500 and reply.json()["error"]["type"] == TOOL_ERROR_TYPE)
    except Exception:  # any other body: then it is none
        return False


def sample_arguments(parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Arguments that the schema allows: small ones, empty ones, and large ones; optional ones in the first only."""
    definitions = parameters.get("$defs", {})
    properties: Mapping[str, Any] = parameters.get("properties", {})
    required = set(parameters.get("required", ()))
    found = []
    for size in range(3):
        names = [name for name in properties if size == 0 or name in required]
        found.append({name: _sample(properties[name], size, definitions, 0) for name in names})
    return [each for index, each in enumerate(found) if each not in found[:index]]


def _sample(schema: Mapping[str, Any], size: int, definitions: Mapping[str, Any], depth: int) -> Any:
    if "$ref" in schema:
        return _sample(definitions[schema["$ref"].rpartition("/")[2]], size, definitions, depth + 1)
    for key in ("enum", "anyOf", "oneOf"):
        if choices := schema.get(key):
            choice = choices[size % len(choices)]
            return choice if key == "enum" else _sample(choice, size, definitions, depth + 1)
    if "const" in schema:
        return schema["const"]
    kind = schema.get("type")
    if kind == "object":
        names = list(schema.get("required", ())) if depth < 5 else []
        inner = schema.get("properties", {})
        return {name: _sample(inner[name], size, definitions, depth + 1) for name in names if name in inner}
    if kind == "array":
        if "prefixItems" in schema:
            return [_sample(each, size, definitions, depth + 1) for each in schema["prefixItems"]]
        count = max(schema.get("minItems", 0), 0 if size == 1 or depth > 4 else 1)
        return [_sample(schema.get("items", {"type": "string"}), size, definitions, depth + 1)] * count
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    if kind in ("integer", "number"):
        number = (1, 0, 10**6)[size]
        number = number if low is None else max(number, int(low) + ("exclusiveMinimum" in schema))
        number = number if high is None else min(number, int(high))
        return number if kind == "integer" else float(number)
    samples = {"string": ("x", "", "Ünïcode\u2028 " * 40), "boolean": (True, False, True), "null": (None, None, None)}
    return samples.get(str(kind), samples["string"])[size]


def as_json(value: Any) -> Any:
    """`value` after a trip through JSON. Raises `Nonconforming` for what JSON cannot carry."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise Nonconforming(f"a task is not JSON: {error}") from None
