"""A user and an agent take turns in one session: who speaks when, what each sees, and what ends it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from toprope.catalog.tool_loop import ToolLoop
from toprope.errors.tree import BadRequest, ConfigError
from toprope.http.client import Client, Peer
from toprope.launch.config import read_configuration
from toprope.launch.run import RunJob
from toprope.servers.agent.server import AgentServer
from toprope.servers.environment.base import EnvironmentServer
from toprope.servers.environment.interactive import Interactive
from toprope.servers.environment.users import BEGIN, MAX_SAID_CHARS, SILENCE, seen_by_the_user
from toprope.servers.model.server import ModelServer
from toprope.servers.resources.environment import Environment, Verdict
from toprope.servers.resources.server import ResourcesServer
from toprope.testing import toy_tokenizer
from toprope.testing.scripted import ScriptCall, ScriptedCall, ScriptedEngine, ScriptedFault, ScriptedReply
from toprope.tools.spec import tool
from toprope.wire.responses import NOT_SAMPLING

from .conftest import KEY, House, Part, answer, cut, hang

SIGNING_KEY = b"k" * 32


class Desk(Environment):
    """Books what it is told; verify keeps everything that it was shown."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def seed(self, task: dict[str, Any]) -> list[str]:
        return []

    @tool
    def book(self, state: list[str], seat: str) -> str:
        """Book a seat."""
        state.append(seat)
        return f"booked {seat}"

    def verify(self, state: list[str], task: dict[str, Any], response: dict[str, Any]) -> Verdict:
        self.seen.append(response)
        return Verdict(reward=float(state == task.get("wanted", state)))


class Talk:
    """Our four servers and a fifth, the user's model, in one process."""

    def __init__(self, client: Client, stack: AsyncExitStack) -> None:
        self.client = client
        self.stack = stack
        self.desk = Desk()
        self.policy = ScriptedEngine(script=lambda call: f"answer {call.turn + 1}")
        self.user = ScriptedEngine(script=lambda call: "go on")

    async def place(self, app: Any) -> None:
        self.client.register(f"inline://{app.name}", app)
        await app.start()
        self.stack.push_async_callback(app.stop)

    async def build(self, **options: Any) -> Peer:
        protocol = Interactive(user_model="user", **options)
        self.resources = ResourcesServer(name="desk", environment=self.desk, signing_key=SIGNING_KEY)
        self.agent = AgentServer(
            name="clerk",
            agent=ToolLoop(),
            model=self.client.peer("inline://policy", "model"),
            client=self.client,
            signing_key=SIGNING_KEY,
        )
        for name, engine in (("policy", self.policy), ("user", self.user)):
            await self.place(ModelServer(name=name, engine=engine).app)
        await self.place(self.resources.app)
        await self.place(self.agent.app)
        server = EnvironmentServer(
            name="episode",
            protocol=protocol,
            resources=self.client.peer("inline://desk", "resources"),
            agent=self.client.peer("inline://clerk", "agent"),
            models={"user": self.client.peer("inline://user", "model")},
            tools=["direct_http"],
        )
        await self.place(server.app)
        return self.client.peer("inline://episode", "environment")

    async def run(self, user: Any, *, given: Any = "hello", **data: Any) -> Any:
        task_input = {"responses_create_params": {"input": given, **data.pop("params", {})}, "user": user, **data}
        task = {"task_id": {"taskset": "t", "task_id": "1"}, "task_input": task_input}
        body = {"episode_id": {"rollout_id": "run.0-0", "attempt": 1}, "task": task}
        peer = self.client.peer("inline://episode", "environment")
        outcome = (await peer.request("POST", "/run", body=body)).json()
        assert (len(self.resources.sessions), len(self.agent.sessions)) == (0, 0)
        return outcome


@pytest.fixture
async def talk() -> AsyncIterator[Talk]:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client(transport_attempts=2, transport_budget_s=0.5))
        yield Talk(client, stack)


