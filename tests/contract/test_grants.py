"""Tools over direct HTTP and over MCP: the right session, the right rollout, and nothing but tools."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client as McpClient
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError

from toprope.correlation.context import rollout_context
from toprope.http.cookies import merge_cookies
from toprope.http.reply import Reply
from toprope.protocol.grants import McpGrant, StreamableHttp
from toprope.servers.environment.participant import SessionReport

from .grants_house import House, call, house, outputs, say, server_process

OVER = ("inline", "http")
HOW = ("direct_http", "mcp")
NAMED = [{"type": "function", "name": name, "parameters": {}} for name in ("add", "where", "refuse", "crash", "wait")]
SECRET = "the-servers-own-key"
TOOLS = "x-toprope-tools"


def named(how: str, *names: str) -> list[dict[str, Any]] | None:
    """The task's own list of tools, where the grant brings none."""
    return [entry for entry in NAMED if entry["name"] in names] if how == "direct_http" else None


async def seeded(home: House, key: str, *, token: str | None = "tok", **task: Any) -> Reply:
    """A session of the resources server, seeded as an environment server of ours does it."""
    body = {
        "resources_session_id": f"s-{key}",
        "episode_id": {"rollout_id": key, "attempt": 0},
        "task_id": {"taskset": "t", "task_id": "1"},
        "task_data": task,
    }
    headers = {} if token is None else {"x-toprope-close-token": token}
    with rollout_context(key):
        reply = await home.books.request("POST", "/seed_session", body=body, headers=headers)
    return reply.require("seed")


@pytest.mark.promise("EP-13")
@pytest.mark.promise("ID-2")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("over", OVER)
async def test_a_tool_reaches_its_sessions_state_and_works_for_its_rollout(over: str, how: str) -> None:
    turns = [[call("add", {"n": 4})], [call("where", call_id="c2")], [say("done")]]
    async with house(*turns, over=over, tools=[how]) as home:
        reply = await home.episode_of("r.0-0", attempt=2, tools=named(how, "add", "where"), start=3, goal=7)
        assert reply["failure"] is None, reply
        result = reply["result"]
        assert (result["reward"], result["n"]) == (1.0, 7)
        assert outputs(result["response"]) == ["7", '{"rollout":"r.0-0-a2","n":7}']
        assert home.environment.seen == {"r.0-0-a2": {"r.0-0-a2"}}, "in the tool, a child task and to_thread"
        assert home.idle()
        if how == "mcp":
            offered = {entry["name"]: entry for entry in home.model.bodies[0]["tools"]}
            assert sorted(offered) == ["add", "crash", "refuse", "wait", "where"]
            assert offered["add"]["description"] == "Add n to the number."
            assert offered["add"]["parameters"]["properties"] == {"n": {"type": "integer"}}


@pytest.mark.promise("EP-12")
@pytest.mark.parametrize(("how", "via"), [("direct_http", "direct_http"), ("mcp", "mcp/streamable_http")])
async def test_observations_say_which_tool_was_called_over_which_grant(how: str, via: str) -> None:
    turns = [[call("add", {"n": 1}), call("refuse", call_id="c2"), call("nothing", call_id="c3")], [say("done")]]
    async with house(*turns, tools=[how]) as home:
        reply = await home.episode_of("r.0-0", tools=named(how, "add", "refuse"))
        seen = reply["result"]["ng_agent_observations"]
        assert (seen["source"], seen["gaps"]) == ("clerk", [])
        assert [record["kind"] for record in seen["records"]] == ["invocation", "tool_call", "tool_call", "tool_call"]
        name = "environment" if how == "direct_http" else "counter"
        granted = {"grant": name, "transport": via}
        calls = [{k: v for k, v in record.items() if k != "duration_s"} for record in seen["records"][1:]]
        assert calls == [
            {"kind": "tool_call", "name": "add", "call_id": "c1", "ok": True, **granted},
            {"kind": "tool_call", "name": "refuse", "call_id": "c2", "ok": False, **granted},
            {"kind": "tool_call", "name": "nothing", "call_id": "c3", "ok": False},
        ], "one that went nowhere has no grant"
        assert seen["records"][0]["model_calls"] == 2


