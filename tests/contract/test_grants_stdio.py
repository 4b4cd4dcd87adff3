"""MCP servers that the agent starts: only what its configuration lists, without our secrets, gone with the session."""

from __future__ import annotations

import asyncio
import os
import select
import sys
from pathlib import Path
from typing import Any

import pytest

from toprope.errors.tree import TopropeError
from toprope.http.client import Client
from toprope.protocol.grants import McpGrant, Stdio
from toprope.tools.access import ToolAccess
from toprope.tools.outcome import ToolUnavailable

from .grants_house import call, house, outputs, say, server_process

SERVER = str(Path(__file__).with_name("stdio_server.py"))
COUNTER = Stdio(sys.executable, [SERVER])
CLOCK = Stdio(sys.executable, ["-m", "mcp_server_time", "--local-timezone", "UTC"])


async def opened(*programs: Stdio, **options: Any) -> ToolAccess:
    grants = [McpGrant(f"g{number}", program) for number, program in enumerate(programs)]
    async with Client() as client:
        return await ToolAccess.open(grants, client, **{"stdio": programs, **options})


async def ask(access: ToolAccess, name: str, arguments: str = "{}") -> str:
    return (await access.call(name, arguments, offered=frozenset({name}))).text


def gone(pid: int) -> bool:
    """Whether no process has this id, not even as a zombie."""
    return not Path(f"/proc/{pid}").exists()


