"""Servers and callers that others wrote: plain starlette, uvicorn and httpx2, with closed models of their own.

They reject every field they do not know, know a session by the cookie that its seed set, and send no header of ours.
Nothing of the product is imported here; a test says so.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import httpx2 as httpx
import uvicorn
from openai.types.responses import Response as OpenAIResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

PREFIX = re.compile(r"^/ng-rollout/([^/]+)(/training-token-capture)?(/.*)$")


class Closed(BaseModel):
    """A model that takes exactly its fields, strictly typed."""

    model_config = ConfigDict(extra="forbid", strict=True)


class EpisodeId(Closed):
    rollout_id: str
    attempt: int


class TaskId(Closed):
    taskset: str
    task_id: str


class SeedRequest(Closed):
    resources_session_id: str
    episode_id: EpisodeId
    task_id: TaskId
    task_data: dict[str, Any]


class SeedReply(Closed):
    resources_session_id: str
    resources_tools: dict[str, Any] | None = None
    sandbox_access: dict[str, Any] | None = None


class CloseRequest(Closed):
    resources_session_id: str
    episode_id: EpisodeId


class CloseReply(Closed):
    resources_session_id: str


class DirectHttp(Closed):
    kind: Literal["direct_http"]
    name: str
    required: bool
    base_url: str
    cookies: dict[str, str]
    headers: dict[str, str]


class AgentSeedRequest(Closed):
    agent_session_id: str
    episode_id: EpisodeId
    task_id: TaskId
    tool_accesses: list[DirectHttp]
    sandbox_access: dict[str, Any] | None = None


class AgentSeedReply(Closed):
    agent_session_id: str


class AgentCloseRequest(Closed):
    agent_session_id: str
    episode_id: EpisodeId


class Observations(Closed):
    source: str
    records: list[dict[str, Any]]
    gaps: list[str]


class AgentCloseReply(Closed):
    agent_session_id: str
    agent_observations: Observations | None = None
    resources_cookies: dict[str, str] | None = None


class AddRequest(Closed):
    n: int


class VerifyRequest(Closed):
    responses_create_params: dict[str, Any]
    response: dict[str, Any]
    goal: int


class RunFailure(Closed):
    failure_reason: str
    terminal: bool
    failure_kind: str
    stage: str


class RunReply(Closed):
    episode_id: EpisodeId
    task_id: TaskId
    result: dict[str, Any] | None
    failure: RunFailure | None


class ChatMessage(Closed):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatRequest(Closed):
    model: str
    messages: list[ChatMessage]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    stream: bool = False


def check_response(value: dict[str, Any]) -> None:
    """A Responses object as the OpenAI library declares it; a field it does not declare is refused."""
    unknown = set(value) - set(OpenAIResponse.model_fields)
    if unknown:
        raise ValueError(f"response: unknown fields {sorted(unknown)}")


class Stranger:
    """An app with its sessions; `keys` collects the rollout of each request by path, `ours` any header of ours sent."""

    def __init__(self) -> None:
        self.sessions: dict[str, dict[str, Any]] = {}
        self.keys: list[tuple[str, str | None]] = []
        self.opened = 0
        self.closed = 0

    def app(self) -> Callable[..., Awaitable[None]]:
        inner = Starlette(routes=self.routes())

        async def strip(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                match = PREFIX.match(scope["path"])
                path = match[3] if match else scope["path"]
                self.keys.append((path, match[1] if match else None))
                scope = {**scope, "path": path, "raw_path": path.encode(), "prefix": scope["path"][: -len(path)]}
            try:
                await inner(scope, receive, send)
            except (ValidationError, ValueError) as error:
                await JSONResponse({"detail": str(error)}, 422)(scope, receive, send)

        return strip

    def routes(self) -> list[Route]:
        raise TypeError("a stranger has routes")

    def session(self, request: Request) -> dict[str, Any] | None:
        return self.sessions.get(request.cookies.get("session", ""))

    def open(self, reply: BaseModel, session_id: str, state: dict[str, Any]) -> Response:
        cookie = secrets.token_hex(8)
        self.sessions[cookie] = {"id": session_id, **state}
        self.opened += 1
        response = JSONResponse(reply.model_dump(exclude_none=True))
        response.set_cookie("session", cookie)
        return response

    def forget(self, session_id: str) -> None:
        for cookie, state in list(self.sessions.items()):
            if state["id"] == session_id:
                del self.sessions[cookie]
                self.closed += 1


NO_SESSION = JSONResponse({"detail": "no session: the cookie of the seed is needed"}, 401)


class StrangerResources(Stranger):
    """A counter with one tool; the reward is whether the goal was met."""

    def routes(self) -> list[Route]:
        return [
            Route("/seed_session", self.seed, methods=["POST"]),
            Route("/add", self.add, methods=["POST"]),
            Route("/verify", self.verify, methods=["POST"]),
            Route("/close_session", self.close, methods=["POST"]),
        ]

    async def seed(self, request: Request) -> Response:
        asked = SeedRequest.model_validate_json(await request.body())
        reply = SeedReply(resources_session_id=asked.resources_session_id)
        return self.open(reply, asked.resources_session_id, {"n": 0})

    async def add(self, request: Request) -> Response:
        state = self.session(request)
        if state is None:
            return NO_SESSION
        state["n"] += AddRequest.model_validate_json(await request.body()).n
        return JSONResponse({"n": state["n"]})

    async def verify(self, request: Request) -> Response:
        state = self.session(request)
        if state is None:
            return NO_SESSION
        asked = VerifyRequest.model_validate_json(await request.body())
        check_response(asked.response)
        return JSONResponse({**asked.model_dump(), "reward": float(state["n"] == asked.goal), "final_n": state["n"]})

    async def close(self, request: Request) -> Response:
        asked = CloseRequest.model_validate_json(await request.body())
        self.forget(asked.resources_session_id)
        return JSONResponse(CloseReply(resources_session_id=asked.resources_session_id).model_dump())


class FlatSeedRequest(Closed):
    responses_create_params: dict[str, Any]
    goal: int


class Nothing(Closed):
    """What an older environment answers to its seed."""


class StrangerFlatResources(StrangerResources):
    """The same counter as an older environment serves it: a flat seed, an empty reply, a cookie, and no close.

    Its cookie holds what the session is, and changes with every use, as signed session cookies do.
    """

    def routes(self) -> list[Route]:
        return [route for route in super().routes() if route.path != "/close_session"]

    async def seed(self, request: Request) -> Response:
        FlatSeedRequest.model_validate_json(await request.body())
        return self.open(Nothing(), secrets.token_hex(4), {"n": 0})

    async def add(self, request: Request) -> Response:
        response = await super().add(request)
        state = self.sessions.pop(request.cookies.get("session", ""), None)
        if state is not None:
            cookie = secrets.token_hex(8)
            self.sessions[cookie] = state
            response.set_cookie("session", cookie)
        return response


class OwnRunRequest(Closed):
    """A row as a collector sends it to an agent's own `/run`, with the identity that the row carries."""

    responses_create_params: dict[str, Any]
    goal: int
    task_index: int = Field(alias="_ng_task_index")
    rollout_index: int = Field(alias="_ng_rollout_index")
    rollout_id: str = Field(alias="_ng_rollout_id")
    attempt: int = Field(default=0, alias="_ng_attempt_index")