def lines(output: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Who said what, of a response's items."""
    told = []
    for item in output:
        content = item["content"]
        told.append((item["role"], content if isinstance(content, str) else content[0]["text"]))
    return told


async def test_scripted_lines_come_one_after_each_turn_and_verify_sees_the_whole_conversation(talk: Talk) -> None:
    await talk.build()
    outcome = await talk.run({"script": ["two seats", "thanks"]})
    assert outcome["failure"] is None, outcome["failure"]
    result = outcome["result"]
    assert lines(result["response"]["output"]) == [
        ("assistant", "answer 1"),
        ("user", "two seats"),
        ("assistant", "answer 2"),
        ("user", "thanks"),
        ("assistant", "answer 3"),
    ]
    assert result["termination"] == "user_done"
    assert talk.desk.seen[0]["output"] == result["response"]["output"]
    # Each activation was asked with everything that was said before it, and one agent session held them all.
    assert [len(request.request.input) for request in talk.policy.requests] == [1, 3, 5]
    records = result["ng_agent_observations"]["records"]
    assert [record["number"] for record in records if record["kind"] == "invocation"] == [1, 2, 3]
    assert result["response"]["usage"]["output_tokens"] == sum(
        len(toy_tokenizer.encode(f"answer {n}")) + 1 for n in (1, 2, 3)
    )


async def test_a_model_plays_the_user_from_the_other_side_until_it_says_stop(talk: Talk) -> None:
    replies = iter(["I want seat 4.", "Yes, that one.", "Thank you. ###STOP###"])
    talk.user = ScriptedEngine(script=lambda call: next(replies))
    await talk.build(user_sampling={"temperature": 0.5})
    outcome = await talk.run({"instructions": "You want seat 4."}, given=[{"role": "system", "content": "Be brief."}])
    assert outcome["failure"] is None, outcome["failure"]
    output = outcome["result"]["response"]["output"]
    assert lines(output) == [
        ("user", "I want seat 4."),
        ("assistant", "answer 1"),
        ("user", "Yes, that one."),
        ("assistant", "answer 2"),
        ("user", "Thank you."),
    ]
    assert outcome["result"]["termination"] == "user_done"
    first, second, third = (request.request for request in talk.user.requests)
    assert "You want seat 4." in str(first.input[0]["content"])
    assert [(item["role"], item["content"]) for item in first.input[1:]] == [("user", BEGIN)]
    assert [(item["role"], item["content"]) for item in third.input[1:]] == [
        ("assistant", "I want seat 4."),
        ("user", "answer 1"),
        ("assistant", "Yes, that one."),
        ("user", "answer 2"),
    ]
    assert "Be brief." not in json.dumps([dict(item) for item in second.input])


async def test_a_model_user_that_says_too_much_is_cut_and_the_agent_reads_so(talk: Talk) -> None:
    replies = iter(["x" * (MAX_SAID_CHARS + 5), "y" * (MAX_SAID_CHARS + 6) + " ###STOP###"])
    talk.user = ScriptedEngine(script=lambda call: next(replies))
    await talk.build()
    outcome = await talk.run({"instructions": "Go on and on."}, given=[{"role": "system", "content": "Be brief."}])
    said = [text for role, text in lines(outcome["result"]["response"]["output"]) if role == "user"]
    assert said == [
        "x" * MAX_SAID_CHARS + "\n[5 more characters left out]",
        "y" * MAX_SAID_CHARS + "\n[6 more characters left out]",
    ]


@pytest.mark.promise("ID-3")
async def test_the_users_calls_carry_the_rollout_and_are_never_captured(talk: Talk) -> None:
    seen: list[str | None] = []

    def say(call: ScriptCall) -> str:
        seen.append(call.rollout_id)
        return "###STOP###"

    talk.user = ScriptedEngine(script=say)
    await talk.build()
    assert (await talk.run({"instructions": "You are done."}))["failure"] is None
    assert seen == [KEY]


async def test_the_state_is_one_over_all_turns(talk: Talk) -> None:
    def solve(call: ScriptCall) -> Any:
        last = call.last_text
        if last.startswith("seat"):
            return ScriptedReply(calls=[ScriptedCall("book", {"seat": last.removeprefix("seat ")})])
        return f"done: {last}"

    talk.policy = ScriptedEngine(script=solve)
    await talk.build()
    params = {"tools": talk.desk.tool_list()}
    outcome = await talk.run({"script": ["seat b"]}, given="seat a", params=params, wanted=["a", "b"])
    assert outcome["failure"] is None, outcome["failure"]
    assert outcome["result"]["reward"] == 1.0
    kinds = [item["type"] for item in outcome["result"]["response"]["output"]]
    turn = ["function_call", "function_call_output", "message"]
    assert kinds == [*turn, "message", *turn]


async def test_the_turns_are_bounded(talk: Talk) -> None:
    await talk.build(max_turns=3)
    outcome = await talk.run({"instructions": "Never stop."})
    assert outcome["result"]["termination"] == "max_turns"
    assert (len(talk.policy.requests), len(talk.user.requests)) == (3, 2)


async def test_a_turn_that_is_incomplete_ends_the_conversation_and_the_verifier_decides(talk: Talk) -> None:
    talk.policy = ScriptedEngine(script=lambda call: ScriptedReply(text="I was cu", finish_reason="length"))
    await talk.build()
    outcome = await talk.run({"script": ["go on"]})
    assert outcome["result"]["termination"] == "agent_stopped"
    assert outcome["result"]["response"]["status"] == "incomplete"
    assert len(talk.policy.requests) == 1


@pytest.mark.promise("EP-9")
@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (ScriptedReply(fault=ScriptedFault(503, "no room")), "no room"),
        (ScriptedReply(fault=ScriptedFault(400, "9000 tokens", "model_context_length")), "9000 tokens"),
        (ScriptedReply(text=" "), "said nothing"),
        (ScriptedReply(text="I want a se", finish_reason="length"), "its reply was cut"),
        (ScriptedReply(text="bye ###STOP###", finish_reason="length"), "its reply was cut"),
    ],
)
async def test_a_user_model_that_fails_is_a_retryable_failure_and_never_text_for_the_agent(
    talk: Talk, reply: ScriptedReply, said: str
) -> None:
    talk.user = ScriptedEngine(script=lambda call: reply)
    await talk.build()
    failure = (await talk.run({"instructions": "You want a seat."}))["failure"]
    assert (failure["failure_kind"], failure["stage"], failure["terminal"]) == ("model_unavailable", "agent", False)
    assert said in failure["failure_reason"]
    assert "the user's model user" in failure["failure_reason"]
    assert "reward" not in failure
    assert lines(failure["partial_response"]["output"]) == [("assistant", "answer 1")]
    assert len(talk.policy.requests) == 1