@pytest.mark.promise("ID-2")
@pytest.mark.parametrize("how", HOW)
async def test_sessions_that_run_at_once_see_each_their_own_state_and_rollout(how: str) -> None:
    turns = [[call("add", {"n": 1})], [call("add", {"n": 1}, "c2")], [call("where", call_id="c3")], [say("done")]]
    async with house(*turns, tools=[how]) as home:
        rollouts = [f"r.{number}-0" for number in range(30)]
        listed = named(how, "add", "where")
        replies = await asyncio.gather(
            *(home.episode_of(key, tools=listed, start=10 * number) for number, key in enumerate(rollouts))
        )
        for number, (key, reply) in enumerate(zip(rollouts, replies, strict=True)):
            assert reply["result"]["n"] == 10 * number + 2
            assert outputs(reply["result"]["response"])[-1] == f'{{"rollout":"{key}","n":{10 * number + 2}}}'
        assert home.environment.seen == {key: {key} for key in rollouts}
        assert home.idle()


@pytest.mark.promise("ID-2")
async def test_a_thousand_interleaved_calls_over_mcp_never_mix_rollouts() -> None:
    accept = {"accept": "application/json, text/event-stream"}
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "where", "arguments": {}}}
    async with house() as home:
        held = {f"r.{number}-0": (await seeded(home, f"r.{number}-0")).headers[TOOLS] for number in range(50)}

        async def ask(key: str, *, prefixed: bool) -> None:
            peer = home.books if prefixed else home.client.peer("inline://counter", None)
            with rollout_context(key):
                reply = await peer.request("POST", "/mcp", body=body, headers={TOOLS: held[key], **accept})
            text = reply.json()["result"]["content"][0]["text"]
            assert text == f'{{"rollout":"{key}","n":0}}', "without a prefix it is the rollout of the session"

        await asyncio.gather(*(ask(f"r.{n % 50}-0", prefixed=bool(n % 3)) for n in range(1000)))


@pytest.mark.promise("EP-13")
@pytest.mark.promise("EP-19")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("over", OVER)
async def test_what_a_tool_says_no_to_is_text_and_what_breaks_ends_the_activation(over: str, how: str) -> None:
    mild = [call("refuse"), call("add", {"n": "x"}, "c2"), call("nothing", call_id="c3"), call("add", "{", "c4")]
    mild.append(call("add", '{"n": ' + "1" * 5_000 + "}", "c5"))
    async with house(mild, [say("I give up")], over=over, tools=[how]) as home:
        reply = await home.episode_of("r.0-0", tools=named(how, "add", "refuse"))
        texts = outputs(reply["result"]["response"])
        assert texts[0] == "not on a Monday"
        assert "Expected `int`, got `str`" in texts[1]
        assert texts[2].startswith("error: no tool named 'nothing' can be called")
        assert "not valid JSON" in texts[3]
        assert "an integer has 5000 digits" in texts[4]
    async with house([call("crash")], [say("never said")], over=over, tools=[how]) as home:
        reply = await home.episode_of("r.0-0", tools=named(how, "crash"))
        failure = reply["failure"]
        assert (failure["stage"], failure["failure_kind"], failure["terminal"]) == ("agent", "tool_unavailable", False)
        assert "ZeroDivisionError: broken inside" in failure["failure_reason"]
        assert len(home.model.bodies) == 1, "the model was told nothing"
        assert home.idle()


@pytest.mark.promise("EP-10")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("over", OVER)
async def test_an_agent_past_its_deadline_leaves_its_tool_and_its_sessions(over: str, how: str) -> None:
    async with house([call("wait")], [say("never said")], over=over, tools=[how], agent_timeout_s=0.5) as home:
        reply = await home.episode_of("r.0-0", tools=named(how, "wait"))
        failure = reply["failure"]
        assert (failure["stage"], failure["failure_kind"], failure["terminal"]) == ("agent", "agent_timeout", False)
        assert failure["partial_response"]["output"] == [call("wait")]
        assert (home.environment.waiting, home.environment.cut_off) == (1, 1)
        assert home.idle()