class StrangerRunAgent(Stranger):
    """An older harness that runs whole episodes itself: its own `/run`, over an older environment and a Chat endpoint.

    `failures` are statuses to answer with, one a request, before it does its work.
    """

    def __init__(self, model_url: str, resources_url: str) -> None:
        super().__init__()
        self.model_url = model_url
        self.resources_url = resources_url
        self.failures: list[int] = []
        self.asked: list[OwnRunRequest] = []

    def routes(self) -> list[Route]:
        return [Route("/run", self.run, methods=["POST"])]

    async def run(self, request: Request) -> Response:
        asked = OwnRunRequest.model_validate_json(await request.body())
        self.asked.append(asked)
        if self.failures:
            return JSONResponse({"detail": "the harness fell over"}, self.failures.pop(0))
        key = asked.rollout_id + (f"-a{asked.attempt}" if asked.attempt else "")
        prefix = f"/ng-rollout/{key}"
        task = {"responses_create_params": asked.responses_create_params, "goal": asked.goal}
        async with httpx.AsyncClient(base_url=self.resources_url + prefix) as resources:
            (await resources.post("/seed_session", json=task)).raise_for_status()
            body = {"model": "stranger", "messages": asked.responses_create_params["input"]}
            url = f"{self.model_url}{prefix}/v1/chat/completions"
            said = (await resources.post(url, json=body)).raise_for_status().json()["choices"][0]["message"]
            for call in said["tool_calls"]:
                tool = await resources.post(f"/{call['function']['name']}", content=call["function"]["arguments"])
                tool.raise_for_status()
            text = {"type": "output_text", "text": "done", "annotations": []}
            message = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [text]}
            answer = {
                "id": "resp_theirs",
                "object": "response",
                "created_at": 0,
                "status": "completed",
                "output": [message],
            }
            verified = (await resources.post("/verify", json={**task, "response": answer})).raise_for_status().json()
        echoed = asked.model_dump(by_alias=True, include={"task_index", "rollout_index"})
        return JSONResponse({**echoed, **verified})


