"""What an author's `verify` found, as the verify reply: checked field by field, never passed on half.

A reward that is no finite number is `bad_reward`; every other field that is not what it must be is `verify_failed`.
Both are terminal, since the same code would say the same again. Fields of the verdict that stand in the task are not
echoed: a task cannot say what became of it. All of it runs the author's code where the verdict has some (a number, a
dict of its own kind), so it is a reader of `author`. Left to others: running `verify` (`server`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from toprope.errors.body import said_by, shorten
from toprope.errors.kinds import Kind, known_kind
from toprope.errors.tree import TopropeError
from toprope.http.jsonbody import encode
from toprope.protocol.episode import RESERVED_TASK_DATA
from toprope.protocol.sessions import is_handle
from toprope.servers.resources.author import HANDLE_NEEDED, shown
from toprope.servers.resources.environment import Verdict

_ECHOED = frozenset({"response", "responses_create_params"})


def verify_reply(server: str, body: Mapping[str, Any], found: Any, *, extended: bool) -> bytes:
    """The JSON of the reply to a verify request with `body`, whose author returned `found`.

    `extended`: the caller reads fields that NeMo Gym's models do not know. Raises `TopropeError` of kind bad_reward or
    verify_failed, terminal, naming the field and what it is.
    """
    verdict = found if isinstance(found, Verdict) else Verdict(reward=found)
    reply = {name: value for name, value in body.items() if name in _ECHOED or name not in RESERVED_TASK_DATA}
    reply.update(_extra(verdict.extra))
    reply["reward"] = _finite(verdict.reward, "the reward")
    reply["mask_sample"] = _of("mask_sample", verdict.mask_sample, bool, "true or false is needed")
    if verdict.failure_kind is not None:
        reply["failure_kind"] = known_kind(_text("failure_kind", verdict.failure_kind), server)
        reply["failure_reason"] = f"verify gave no reason beside its failure_kind {reply['failure_kind']}"
    if verdict.failure_reason is not None:
        reply["failure_reason"] = shorten(_text("failure_reason", verdict.failure_reason))
    if verdict.reward_components is not None:
        reply["reward_components"] = _components(verdict.reward_components)
    if verdict.env_session_id is not None:
        handle = _text("env_session_id", verdict.env_session_id, HANDLE_NEEDED)
        if not is_handle(handle):
            raise _failed(f"env_session_id is {shown(handle)}; {HANDLE_NEEDED}")
        if extended:
            reply["env_session_id"] = handle
    try:
        return encode(reply)
    except BaseException as error:  # whatever an author's value does when it is written, sys.exit() in it too
        raise _failed(f"the verdict cannot be sent as JSON: {said_by(error)}") from error


def _extra(extra: Any) -> dict[str, Any]:
    fields = _named("extra", _of("extra", extra, dict, "a dict is needed"))
    clash = RESERVED_TASK_DATA & fields.keys()
    if clash:
        raise _failed(f"extra[{min(clash)!r}] is a field of the verdict, or of the result, itself")
    return fields


def _components(found: Any) -> dict[str, float]:
    named = _named("reward_components", _of("reward_components", found, dict, "a dict of numbers by name is needed"))
    return {
        name: value
        if isinstance(value, bool)  # says yes or no, and is no measure
        else _finite(value, f"reward_components[{shown(name)}]")
        for name, value in named.items()
    }


def _named(what: str, found: dict[Any, Any]) -> dict[str, Any]:
    """`found` as a plain dict. What is really in it: a dict, or a text, of the author's own kind can show another."""
    odd = [name for name in dict.keys(found) if not isinstance(name, str)]
    if odd:
        raise _failed(f"{what} has the key {shown(odd[0])}; names are texts")
    return {str.__str__(name): value for name, value in dict.items(found)}


def _of(name: str, value: Any, kind: type, needed: str) -> Any:
    if not isinstance(value, kind):
        raise _failed(f"{name} is {shown(value)}; {needed}")
    return value


def _text(name: str, value: Any, needed: str = "a text is needed") -> str:
    return str.__str__(_of(name, value, str, needed))  # without what a class of the author's overrides


def _finite(number: Any, what: str) -> float:
    try:
        if isinstance(number, Real) and not isinstance(number, bool) and math.isfinite(value := float(number)):
            return value
    except BaseException:  # an integer beyond floats, or an author's own kind of number that fails: told below
        pass
    raise TopropeError(
        f"verify: {what} is {shown(number)}; a finite number is needed",
        kind=Kind.BAD_REWARD,
        status=500,
        retryable=False,
    )


def _failed(why: str) -> TopropeError:
    return TopropeError(f"verify: {why}", kind=Kind.VERIFY_FAILED, status=500, retryable=False)
