"""What protocols of turns have in common: reading the task, opening both sessions, one activation, the end.

    open_sessions:  seed resources -> grants, seed agent
    activate:       one activation of the agent's session
    finish:         close agent -> verify

The agent is closed before verify, so that nothing moves while the state is scored. Left to others: how many turns there
are and who speaks in between (the protocols), admission, clean-up and what a failure looks like (`base`, `episode`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from toprope.errors.kinds import Delivery, Kind, Stage
from toprope.errors.tree import BadRequest, TopropeError
from toprope.http.cookies import told_cookies
from toprope.protocol.episode import RESERVED_TASK_DATA
from toprope.protocol.grants import GRANT_NAME, DirectHttpGrant, Grant, McpGrant, StreamableHttp
from toprope.servers.environment.episode import DeadlinePassed, Episode
from toprope.servers.environment.judging import accepted, read_response, read_verdict
from toprope.servers.environment.participant import Participant

log = logging.getLogger("toprope.episode")


@dataclass(frozen=True, slots=True)
class TurnInput:
    """A task's input: what the agent is asked, and what the environment knows of it."""

    responses_create_params: dict[str, Any]
    task_data: dict[str, Any]

    def flat(self) -> dict[str, Any]:
        """The task as one flat object, as NeMo Gym's older servers read it."""
        return {**self.task_data, "responses_create_params": self.responses_create_params}


@dataclass(frozen=True, slots=True)
class Opened:
    """Both sessions of an episode, seeded, and the grants that the agent has."""

    resources: Participant
    agent: Participant
    grants: list[Grant]


def read_input(task_input: Mapping[str, Any]) -> TurnInput:
    """`{responses_create_params, task_data}`; flat fields beside `task_data` fold into it. Raises `BadRequest`."""
    params = task_input.get("responses_create_params")
    if not isinstance(params, dict) or not isinstance(params.get("input"), str | list):
        raise BadRequest("task_input.responses_create_params: an object with `input` (a string or a list) is needed")
    data = task_input.get("task_data", {})
    if not isinstance(data, dict):
        raise BadRequest("task_input.task_data: an object is needed")
    folded = dict(data)
    for name, value in task_input.items():
        if name in ("responses_create_params", "task_data"):
            continue
        if name in folded and folded[name] != value:
            raise BadRequest(f"task_input.{name}: stands beside task_data and in it, with two values")
        folded[name] = value
    reserved = RESERVED_TASK_DATA & set(folded)
    if reserved:
        raise BadRequest(
            f"task_input.task_data.{min(reserved)}: this name is reserved for the verify request and its verdict"
        )
    return TurnInput(params, folded)


async def open_sessions(episode: Episode, given: TurnInput) -> Opened:
    """Seed both participants, each with its clean-up owed before anything is sent."""
    resources = episode.mint_resources()
    async with episode.at(Stage.SEED):
        typed = {"task_id": episode.task_id, "task_data": given.task_data}
        seeded = await resources.seed(given.flat() if episode.plan.flat_resources else typed, Stage.SEED)
        await episode.report(resources, seeded)
        granted = grants(episode, resources, seeded)
    agent = episode.mint_agent()
    async with episode.at(Stage.AGENT):
        fields: dict[str, Any] = {"task_id": episode.task_id, "tool_accesses": granted}
        if seeded.get("sandbox_access") is not None:
            fields["sandbox_access"] = seeded["sandbox_access"]
        await episode.report(agent, await agent.seed(fields, Stage.AGENT))
    return Opened(resources, agent, granted)


async def activate(
    episode: Episode, agent: Participant, number: int, body: Mapping[str, Any], deadline: float
) -> DeadlinePassed | None:
    """Run activation `number`; its response ends the episode's so far. Returns the deadline if that ended it.

    `deadline` is a time of the loop. Raises what else went wrong.
    """
    what = f"activation {number}" if number > 1 else "activation"
    episode.answering = True
    try:
        async with episode.at(Stage.AGENT, deadline=deadline, kind=Kind.AGENT_TIMEOUT):
            reply = await agent.activate(number, body, capture=episode.plan.capture)
    except DeadlinePassed as late:
        return late
    episode.answered(read_response(accepted(reply, Stage.AGENT, what), what))
    return None


async def finish(episode: Episode, opened: Opened, given: TurnInput, late: DeadlinePassed | None) -> dict[str, Any]:
    """Close the agent, verify, and return the result. `late`: the agent's time was up before it had ended.

    Then only an environment that is gradable on timeout is verified, with what the agent's close brought back.
    """
    if late is not None and not episode.plan.gradable_on_timeout:
        raise late  # the clean-up stops the agent, and brings what it had so far
    closed = await _close_agent(episode, opened, late)
    if late is not None and (episode.answering or episode.partial_response is None):
        episode.stage = Stage.AGENT
        raise late
    opened.resources.cookies.update(told_cookies(closed.get("resources_cookies")))
    result = await _verify(episode, opened.resources, given)
    result["ng_agent_observations"] = _observations(closed)
    if late is not None:
        result["termination"] = "agent_timeout"
    return result