class StrangerAgent(Stranger):
    """A harness over Chat: it calls its model and runs one round of tools with the grant's headers and cookies."""

    def __init__(self, model_url: str) -> None:
        super().__init__()
        self.model_url = model_url

    def routes(self) -> list[Route]:
        return [
            Route("/v1/agent_sessions", self.seed, methods=["POST"]),
            Route("/v1/responses", self.respond, methods=["POST"]),
            Route("/v1/agent_sessions/close", self.close, methods=["POST"]),
        ]

    async def seed(self, request: Request) -> Response:
        asked = AgentSeedRequest.model_validate_json(await request.body())
        state = {"grants": asked.tool_accesses, "cookies": dict(asked.tool_accesses[0].cookies)}
        return self.open(AgentSeedReply(agent_session_id=asked.agent_session_id), asked.agent_session_id, state)

    async def respond(self, request: Request) -> Response:
        state = self.session(request)
        if state is None:
            return NO_SESSION
        asked = await request.json()
        messages = [{"role": item["role"], "content": item["content"]} for item in asked["input"]]
        tools = [
            {"type": "function", "function": {k: tool[k] for k in ("name", "description", "parameters")}}
            for tool in asked["tools"]
        ]
        output: list[dict[str, Any]] = []
        async with httpx.AsyncClient() as http:
            while True:
                body = {"model": "stranger", "messages": messages, "tools": tools}
                url = f"{self.model_url}{request.scope['prefix']}/v1/chat/completions"
                said = (await http.post(url, json=body)).raise_for_status().json()["choices"][0]["message"]
                if not said.get("tool_calls"):
                    break
                messages.append({"role": "assistant", "content": None, "tool_calls": said["tool_calls"]})
                for call in said["tool_calls"]:
                    result = await self.run_tool(http, state, call["function"])
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
                    output.append({"type": "function_call", "call_id": call["id"], **call["function"]})
                    output.append({"type": "function_call_output", "call_id": call["id"], "output": result})
        text = {"type": "output_text", "text": said["content"], "annotations": []}
        output.append({"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [text]})
        return JSONResponse(
            {"id": "resp_theirs", "object": "response", "created_at": 0, "status": "completed", "output": output}
        )

    async def run_tool(self, http: httpx.AsyncClient, state: dict[str, Any], function: dict[str, str]) -> str:
        grant = state["grants"][0]
        reply = await http.post(
            f"{grant.base_url}/{function['name']}",
            content=function["arguments"],
            headers=dict(grant.headers) | {"cookie": "; ".join(f"{k}={v}" for k, v in state["cookies"].items())},
        )
        state["cookies"].update(dict(reply.cookies))
        return reply.raise_for_status().text

    async def close(self, request: Request) -> Response:
        asked = AgentCloseRequest.model_validate_json(await request.body())
        state = self.session(request)
        self.forget(asked.agent_session_id)
        cookies = state["cookies"] if state else None
        reply = AgentCloseReply(agent_session_id=asked.agent_session_id, resources_cookies=cookies or None)
        return JSONResponse(reply.model_dump(exclude_none=True))


class StrangerEndpoint(Stranger):
    """An OpenAI-compatible endpoint that calls `add` once with 5 and then says what came back."""

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/chat/completions", self.complete, methods=["POST"]),
        ]

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "stranger", "object": "model"}]})

    async def complete(self, request: Request) -> Response:
        asked = ChatRequest.model_validate_json(await request.body())
        outputs = [message for message in asked.messages if message.role == "tool"]
        if outputs:
            message: dict[str, Any] = {"role": "assistant", "content": f"It is {outputs[-1].content}."}
        else:
            function = {"name": "add", "arguments": '{"n": 5}'}
            calls = [{"id": "call_1", "type": "function", "function": function}]
            message = {"role": "assistant", "content": None, "tool_calls": calls}
        choice = {"index": 0, "message": message, "finish_reason": "stop" if outputs else "tool_calls"}
        usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
        return JSONResponse(
            {"id": "cmpl-1", "object": "chat.completion", "model": asked.model, "choices": [choice], "usage": usage}
        )