@pytest.mark.promise("EP-13")
@pytest.mark.parametrize("how", HOW)
async def test_a_tool_outside_the_sessions_own_list_does_not_exist_for_it(how: str) -> None:
    turns = [[call("add", {"n": 1})], [call("where", call_id="c2")], [say("done")]]
    async with house(*turns, tools=[how]) as home:
        reply = await home.episode_of("r.0-0", tools=named(how, "add", "where"), only=["where"])
        assert reply["failure"] is None, reply
        refused, where = outputs(reply["result"]["response"])
        assert "no tool named 'add'" in refused
        assert "where" in refused
        assert '"n":0' in where
        if how == "mcp":
            assert [entry["name"] for entry in home.model.bodies[0]["tools"]] == ["where"]
        reply = await home.episode_of("r.1-0", only=["typo"])
        assert (reply["failure"]["stage"], reply["failure"]["terminal"]) == ("seed", True)
        assert "'typo'" in reply["failure"]["failure_reason"]
        assert home.idle()


@pytest.mark.promise("EP-13")
async def test_a_tool_that_is_named_for_one_grant_and_offered_by_another_is_refused() -> None:
    async with house([call("add", {"n": 1})], [say("done")], tools=["direct_http", "mcp"]) as home:
        reply = await home.episode_of("r.0-0", tools=named("direct_http", "add"))
        failure = reply["failure"]
        assert (failure["stage"], failure["failure_kind"], failure["terminal"]) == ("agent", "bad_request", True)
        assert "'add'" in failure["failure_reason"]
        assert home.model.bodies == [], "before any model call"
        reply = await home.episode_of("r.1-0", tools=[{"type": "function", "name": "elsewhere", "parameters": {}}])
        assert reply["failure"] is None, "what only one of them has is no trouble"
        assert home.idle()


@pytest.mark.promise("EP-13")
async def test_two_grants_that_offer_one_tool_are_refused_or_the_optional_one_skipped() -> None:
    for required in (True, False):
        async with house([call("add", {"n": 1})], [say("done")], over="http", tools=["mcp"]) as home:
            seed = await seeded(home, "other")
            headers = {TOOLS: seed.headers[TOOLS]}
            with rollout_context("other"):
                url = home.books.url("/mcp")
            more = McpGrant("twin", StreamableHttp(url, headers), required=required)
            home.episode._plan = _with(home.episode._plan, further_grants=(more,))
            reply = await home.episode_of("r.0-0", goal=1)
            if required:
                failure = reply["failure"]
                assert (failure["failure_kind"], failure["terminal"]) == ("grant_unavailable", True)
                assert "the grant 'counter' offers one too" in failure["failure_reason"]
            else:
                assert reply["result"]["reward"] == 1.0
                (gap,) = reply["result"]["ng_agent_observations"]["gaps"]
                assert gap.startswith("optional grant twin: ")
            assert len(home.agent.sessions) == 0


def _with(plan: Any, **changes: Any) -> Any:
    from dataclasses import replace

    return replace(plan, **changes)


@pytest.mark.promise("EP-13")
@pytest.mark.parametrize("required", [True, False])
async def test_a_grant_whose_server_cannot_be_reached_fails_the_seed_or_is_a_gap(required: bool) -> None:
    more = McpGrant("maps", StreamableHttp("http://127.0.0.1:9/mcp"), required=required)
    async with house([say("done")], further_grants=[more]) as home:
        reply = await home.episode_of("r.0-0")
        if required:
            failure = reply["failure"]
            assert (failure["stage"], failure["failure_kind"]) == ("agent", "grant_unavailable")
            assert failure["terminal"] is False, "another attempt may find it up"
        else:
            (gap,) = reply["result"]["ng_agent_observations"]["gaps"]
            assert gap.startswith("optional grant maps: grant maps: http://127.0.0.1:9/mcp: ")
        assert home.idle()


