"""What every environment must keep, as plain async functions: the conformance suite for environments.

The environment as it stands is served by a real resources server and treated as the network treats it: seeds that come
fifty times, replies that nobody reads, closes with the wrong token, a release that fails. Beside that: sessions that
must not see each other, tools that must not break on arguments which their schema allows, tasks that are JSON.

    assert findings(Shop(), tasks="tasks.jsonl") == []

`check_environment` is the same for code that runs in a loop already. Needs no test framework. A check returns when the
promise holds and raises `Nonconforming` when it does not; left to others: how it is called (`environment_kit`).
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from toprope.collector.tasks import TaskLike, read_tasks
from toprope.errors.body import said_by
from toprope.errors.tree import TopropeError
from toprope.sandbox.desk import SandboxDesk
from toprope.servers.environment.turns import TurnInput, read_input
from toprope.servers.resources.environment import Environment
from toprope.testing.environment_calls import every_call_ends_and_leaves_the_loop_free
from toprope.testing.environment_kit import (
    Caller,
    House,
    Nonconforming,
    Subject,
    as_json,
    is_tool_error,
    must,
    run,
    said,
    sample_arguments,
    served,
)
from toprope.tools.spec import ToolSpec

T = TypeVar("T")
Check = Callable[[Subject], Awaitable[None]]
Tasks = str | os.PathLike[str] | Iterable[TaskLike]

READ_TASKS = "tasks_are_json_and_the_same_for_a_seed"
"""What comes before every check: without tasks none can run."""

LEAVE_S = 5.0
"""Seconds that a check which was given up gets to put things away."""

_IMMUTABLE = (type(None), bool, int, float, complex, str, bytes, tuple, frozenset)


@dataclass(frozen=True, slots=True)
class Finding:
    """One promise that is not kept: the name of its check, and what happened."""

    check: str
    problem: str


def findings(target: Environment | Callable[[], Environment], **options: Any) -> list[Finding]:
    """`check_environment`, for code that runs in no event loop."""
    return asyncio.run(check_environment(target, **options))


async def check_environment(
    target: Environment | Callable[[], Environment],
    *,
    tasks: Tasks | None = None,
    size: int = 3,
    seed: int = 7,
    sessions: int = 50,
    sandboxes: SandboxDesk | None = None,
    timeout_s: float = 60.0,
) -> list[Finding]:
    """Every check over one environment, in order; what is not kept. An empty list means that it conforms.

    `tasks`: a JSONL file or tasks; absent, the environment's own, `size` of them by `seed`. `sessions`: how many at
    once. `sandboxes`: opened already, for an environment that wants a sandbox a session. `timeout_s` bounds each check,
    half of it each call of the first that calls the environment: where one never ends, nothing further is
    checked, and each check that was left out is a finding.
    """
    environment = target if isinstance(target, Environment) else target()
    found: list[Finding] = []
    try:
        given = await _bounded(run(_gather, environment, tasks, size, seed), timeout_s)
    except Nonconforming as error:
        return [Finding(READ_TASKS, str(error))]
    except Exception as error:  # the author's own, sys.exit() too
        return [Finding(READ_TASKS, said_by(error))]
    subject = Subject(environment, given, sessions, sandboxes, call_timeout_s=timeout_s / 2)
    for name, check in CHECKS.items():
        if subject.stuck:
            found.append(Finding(name, f"not checked: {subject.stuck[0]}"))
            continue
        try:
            await _bounded(check(subject), timeout_s)
        except Nonconforming as error:
            found.append(Finding(name, subject.stuck[0] if subject.stuck else str(error)))
        except Exception as error:  # a check that trips over what the environment did has found something
            found.append(Finding(name, said_by(error)))
    return found


async def _bounded(work: Awaitable[T], timeout_s: float) -> T:
    """The outcome of `work`. Raises `Nonconforming` where it does not end in time; then it is cancelled and left."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        if not task.done():
            raise Nonconforming(f"it did not end within {timeout_s:g} s")
        return task.result()
    finally:
        task.cancel()
        await asyncio.wait({task}, timeout=LEAVE_S)


