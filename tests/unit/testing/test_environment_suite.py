"""The conformance suite for environments: each deliberately broken environment fails the check that is about it."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from toprope.errors.tree import ToolError
from toprope.protocol.episode import Task
from toprope.protocol.ids import TaskId
from toprope.servers.resources.environment import Environment
from toprope.testing.environment_kit import sample_arguments
from toprope.testing.environment_suite import CHECKS, READ_TASKS, Finding, check_environment, findings
from toprope.tools.spec import tool


def task(number: int, **params: Any) -> Task:
    given = {"responses_create_params": {"input": "go", **params}, "task_data": {"goal": number}}
    return Task(TaskId("counter", str(number)), given)


class Counter(Environment):
    """One that keeps every promise."""

    def seed(self, task: dict[str, Any]) -> dict[str, int]:
        return {"n": 0}

    @tool
    def add(self, state: dict[str, int], n: int) -> int:
        """Add n."""
        if n < 0:
            raise ToolError("not less than nothing")
        state["n"] += n
        return state["n"]

    def verify(self, state: dict[str, int], task: dict[str, Any], response: dict[str, Any]) -> float:
        return float(state["n"] == task["goal"])

    def release(self, state: dict[str, int]) -> None:
        state.clear()

    def tasks(self, size: int, seed: int) -> Iterable[Task]:
        return [task(number, tools=self.tool_list()) for number in range(size)]


class OneStateForAll(Counter):
    shared: dict[str, int] = {}  # noqa: RUF012

    def seed(self, task: dict[str, Any]) -> dict[str, int]:
        self.shared["n"] = 0
        return self.shared

    def release(self, state: dict[str, int]) -> None:
        pass


class CountsInTheClass(Counter):
    """Each session has its own state, and the tool uses another."""

    total = 0

    @tool
    def add(self, state: dict[str, int], n: int) -> int:
        """Add n."""
        CountsInTheClass.total += abs(n)
        return CountsInTheClass.total


class ToolWithoutWords(Counter):
    @tool
    def silent(self, state: dict[str, int]) -> int:
        return 1


class ToolThatBreaks(Counter):
    @tool
    def look_up(self, state: dict[str, int], name: str) -> int:
        """Look a name up."""
        return {"n": 1}[name]


class ToolThatReturnsNoJson(Counter):
    @tool
    def things(self, state: dict[str, int]) -> Any:
        """Give a set of things."""
        return {object()}


class VerdictByChance(Counter):
    numbers = itertools.count()

    def verify(self, state: dict[str, int], task: dict[str, Any], response: dict[str, Any]) -> float:
        return float(next(self.numbers))


class VerifySpendsItsState(Counter):
    def verify(self, state: dict[str, int], task: dict[str, Any], response: dict[str, Any]) -> float:
        state["n"] += 1
        return float(state["n"])


class VerifyNeedsAnAnswer(Counter):
    def verify(self, state: dict[str, int], task: dict[str, Any], response: dict[str, Any]) -> float:
        return float(response["output"][-1]["content"] == "done")


class RewardIsNotANumber(Counter):
    def verify(self, state: dict[str, int], task: dict[str, Any], response: dict[str, Any]) -> float:
        return float("nan")


class ReleaseThatRaises(Counter):
    def release(self, state: dict[str, int]) -> None:
        raise OSError("cannot")


class SeedThatFails(Counter):
    def seed(self, task: dict[str, Any]) -> dict[str, int]:
        raise ConnectionError("nobody there")


class TasksThatDiffer(Counter):
    numbers = itertools.count()

    def tasks(self, size: int, seed: int) -> Iterable[Task]:
        return [task(next(self.numbers)) for _ in range(size)]


class TasksThatAreNoJson(Counter):
    def tasks(self, size: int, seed: int) -> Iterable[Task]:
        return [
            Task(TaskId("t", str(n)), {"responses_create_params": {"input": "x"}, "at": (1, n)}) for n in range(size)
        ]


class TasksOfOneName(Counter):
    def tasks(self, size: int, seed: int) -> Iterable[Task]:
        return [task(1)] * size


class TasksThatOfferWhatIsNotThere(Counter):
    def tasks(self, size: int, seed: int) -> Iterable[Task]:
        tools = [{"type": "function", "name": "subtract", "parameters": {"type": "object", "properties": {}}}]
        return [task(number, tools=tools) for number in range(size)]


class TasksThatOfferAnArgumentTooMany(Counter):
    def tasks(self, size: int, seed: int) -> Iterable[Task]:
        tools = [{"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"m": {}}}}]
        return [task(number, tools=tools) for number in range(size)]


class TasksWithoutEnd(Counter):
    def tasks(self, size: int, seed: int) -> Iterable[Task]:
        return map(task, itertools.count())


class TasksThatLeave(Counter):
    def tasks(self, size: int, seed: int) -> Iterable[Task]:
        sys.exit(3)


class SeedThatLeaves(Counter):
    def seed(self, task: dict[str, Any]) -> dict[str, int]:
        sys.exit(3)


class VerifyThatLeaves(Counter):
    def verify(self, state: dict[str, int], task: dict[str, Any], response: dict[str, Any]) -> float:
        sys.exit(3)


class ToolThatLeaves(Counter):
    @tool
    async def leave(self, state: dict[str, int]) -> None:
        """Leave."""
        sys.exit(3)


class ReleaseThatLeaves(Counter):
    def release(self, state: dict[str, int]) -> None:
        raise KeyboardInterrupt


class VerifyBlocksTheLoop(Counter):
    async def verify(self, state: Any, task: dict[str, Any], response: dict[str, Any]) -> float:  # type: ignore[override]
        time.sleep(0.3)  # noqa: ASYNC251  # what the check is about
        return 0.0


class ToolBlocksTheLoop(Counter):
    @tool
    async def look(self, state: dict[str, int]) -> int:
        """Look."""
        time.sleep(0.3)  # noqa: ASYNC251  # what the check is about
        return 0


BROKEN: dict[Callable[[], Environment], str] = {
    OneStateForAll: "sessions_by_the_dozen_are_each_their_own",
    CountsInTheClass: "sessions_do_not_see_each_other",
    ToolWithoutWords: "tools_are_described",
    ToolThatBreaks: "tools_answer_whatever_their_schema_allows",
    ToolThatReturnsNoJson: "tools_answer_whatever_their_schema_allows",
    VerdictByChance: "equal_sessions_get_equal_verdicts",
    VerifySpendsItsState: "equal_sessions_get_equal_verdicts",
    VerifyNeedsAnAnswer: "an_agent_that_does_nothing_gets_a_verdict",
    RewardIsNotANumber: "an_agent_that_does_nothing_gets_a_verdict",
    ReleaseThatRaises: "a_release_that_failed_is_called_again",
    SeedThatFails: "equal_seeds_allocate_once",
    TasksThatDiffer: READ_TASKS,
    TasksThatAreNoJson: READ_TASKS,
    TasksOfOneName: READ_TASKS,
    TasksWithoutEnd: READ_TASKS,
    TasksThatLeave: READ_TASKS,
    SeedThatLeaves: "equal_seeds_allocate_once",
    VerifyThatLeaves: "an_agent_that_does_nothing_gets_a_verdict",
    ToolThatLeaves: "tools_answer_whatever_their_schema_allows",
    ReleaseThatLeaves: "a_release_that_failed_is_called_again",
    VerifyBlocksTheLoop: "every_call_ends_and_leaves_the_loop_free",
    ToolBlocksTheLoop: "every_call_ends_and_leaves_the_loop_free",
    TasksThatOfferWhatIsNotThere: "tasks_offer_the_tools_that_are_served",
    TasksThatOfferAnArgumentTooMany: "tasks_offer_the_tools_that_are_served",
}


@pytest.mark.promise("EP-15")
async def test_an_environment_that_keeps_every_promise_has_no_finding() -> None:
    assert await check_environment(Counter) == []

    class SlowInAThread(Counter):
        def verify(self, state: dict[str, int], task: dict[str, Any], response: dict[str, Any]) -> float:
            time.sleep(0.3)  # longer than the loop may be blocked
            return 0.0

    assert await check_environment(SlowInAThread, sessions=2) == []
    assert await check_environment(Counter(), tasks=[task(1), task(2)]) == []


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
async def test_a_broken_environment_fails_the_check_that_is_about_it(broken: Callable[[], Environment]) -> None:
    found = await check_environment(broken, timeout_s=20, sessions=5)
    assert BROKEN[broken] in {finding.check for finding in found}, found
    assert all(finding.problem for finding in found)


async def test_every_check_can_fail() -> None:
    """Two are about the server around the environment, and are shown with one that has a leak of its own."""

    class SeedsTwice(Counter):
        """An author who calls `seed` again by himself, as a retry of his own would."""

        async def seed(self, task: dict[str, Any]) -> dict[str, int]:  # type: ignore[override]
            if asyncio.current_task() is not None and not task.get("again"):
                return dict(await vars(self)["seed"]({**task, "again": True}))
            return {"n": 0}

    by_server = {
        "a_lost_reply_leaves_nothing_open",
        "a_close_during_its_seed_releases_what_the_seed_took",
        "equal_seeds_allocate_once",
    }
    found = {finding.check for finding in await check_environment(SeedsTwice)}
    assert by_server <= found
    tokens = {finding.check for finding in await check_environment(RewardIsNotANumber)}
    wrong = {finding.check for finding in await check_environment(VerifyNeedsAnAnswer)}
    caught = set(BROKEN.values()) | found | tokens | wrong
    assert set(CHECKS) <= caught


async def test_an_environment_that_declares_chance_is_not_held_to_equal_verdicts() -> None:
    class Honest(VerdictByChance):
        deterministic = False

    assert await check_environment(Honest) == []


async def test_without_tasks_it_says_what_is_missing() -> None:
    class Bare(Environment):
        def verify(self, state: None, task: dict[str, Any], response: dict[str, Any]) -> float:
            return 0.0

    (finding,) = await check_environment(Bare)
    assert finding == Finding(READ_TASKS, "it makes no tasks of its own; give the suite a file of tasks")
    assert await check_environment(Bare, tasks=[task(1)]) == []


async def test_a_check_that_never_ends_is_a_finding_and_the_others_go_on() -> None:
    class HangsTheSecondTime(ToolThatBreaks):
        async def verify(  # type: ignore[override]
            self, state: Any, task: dict[str, Any], response: dict[str, Any]
        ) -> float:
            if state.setdefault("verified", 0):
                await asyncio.Event().wait()
            state["verified"] = 1
            return 0.0

    found = await check_environment(HangsTheSecondTime, timeout_s=2.0, sessions=5)
    problems = {finding.check: finding.problem for finding in found}
    assert problems["equal_sessions_get_equal_verdicts"] == "it did not end within 2 s"
    assert "look_up broke" in problems["tools_answer_whatever_their_schema_allows"]
    assert "tools_are_described" not in problems


LET_GO = threading.Event()


class VerifyHangs(Counter):
    def verify(self, state: dict[str, int], task: dict[str, Any], response: dict[str, Any]) -> float:
        LET_GO.wait()
        return 0.0


class ReleaseHangs(Counter):
    async def release(self, state: dict[str, int]) -> None:  # type: ignore[override]
        await asyncio.Event().wait()


class SeedHangs(Counter):
    def seed(self, task: dict[str, Any]) -> dict[str, int]:
        LET_GO.wait()
        return {"n": 0}


class ToolHangs(Counter):
    @tool
    def look(self, state: dict[str, int]) -> int:
        """Look."""
        LET_GO.wait()
        return 0


@pytest.mark.parametrize(
    ("hanging", "what"),
    [(SeedHangs, "seed"), (ToolHangs, "tool look"), (VerifyHangs, "verify"), (ReleaseHangs, "release")],
)
def test_a_call_that_never_ends_is_named_and_neither_the_suite_nor_its_process_waits_for_it(
    hanging: Callable[[], Environment], what: str
) -> None:
    LET_GO.clear()
    try:
        found = findings(hanging, timeout_s=2.0)
    finally:
        LET_GO.set()
    names = list(CHECKS)
    first = names.index("every_call_ends_and_leaves_the_loop_free")
    assert found[0] == Finding(names[first], f"{what} did not end within 1 s")
    assert found[1:] == [Finding(name, f"not checked: {found[0].problem}") for name in names[first + 1 :]]


def test_tasks_that_never_come_are_a_finding() -> None:
    class Endless(Counter):
        def tasks(self, size: int, seed: int) -> Iterable[Task]:
            LET_GO.wait()
            return []

    LET_GO.clear()
    try:
        assert findings(Endless, timeout_s=0.2) == [Finding(READ_TASKS, "it did not end within 0.2 s")]
    finally:
        LET_GO.set()


def test_the_environment_is_as_it_was_when_the_suite_is_done_and_no_loop_is_needed() -> None:
    counter = Counter()
    assert findings(counter) == []
    assert vars(counter) == {}


def test_the_suite_needs_no_test_framework() -> None:
    code = "import sys, toprope.testing.environment_suite; assert not {'pytest', 'hypothesis'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_sample_arguments_are_valid_and_cover_the_kinds_of_a_schema() -> None:
    schema = {
        "type": "object",
        "$defs": {"Point": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
        "properties": {
            "n": {"type": "integer", "minimum": 3, "maximum": 5},
            "kind": {"enum": ["a", "b"]},
            "at": {"$ref": "#/$defs/Point"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "many": {"type": "array", "items": {"type": "boolean"}},
        },
        "required": ["n", "kind", "at"],
    }
    first, *others = sample_arguments(schema)
    assert first == {"n": 3, "kind": "a", "at": {"x": 1.0}, "maybe": "x", "many": [True]}
    assert [each["n"] for each in others] == [3, 5]
    assert all(set(each) == {"n", "kind", "at"} for each in others)