CLOSED = ("/verify", "/close_session", "/seed_session", "/aggregate_metrics")


@pytest.mark.promise("EP-19")
@pytest.mark.parametrize("key", [None, SECRET])
@pytest.mark.parametrize("token", ["tok", None])
async def test_a_grants_credential_cannot_verify_close_or_seed(token: str | None, key: str | None) -> None:
    async with house(over="http", key=key) as home:
        seed = await seeded(home, "r", token=token, goal=0)
        credential = seed.headers[TOOLS]
        cookies = merge_cookies({}, seed)
        agent = home.client.peer(str(home.books.origin), "resources")  # what an agent has: no key
        verify = {"responses_create_params": {"input": []}, "response": {"output": []}, "goal": 0}
        close = {"resources_session_id": "s-r", "episode_id": {"rollout_id": "r", "attempt": 0}}
        bodies = {"/verify": verify, "/close_session": close}
        named = {"x-toprope-session": "s-r"}
        with rollout_context("r"):
            for path in CLOSED:
                for more in ({}, named, {"x-toprope-close-token": "guessed"}):
                    for beside in ({}, cookies):
                        headers = {TOOLS: credential, **more}
                        body = bodies.get(path, {})
                        reply = await agent.request("POST", path, body=body, headers=headers, cookies=beside)
                        assert reply.status == 403, (path, more, beside)
                        assert reply.error_info().kind == "forbidden"
            over_mcp = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "verify"}}
            accept = {"accept": "application/json, text/event-stream"}
            reply = await agent.request("POST", "/mcp", body=over_mcp, headers={TOOLS: credential, **accept})
            assert "no tool named 'verify'" in reply.json()["error"]["message"]
            tool = await agent.request("POST", "/add", body={"n": 1}, headers={TOOLS: credential})
            assert (tool.status, tool.text) == (200, "1")
            assert (home.environment.verified, home.environment.aggregated) == ([], 0)
            assert len(home.resources.sessions) == 1
            owner = named if token is None else {**named, "x-toprope-close-token": token}
            assert (await home.books.request("POST", "/verify", body=verify, headers=owner)).status == 200
            closed = await home.books.request("POST", "/close_session", body=close, headers=owner)
            assert closed.json()["outcome"] == "closed"
            late = await agent.request("POST", "/add", body={"n": 1}, headers={TOOLS: credential})
            assert (late.status, late.error_info().kind) == (
                (404, "session_lost") if key is None else (401, "forbidden")
            )
            late = await home.books.request("POST", "/add", body={"n": 1}, headers={TOOLS: credential})
            assert late.status == 404
            assert "this tools-only credential is not open here" in late.error_info().message, "it is void itself"


@pytest.mark.promise("EP-19")
async def test_a_credential_opens_one_session_only_and_names_none() -> None:
    async with house() as home:
        one = (await seeded(home, "one")).headers[TOOLS]
        two = (await seeded(home, "two")).headers[TOOLS]
        assert one != two
        assert "one" not in one
        again = (await seeded(home, "one")).headers[TOOLS]
        assert again == one, "a seed that is sent again gets the same answer"
        with rollout_context("two"):
            crossed = await home.books.request("POST", "/add", body={"n": 1}, headers={TOOLS: one})
        assert crossed.status == 409
        with rollout_context("one"):
            for wrong in ("", "x", one[:-1], "\u00e9"):
                reply = await home.books.request("POST", "/add", body={"n": 1}, headers={TOOLS: wrong})
                assert (reply.status, reply.error_info().kind) == (404, "session_lost")
        states = {
            session.session_id: session.value.state["n"] for session in home.resources.sessions._sessions.values()
        }
        assert states == {"s-one": 0, "s-two": 0}


