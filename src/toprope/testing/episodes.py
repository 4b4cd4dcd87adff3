"""A scripted environment server: `POST /run` answered by a function, for tests of collectors and trainers.

Real app, real bytes, a real collector; only what an episode does, and what its model calls sampled, is scripted. Left
to others: real episodes (`servers.environment`).
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from toprope.canonical.json import loads
from toprope.capture.protocols import TokenSink, TokenSource
from toprope.collector.collect import Collector
from toprope.collector.events import Observer
from toprope.collector.settings import CaptureSettings, Destination, RunSettings
from toprope.collector.summary import Summary
from toprope.collector.tasks import TaskLike
from toprope.correlation.ids import capture_key
from toprope.http.app import ServerApp, build_app
from toprope.http.client import Client
from toprope.http.reply import Reply, json_reply
from toprope.http.request import Request
from toprope.http.routing import Route
from toprope.tokens.entry import TokenEntry
from toprope.tokens.hashing import ChainHash


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


async def collect_scripted(
    run_dir: str | os.PathLike[str],
    answer: Answer,
    tasks: str | os.PathLike[str] | Iterable[TaskLike],
    *,
    source: TokenSource | None = None,
    selected: bool = False,
    settings: RunSettings | None = None,
    capture: CaptureSettings | None = None,
    observers: Sequence[Observer] = (),
) -> Summary:
    """Collect `tasks` against one scripted environment, in process. `selected`: tokens are captured into `source`.

    Failures are retried without waiting, unless `settings` say otherwise.
    """
    environment = ScriptedEnvironment(answer)
    async with Client(inline={"environment": environment.app}) as client:
        peer = client.peer("inline://environment", "environment")
        collector = Collector(
            run_dir=run_dir,
            environments={"*": Destination(peer=peer, name="scripted", selected=selected)},
            source=source,
            settings=settings or RunSettings(run_id="run", backoff_s=0.0),
            capture=capture or CaptureSettings(enabled=selected),
            observers=observers,
        )
        try:
            return await collector.collect(tasks)
        finally:
            await environment.app.stop()


async def sample_calls(sink: TokenSink, key: str, turns: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
    """Put one conversation's calls into `sink`: each turn is (what is new in its prompt, what was generated).

    The logprob of the n-th generated id of a call is -0.1 * n; each call's one output item says `turn <n>`, and the
    response id is `sampled-<n>`, counted from 1.
    """
    state, cum_len, parent = ChainHash(), 0, None
    history: list[int] = []
    for number, (new, generated) in enumerate(turns, 1):
        history += new
        state = state.extend(np.asarray(new, np.uint32)).extend(np.asarray(generated, np.uint32))
        cum_len += len(new) + len(generated)
        call_id = f"call-{number:04d}"
        content = [{"type": "output_text", "text": f"turn {number}", "annotations": []}]
        await sink.begin_call(key, call_id)
        await sink.put(
            TokenEntry(
                rollout_id=key,
                model_call_id=call_id,
                model="scripted",
                created_at=float(number),
                prompt_token_ids=np.asarray(history, np.uint32),
                generation_token_ids=np.asarray(generated, np.uint32),
                generation_log_probs=np.asarray([-0.1 * (n + 1) for n in range(len(generated))]),
                output_items=({"id": f"msg-{number}", "type": "message", "role": "assistant", "content": content},),
                token_item_index=0,
                response_id=f"sampled-{number}",
                parent_decision="root" if parent is None else "resolved",
                parent_call_id=parent,
                cum_len=cum_len,
                chain_hash=state.hexdigest(),
                finish_reason="stop",
            )
        )
        history += generated
        parent = call_id