def _gather(environment: Environment, tasks: Tasks | None, size: int, seed: int) -> list[TurnInput]:
    """The tasks, each as the planner of a run reads it. Raises `Nonconforming`."""
    if tasks is not None:
        try:
            rows = [(task.task_id, task.task_input) for task in islice(read_tasks(tasks), size)]
        except TopropeError as error:
            raise Nonconforming(error.message) from None
    else:
        must(
            type(environment).tasks is not Environment.tasks,
            "it makes no tasks of its own; give the suite a file of tasks",
        )
        once, twice = (
            [(each.task_id, each.task_input) for each in islice(environment.tasks(size, seed), size + 1)]
            for _ in range(2)
        )
        must(once == twice, f"tasks({size}, {seed}) gave other tasks the second time")
        gave = f"more than {size}" if len(once) > size else str(len(once))
        must(len(once) == size, f"tasks({size}, {seed}) gave {gave} tasks")
        must(len({(each.taskset, each.task_id) for each, _ in once}) == size, "two tasks have one id")
        rows = [(each.task_id, task_input) for each, task_input in once]
    must(bool(rows), "there is no task")
    found = []
    for task_id, task_input in rows:
        must(as_json(task_input) == task_input, f"task {task_id} is another after a trip through JSON (tuples, keys)")
        try:
            found.append(read_input(task_input))
        except TopropeError as error:
            raise Nonconforming(f"task {task_id}: {error.message}") from None
    return found


# -- what it says of itself ------------------------------------------------------------------------------------------


async def tools_are_described(subject: Subject) -> None:
    for name, spec in subject.environment.tools.items():
        must(bool(spec.description.strip()), f"tool {name} has no docstring: a model is told nothing of it")
        schema = as_json(dict(spec.parameters))
        must(schema.get("type") == "object", f"tool {name}: its parameters are no object: {schema}")
        for argument, one in schema.get("properties", {}).items():
            known = {"type", "enum", "anyOf", "oneOf", "$ref", "const"} & set(one)
            must(bool(known), f"tool {name}: nothing is said of the type of {argument}; give it a type hint")


async def tasks_offer_the_tools_that_are_served(subject: Subject) -> None:
    served_tools = subject.environment.tools
    for number, given in enumerate(subject.tasks):
        for each in given.responses_create_params.get("tools") or []:
            name = each.get("name")
            if each.get("type") != "function":
                continue
            must(name in served_tools, f"task {number} offers the tool {name!r}, which is not served")
            offered = set((each.get("parameters") or {}).get("properties", {}))
            real = set(served_tools[name].parameters.get("properties", {}))
            must(
                offered <= real,
                f"task {number} offers {name} with the arguments {offered - real} that it does not have",
            )


# -- sessions --------------------------------------------------------------------------------------------------------


async def equal_seeds_allocate_once(subject: Subject) -> None:
    async with served(subject) as house:
        caller = house.caller()
        replies = await asyncio.gather(*(caller.seed() for _ in range(subject.sessions)))
        must({reply.status for reply in replies} == {200}, f"a seed failed: {said(replies[0])}")
        must(len({reply.body for reply in replies}) == 1, "equal seeds got different replies")
        if subject.environment.stateful:
            must(len(house.watch.seeded) == 1, f"{len(replies)} equal seeds ran seed {len(house.watch.seeded)} times")
        other = await caller.seed(task_data={**caller.given.task_data, "another": 1})
        must(other.status == 409, f"the same session with another task answered {other.status}, not 409")
        await _closed(caller)
        must((await caller.seed()).status == 409, "a seed after the close is not refused with 409")
        never = house.caller()
        must((await never.close()).status == 200, "the close of a session that was never seeded is refused")
        must((await never.seed()).status == 409, "a seed after the close of its id is not refused with 409")
        house.nothing_is_open()