class Running:
    """An app on a socket of its own, in a thread of its own."""

    def __init__(self, app: Any, host: str = "127.0.0.1", *, lifespan: Literal["on", "off"] = "off") -> None:
        started = threading.Event()

        class Server(uvicorn.Server):
            async def startup(self, sockets: Any = None) -> None:
                await super().startup(sockets)
                started.set()

        config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", lifespan=lifespan)
        sock = config.bind_socket()
        self.url = f"http://{host}:{sock.getsockname()[1]}"
        self._server = Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [sock]}, daemon=True)
        self._thread.start()
        started.wait(10)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)


def drive_an_episode(resources_url: str, agent_url: str, key: str, params: dict[str, Any], goal: int) -> dict[str, Any]:
    """What their environment server does: two cookie jars, no header of ours, every reply in a closed model."""
    prefix = f"/ng-rollout/{key}"
    episode = {"rollout_id": key, "attempt": 0}
    task = {"taskset": "theirs", "task_id": "1"}
    with httpx.Client(base_url=resources_url + prefix) as resources, httpx.Client(base_url=agent_url + prefix) as agent:
        seed: dict[str, Any] = {
            "resources_session_id": "theirs-r1",
            "episode_id": episode,
            "task_id": task,
            "task_data": {"start": 0},
        }
        SeedReply.model_validate_json(resources.post("/seed_session", json=seed).raise_for_status().content)
        grant = {
            "kind": "direct_http",
            "name": "env",
            "required": True,
            "base_url": resources_url + prefix,
            "cookies": dict(resources.cookies),
            "headers": {},
        }
        seed = {"agent_session_id": "theirs-a1", "episode_id": episode, "task_id": task, "tool_accesses": [grant]}
        AgentSeedReply.model_validate_json(agent.post("/v1/agent_sessions", json=seed).raise_for_status().content)
        answer = agent.post("/v1/responses", json=params).raise_for_status().json()
        check_response(answer)
        closing = {"agent_session_id": "theirs-a1", "episode_id": episode}
        reply = agent.post("/v1/agent_sessions/close", json=closing).raise_for_status()
        closed = AgentCloseReply.model_validate_json(reply.content)
        for name, value in (closed.resources_cookies or {}).items():
            resources.cookies.set(name, value)
        body = {"goal": goal, "responses_create_params": params, "response": answer}
        verified: dict[str, Any] = resources.post("/verify", json=body).raise_for_status().json()
        closing = {"resources_session_id": "theirs-r1", "episode_id": episode}
        CloseReply.model_validate_json(resources.post("/close_session", json=closing).raise_for_status().content)
    return verified