def wait_until_gone(pid: int) -> bool:
    """Wait for the kernel to say that the process ended (20 s at most)."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], 20)[0])
    finally:
        os.close(handle)


@pytest.mark.promise("EP-13")
async def test_listed_programs_serve_each_session_from_a_process_of_its_own() -> None:
    turns = [[call("count", {"n": 2})], [call("count", {"n": 3}, "c2")], [say("done")]]
    grant = McpGrant("counter", COUNTER)
    async with house(*turns, further_grants=[grant], mcp_stdio=[COUNTER]) as home:
        replies = await asyncio.gather(*(home.episode_of(f"r.{number}-0") for number in range(2)))
        for reply in replies:
            assert reply["failure"] is None, reply
            assert outputs(reply["result"]["response"]) == ["2", "5"]
            seen = reply["result"]["ng_agent_observations"]
            assert seen["gaps"] == ["grant counter: no model can call a tool named 'not.callable'"]
            assert {record["transport"] for record in seen["records"][1:]} == {"mcp/stdio"}
        assert home.idle()


@pytest.mark.promise("EP-13")
async def test_a_server_that_others_wrote_is_used_like_ours() -> None:
    turns = [
        [call("convert_time", {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"})],
        [call("convert_time", {"source_timezone": "UTC", "time": "noon", "target_timezone": "Asia/Tokyo"}, "c2")],
        [say("done")],
    ]
    async with house(*turns, further_grants=[McpGrant("clock", CLOCK)], mcp_stdio=[CLOCK]) as home:
        reply = await home.episode_of("r.0-0")
        right, wrong = outputs(reply["result"]["response"])
        assert "T21:00:00+09:00" in right
        assert "Invalid time format" in wrong, "an error of the tool is the model's to read"
        assert home.idle()


@pytest.mark.promise("EP-13")
@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize(
    "listed",
    [
        (),
        (Stdio(sys.executable, [SERVER, "more"]),),
        (Stdio(sys.executable, [SERVER], {"A": "b"}),),
        (Stdio(sys.executable, [SERVER], {}, "/"),),
    ],
)
async def test_a_program_that_is_not_listed_exactly_so_is_refused(required: bool, listed: Any) -> None:
    grant = McpGrant("counter", COUNTER, required=required)
    async with house([say("done")], further_grants=[grant], mcp_stdio=listed) as home:
        reply = await home.episode_of("r.0-0")
        if required:
            failure = reply["failure"]
            assert (failure["stage"], failure["failure_kind"], failure["terminal"]) == (
                "agent",
                "grant_unavailable",
                True,
            )
            assert "mcp_stdio" in failure["failure_reason"]
        else:
            (gap,) = reply["result"]["ng_agent_observations"]["gaps"]
            assert gap.startswith("optional grant counter: ")
        assert home.idle()


async def test_it_gets_none_of_our_environment_but_where_programs_and_homes_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("TOPROPE_ANYTHING", "secret")
    program = Stdio(sys.executable, [SERVER], {"GIVEN": "by the list"})
    access = await opened(program)
    try:
        names = set((await ask(access, "variables")).split()[1:])
    finally:
        await access.close()
    allowed = {"HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER", "LC_CTYPE", "GIVEN"}
    assert names <= allowed
    assert {"GIVEN", "PATH"} <= names


@pytest.mark.parametrize("manners", [[], ["stubborn"]])
async def test_closing_the_session_leaves_nothing_of_it_running(manners: list[str]) -> None:
    access = await opened(Stdio(sys.executable, [SERVER, *manners]))
    pid = int((await ask(access, "variables")).split()[0])
    daemon = int(await ask(access, "leave_a_daemon"))
    assert not gone(pid)
    assert not gone(daemon)
    await access.close()
    assert gone(pid)
    assert gone(daemon), "in a session of its own, ignoring SIGTERM, and nobody's child"


async def test_nothing_of_it_outlives_an_agent_server_that_is_killed() -> None:
    agent = server_process(Path(__file__).with_name("stdio_agent.py"), SERVER)
    try:
        assert agent.process.stdout is not None
        pids = [int(agent.url), int(agent.process.stdout.readline())]
        assert not any(gone(pid) for pid in pids)
    finally:
        agent.kill()
    assert [await asyncio.to_thread(wait_until_gone, pid) for pid in pids] == [True, True]


@pytest.mark.promise("EP-19")
async def test_a_program_that_dies_ends_the_activation_retryably() -> None:
    async with house(
        [call("die")], [say("never said")], further_grants=[McpGrant("counter", COUNTER)], mcp_stdio=[COUNTER]
    ) as home:
        reply = await home.episode_of("r.0-0")
        failure = reply["failure"]
        assert (failure["stage"], failure["failure_kind"], failure["terminal"]) == ("agent", "tool_unavailable", False)
        assert len(home.model.bodies) == 1
        assert home.idle()


async def test_programs_that_cannot_be_started_say_so_and_leave_the_others_closed() -> None:
    missing = Stdio("no-such-program-anywhere")
    with pytest.raises(TopropeError, match="'no-such-program-anywhere' is no program on this host") as caught:
        await opened(COUNTER, missing)
    assert (caught.value.kind, caught.value.retryable) == ("grant_unavailable", False)
    crashes = Stdio(sys.executable, ["-c", "raise SystemExit('no licence found')"])
    with pytest.raises(TopropeError, match="no licence found") as caught:
        await opened(crashes)
    assert (caught.value.kind, caught.value.retryable) == ("grant_unavailable", True)


async def test_a_call_after_the_program_died_is_trouble_and_not_text() -> None:
    access = await opened(COUNTER)
    try:
        for name in ("die", "count"):
            with pytest.raises(ToolUnavailable):
                await access.call(name, '{"n": 1}', offered=frozenset({name}))
    finally:
        await access.close()


LIAR = str(Path(__file__).with_name("stdio_liar.py"))


@pytest.mark.promise("EP-19")
@pytest.mark.parametrize(
    ("manner", "why"), [("endless", "a line of more than 16777216 bytes"), ("wrong_id", "a request of id 99999")]
)
async def test_a_program_whose_answer_never_comes_is_trouble_at_once(manner: str, why: str) -> None:
    access = await opened(Stdio(sys.executable, [LIAR, manner]))
    try:
        with pytest.raises(ToolUnavailable, match=why) as caught:
            async with asyncio.timeout(60):  # without the bound and the check it would wait for ever
                await ask(access, "add")
        assert caught.value.retryable
    finally:
        await access.close()


async def test_long_answers_within_the_bound_arrive_whole_and_calls_can_be_many() -> None:
    access = await opened(Stdio(sys.executable, [LIAR, "honest"]))
    try:
        told = await asyncio.gather(*(ask(access, "add", f'{{"size": {10**number}}}') for number in range(6)))
        assert [len(text) for text in told] == [10**number for number in range(6)]
    finally:
        await access.close()


async def asking_for_ever(access: ToolAccess) -> None:
    while True:
        await ask(access, "add")


async def test_an_answer_that_comes_twice_is_the_next_calls_trouble_and_not_its_answer() -> None:
    access = await opened(Stdio(sys.executable, [LIAR, "twice"]))
    try:
        assert await ask(access, "add") == "x"
        with pytest.raises(ToolUnavailable, match="none of that id is open"):
            await asyncio.wait_for(asking_for_ever(access), 60)
    finally:
        await access.close()


@pytest.mark.parametrize(
    ("manner", "why"),
    [("many", "more than 1000 tools"), ("pages", "more than 1000 tools"), ("no_listing", "no such method")],
)
async def test_what_no_further_try_can_mend_is_refused_for_good(manner: str, why: str) -> None:
    with pytest.raises(TopropeError, match=why) as caught:
        await opened(Stdio(sys.executable, [LIAR, manner]))
    assert (caught.value.kind, caught.value.status, caught.value.retryable) == ("grant_unavailable", 422, False)
