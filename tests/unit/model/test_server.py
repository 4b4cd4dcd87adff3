"""The model server: identity, the order of one call, custody, refusals, what a reply holds."""

from __future__ import annotations

import asyncio
import gzip
import json

import pytest

from toprope.canonical.digest import digest_bytes
from toprope.correlation.context import current_rollout_id
from toprope.errors.kinds import Kind
from toprope.errors.tree import CaptureClosed, CaptureError, ConfigError, LimitReached
from toprope.http.app import Limits
from toprope.http.reply import json_reply
from toprope.http.routing import Route
from toprope.servers.model.server import ModelServer
from toprope.telemetry.calls import CallLog, read_call_log
from toprope.testing.scripted import ScriptedEngine

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
RESPONSES = {"model": "m", "input": "hi"}
CAPTURED = "/ng-rollout/4-2/training-token-capture"


@pytest.mark.promise("ID-2")
async def test_a_users_own_model_server_sees_the_rollout_in_handlers_hooks_engine_and_threads(serve):
    seen = []

    def script(call):
        seen.append(("engine", call.rollout_id))
        return "ok"

    class Mine(ModelServer):
        async def chat_completions(self, request):
            seen.append(("handler", current_rollout_id()))
            seen.append(("thread", await asyncio.to_thread(current_rollout_id)))
            seen.append(("task", await asyncio.create_task(_ask())))
            return await super().chat_completions(request)

        async def before_call(self, call):
            seen.append(("before", current_rollout_id()))

        async def after_call(self, call, reply):
            seen.append(("after", current_rollout_id()))

    async with serve(Mine, engine=ScriptedEngine(script=script)) as (peer, _):
        for path, expected in (("/ng-rollout/4-2/v1/chat/completions", "4-2"), ("/v1/chat/completions", None)):
            seen.clear()
            assert (await peer.request("POST", path, body=CHAT)).status == 200
            places = ("handler", "thread", "task", "before", "engine", "after")
            assert seen == [(place, expected) for place in places]


async def _ask():
    return current_rollout_id()


@pytest.mark.promise("ID-2")
async def test_interleaved_calls_never_see_each_others_rollout(serve):
    wrong = []
    everyone = asyncio.Event()
    waiting = 0

    async def script(call):
        nonlocal waiting
        waiting += 1
        if waiting == 100:
            everyone.set()
        await everyone.wait()
        if f"r{call.last_text}" != call.rollout_id:
            wrong.append((call.last_text, call.rollout_id))
        return "ok"

    async with serve(engine=ScriptedEngine(script=script)) as (peer, _):
        await asyncio.gather(
            *(peer.request("POST", f"/ng-rollout/r{n}/v1/responses", body={"input": str(n)}) for n in range(100))
        )
    assert wrong == []


@pytest.mark.promise("MS-2")
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/responses", RESPONSES)])
async def test_a_captured_call_goes_through_its_steps_in_order(serve, notebook, path, body):
    def script(call):
        notebook.events.append(("engine",))
        return "ok"

    class Mine(ModelServer):
        async def before_call(self, call):
            notebook.events.append(("before",))

        async def after_call(self, call, reply):
            notebook.events.append(("after",))

    async with serve(Mine, engine=ScriptedEngine(script=script), recorder=notebook) as (peer, server):
        reply = await peer.request("POST", CAPTURED + path, body=body)
        assert [event[0] for event in notebook.events] == ["begin", "before", "engine", "record", "after"]
        (evidence,) = notebook.evidence
        assert (evidence.key, evidence.response_id) == ("4-2", reply.json()["id"])
        assert evidence.tokens is not None
        assert evidence.output_items[-1]["content"][0]["text"] == "ok"
        assert server.engine.requests[-1].want_tokens


async def test_a_call_without_the_capture_segment_is_not_recorded(serve, notebook):
    async with serve(recorder=notebook) as (peer, server):
        await peer.request("POST", "/ng-rollout/4-2/v1/responses", body=RESPONSES)
        assert notebook.events == []
        assert not server.engine.requests[-1].want_tokens


@pytest.mark.parametrize(
    ("failure", "status"), [(CaptureClosed("frozen"), 403), (CaptureError("the disk is full"), 500)]
)
async def test_an_intent_that_cannot_be_kept_fails_the_call_before_a_token_is_sampled(serve, notebook, failure, status):
    notebook.fail_begin = failure
    async with serve(recorder=notebook) as (peer, server):
        reply = await peer.request("POST", CAPTURED + "/v1/responses", body=RESPONSES)
        assert reply.status == status
        assert server.engine.calls == 0


