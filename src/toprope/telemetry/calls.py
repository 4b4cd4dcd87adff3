"""One line for each model call, captured or not: what an evaluation asks about (how long, how many tokens, why not).

Written as JSON lines, one `write` to an append-only descriptor each, never synced: it observes and decides nothing.
A disk that refuses a line costs that line, is logged once and counted. Left to others: token capture
(`toprope.capture`), which is durable and decides.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

log = logging.getLogger(__name__)


class ModelCallRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """One model call as its server saw it. Times are seconds since 1970; a count of None is unknown, never zero.

    `rollout_id` is the capture key, None for a call without identity. `status` is what the client got. `error` is the
    kind of the failure. `losses` names what the request held and the engine's dialect could not carry, and as
    `reply.<item>.<what>` what of the reply the client's dialect cannot.
    `client_session_id` is the client's own `X-Session-ID` beside a key. `time_to_first_token` is in seconds after
    `started`, known for streams only. `client_gone`: the client left before its reply was sent whole; status 499 is
    that of a call which was stopped for it. `replay_of` names the recorded call that a retry was answered from.
    `token_in` says what the prompt was: `exact` (the recorded ids of the turn that it continues, and what came since),
    `first`, `fallback:<reason>`, None where token-in was not for it; `forgiven` counts how an exact one's history
    differed from what was recorded.
    """

    call_id: str
    server: str
    dialect: str
    started: float
    ended: float
    status: int
    rollout_id: str | None = None
    captured: bool = False
    streamed: bool = False
    model: str | None = None
    finish_reason: str | None = None
    time_to_first_token: float | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    error: str | None = None
    error_message: str | None = None
    token_fault: str | None = None
    client_session_id: str | None = None
    retry_count: int | None = None
    losses: tuple[str, ...] = ()
    client_gone: bool = False
    replay_of: str | None = None
    token_in: str | None = None
    forgiven: dict[str, int] = {}


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(ModelCallRecord)


class CallLog:
    """The file of one run's model calls; several servers and processes may share it. Missing folders are made."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.lost = 0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd: int | None = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, record: ModelCallRecord) -> None:
        """On return the line is with the operating system, or counted in `lost`. Never raises for a full disk."""
        try:
            if self._fd is None:
                raise OSError("the call log is closed")
            os.write(self._fd, _encoder.encode(record) + b"\n")
        except (OSError, UnicodeEncodeError) as error:
            if not self.lost:
                log.warning("%s: a model-call record was lost: %s", self.path, error)
            self.lost += 1

    def close(self) -> None:
        """On return the file is closed; later writes are counted as lost. Twice: no-op."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def read_call_log(path: str | Path) -> Iterator[ModelCallRecord]:
    """The records of a call log in order of writing. A torn or foreign line is passed over: nothing rests on it."""
    with open(path, "rb") as lines:
        for line in lines:
            try:
                yield _decoder.decode(line)
            except msgspec.DecodeError:
                continue
