"""The tool loop: what the model is sent, what it is told, when the loop ends."""

from __future__ import annotations

import json
from typing import Any

import pytest

from toprope.catalog.tool_loop import ToolLoop
from toprope.errors.tree import ConfigError
from toprope.http.app import Route, build_app
from toprope.http.reply import Reply, json_reply, text_reply
from toprope.tools.outcome import MAX_OUTPUT_CHARS

from .conftest import USAGE, call, say

ADD = {"type": "function", "name": "add", "parameters": {}}
ASK = {"input": [{"role": "user", "content": "2+3"}], "tools": [ADD]}


@pytest.fixture
def tools(client: Any) -> dict[str, Any]:
    """A tool server whose replies a test sets; returns its grant and what was called."""
    state: dict[str, Any] = {"calls": [], "reply": text_reply("5"), "app": None}

    async def answer(request: Any) -> Reply:
        name = request.path_params["name"]
        state["calls"].append((name, await request.body(), dict(request.cookies), request.headers.get("x-secret")))
        reply: Reply = state["reply"]
        return reply

    app = build_app(name="tools", role="resources", routes=[Route("POST", "/{name}", answer)])
    client.register("inline://tools", app)
    state["grant"] = {
        "kind": "direct_http",
        "name": "env",
        "base_url": "inline://tools/ng-rollout/run.0-0",
        "headers": {"x-secret": "grant"},
        "cookies": {},
    }
    return state


async def run(house: Any, granted: dict[str, Any] | None = None, **changes: Any) -> Reply:
    await house.seed(tool_accesses=[] if granted is None else [granted["grant"]])
    reply: Reply = await house.activate({**ASK, **changes})
    return reply


async def test_calls_and_outputs_stand_in_order_and_the_model_sees_the_whole_history(
    make_house: Any, tools: dict[str, Any]
) -> None:
    two = [call("add", {"a": 2, "b": 3}, "c1"), call("add", {"a": 1, "b": 1}, "c2")]
    house = await make_house(two, [say("5")])
    reply = (await run(house, tools)).json()
    outputs = [{"type": "function_call_output", "call_id": name, "output": "5"} for name in ("c1", "c2")]
    assert reply["output"] == [*two, *outputs, say("5")]
    assert (reply["status"], reply["id"]) == ("completed", "resp-2")
    assert house.model.bodies[1]["input"] == [*ASK["input"], *two, *outputs]
    assert [(name, body) for name, body, _, _ in tools["calls"]] == [
        ("add", b'{"a": 2, "b": 3}'),
        ("add", b'{"a": 1, "b": 1}'),
    ]
    assert tools["calls"][0][3] == "grant"


async def test_usage_is_the_sum_of_all_calls_and_unknown_stays_unknown(make_house: Any, tools: dict[str, Any]) -> None:
    house = await make_house([call("add", {})], [say("5")])
    usage = (await run(house, tools)).json()["usage"]
    assert usage == {
        "input_tokens": 20,
        "output_tokens": 6,
        "total_tokens": 26,
        "input_tokens_details": {"cached_tokens": 2},
    }
    silent = json_reply({"id": "r", "status": "completed", "output": [say("5")], "usage": None})
    house.model.turns = [silent]
    assert (await house.activate(ASK, number=2)).json()["usage"] is None
    assert USAGE["input_tokens"] == 10


async def test_a_forced_choice_holds_until_the_first_call_and_is_auto_from_then_on(
    make_house: Any, tools: dict[str, Any]
) -> None:
    house = await make_house([call("add", {})], [call("add", {})], [say("5")])
    forced = {"type": "function", "name": "add"}
    await run(house, tools, tool_choice=forced)
    assert [body["tool_choice"] for body in house.model.bodies] == [forced, "auto", "auto"]


@pytest.mark.parametrize("choice", ["none", "auto"])
async def test_a_choice_that_forces_nothing_is_left_alone(make_house: Any, tools: dict[str, Any], choice: str) -> None:
    house = await make_house([call("add", {})], [say("5")])
    await run(house, tools, tool_choice=choice)
    assert [body["tool_choice"] for body in house.model.bodies] == [choice, choice]


@pytest.mark.parametrize("arguments", ['{"a": 2', "nonsense", "[1, 2]", '{"a": NaN}'])
async def test_arguments_that_do_not_parse_are_told_to_the_model_and_the_loop_goes_on(
    make_house: Any, tools: dict[str, Any], arguments: str
) -> None:
    house = await make_house([call("add", arguments)], [say("sorry")])
    reply = (await run(house, tools)).json()
    assert reply["output"][0]["arguments"] == arguments
    assert reply["output"][1]["output"].startswith("error: the arguments of add")
    assert reply["output"][2] == say("sorry")
    assert tools["calls"] == []