@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [
        ({"status": 503, "message": "busy"}, 503, "upstream:model_unavailable"),
        ({"status": 401, "message": "key", "kind": "model_auth"}, 401, "upstream:model_auth"),
    ],
)
async def test_an_engine_that_fails_closes_the_intent(serve, notebook, fault, status, reason):
    engine = ScriptedEngine(script=[{"fault": fault}])
    async with serve(engine=engine, recorder=notebook) as (peer, _):
        reply = await peer.request("POST", CAPTURED + "/v1/responses", body=RESPONSES)
        assert reply.status == status
        assert [(event[0], event[3]) for event in notebook.events[1:]] == [("abort", reason)]
        assert ("x-should-retry" in reply.headers) == (status == 401)


async def test_a_refusal_by_a_hook_ends_the_trajectory_on_record_and_is_not_repeated(serve, notebook):
    class Mine(ModelServer):
        async def before_call(self, call):
            raise LimitReached("this rollout has had its 3 calls")

    async with serve(Mine, recorder=notebook) as (peer, server):
        reply = await peer.request("POST", CAPTURED + "/v1/chat/completions", body=CHAT)
        assert reply.status == 403
        assert reply.headers["x-should-retry"] == "false"
        assert reply.json()["error"]["kind"] == Kind.LIMIT_REACHED
        assert [event[0] for event in notebook.events] == ["begin", "abort"]
        assert notebook.events[1][3] == "truncated:limit_reached"
        assert server.engine.calls == 0


async def test_an_after_hook_that_raises_does_not_take_the_turn_away(serve, notebook):
    class Mine(ModelServer):
        async def after_call(self, call, reply):
            raise RuntimeError("observer")

    async with serve(Mine, recorder=notebook) as (peer, _):
        assert (await peer.request("POST", CAPTURED + "/v1/responses", body=RESPONSES)).status == 200
        assert [event[0] for event in notebook.events] == ["begin", "record"]


async def test_a_captured_call_whose_client_left_is_recorded_in_full(serve, notebook):
    """A second call, which is not captured, leaves after it: when that one is cancelled, the first would be too."""
    reached, go_on, cancelled = asyncio.Queue(), asyncio.Event(), []

    async def script(call):
        reached.put_nowait(call.rollout_id)
        try:
            await go_on.wait()
        except asyncio.CancelledError:
            cancelled.append(call.rollout_id)
            go_on.set()
            raise
        return "late"

    async with serve(engine=ScriptedEngine(script=script), recorder=notebook) as (peer, _):
        for path in (CAPTURED, "/ng-rollout/4-3"):
            call = asyncio.create_task(peer.request("POST", path + "/v1/responses", body=RESPONSES))
            await reached.get()
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        await asyncio.wait_for(notebook.recorded.wait(), 10)
        assert cancelled == ["4-3"]
        assert [event[0] for event in notebook.events] == ["begin", "abort", "record"]
        assert (notebook.events[1][3], notebook.evidence[0].client_gone) == ("client_gone", True)


async def test_the_intent_holds_what_a_retry_is_known_by(serve, notebook):
    async with serve(recorder=notebook) as (peer, _):
        headers = {"x-stainless-retry-count": "2", "content-type": "application/json"}
        body = json.dumps(RESPONSES).encode()
        await peer.request("POST", CAPTURED + "/v1/responses", body=body, headers=headers)
    intent = notebook.events[0][3]
    assert (intent.request_digest, intent.retry_count) == (f"{digest_bytes(body)}/responses", 2)
    assert notebook.evidence[0].request_digest == digest_bytes(body)


@pytest.mark.promise("MS-11")
async def test_an_answer_that_goes_round_the_recorder_is_named_and_probes_are_not(serve, notebook):
    class Mine(ModelServer):
        def routes(self):
            return [*super().routes(), Route("POST", "/v1/completions", self.legacy)]

        async def responses(self, request):
            return json_reply({"mine": True})

        async def legacy(self, request):
            return json_reply({"choices": []})

    async with serve(Mine, recorder=notebook) as (peer, _):
        for method, path in (
            ("GET", "/v1/models"),
            ("GET", "/api/tags"),
            ("POST", "/v1/messages/count_tokens"),
            ("GET", "/v1/responses"),
            ("GET", "/health"),
        ):
            await peer.request(method, CAPTURED + path, body=None if method == "GET" else {})
        assert notebook.events == []
        await peer.request("POST", CAPTURED + "/v1/responses", body=RESPONSES)
        await peer.request("POST", CAPTURED + "/v1/completions", body={"prompt": "x"})
        assert [event[3] for event in notebook.events] == [
            "unobserved_path:POST /v1/responses",
            "unobserved_path:POST /v1/completions",
        ]


