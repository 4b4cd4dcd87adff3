"""A scripted environment server: `POST /run` answered by a function, for tests of collectors and trainers.

Real app, real bytes; only what an episode does is scripted. Left to others: real episodes
(`servers.environment`), captured tokens (a test puts them into a store itself).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from toprope.canonical.json import loads
from toprope.correlation.ids import capture_key
from toprope.http.app import ServerApp, build_app
from toprope.http.reply import Reply, json_reply
from toprope.http.request import Request
from toprope.http.routing import Route


@dataclass(frozen=True, slots=True)
class Run:
    """One request to `/run`."""

    body: dict[str, Any]

    @property
    def rollout_id(self) -> str:
        return str(self.body["episode_id"]["rollout_id"])

    @property
    def attempt(self) -> int:
        return int(self.body["episode_id"]["attempt"])

    @property
    def key(self) -> str:
        """The capture key."""
        return capture_key(self.rollout_id, self.attempt)

    @property
    def task_id(self) -> str:
        return str(self.body["task"]["task_id"]["task_id"])

    @property
    def task_input(self) -> dict[str, Any]:
        return dict(self.body["task"]["task_input"])

    def result(self, reward: Any = 1.0, **fields: Any) -> dict[str, Any]:
        """The reply of an episode with a verdict; `fields` stand beside the reward."""
        params = self.task_input.get("responses_create_params", {})
        verdict = {"responses_create_params": params, "response": text_response("done"), "reward": reward, **fields}
        return self.reply(verdict, None)

    def failure(
        self,
        kind: str = "agent_failed",
        *,
        terminal: bool = False,
        stage: str = "agent",
        reason: str = "scripted failure",
        **fields: Any,
    ) -> dict[str, Any]:
        """The reply of an episode without one."""
        told = {"failure_reason": reason, "terminal": terminal, "failure_kind": kind, "stage": stage, **fields}
        return self.reply(None, told)

    def reply(self, result: Any, failure: Any) -> dict[str, Any]:
        """Any reply with the right identities."""
        return {
            "episode_id": self.body["episode_id"],
            "task_id": self.body["task"]["task_id"],
            "result": result,
            "failure": failure,
        }


Answer = Callable[[Run], Awaitable[dict[str, Any] | Reply]]


class ScriptedEnvironment:
    """`app` is the server; `runs` are the requests in order of arrival; `most_in_flight` is the peak of concurrency."""

    def __init__(self, answer: Answer, *, name: str = "scripted-environment", keep_runs: bool = True) -> None:
        self.runs: list[Run] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self._answer = answer
        self._keep_runs = keep_runs
        self.app: ServerApp = build_app(name=name, role="environment", routes=[Route("POST", "/run", self._run)])

    async def _run(self, request: Request) -> Reply:
        run = Run(loads(await request.body()))
        if self._keep_runs:
            self.runs.append(run)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            answer = await self._answer(run)
        finally:
            self.in_flight -= 1
        return answer if isinstance(answer, Reply) else json_reply(answer)


def text_response(text: str) -> dict[str, Any]:
    """A Responses object with one assistant message."""
    content = [{"type": "output_text", "text": text, "annotations": []}]
    item = {"id": "msg-1", "type": "message", "role": "assistant", "status": "completed", "content": content}
    return {"id": "resp-1", "object": "response", "status": "completed", "model": "scripted", "output": [item]}