async def test_empty_arguments_mean_an_empty_object_and_stay_empty_in_the_history(
    make_house: Any, tools: dict[str, Any]
) -> None:
    house = await make_house([call("add", "")], [say("5")])
    reply = (await run(house, tools)).json()
    assert tools["calls"][0][1] == b"{}"
    assert reply["output"][0]["arguments"] == ""


@pytest.mark.promise("EP-13")
@pytest.mark.parametrize("name", ["subtract", "verify", "close_session", "../verify", "add/../verify", ""])
async def test_a_tool_that_was_not_offered_is_a_clean_error_and_reaches_no_server(
    make_house: Any, tools: dict[str, Any], name: str
) -> None:
    house = await make_house([call(name, {})], [say("ok")])
    listed = [ADD] if name == "subtract" else [ADD, {"type": "function", "name": name}]
    reply = (await run(house, tools, tools=listed)).json()
    assert reply["output"][1]["output"].startswith(f"error: no tool named {name!r}")
    assert tools["calls"] == []


@pytest.mark.parametrize("most", [10, None])
@pytest.mark.parametrize("status", [200, 422])
async def test_what_a_tool_says_is_cut_at_its_bound_and_the_model_and_the_record_are_told(
    make_house: Any, tools: dict[str, Any], most: int | None, status: int
) -> None:
    bound = most or MAX_OUTPUT_CHARS
    tools["reply"] = text_reply("é" * (bound + 7), status)
    agent = ToolLoop() if most is None else ToolLoop(max_tool_chars=most)
    house = await make_house([call("add", {})], [say("5")], agent=agent)
    await run(house, tools)
    (told,) = [item["output"] for item in house.model.bodies[1]["input"] if item.get("output") is not None]
    if status == 422:  # an error of a stranger's is an excerpt already
        assert len(told) < bound + 50
        return
    assert told == "é" * bound + "\n[7 more characters left out]"
    closed = (await house.close()).json()
    (record,) = [each for each in closed["agent_observations"]["records"] if each["kind"] == "tool_call"]
    assert record["left_out_chars"] == 7


@pytest.mark.parametrize("wrong", [{"max_steps": 0}, {"max_tool_chars": 0}])
def test_bounds_of_the_loop_below_one_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ToolLoop(**wrong)


async def test_without_a_grant_every_call_is_a_clean_error(make_house: Any) -> None:
    house = await make_house([call("add", {})], [say("ok")])
    reply = (await run(house)).json()
    assert reply["output"][1]["output"] == "error: no tool named 'add' can be called; available: none"


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (json_reply({"error": {"kind": "bad_request", "message": "no such account", "type": "tool_error"}}, 422), None),
        (json_reply({"error": {"kind": "bad_request", "message": "no such route"}}, 404), "no such route"),
        (json_reply({"detail": "no such account"}, 400), '{"detail":"no such account"}'),
        (text_reply("no such account", 404), "no such account"),
    ],
)
async def test_an_error_that_the_tool_raised_is_text_for_the_model(
    make_house: Any, tools: dict[str, Any], answer: Reply, told: str | None
) -> None:
    tools["reply"] = answer
    house = await make_house([call("add", {})], [say("ok")])
    reply = (await run(house, tools)).json()
    assert reply["output"][1]["output"] == (told or "no such account")
    observed = (await house.close()).json()["agent_observations"]["records"][1]
    assert (observed["kind"], observed["name"], observed["ok"]) == ("tool_call", "add", False)


@pytest.mark.promise("EP-19")
@pytest.mark.parametrize(
    "answer",
    [
        json_reply({"error": {"kind": "internal", "message": "bug"}}, 500),
        text_reply("upstream is away", 503),
        text_reply("slow down", 429),
        json_reply({"error": {"kind": "session_lost", "message": "who", "retryable": True}}, 404),
        json_reply({"error": {"kind": "session_expired", "message": "late", "retryable": True}}, 404),
        json_reply({"error": {"kind": "forbidden", "message": "no", "retryable": False}}, 403),
        # A refusal of the tools' server itself, with the kind that a tool's own error has too.
        json_reply({"error": {"kind": "bad_request", "message": "no session is named", "retryable": False}}, 422),
    ],
)
async def test_trouble_behind_a_tool_ends_the_activation_and_never_reaches_the_model(
    make_house: Any, tools: dict[str, Any], answer: Reply
) -> None:
    tools["reply"] = answer
    house = await make_house([call("add", {})], [say("ok")])
    reply = await run(house, tools)
    error = reply.json()["error"]
    assert (reply.status, error["kind"], error["retryable"]) == (502, "tool_unavailable", True)
    assert len(house.model.bodies) == 1