# -- with scripted participants: deadlines and lost replies ------------------------------------------------------------

SCRIPT = {"script": ["one", "two"]}
TASK = {
    "task_id": {"taskset": "t", "task_id": "1"},
    "task_input": {"responses_create_params": {"input": "hi"}, "task_data": {"goal": 3, "user": SCRIPT}},
}


@pytest.fixture
async def house(make_house: Callable[..., Any]) -> House:
    made: House = await make_house(protocol=Interactive())
    made.task = TASK
    return made


async def test_activations_are_numbered_in_one_session_and_the_agent_is_closed_once_before_verify(house: House) -> None:
    await house.result()
    assert house.steps == [
        "resources /seed_session",
        "agent /v1/agent_sessions",
        *["agent /v1/responses"] * 3,
        "agent /v1/agent_sessions/close",
        "resources /verify",
        "resources /close_session",
    ]
    calls = house.calls("/v1/responses")
    assert [seen.headers["x-toprope-activation"] for seen in calls] == ["1", "2", "3"]
    assert len({seen.headers["x-toprope-session"] for seen in calls}) == 1
    assert house.calls("/seed_session")[0].body["task_data"] == {"goal": 3, "user": SCRIPT}


def on_turn(number: int, act: Any) -> Callable[[Any], Awaitable[Any]]:
    """`act` in activation `number`; one word of an answer in every other."""

    async def respond(seen: Any) -> Any:
        if seen.headers["x-toprope-activation"] == str(number):
            return await act(seen)
        content = [{"type": "output_text", "text": "yes", "annotations": []}]
        item = {"type": "message", "role": "assistant", "content": content}
        return 200, {"id": "r", "object": "response", "status": "completed", "output": [item]}, {}

    return respond