def texts(value: Any) -> set[str]:
    """Every text in `value`, names of fields too."""
    if isinstance(value, dict):
        return set().union(*map(texts, value), *map(texts, value.values()))
    if isinstance(value, list):
        return set().union(*map(texts, value))
    return {value} if isinstance(value, str) else set()


@pytest.mark.promise("EP-19")
@pytest.mark.parametrize("over", OVER)
async def test_nothing_that_a_caller_is_told_of_sessions_opens_one(over: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    told: list[SessionReport] = []
    options: dict[str, Any] = {"on_session": told.append, "tools": ["direct_http"]}
    async with house([call("wait")], [say("never said")], over=over, **options) as home:
        running = asyncio.create_task(home.episode_of("r.0-0", tools=named("direct_http", "wait")))
        async with asyncio.timeout(60):  # fails, and does not hang
            while home.environment.waiting == 0:  # noqa: ASYNC110  # no event says that the tool was entered
                await asyncio.sleep(0.001)
        anybody = home.client.peer(str(home.run.origin), None)
        listed = (await anybody.request("GET", "/sessions")).json()
        assert [entry["participant"] for entry in listed["sessions"]] == ["resources", "agent"]
        assert [entry["session_id"] for entry in listed["sessions"]] == [report.session_id for report in told]
        assert len({report.session_id for report in told}) == 2
        (open_here,) = home.resources.sessions._sessions
        (open_there,) = home.agent.sessions._sessions
        known = texts(listed) | {report.session_id for report in told} | set(re.findall(r"[\w.:-]+", caplog.text))
        assert not {open_here, open_there} & known
        for name in sorted(known):
            headers = {"x-toprope-session": name, TOOLS: name}
            for more in ({"x-toprope-session": name}, {TOOLS: name}, headers):
                tool = await home.client.peer(str(home.books.origin), None).request(
                    "POST", "/add", body={"n": 1}, headers=more
                )
                assert (tool.status, tool.error_info().kind) == (404, "session_lost"), name
            agent = home.client.peer(str(home.episode._plan.agent.origin), None)
            asked = await agent.request("POST", "/v1/responses", body={"input": "x"}, headers=headers)
            assert (asked.status, asked.error_info().kind) == (404, "session_lost"), name
        assert home.resources.sessions._sessions[open_here].value.state["n"] == 0
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        again: list[Any] = []
        async with asyncio.timeout(60):  # as above
            while not (again and all(entry["closed"] for entry in again)):  # nothing tells when the clean-up has ended
                await asyncio.sleep(0.001)
                again = (await anybody.request("GET", "/sessions")).json()["sessions"]
        names = [entry["session_id"] for entry in again]
        assert names == [report.session_id for report in told], "so that an open can be matched with its close"


@pytest.mark.promise("EP-19")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("over", OVER)
async def test_a_server_with_an_api_key_is_behind_grants_that_do_not_carry_it(over: str, how: str) -> None:
    turns = [[call("add", {"n": 2})], [say("done")]]
    async with house(*turns, over=over, key=SECRET, tools=[how]) as home:
        given: list[Any] = []
        allocate = home.agent._allocate

        async def listen(seed: Any, *rest: Any) -> Any:
            given.append(seed)
            return await allocate(seed, *rest)

        home.agent._allocate = listen  # type: ignore[method-assign]
        reply = await home.episode_of("r.0-0", tools=named(how, "add"), goal=2)
        assert reply["failure"] is None, reply
        assert reply["result"]["reward"] == 1.0
        assert SECRET not in repr(given)
        assert "session" not in repr(given[0].tool_accesses).replace("agent_session_id", "")
        bare = home.client.peer(str(home.books.origin), "resources")
        with rollout_context("r.0-0"):
            assert (await bare.request("POST", "/add", body={"n": 1})).status == 401
            assert (await bare.request("POST", "/mcp", body={})).status == 401
            assert (await bare.request("POST", "/add", body={}, headers={TOOLS: "guess"})).status == 401
        assert home.idle()


@pytest.mark.promise("EP-19")
@pytest.mark.parametrize("how", HOW)
async def test_a_tool_server_that_is_killed_in_mid_activation_is_a_retryable_failure(how: str, tmp_path: Path) -> None:
    """SIGKILL while the tool runs: never a reward, never text for the model."""
    marker = tmp_path / "marker"
    os.mkfifo(marker)  # opening it to read waits for the tool to open it to write
    server = server_process(Path(__file__).with_name("killable_counter.py"), str(marker))
    try:
        options = {"over": "http", "resources_url": server.url, "tools": [how], "cleanup_timeout_s": 4.0}
        async with house([call("hang")], [say("never said")], **options) as home:
            listed = [{"type": "function", "name": "hang", "parameters": {}}] if how == "direct_http" else None
            running = asyncio.create_task(home.episode_of("r.0-0", tools=listed))
            assert await asyncio.to_thread(marker.read_text) == "running"
            server.kill()
            reply = await running
            failure = reply["failure"]
            assert reply["result"] is None
            assert (failure["stage"], failure["failure_kind"]) == ("agent", "tool_unavailable"), failure
            assert failure["terminal"] is False
            assert len(home.model.bodies) == 1
            assert len(home.agent.sessions) == 0
    finally:
        server.kill()


# -- the official client, as a stranger --------------------------------------------------------------------------


def official(url: str, headers: dict[str, str], mode: str) -> tuple[McpClient, httpx2.AsyncClient]:
    http = httpx2.AsyncClient(headers=headers)
    return McpClient(streamable_http_client(url, http_client=http), mode=mode), http  # type: ignore[arg-type]


@pytest.mark.promise("EP-13")
@pytest.mark.promise("ID-2")
@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_the_official_client_finds_and_calls_the_tools_of_its_session(mode: str) -> None:
    async with house(over="http") as home:
        seed = await seeded(home, "theirs", token=None, start=5, only=["add", "where", "refuse", "crash"])
        offer = seed.json()["resources_tools"]
        assert (offer["server_name"], offer["url_path"], offer["transport"]) == ("counter", "/mcp", "http")
        url = f"{home.books.origin}/ng-rollout/theirs{offer['url_path']}"
        session, http = official(url, offer["headers"], mode)
        async with http, session as client:
            assert client.server_info.name == "counter"
            listed = (await client.list_tools()).tools
            assert [entry.name for entry in listed] == ["add", "crash", "refuse", "where"]
            assert listed[0].input_schema["required"] == ["n"]
            added = await client.call_tool("add", {"n": 2})
            assert (added.content[0].text, added.is_error) == ("7", False)  # type: ignore[union-attr]
            where = await client.call_tool("where", {})
            assert where.content[0].text == '{"rollout":"theirs","n":7}'  # type: ignore[union-attr]
            refused = await client.call_tool("refuse", {})
            assert (refused.content[0].text, refused.is_error) == ("not on a Monday", True)  # type: ignore[union-attr]
            wrong = await client.call_tool("add", {"n": "two"})
            assert wrong.is_error
            with pytest.raises(MCPError, match="no tool named 'verify'"):
                await client.call_tool("verify", {})
            with pytest.raises(MCPError, match="broken inside") as broken:
                await client.call_tool("crash", {})
            assert broken.value.data["kind"] == "tool_unavailable"


@pytest.mark.promise("EP-19")
@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_the_official_client_without_the_sessions_credential_gets_nothing(mode: str) -> None:
    async with house(over="http") as home:
        await seeded(home, "theirs")
        for headers in ({}, {TOOLS: "guess"}):
            session, http = official(f"{home.books.origin}/ng-rollout/theirs/mcp", headers, mode)
            with pytest.raises((MCPError, BaseExceptionGroup)):
                async with http, session as client:
                    await client.list_tools()
        async with httpx2.AsyncClient() as http:
            for method in ("GET", "DELETE"):
                assert (await http.request(method, f"{home.books.origin}/mcp")).status_code == 405