async def a_lost_reply_leaves_nothing_open(subject: Subject) -> None:
    """The caller of a seed, of a verify, of a close is gone before the answer; then each is sent again."""
    async with served(subject) as house:
        caller = house.caller()
        await _dropped(house, "seed" if subject.environment.stateful else None, caller.seed())
        must((await caller.seed()).status == 200, "a seed that is sent again after its reply was lost fails")
        if subject.environment.stateful:
            must(len(house.watch.seeded) == 1, f"a seed that was sent again ran {len(house.watch.seeded)} times")
        await _dropped(house, "verify", caller.verify())
        reply = await caller.verify()
        must(reply.status == 200, f"verify after a verify whose caller left answered {reply.status}: {said(reply)}")
        await _dropped(house, "release" if subject.releases else None, caller.close())
        again = await caller.close()
        must(again.status == 200, f"a close that is sent again answered {again.status}: {said(again)}")
        must((await caller.close()).json().get("outcome") == "already_closed", "the third close is not already_closed")
        house.nothing_is_open()


async def a_close_during_its_seed_releases_what_the_seed_took(subject: Subject) -> None:
    async with served(subject) as house:
        caller = house.caller()
        gate = house.watch.hold["seed"] = asyncio.Event()
        seeding = asyncio.ensure_future(caller.seed())
        if subject.environment.stateful:
            await house.watch.entered["seed"].wait()
        closing = asyncio.ensure_future(caller.close())
        await asyncio.sleep(0)
        gate.set()
        await asyncio.wait({seeding, closing})
        must(closing.result().status == 200, f"the close answered {closing.result().status}")
        house.nothing_is_open()


async def sessions_by_the_dozen_are_each_their_own(subject: Subject) -> None:
    async with served(subject) as house:
        callers = [house.caller(number) for number in range(subject.sessions)]
        await asyncio.gather(*(caller.opened() for caller in callers))
        own = [state for state in house.watch.seeded if not isinstance(state, _IMMUTABLE)]
        must(
            len({id(state) for state in own}) == len(own), "seed gave one object to two sessions; make a fresh one each"
        )
        replies = await asyncio.gather(*(caller.verify() for caller in callers))
        must({reply.status for reply in replies} == {200}, f"verify failed: {said(_worst(replies))}")
        await asyncio.gather(*map(_closed, callers))
        house.nothing_is_open()


async def a_close_needs_its_token(subject: Subject) -> None:
    async with served(subject) as house:
        caller = await house.caller().opened()
        for token in ("wrong", ""):
            reply = await caller.close(token=token)
            must(reply.status == 403, f"a close with the token {token!r} answered {reply.status}, not 403")
            reply = await caller.verify(token=token)
            must(reply.status == 403, f"verify with the token {token!r} answered {reply.status}, not 403")
        must(not house.watch.released, "a close with a wrong token released the session")
        reply = await caller.verify()
        must(reply.status == 200, f"verify with the right token answered {reply.status}: {said(reply)}")
        await _closed(caller)
        house.nothing_is_open()


async def a_release_that_failed_is_called_again(subject: Subject) -> None:
    if not subject.releases:
        return
    async with served(subject) as house:
        caller = await house.caller().opened()
        house.watch.fail_releases = 1
        reply = await caller.close()
        must(reply.error_info().kind == "session_release_failed", f"a failed release answered {reply.status}")
        await _closed(caller)
        house.nothing_is_open()


# -- tools and verify ------------------------------------------------------------------------------------------------


async def tools_answer_whatever_their_schema_allows(subject: Subject) -> None:
    async with served(subject) as house:
        for number in range(len(subject.tasks)):
            for name, spec in subject.environment.tools.items():
                for arguments in sample_arguments(spec.parameters):
                    caller = await house.caller(number).opened()
                    reply = await caller.post(f"/{name}", arguments)
                    must(
                        reply.status < 400 or is_tool_error(reply),
                        f"tool {name} broke on {arguments}: {said(reply)}; raise ToolError to tell the model no",
                    )
                    await _closed(caller)


async def wrong_arguments_are_told_to_the_model(subject: Subject) -> None:
    async with served(subject) as house:
        caller = await house.caller().opened()
        for name, spec in subject.environment.tools.items():
            bodies: list[Any] = [["no", "object"], b"{no json"]
            if spec.parameters.get("required"):
                bodies.append({})
            for body in bodies:
                reply = await caller.post(f"/{name}", body)
                must(is_tool_error(reply), f"tool {name} answered {body!r} with {reply.status}: {said(reply)}")
        reply = await caller.verify()
        must(reply.status == 200, f"verify after refused calls answered {reply.status}: {said(reply)}")
        await _closed(caller)