@pytest.mark.promise("EP-8")
@pytest.mark.parametrize(("speaks", "sent"), [(True, 2), (False, 1)])
async def test_a_later_turn_whose_reply_is_lost_fails_retryably_and_keeps_what_was_said(
    house: House, speaks: bool, sent: int
) -> None:
    house.agent.speaks = speaks
    house.agent.acts["/v1/responses"] = on_turn(2, cut)
    failure = await house.failure()
    assert (failure["failure_kind"], failure["stage"], failure["terminal"]) == ("transport_dropped", "agent", False)
    assert lines(failure["partial_response"]["output"]) == [("assistant", "yes"), ("user", "one")]
    numbers = [seen.headers["x-toprope-activation"] for seen in house.calls("/v1/responses")]
    assert numbers == ["1"] + ["2"] * sent
    assert not house.calls("/verify")


@pytest.mark.promise("EP-10")
@pytest.mark.parametrize("gradable", [False, True])
async def test_a_deadline_in_a_later_turn_is_graded_with_the_whole_conversation_where_the_state_is_gradable(
    make_house: Any, gradable: bool
) -> None:
    house: House = await make_house(protocol=Interactive(), agent_timeout_s=1.5, gradable_on_timeout=gradable)
    house.task = TASK
    house.agent.acts["/v1/responses"] = on_turn(2, hang)
    usual = house.agent.usual("/v1/agent_sessions/close")
    partial = {"object": "response", "output": [{"type": "message", "role": "assistant", "content": "half"}]}

    async def close(seen: Any) -> Any:
        status, body, headers = await usual(seen)
        return status, {**body, "partial_response": partial}, headers

    house.agent.acts["/v1/agent_sessions/close"] = close
    told = [("assistant", "yes"), ("user", "one"), ("assistant", "half")]
    if gradable:
        result = await house.result()
        assert result["termination"] == "agent_timeout"
        assert lines(result["response"]["output"]) == told
        assert result["response"]["status"] == "incomplete"
    else:
        failure = await house.failure()
        assert (failure["failure_kind"], failure["stage"], failure["terminal"]) == ("agent_timeout", "agent", False)
        assert lines(failure["partial_response"]["output"]) == told


async def test_a_user_model_that_hangs_is_given_up_within_its_own_time(make_house: Any) -> None:
    house: House = await make_house(
        protocol=Interactive(user_model="user", user_timeout_s=0.2), models=["user"], agent_timeout_s=60.0
    )
    user = Part("user", house.log, acts={"/v1/responses": hang})
    house.client.register("inline://user", user)
    house.task = {
        **TASK,
        "task_input": {"responses_create_params": {"input": "hi"}, "user": {"instructions": "You wait."}},
    }
    failure = await house.failure()
    assert (failure["failure_kind"], failure["stage"], failure["terminal"]) == ("model_unavailable", "agent", False)
    assert "did not answer within 0.2 s" in failure["failure_reason"]


async def test_a_user_model_that_answers_nonsense_is_given_up(make_house: Any) -> None:
    house: House = await make_house(protocol=Interactive(user_model="user"), models=["user"])
    user = Part("user", house.log, acts={"/v1/responses": answer(200, {"choices": []})})
    house.client.register("inline://user", user)
    house.task = {
        **TASK,
        "task_input": {"responses_create_params": {"input": "hi"}, "user": {"instructions": "You wait."}},
    }
    failure = await house.failure()
    assert (failure["failure_kind"], failure["stage"], failure["terminal"]) == ("model_unavailable", "agent", False)


# -- reading and configuring -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("user", "said"),
    [
        (None, "an object is needed"),
        ({}, "exactly one"),
        ({"script": ["a"], "instructions": "b"}, "exactly one"),
        ({"scrip": ["a"]}, "scrip"),
        ({"script": "a"}, "a list of texts"),
        ({"script": ["a", 1]}, "a list of texts"),
        ({"instructions": " "}, "a text is needed"),
        ({"instructions": "You are."}, "needs `user_model`"),
    ],
)
def test_a_user_that_cannot_be_read_is_refused_before_anything_runs(user: Any, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        Interactive().read({"responses_create_params": {"input": "hi"}, "user": user})


def test_an_empty_script_needs_a_message_of_the_user_in_the_input() -> None:
    with pytest.raises(BadRequest, match="no message of the user"):
        Interactive().read({"responses_create_params": {"input": []}, "user": {"script": []}})


@pytest.mark.parametrize("given", [{"max_turns": 0}, {"stop": ""}, {"user_timeout_s": 0}])
def test_settings_out_of_bounds_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        Interactive(**given)


@pytest.mark.parametrize("field", sorted(NOT_SAMPLING))
def test_what_is_no_sampling_of_the_user_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=rf"user_sampling\.{field}: this is no setting of sampling"):
        Interactive(user_sampling={"temperature": 0.5, field: True})