@pytest.mark.promise("EP-19")
async def test_a_tool_server_that_cannot_be_reached_ends_the_activation(make_house: Any, tools: dict[str, Any]) -> None:
    tools["grant"] = {**tools["grant"], "base_url": "inline://nowhere"}
    house = await make_house([call("add", {})], [say("ok")])
    error = (await run(house, tools)).json()["error"]
    assert (error["kind"], error["delivery"], error["retryable"]) == ("tool_unavailable", "not_sent", True)


@pytest.mark.promise("EP-16")
async def test_cookies_of_a_grant_are_merged_and_returned_at_the_close(make_house: Any, tools: dict[str, Any]) -> None:
    tools["grant"] = {**tools["grant"], "cookies": {"session": "one", "kept": "yes"}}
    tools["reply"] = Reply(200, b"5", cookies={"session": "two"})
    house = await make_house([call("add", {})], [call("add", {})], [say("5")])
    await run(house, tools)
    assert [cookies for _, _, cookies, _ in tools["calls"]] == [
        {"session": "one", "kept": "yes"},
        {"session": "two", "kept": "yes"},
    ]
    assert (await house.close()).json()["resources_cookies"] == {"session": "two", "kept": "yes"}


async def test_the_step_limit_ends_the_loop_as_incomplete_with_its_last_calls_answered(
    make_house: Any, tools: dict[str, Any]
) -> None:
    house = await make_house([call("add", {})], max_steps=3)
    reply = (await run(house, tools)).json()
    assert len(house.model.bodies) == 3
    assert (reply["status"], reply["incomplete_details"]) == ("incomplete", {"reason": "max_steps"})
    assert [item["type"] for item in reply["output"]] == ["function_call", "function_call_output"] * 3


@pytest.mark.parametrize("kind", ["limit_reached", "model_context_length"])
async def test_a_trajectory_that_may_not_go_on_ends_as_incomplete_with_what_it_has(
    make_house: Any, tools: dict[str, Any], kind: str
) -> None:
    refusal = json_reply({"error": {"kind": kind, "message": "no further", "retryable": False}}, 403)
    house = await make_house([call("add", {})], refusal)
    reply = (await run(house, tools)).json()
    assert (reply["status"], reply["incomplete_details"]) == ("incomplete", {"reason": kind})
    assert [item["type"] for item in reply["output"]] == ["function_call", "function_call_output"]
    assert (reply["id"], reply["terminal_response_id"]) == ("resp-1", "resp-1")
    assert reply["usage"]["input_tokens"] == USAGE["input_tokens"]


@pytest.mark.parametrize(
    ("turns", "kind"),
    [
        ([], "limit_reached"),
        ([], "model_context_length"),
        ([[call("add", {})]], "stale"),
        ([[call("add", {})]], "model_quota"),
    ],
)
async def test_a_refusal_before_anything_was_sampled_or_for_another_reason_is_a_failure(
    make_house: Any, tools: dict[str, Any], turns: list[Any], kind: str
) -> None:
    refusal = json_reply({"error": {"kind": kind, "message": "no", "retryable": False}}, 403)
    house = await make_house(*turns, refusal)
    reply = await run(house, tools)
    error = reply.json()["error"]
    assert (reply.status, error["kind"], error["retryable"]) == (502, kind, False)


async def test_a_turn_that_was_cut_ends_the_loop_without_running_its_calls(
    make_house: Any, tools: dict[str, Any]
) -> None:
    house = await make_house([call("add", '{"a":')])
    house.model.status = "incomplete"
    reply = (await run(house, tools)).json()
    assert (reply["status"], len(reply["output"])) == ("incomplete", 1)
    assert tools["calls"] == []


async def test_a_string_input_becomes_a_user_message(make_house: Any) -> None:
    house = await make_house([say("hi")])
    await run(house, input="hello")
    assert house.model.bodies[0]["input"] == [{"type": "message", "role": "user", "content": "hello"}]


async def test_a_model_reply_without_output_is_a_terminal_bad_reply(make_house: Any) -> None:
    house = await make_house(json_reply({"choices": []}))
    error = (await run(house)).json()["error"]
    assert (error["kind"], error["retryable"]) == ("bad_reply", False)
    assert "choices" in error["message"]


async def test_items_of_the_model_are_sent_back_as_they_came(make_house: Any, tools: dict[str, Any]) -> None:
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "xyz"}
    odd = {**call("add", '{"b": 1.0,"a":"caf\\u00e9"}'), "id": "fc_1", "x_extra": [1]}
    house = await make_house([reasoning, odd], [say("5")])
    await run(house, tools)
    assert json.dumps(house.model.bodies[1]["input"][1:3]) == json.dumps([reasoning, odd])
