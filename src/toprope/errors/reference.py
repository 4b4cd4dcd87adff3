"""What every kind of failure means and what helps, and the failure table of an episode: the data of a reference page.

docs/reference/failures.md is `page()`; a test compares, and another holds that every kind has its row. Left to others:
the kinds themselves (`kinds`), deciding which one a failure is (`servers.environment`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from toprope.errors.kinds import Delivery, Kind, Stage


class Meaning(NamedTuple):
    """`what` happened, and what a person can do: `helps`."""

    what: str
    helps: str


KINDS: Mapping[Kind, Meaning] = {
    Kind.TRANSPORT_UNREACHABLE: Meaning(
        "No connection: the port refused, or the name did not resolve.",
        "Is the server up, and at the URL that the message names?",
    ),
    Kind.TRANSPORT_DROPPED: Meaning(
        "The connection ended before the whole reply was there.",
        "The server died or was restarted; its own log says why.",
    ),
    Kind.TRANSPORT_TIMEOUT: Meaning(
        "The peer did not connect or did not answer in time.",
        "It hangs or is overloaded; raise the bound if it is slow.",
    ),
    Kind.TRANSPORT_RESOURCE: Meaning(
        "This machine is out of descriptors, memory or ports.", "Raise `ulimit -n`, or lower `run.concurrency`."
    ),
    Kind.BAD_REQUEST: Meaning(
        "A server refused what it was sent; the message names the field.", "Mend the task or the caller."
    ),
    Kind.BAD_REPLY: Meaning(
        "A peer answered with something that the protocol does not know: no JSON, another id, a cut shape.",
        "Is this the right server behind the URL? An older one may need `protocol: flat`.",
    ),
    Kind.CONFLICT: Meaning(
        "The same id with another payload, a closed session, another rollout's session.",
        "A caller reuses ids, or two callers drive one session.",
    ),
    Kind.FORBIDDEN: Meaning(
        "The close token or the tools-only credential does not admit this call.",
        "Only whoever seeded a session verifies and closes it.",
    ),
    Kind.CAPACITY: Meaning(
        "A server has no room now, and says when to come again.",
        "Nothing: it is waited for. More servers, if it lasts.",
    ),
    Kind.SESSION_LOST: Meaning(
        "The session is not known: its server was restarted, or it is another worker's.",
        "Why did the server restart? A stateful server runs in one worker.",
    ),
    Kind.SESSION_EXPIRED: Meaning(
        "Nobody used or closed the session for its lease.", "Raise `session_ttl_s` if episodes pause that long."
    ),
    Kind.SESSION_RELEASE_FAILED: Meaning(
        "Closing did not free what the seed took; it will be tried again.",
        "The message has the error of the author's `release`.",
    ),
    Kind.SEED_FAILED: Meaning(
        "The environment could not set the episode up.", "The message has the error of its `seed`."
    ),
    Kind.GRANT_UNAVAILABLE: Meaning(
        "A required grant (tools, a sandbox) is not offered or could not be established.",
        "Does the environment offer it, and is the agent allowed to use it?",
    ),
    Kind.AGENT_FAILED: Meaning("The agent raised, or answered with an error.", "The message has its type and text."),
    Kind.AGENT_TIMEOUT: Meaning(
        "The agent was stopped at its deadline.",
        "Raise `agent_timeout_s`; an environment that is `gradable_on_timeout` scores what is there.",
    ),
    Kind.TOOL_UNAVAILABLE: Meaning(
        "A tool's server could not be reached or broke; its own words to the model are no failure.",
        "Look at the resources server.",
    ),
    Kind.MODEL_UNAVAILABLE: Meaning(
        "An engine, or the model that plays a user, is down or overloaded.",
        "Look at the engine; attempts come back to it.",
    ),
    Kind.MODEL_REJECTED: Meaning("An engine refused the request for what it says.", "The message has its words."),
    Kind.MODEL_AUTH: Meaning("An engine refused the credentials.", "Check `api_key` of the engine."),
    Kind.MODEL_QUOTA: Meaning("The account behind an engine has nothing left.", "Pay, or take another."),
    Kind.MODEL_CONTEXT_LENGTH: Meaning(
        "The conversation does not fit into the model's context.", "Fewer steps, shorter outputs, another model."
    ),
    Kind.JUDGE_UNAVAILABLE: Meaning(
        "The model that judges did not answer; so there is no reward.", "Look at the judge's model server."
    ),
    Kind.VERIFY_FAILED: Meaning(
        "The verifier raised, or answered with an error.", "The message has its type and text."
    ),
    Kind.VERIFY_TIMEOUT: Meaning(
        "The verifier did not answer in time.", "Raise `verify_timeout_s`, or make it faster."
    ),
    Kind.BAD_REWARD: Meaning(
        "The reward is absent or no finite number; the message says what stood there.", "Mend the verifier."
    ),
    Kind.EPISODE_TIMEOUT: Meaning(
        "The whole episode's time was used up; `stage` says where it stood.", "Raise `episode_timeout_s`."
    ),
    Kind.ADMISSION_TIMEOUT: Meaning(
        "No slot became free within `queue_timeout_s`; nothing was started, and no attempt is used up.",
        "Lower `run.concurrency`, or raise `max_concurrent_episodes`.",
    ),
    Kind.CANCELLED: Meaning("Whoever asked for it gave it up, or its session was closed.", "Nothing."),
    Kind.CAPTURE_CLOSED: Meaning(
        "A model call came for a rollout whose tokens are delivered already.", "The agent goes on after its answer."
    ),
    Kind.CAPTURE_FAILED: Meaning(
        "A token could not be kept, and the run was told to fail then (`on_capture_error: fail`).",
        "The message names the disk's or the store's error.",
    ),
    Kind.LIMIT_REACHED: Meaning("A budget of the rollout is used up.", "Raise it, or let the agent end sooner."),
    Kind.STALE: Meaning(
        "The trainer gave the rollout up: its tokens are older than it accepts.",
        "Nothing; it is not tried again. What it had done stays as evidence.",
    ),
    Kind.INTERNAL: Meaning(
        "A bug of ours, or of code that runs inside our servers.", "Please report it, with the log."
    ),
}


class Row(NamedTuple):
    """One row of the failure table. `terminal` is `no`, `yes`, or how it is known; `reward`: what becomes of it."""

    what: str
    stage: str
    terminal: str
    reward: str


NO_REWARD, WITH_PARTIAL = "none", "none, partial response kept"
FAILURES: tuple[Row, ...] = (
    Row("the queue is full (uses up no attempt; backs off)", Stage.ADMISSION, "no", NO_REWARD),
    Row("seed: 408, 425, 429, 5xx, refused, dropped, cut body, lost reply, timeout", Stage.SEED, "no", NO_REWARD),
    Row("seed: other 4xx, wrong id, bad body; a grant that was asked for is not offered", Stage.SEED, "yes", NO_REWARD),
    Row("agent seed: as seed", Stage.AGENT, "as seed", NO_REWARD),
    Row("activation: 408, 425, 429, 5xx, dropped, cut body, timeout", Stage.AGENT, "no", NO_REWARD),
    Row("activation: other 4xx, a reply that is no Responses object", Stage.AGENT, "yes", NO_REWARD),
    Row("activation: 200 with status failed or incomplete", "-", "-", "the verifier decides"),
    Row("the model that plays the user fails (`interactive`)", Stage.AGENT, "no", WITH_PARTIAL),
    Row("the agent's close stays broken where its reply is needed", Stage.CLEANUP, "no", WITH_PARTIAL),
    Row(
        "verify: 408, 425, 429, 5xx, dropped, cut body, timeout, session_lost, session_expired",
        Stage.VERIFICATION,
        "no",
        WITH_PARTIAL,
    ),
    Row("verify: other 4xx; no reward; a reward that is no finite number", Stage.VERIFICATION, "yes", WITH_PARTIAL),
    Row("verify says `mask_sample`", "-", "a result", "kept, out of every statistic"),
    Row("the judge is unavailable", Stage.VERIFICATION, "no", NO_REWARD),
    Row("the resources close fails or is slow after the verdict", "-", "a result", "kept"),
    Row("the episode's deadline", "where it stood", "no", WITH_PARTIAL),
    Row("a bug in the environment server", "where it stood", "yes", NO_REWARD),
)

_DELIVERIES: Mapping[Delivery, str] = {
    Delivery.NOT_SENT: "nothing can have arrived: sending it again is safe",
    Delivery.POSSIBLY_DELIVERED: "it may have been executed",
    Delivery.DELIVERED: "the peer has answered, if badly",
}


_OWN = (
    "A kind of an environment's or an agent's own, such as `solver:bad_tool_arguments`: the model's own tool call had "
    "arguments that are no JSON, and the model server then refused the history with them."
)


def page() -> str:
    """The text of docs/reference/failures.md."""
    table = "\n".join(f"| {row.what} | {row.stage} | {row.terminal} | {row.reward} |" for row in FAILURES)
    kinds = "\n".join(f"| `{kind}` | {meaning.what} | {meaning.helps} |" for kind, meaning in KINDS.items())
    deliveries = "\n".join(f"- `{delivery}`: {said}" for delivery, said in _DELIVERIES.items())
    stages = ", ".join(f"`{stage}`" for stage in Stage)
    return f"""# Failures

Made from the kinds of `toprope.errors` by `make docs`; do not edit.

An attempt without a verdict leaves a row in failures.jsonl, and never a reward: `failure_kind`, `stage` ({stages}),
`terminal` (trying again cannot help), `failure_reason` with the root cause, `delivery` and `upstream_status` where they
are known, `env_session_id` where the environment told one, and what the agent had said so far as `partial_response`.
`toprope show DIR` lists them.

## What becomes of an episode

A typed error body says itself whether trying again can help (`retryable`); without one the status does.

| what fails | stage | terminal | reward |
| --- | --- | --- | --- |
{table}

## Kinds

| kind | what happened | what helps |
| --- | --- | --- |
{kinds}
| `<server>:<kind>` | {_OWN} | Ask the author of the environment or agent. |

## Delivery

{deliveries}
"""