@pytest.mark.promise("EP-12")
async def test_what_ended_a_conversation_is_not_the_verifiers_to_say(make_house: Any) -> None:
    house: House = await make_house(protocol=Interactive())
    house.resources.acts["/verify"] = answer(200, {"reward": 1.0, "termination": "agent_timeout"})
    house.task = {
        **TASK,
        "task_input": {"responses_create_params": {"input": "hi"}, "user": {"script": ["more"]}},
    }
    assert (await house.result())["termination"] == "user_done"


def test_the_user_sees_words_only_and_always_has_somebody_to_answer() -> None:
    said = [
        {"role": "system", "content": "secret"},
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "output": "x"},
        {"type": "message", "role": "assistant", "content": []},
    ]
    assert seen_by_the_user(said) == [{"role": "assistant", "content": "hi"}, {"role": "user", "content": SILENCE}]
    assert seen_by_the_user([]) == [{"role": "user", "content": BEGIN}]


# A scripted engine counts the turns it took: the task's own "hi" is the first of the user's.
PERSON = [{"text": "hi"}, {"text": "why?"}, {"text": "###STOP###"}]
CONFIGURATION: dict[str, Any] = {
    "servers": {
        "policy": {"role": "model", "engine": {"kind": "scripted", "script": [{"text": "one"}, {"text": "two"}]}},
        "person": {"role": "model", "engine": {"kind": "scripted", "script": PERSON}},
        "books": {"role": "resources", "use": "ledger"},
        "clerk": {"role": "agent", "use": "tool_loop", "model": "policy", "token_id_capture": True},
        "episode": {
            "role": "environment",
            "use": "interactive",
            "config": {"user_model": "person", "max_turns": 5},
            "resources": "books",
            "agent": "clerk",
        },
    },
    "token_id_capture": {"enabled": True},
}  # fmt: skip


@pytest.mark.promise("ID-3")
async def test_a_run_captures_every_turn_of_the_agent_as_one_trajectory_and_none_of_the_user(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    data = {"accounts": {"ann": 1}, "goal": {"ann": 1}, "user": {"instructions": "Ask why."}}
    tasks.write_text(json.dumps({"responses_create_params": {"input": "hi"}, **data}) + "\n")
    run = {"environment": "episode", "tasks": "tasks.jsonl", "out": str(tmp_path / "out"), "max_attempts": 1}
    configuration = read_configuration({**CONFIGURATION, "run": run}, file="talk.yaml", directory=tmp_path)
    summary = await RunJob(configuration).collect()
    assert summary.exit_status == 0, summary.message
    rows = (tmp_path / "out/results.jsonl").read_bytes().splitlines()
    assert len(rows) == 1, (tmp_path / "out/failures.jsonl").read_text()
    row = json.loads(rows[0])
    assert (row["mask_sample"], row["termination"]) == (False, "user_done")
    assert row["_ng_token_capture"]["n_calls"] == 2
    calls = [json.loads(line) for line in (tmp_path / "out/logs/model_calls.jsonl").read_bytes().splitlines()]
    told = sorted((call["server"], call["captured"]) for call in calls)
    assert told == [("person", False), ("person", False), ("policy", True), ("policy", True)]
    assert {call["rollout_id"] for call in calls} == {row["_ng_rollout_id"]}


def test_a_user_model_that_is_no_model_server_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    servers = {**CONFIGURATION["servers"]}
    servers["episode"] = {**servers["episode"], "config": {"user_model": "persn"}}
    run = {"environment": "episode", "tasks": [{"generate": "books"}]}
    values = {**CONFIGURATION, "servers": servers, "run": run}
    with pytest.raises(ConfigError, match=r"servers\.episode\.config.*'persn'.*did you mean 'person'"):
        RunJob(read_configuration(values, file="talk.yaml", directory=tmp_path))