async def _close_agent(episode: Episode, opened: Opened, late: DeadlinePassed | None) -> dict[str, Any]:
    """Close the agent, so that it is quiet before verify. Raises retryably where its reply is needed."""
    agent = opened.agent
    try:
        async with episode.at(Stage.CLEANUP):
            closed = await agent.close()
    except (TopropeError, TimeoutError) as error:
        text = getattr(error, "message", "close of the agent session: no reply within the clean-up time")
        carried_cookies = any(isinstance(grant, DirectHttpGrant) and grant.cookies for grant in opened.grants)
        if late is None and episode.plan.close_reply_optional and not carried_cookies:
            key = episode.episode_id.key
            log.warning("rollout %s: agent session %s may be left open: %s", key, agent.session_name, text)
            agent.owes_close = False
            return {"agent_observations": {"source": "none", "records": [], "gaps": [f"close failed: {text}"]}}
        if late is not None:
            episode.stage = Stage.AGENT
            raise late from error
        kind = getattr(error, "kind", Kind.TRANSPORT_TIMEOUT)
        raise TopropeError(
            f"the agent could not be closed, and the state cannot be verified while it may still act: {text}",
            kind=kind,
            retryable=True,
            delivery=getattr(error, "delivery", Delivery.POSSIBLY_DELIVERED),
            upstream_status=getattr(error, "upstream_status", None),
        ) from error
    await episode.closed(agent)
    episode.keep_partial(closed)
    return closed


async def _verify(episode: Episode, resources: Participant, given: TurnInput) -> dict[str, Any]:
    response = dict(episode.partial_response or {})
    # A witness for token delivery that the agent adds: strangers' models of a response do not know it.
    terminal = None if resources.speaks_protocol else response.pop("terminal_response_id", None)
    deadline = episode.now + episode.plan.timeouts.verify_s
    async with episode.at(Stage.VERIFICATION, deadline=deadline, kind=Kind.VERIFY_TIMEOUT):
        reply = await resources.call("/verify", {**given.flat(), "response": response})
        result = read_verdict(accepted(reply, Stage.VERIFICATION, "verify"))
    if terminal is not None and isinstance(result.get("response"), dict):
        result["response"].setdefault("terminal_response_id", terminal)
    return result


def grants(episode: Episode, resources: Participant, seeded: Mapping[str, Any]) -> list[Grant]:
    """The grants that the configuration asks for. Raises kind grant_unavailable (terminal) for one not offered."""
    found: list[Grant] = []
    if "direct_http" in episode.plan.tools:
        headers, cookies = resources.tool_credentials()
        if episode.plan.resources.keyed and resources.tools_credential is None:
            raise _not_offered(
                "tools: direct_http is asked for, the resources server has an API key, and its seed reply offers no "
                "credential for tools only; the key itself is never given to an agent"
            )
        found.append(DirectHttpGrant("environment", episode.tools_url(), cookies=cookies, headers=headers))
    taken = {grant.name for grant in (*found, *episode.plan.further_grants)}
    if "mcp" in episode.plan.tools:
        found.append(_mcp_grant(episode, seeded, taken))
    return [*found, *episode.plan.further_grants]


def _not_offered(why: str) -> TopropeError:
    return TopropeError(why, kind=Kind.GRANT_UNAVAILABLE, status=422, retryable=False)


def _mcp_grant(episode: Episode, seeded: Mapping[str, Any], taken: Collection[str]) -> McpGrant:
    offer = seeded.get("resources_tools")
    if not isinstance(offer, dict) or not isinstance(offer.get("server_name"), str):
        raise _not_offered("tools: mcp is asked for, and the seed reply offers no resources_tools")
    name = offer["server_name"]
    if name in taken or not GRANT_NAME.fullmatch(name):
        name = "environment.mcp"
    url = episode.tools_url(str(offer.get("url_path", "/mcp")))
    headers = offer.get("headers") or {}
    return McpGrant(name, StreamableHttp(url, {str(k): str(v) for k, v in headers.items()}))


def _observations(closed: Mapping[str, Any]) -> dict[str, Any]:
    seen = closed.get("agent_observations")
    if isinstance(seen, dict):
        return seen
    return {"source": "none", "records": [], "gaps": ["the agent's close gave no observations"]}