async def test_a_capture_path_on_a_server_without_a_store_is_refused(serve):
    async with serve() as (peer, server):
        reply = await peer.request("POST", CAPTURED + "/v1/responses", body=RESPONSES)
        assert (reply.status, reply.json()["error"]["kind"]) == (403, Kind.CAPTURE_FAILED)
        assert server.engine.calls == 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_tokens_stand_in_a_reply_only_for_a_caller_that_asks(serve, notebook, path):
    body = CHAT if "chat" in path else RESPONSES
    async with serve(recorder=notebook) as (peer, _):
        plain = await peer.request("POST", CAPTURED + path, body=body)
        assert b"generation_token_ids" not in plain.body
        asked = await peer.request("POST", path, body=body, headers={"X-Toprope-Include": "token_ids"})
        bearer = asked.json()["choices"][0]["message"] if "chat" in path else asked.json()["output"][-1]
        assert len(bearer["generation_token_ids"]) == len(bearer["generation_log_probs"]) > 0
        assert bearer["prompt_token_ids"] == notebook.evidence[0].tokens.prompt_token_ids.tolist()
    async with serve(return_token_ids=True) as (peer, _):
        assert b"generation_log_probs" in (await peer.request("POST", path, body=body)).body


@pytest.mark.parametrize(
    ("identity", "headers", "path", "key"),
    [
        (["header"], {"X-Session-ID": "7-1"}, "/v1/responses", "7-1"),
        (["api_key"], {"Authorization": "Bearer 7-1"}, "/v1/responses", "7-1"),
        (["api_key"], {"x-api-key": "7-1"}, "/v1/responses", "7-1"),
        (["session_path"], {}, "/sessions/7-1/v1/responses", "7-1"),
        (["header", "session_path"], {"X-Session-ID": "7-1"}, "/sessions/8-1/v1/responses", "7-1"),
        (["header"], {"X-Session-ID": "7-1"}, "/ng-rollout/4-2/v1/responses", "4-2"),
        (["header"], {}, "/v1/responses", None),
        ([], {"X-Session-ID": "7-1", "Authorization": "Bearer 7-1"}, "/v1/responses", None),
    ],
)
async def test_the_path_decides_and_configured_places_stand_in_for_it(serve, notebook, identity, headers, path, key):
    seen = []
    engine = ScriptedEngine(script=lambda call: seen.append(call.rollout_id) or "ok")
    settings = {"engine": engine, "recorder": notebook, "identity": identity, "capture_unprefixed": True}
    async with serve(**settings) as (peer, _):
        assert (await peer.request("POST", path, body=RESPONSES, headers=headers)).status == 200
    assert seen == [key]
    assert [event[1] for event in notebook.events if event[0] == "record"] == ([key] if key == "7-1" else [])


@pytest.mark.promise("ID-1")
@pytest.mark.parametrize(
    ("headers", "path"),
    [
        ({"X-Session-ID": "../x"}, "/v1/responses"),
        ({"x-api-key": "a=b"}, "/v1/responses"),
        ({}, "/sessions/%41b/v1/responses"),
        ({}, "/sessions/.x/v1/responses"),
        ({}, "/ng-rollout/%2e%2e/v1/responses"),
    ],
)
async def test_an_identity_that_is_no_key_is_refused_in_the_dialects_shape(serve, headers, path):
    async with serve(identity=["header", "api_key", "session_path"]) as (peer, server):
        reply = await peer.request("POST", path, body=RESPONSES, headers=headers)
        assert reply.status == 400
        assert reply.json()["error"]["type"] == "invalid_request_error"
        assert "a=b" not in reply.text
        assert server.engine.calls == 0


def test_a_secret_cannot_be_an_identity_too():
    with pytest.raises(ConfigError, match="api_key"):
        ModelServer(name="policy", engine=ScriptedEngine(), identity=["api_key"], api_key="secret")
    with pytest.raises(ConfigError, match="identity: 'cookie' is not accepted"):
        ModelServer(name="policy", engine=ScriptedEngine(), identity=["cookie"])


async def test_upstream_gets_the_clients_own_session_or_else_the_capture_key(serve, tmp_path):
    log = CallLog(tmp_path / "calls.jsonl")
    async with serve(call_log=log) as (peer, server):
        await peer.request("POST", "/ng-rollout/4-2/v1/responses", body=RESPONSES)
        own = {"X-Session-ID": "mine"}
        await peer.request("POST", "/ng-rollout/4-2/v1/responses", body=RESPONSES, headers=own)
        await peer.request("POST", "/v1/responses", body=RESPONSES)
        assert [request.session for request in server.engine.requests] == ["4-2", "mine", None]
    assert [(r.rollout_id, r.client_session_id) for r in read_call_log(log.path)] == [
        ("4-2", None),
        ("4-2", "mine"),
        (None, None),
    ]