async def an_agent_that_does_nothing_gets_a_verdict(subject: Subject) -> None:
    async with served(subject) as house:
        for number in range(len(subject.tasks)):
            caller = await house.caller(number).opened()
            reply = await caller.verify()
            must(reply.status == 200, f"verify of an empty response failed: {said(reply)}")
            reward = reply.json().get("reward")
            finite = isinstance(reward, int | float) and not isinstance(reward, bool) and math.isfinite(reward)
            must(finite, f"the reward of an empty response is {reward!r}")
            await _closed(caller)


async def equal_sessions_get_equal_verdicts(subject: Subject) -> None:
    if not subject.deterministic:
        return
    async with served(subject) as house:
        caller = await house.caller().opened()
        first = _verdict(await caller.verify())
        must(_verdict(await caller.verify()) == first, "verify of the same session changed its verdict the second time")
        fresh = await house.caller().opened()
        must(_verdict(await fresh.verify()) == first, "verify of an equal session gave another verdict")
        await asyncio.gather(_closed(caller), _closed(fresh))


async def sessions_do_not_see_each_other(subject: Subject) -> None:
    """The same calls in a fresh session, beside others, and after others have ended, give the same replies."""
    if not subject.deterministic:
        return
    async with served(subject) as house:
        tools = subject.environment.tools
        alone = await house.caller().opened()
        wanted = await _transcript(alone, tools)
        await _closed(alone)
        beside = await house.caller().opened()
        busy = [await house.caller().opened() for _ in range(4)]
        seen = await asyncio.gather(*(_transcript(each, tools) for each in busy))
        must(all(each == wanted for each in seen), "sessions that ran at once got other replies than one alone")
        must(await _transcript(beside, tools) == wanted, "what other sessions did changed the replies of this one")
        await asyncio.gather(_closed(beside), *map(_closed, busy))


CHECKS: Mapping[str, Check] = {
    check.__name__: check
    for check in (
        tools_are_described,
        tasks_offer_the_tools_that_are_served,
        every_call_ends_and_leaves_the_loop_free,
        equal_seeds_allocate_once,
        a_lost_reply_leaves_nothing_open,
        a_close_during_its_seed_releases_what_the_seed_took,
        sessions_by_the_dozen_are_each_their_own,
        a_close_needs_its_token,
        a_release_that_failed_is_called_again,
        tools_answer_whatever_their_schema_allows,
        wrong_arguments_are_told_to_the_model,
        an_agent_that_does_nothing_gets_a_verdict,
        equal_sessions_get_equal_verdicts,
        sessions_do_not_see_each_other,
    )
}
"""The checks by name, in the order in which they run; before them the tasks are read."""


async def _dropped(house: House, inside: str | None, call: Coroutine[Any, Any, Any]) -> None:
    """Make a call, and be gone before it is answered: while the author's `inside` runs, or as soon as it is sent."""
    sent = asyncio.ensure_future(call)
    if inside is None:
        await asyncio.sleep(0)
    else:
        gate = house.watch.hold[inside] = asyncio.Event()
        await asyncio.wait(
            {sent, entered := asyncio.ensure_future(house.watch.entered[inside].wait())}, return_when="FIRST_COMPLETED"
        )
        entered.cancel()
    sent.cancel()
    await asyncio.wait({sent})
    if inside is not None:
        gate.set()
        del house.watch.hold[inside]


async def _closed(caller: Caller) -> None:
    reply = await caller.close()
    must(reply.status == 200, f"close answered {reply.status}: {said(reply)}")
    must(reply.json().get("outcome") == "closed", f"close answered {reply.text}")


async def _transcript(caller: Caller, tools: Mapping[str, ToolSpec]) -> list[Any]:
    found: list[Any] = []
    for name, spec in tools.items():
        for arguments in sample_arguments(spec.parameters):
            reply = await caller.post(f"/{name}", arguments)
            found.append((name, reply.status, reply.text))
    return [*found, _verdict(await caller.verify())]


def _verdict(reply: Any) -> Any:
    must(reply.status == 200, f"verify failed: {said(reply)}")
    return reply.json()


def _worst(replies: Iterable[Any]) -> Any:
    return max(replies, key=lambda reply: reply.status)
