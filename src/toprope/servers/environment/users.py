"""Who talks with the agent in an `interactive` episode: lines from the task, or a model that plays the user.

    {"script": ["...", "..."]}       said in order, one after each turn of the agent; then the user is done
    {"instructions": "You are ..."}  said by a model, which sees the conversation from the other side

What a model user fails with is trouble of the episode, never text for the agent. Left to others: whose turn it is and
how often (`interactive`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from toprope.errors.kinds import Delivery, Kind, Stage
from toprope.errors.tree import BadRequest, TopropeError
from toprope.http.client import Peer
from toprope.servers.environment.episode import DeadlinePassed, Episode
from toprope.servers.environment.judging import read_response

ROLE = """\
You play the user in a conversation with an assistant. Stay in this role: write only the user's next message, never \
the assistant's. When the user has what they came for, or gives up, write {stop} and nothing else.

{instructions}"""
BEGIN = "(The conversation begins. Write the user's first message.)"
MAX_SAID_CHARS = 64 * 1024
"""Of what a model that plays the user says in one turn. A reply that its `max_output_tokens` cut is none."""
SILENCE = "(The assistant said nothing.)"


@dataclass(frozen=True, slots=True)
class UserInput:
    """The task's `user`: exactly one of the two is set."""

    script: tuple[str, ...] | None = None
    instructions: str | None = None


@dataclass(frozen=True, slots=True)
class Utterance:
    """What the user says next. `text` None: nothing more. `done`: the agent does not get another turn."""

    text: str | None
    done: bool = False


class User(Protocol):
    """One user of one episode."""

    async def say(self, episode: Episode, said: Sequence[Mapping[str, Any]], until: float) -> Utterance:
        """The user's next words after the messages `said`, at the latest at `until` (a time of the loop)."""


class ScriptedUser:
    """Says the lines of the task."""

    def __init__(self, script: Sequence[str]) -> None:
        self._lines = iter(script)

    async def say(self, episode: Episode, said: Sequence[Mapping[str, Any]], until: float) -> Utterance:
        """The next line; done after the last."""
        line = next(self._lines, None)
        return Utterance(line, done=line is None)


class UserUnavailable(TopropeError):
    """The model that plays the user failed, whatever the reason: another attempt may find it well."""

    kind = Kind.MODEL_UNAVAILABLE
    status = 502
    retryable = True


@dataclass(slots=True)
class ModelUser:
    """Asks a model server. `name` is that server's, for messages; a call may take `timeout_s` seconds.

    `sampling` are fields of each request; a reply with `stop` in it ends the conversation.
    """

    name: str
    peer: Peer
    instructions: str
    stop: str
    timeout_s: float
    sampling: Mapping[str, Any] = field(default_factory=dict)

    async def say(self, episode: Episode, said: Sequence[Mapping[str, Any]], until: float) -> Utterance:
        """The model's words. Raises `UserUnavailable` for every failure but the episode's own deadline."""
        system = {"role": "system", "content": ROLE.format(stop=self.stop, instructions=self.instructions)}
        body = {**self.sampling, "input": [system, *seen_by_the_user(said)]}
        own = min(until, episode.now + self.timeout_s)
        try:
            async with episode.at(Stage.AGENT, deadline=own, kind=Kind.MODEL_UNAVAILABLE):
                reply = (await self.peer.request("POST", "/v1/responses", body=body)).require("its call")
            response = read_response(reply, "its call")
        except DeadlinePassed as late:
            if late.kind != Kind.MODEL_UNAVAILABLE:
                raise
            why = f"it did not answer within {self.timeout_s:g} s or the agent's time"
            raise self._failed(why, Delivery.POSSIBLY_DELIVERED) from late
        except TopropeError as error:
            raise self._failed(error.message, error.delivery, error.upstream_status) from error
        text, status = text_of(response["output"]), response.get("status")
        if status in ("failed", "incomplete"):  # half a sentence is not what the user says, nor is it the end
            raise self._failed(f"its reply was cut or failed (status {status})", Delivery.DELIVERED)
        if not text.strip():
            raise self._failed(f"it said nothing (status {status})", Delivery.DELIVERED)
        words, stopped, _ = text.partition(self.stop)
        if stopped:
            return Utterance(_bounded(words.strip()) or None, done=True)
        return Utterance(_bounded(text))

    def _failed(
        self, why: str, delivery: Delivery | None = None, upstream_status: int | None = None
    ) -> UserUnavailable:
        return UserUnavailable(
            f"the user's model {self.name}: {why}", delivery=delivery, upstream_status=upstream_status
        )


def _bounded(words: str) -> str:
    more = len(words) - MAX_SAID_CHARS
    return words if more <= 0 else f"{words[:MAX_SAID_CHARS]}\n[{more} more characters left out]"


def read_user(value: Any) -> UserInput:
    """The task's `user`. Raises `BadRequest` naming the field."""
    where = "task_input.task_data.user"
    if not isinstance(value, Mapping):
        raise BadRequest(f'{where}: an object is needed: {{"script": [...]}} or {{"instructions": "..."}}')
    unknown = sorted(set(value) - {"script", "instructions"})
    if unknown or len(value) != 1:
        raise BadRequest(f"{where}: exactly one of script and instructions is needed, got {sorted(value)}")
    script, instructions = value.get("script"), value.get("instructions")
    if instructions is not None:
        if not isinstance(instructions, str) or not instructions.strip():
            raise BadRequest(f"{where}.instructions: a text is needed")
        return UserInput(instructions=instructions)
    if not isinstance(script, list) or not all(isinstance(line, str) for line in script):
        raise BadRequest(f"{where}.script: a list of texts is needed")
    return UserInput(script=tuple(script))


def seen_by_the_user(said: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The messages from the other side: the agent's words as `user`, the user's own as `assistant`.

    Thoughts, tool calls and their outputs, and what a system said, are not the user's to see.
    """
    seen: list[dict[str, str]] = []
    for item in said:
        role = item.get("role")
        if item.get("type", "message") != "message" or role not in ("user", "assistant"):
            continue
        text = text_of([{**item, "role": "assistant"}])
        if role == "assistant":
            seen.append({"role": "user", "content": text or SILENCE})
        elif text:
            seen.append({"role": "assistant", "content": text})
    if not seen or seen[-1]["role"] != "user":
        seen.append({"role": "user", "content": SILENCE if seen else BEGIN})
    return seen


def text_of(items: Sequence[Mapping[str, Any]]) -> str:
    """The text of the assistant messages among `items`, one after the other."""
    texts: list[str] = []
    for item in items:
        if item.get("type", "message") != "message" or item.get("role", "assistant") != "assistant":
            continue
        content = item.get("content")
        if isinstance(content, str):
            texts.append(content)
            continue
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping) and isinstance(part.get("text"), str):
                texts.append(part["text"])
    return "\n".join(texts)