async def test_every_call_leaves_its_record_answered_or_not(serve, notebook, tmp_path):
    log = CallLog(tmp_path / "deep" / "calls.jsonl")
    script = [{"text": "a"}, {"fault": {"status": 503, "message": "busy"}, "when": {"contains": "break"}}]
    async with serve(engine=ScriptedEngine(script=script), recorder=notebook, call_log=log) as (peer, _):
        await peer.request("POST", CAPTURED + "/v1/responses", body=RESPONSES, headers={"x-stainless-retry-count": "1"})
        await peer.request("POST", "/v1/responses", body={"input": "break"})
        await peer.request("POST", "/v1/chat/completions", body={"messages": []})
    log.close()
    good, broken, bad = read_call_log(log.path)
    assert (good.status, good.captured, good.finish_reason, good.retry_count) == (200, True, "stop", 1)
    assert good.input_tokens == len(notebook.evidence[0].tokens.prompt_token_ids)
    assert good.ended >= good.started
    assert (broken.status, broken.error, broken.error_message) == (503, "model_unavailable", "busy")
    assert (broken.input_tokens, broken.output_tokens) == (None, None)
    assert (bad.status, bad.error, bad.dialect) == (400, "bad_request", "chat")


async def test_a_compressed_body_is_read_and_one_over_the_limit_names_it(serve):
    async with serve(limits=Limits(max_body_bytes=1000)) as (peer, server):
        packed = gzip.compress(json.dumps(RESPONSES).encode())
        headers = {"content-encoding": "gzip", "content-type": "application/json"}
        assert (await peer.request("POST", "/v1/responses", body=packed, headers=headers)).status == 200
        bomb = gzip.compress(json.dumps({"input": "x" * 5000}).encode())
        for body, sent in ((bomb, headers), (json.dumps({"input": "x" * 5000}).encode(), {})):
            reply = await peer.request("POST", "/v1/responses", body=body, headers=sent)
            assert reply.status == 413
            assert "1000" in reply.json()["error"]["message"].replace(",", "").replace(" ", "")
            assert reply.headers["x-should-retry"] == "false"
        assert server.engine.calls == 1


async def test_models_are_listed_under_the_engines_name(serve):
    async with serve() as (peer, _):
        listed = (await peer.request("GET", "/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == ["scripted"]


async def test_a_tool_call_the_engine_left_nameless_gets_an_id_of_its_own(serve):
    calls = [{"name": "add", "arguments": "{}", "call_id": "c"}, {"name": "add", "arguments": "{}", "call_id": "c"}]
    async with serve(engine=ScriptedEngine(script=[{"calls": calls}])) as (peer, _):
        output = (await peer.request("POST", "/v1/responses", body=RESPONSES)).json()["output"]
        assert output[0]["call_id"] == "c"
        assert output[1]["call_id"] != "c"
        assert len({item["id"] for item in output}) == 2


@pytest.mark.promise("MS-2")
async def test_the_reply_waits_for_the_record(serve, notebook):
    reached, durable = asyncio.Event(), asyncio.Event()
    note = notebook.record

    async def record(call):
        reached.set()
        await durable.wait()
        await note(call)

    notebook.record = record
    async with serve(recorder=notebook) as (peer, _):
        call = asyncio.create_task(peer.request("POST", CAPTURED + "/v1/responses", body=RESPONSES))
        await reached.wait()
        done, _ = await asyncio.wait({call}, timeout=0.05)
        assert done == set()
        durable.set()
        assert (await call).status == 200
        assert [event[0] for event in notebook.events] == ["begin", "record"]


async def test_a_server_that_stops_over_a_running_call_closes_its_intent(serve, notebook):
    reached = asyncio.Event()

    async def script(call):
        reached.set()
        await asyncio.Event().wait()

    settings = {"engine": ScriptedEngine(script=script), "recorder": notebook, "limits": Limits(drain_s=0.01)}
    async with serve(**settings) as (peer, server):
        call = asyncio.create_task(peer.request("POST", CAPTURED + "/v1/responses", body=RESPONSES))
        await reached.wait()
        await server.app.stop()
        assert (await call).status == 503
        assert [(event[0], event[3]) for event in notebook.events[1:]] == [("abort", "upstream:CancelledError")]
