"""What becomes of the intents that a dead writer left open. Pure.

A call whose writer died before it wrote an entry or an abort can not be recorded any more. If it was not streamed, its
reply cannot have left: it is aborted. If it was streamed, the agent may hold a part of a turn that nobody recorded; it
is aborted only when the agent shows that it threw that part away: it sent the same request again, and no later request
holds a model turn that no record explains. Everything else stays open and counts as lost at freeze.

Who is dead, and how aborts are written, is the store's affair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from toprope.tokens.lineage import DEFERRED, UNRECORDED_TURN

WRITER_DIED = "writer_died"


@dataclass(frozen=True, slots=True)
class BegunCall:
    """One call of a key as its intent and its record tell it; calls are given in the order in which they began.

    `open`: neither entry nor abort. `doubtful`: its record says that its request may hold an unrecorded model turn
    (`is_doubtful`). `writer_epoch` is empty for an intent of unknown origin.
    """

    call_id: str
    open: bool
    stream: bool = False
    request_digest: str = ""
    retry_count: int = 0
    writer_epoch: str = ""
    doubtful: bool = False


def is_doubtful(decision: str, resolution_reason: str | None) -> bool:
    """Whether a record's parent decision leaves room for a model turn of its request that no record explains."""
    bare = (resolution_reason or "").partition(":")[0]
    return decision == "unresolved" and bare in ("", UNRECORDED_TURN, DEFERRED)


def to_abort(calls: Sequence[BegunCall], is_live: Callable[[str], bool]) -> tuple[str, ...]:
    """The ids of the open calls that are to be aborted as `writer_died`.

    A call of unknown origin is never among them: its writer may be alive. Each retry answers for one lost call only.
    """
    dead: dict[str, bool] = {}
    found: list[str] = []
    answered: set[int] = set()
    for at, call in enumerate(calls):
        if not call.open or not call.writer_epoch:
            continue
        if call.writer_epoch not in dead:
            dead[call.writer_epoch] = not is_live(call.writer_epoch)
        if not dead[call.writer_epoch]:
            continue
        if not call.stream:
            found.append(call.call_id)
            continue
        if any(later.doubtful for later in calls[at + 1 :]):
            continue
        retry = next((n for n in range(at + 1, len(calls)) if n not in answered and _retries(calls[n], call)), None)
        if retry is not None:
            answered.add(retry)
            found.append(call.call_id)
    return tuple(found)


def _retries(later: BegunCall, lost: BegunCall) -> bool:
    """Marked by the client, or sent to another writer: an equal request to the same writer is a second sample."""
    same = bool(lost.request_digest) and later.request_digest == lost.request_digest
    return same and (later.retry_count > lost.retry_count or later.writer_epoch != lost.writer_epoch)
