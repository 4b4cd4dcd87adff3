"""Delivery: freeze, attribute, build, and what goes into the row; later, on the caller's word, retire.

    freeze -> attribute -> build -> swap into the row -> [the caller writes the row, synced] -> drop

`finalize_rollout_token_capture` does the first part and never raises: whatever fails masks the one row that it was
asked for. `retire_rollout_token_capture` does the last step, after the row is durable, and never before. Who is
selected, where rows are written and when a run has masked too much is the collector's affair; what a safe trace is,
`trajectory`'s.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, NotRequired, Protocol, TypeAlias, TypedDict, runtime_checkable

import numpy as np

from toprope.capture.bounds import is_callers, within
from toprope.capture.protocols import OptionalVerbs, TokenSource
from toprope.correlation.ids import capture_key
from toprope.errors.tree import CaptureClosed
from toprope.tokens.behaviour import differing
from toprope.tokens.entry import BadRecord, TokenEntry
from toprope.tokens.snapshot import TokenCaptureSnapshot
from toprope.trajectory import reasons
from toprope.trajectory.build import Built, Deliver, Masked, Trainable, build, metrics_json
from toprope.trajectory.evidence import read
from toprope.trajectory.project import (
    TRACES,
    content_only,
    holds_traces,
    is_native,
    project,
    size,
    usage,
    without_tokens,
)
from toprope.trajectory.terminal import witnesses_of

log = logging.getLogger(__name__)

Format: TypeAlias = Literal["items", "trace"]

SIZE_LIMIT = 32 * 2**20
"""Bytes of projected items beyond which a row carries the native trace instead (the projection is quadratic)."""
SOURCE_TIMEOUT_S = 120.0
"""Seconds that a source may take for one freeze or drop: far above a slow disk, far below a lost night."""
_INLINE_IDS = 20_000  # beyond it a build takes milliseconds, which the event loop should not wait for


class Delivered(TypedDict):
    """What becomes of one row. `metrics` is the row's `_ng_token_capture`.

    `rebuilt_response` replaces the row's response; None leaves it as it is (a masked row without token fields).
    """

    rebuilt_response: dict[str, Any] | None
    mask_sample: bool
    error: NotRequired[str]
    metrics: dict[str, Any]


@runtime_checkable
class SettlingSource(Protocol, metaclass=OptionalVerbs):
    """Optional: a source that can wait for calls that are still in flight."""

    async def settle(self, rollout_id: str, timeout_s: float) -> bool:
        """Once it returns no intent of a live writer is open (True), or the time is up (False)."""


async def finalize_rollout_token_capture(
    row: Mapping[str, Any],
    source: TokenSource,
    *,
    settle_s: float = 5.0,
    format: Format = "items",
    deliver: Deliver = "single",
    size_limit: int = SIZE_LIMIT,
    timeout_s: float | None = SOURCE_TIMEOUT_S,
    on_snapshot: Callable[[TokenCaptureSnapshot], None] | None = None,
) -> Delivered | None:
    """Freeze the capture of a flat result row and rebuild its response from what was sampled.

    None: the row is left alone (it carries token ids of its own, was rebuilt before, or is a failure row). Otherwise
    `mask_sample` says whether the row may be trained on; when it may, `rebuilt_response` is the row's response with
    its output and usage replaced, everything else kept. Before freezing it waits up to `settle_s` for open calls; a
    source that does not answer within `timeout_s` seconds masks the row (`source_failed`) and its evidence stays.
    `on_snapshot` is given what was frozen, for whoever needs it beside the row. Repeated before retirement it gives
    the same answer; after it, `already_delivered`. The row is not changed; never raises, but for the cancellation of
    the caller. A row that is no object is masked too (`no_identity`).
    """
    started = time.perf_counter()
    if not isinstance(row, Mapping):
        return _without_capture({}, reasons.NO_IDENTITY, f"the row is no object but {type(row).__name__}")
    key = "the row"
    try:
        response = row.get("response")
        if row.get("failure_kind") or (isinstance(response, Mapping) and _carries_tokens(row, response)):
            return None
        try:
            key = _key_of(row)
        except ValueError as error:
            return _without_capture(row, reasons.NO_IDENTITY, f"the row has no usable identity: {error}")
        if not isinstance(response, Mapping):
            return _without_capture(row, reasons.NO_RESPONSE, f"{key}: the row's response is no object")
        if settle_s > 0 and isinstance(source, SettlingSource):
            await within(timeout_s and settle_s + timeout_s, source.settle(key, settle_s), "settle")
        snapshot = _understood(await within(timeout_s, source.freeze(key), "freeze"), key)
        if on_snapshot is not None:
            on_snapshot(snapshot)
        work = _Work(row, response, snapshot, format, deliver, size_limit)
        heavy = sum(len(e.prompt_token_ids) + len(e.generation_token_ids) for e in snapshot.entries) > _INLINE_IDS
        delivered = await asyncio.to_thread(work.deliver_row) if heavy else work.deliver_row()
    except CaptureClosed as error:
        return _without_capture(row, reasons.ALREADY_DELIVERED, f"{key}: already delivered ({error})")
    except (Exception, asyncio.CancelledError) as error:  # a transport that fails, evidence of a kind never seen: this
        if is_callers(error):  # row is masked and no other
            raise
        log.warning("capture of %s: not delivered: %s: %s", key, type(error).__name__, error, exc_info=True)
        return _without_capture(row, reasons.SOURCE_FAILED, f"{key}: {type(error).__name__}: {error}")
    delivered["metrics"]["build_s"] = round(time.perf_counter() - started, 6)
    return delivered


async def retire_rollout_token_capture(
    rollout_id: str,
    source: TokenSource,
    built: Mapping[str, Any] | None,
    *,
    timeout_s: float | None = SOURCE_TIMEOUT_S,
) -> bool:
    """Drop the payload of a delivered capture; call it only once the rebuilt row is durable with its new owner.

    `rollout_id` is the capture key, `built` what finalize returned (or `delivered_of(row)` after a restart). True: the
    payload is gone and receipts stay. False, and the evidence is kept: the build was masked or is None, something was
    written since, `built` is not of that form, or the source failed or did not answer within `timeout_s` seconds.
    Never raises.
    """
    metrics = built.get("metrics") if isinstance(built, Mapping) and built.get("mask_sample") is False else None
    if not isinstance(metrics, Mapping):
        return False
    snapshot_id, version = metrics.get("snapshot_id"), metrics.get("version")
    if not isinstance(snapshot_id, str) or type(version) is not int:
        return False
    return await _drop(rollout_id, source, snapshot_id, version, timeout_s)


async def retire_redundant_capture(
    rollout_id: str, source: TokenSource, *, timeout_s: float | None = SOURCE_TIMEOUT_S
) -> bool:
    """Drop a capture that no row needs: its rollout was handed over with token ids of the agent's own.

    Call it after the hand-over is durable. True when the payload is gone; False keeps it. Never raises.
    """
    try:
        snapshot = await within(timeout_s, source.freeze(rollout_id), "freeze")
        snapshot_id, version = snapshot.snapshot_id, snapshot.version
    except CaptureClosed:
        return True
    except (Exception, asyncio.CancelledError) as error:  # evidence that cannot be reached is kept, and listed
        if is_callers(error):
            raise
        log.warning("capture of %s: not retired: %s: %s", rollout_id, type(error).__name__, error)
        return False
    return await _drop(rollout_id, source, snapshot_id, version, timeout_s)


def masked_for_its_source(row: Mapping[str, Any], error: str) -> Delivered:
    """What becomes of a row whose source failed before anything could be read: masked, `source_failed`."""
    return _without_capture(row, reasons.SOURCE_FAILED, error)


def swap_into(row: Mapping[str, Any], delivered: Delivered | None) -> dict[str, Any]:
    """The row as it is to be written: response, `mask_sample` and `_ng_token_capture`; all else untouched.

    An environment's own mask stays; `_ng_token_capture.mask_reasons` alone says what capture masked. None changes
    nothing.
    """
    out = dict(row)
    if delivered is None:
        return out
    if delivered["rebuilt_response"] is not None:
        out["response"] = delivered["rebuilt_response"]
    if delivered["mask_sample"] or "mask_sample" in row:
        out["mask_sample"] = bool(row.get("mask_sample")) or delivered["mask_sample"]
    out["_ng_token_capture"] = delivered["metrics"]
    return out


def delivered_of(row: Mapping[str, Any]) -> Delivered | None:
    """What finalize returned for a row that was written, as far as retirement needs it; None if it was not rebuilt."""
    metrics = row.get("_ng_token_capture")
    if not isinstance(metrics, dict):
        return None
    return {"rebuilt_response": None, "mask_sample": bool(metrics.get("mask_reasons")), "metrics": metrics}


def _key_of(row: Mapping[str, Any]) -> str:
    """The capture key of a row; NeMo Gym's rows without an id of their own are `<task index>-<rollout index>`."""
    rollout_id = row.get("_ng_rollout_id")
    places = (row.get("_ng_task_index"), row.get("_ng_rollout_index"))
    if rollout_id is None and all(type(place) is int for place in places):
        rollout_id = f"{places[0]}-{places[1]}"
    attempt = row.get("_ng_attempt_index")
    return capture_key(rollout_id, 0 if attempt is None else attempt)  # type: ignore[arg-type]


class _Work:
    """One build with everything that it needs, so that it can run in a thread. Pure."""

    def __init__(
        self,
        row: Mapping[str, Any],
        response: Mapping[str, Any],
        snapshot: TokenCaptureSnapshot,
        format: Format,
        deliver: Deliver,
        size_limit: int,
    ) -> None:
        self.row, self.response, self.snapshot = row, response, snapshot
        self.format, self.deliver, self.size_limit = format, deliver, size_limit

    def deliver_row(self) -> Delivered:
        evidence = read(self.snapshot.rollout_id, self.snapshot.entries)
        witnesses = witnesses_of(self.row, evidence, self.snapshot.entries)
        built = build(self.snapshot, terminal=witnesses, deliver=self.deliver, evidence=evidence)
        found = built.reasons if isinstance(built, Masked) else ()
        metrics = metrics_json(built.metrics, found)
        metrics["snapshot_id"], metrics["version"] = self.snapshot.snapshot_id, self.snapshot.version
        differ = {each for e in self.snapshot.entries for each in differing(e.sampling, e.logprobs_mode)}
        if differ:
            metrics["raw_logprobs_differ"] = sorted(differ)
        if isinstance(built, Masked):
            metrics["format"] = None
            return {
                "rebuilt_response": _stripped(self.response),
                "mask_sample": True,
                "error": _explain(built, self.snapshot),
                "metrics": metrics,
            }
        entries = {entry.model_call_id: entry for entry in self.snapshot.entries}
        rebuilt = self._rebuild(built, entries, metrics)
        return {"rebuilt_response": rebuilt, "mask_sample": False, "metrics": metrics}

    def _rebuild(self, built: Trainable, entries: Mapping[str, TokenEntry], metrics: dict[str, Any]) -> dict[str, Any]:
        rebuilt = {name: value for name, value in self.response.items() if name != TRACES}
        as_items = self.format == "items" and len(built.traces) == 1
        if as_items:
            projected = size(built.traces[0], entries)
            if projected > self.size_limit:
                as_items = False
                metrics["projected_bytes"] = projected
        if as_items:
            rebuilt["output"] = project(built.traces[0], entries)
        else:
            rebuilt["output"] = content_only(built.traces, entries)
            rebuilt[TRACES] = [trace.as_json() for trace in built.traces]
        rebuilt["usage"] = usage(built.traces, self.response.get("usage"))
        metrics["format"] = "items" if as_items else "trace"
        return rebuilt


def _understood(snapshot: Any, key: str) -> TokenCaptureSnapshot:
    """A source's snapshot as ours. A record that does not read makes it incomplete; it never costs the others.

    Raises `ValueError` for one that could not be dropped again, or does not say whether a call is missing.
    """
    if snapshot.rollout_id != key:
        raise ValueError(f"the source answered for {snapshot.rollout_id!r}")
    version = snapshot.version
    for name, fits, expected in (
        ("snapshot_id", isinstance(snapshot.snapshot_id, str), "a string"),
        ("version", _counts(version), "an integer of at least 0"),
        ("incomplete", isinstance(snapshot.incomplete, bool | int | np.bool_ | np.integer), "true or false"),
    ):
        if not fits:
            raise ValueError(f"the source's snapshot has {name} {getattr(snapshot, name)!r}, expected {expected}")
    told = getattr(snapshot, "reasons", None) or ()
    told = (told,) if isinstance(told, str) else tuple(told)
    if not all(isinstance(reason, str) for reason in told):
        raise ValueError(f"the source's snapshot has reasons {told!r}, expected strings")
    entries: list[TokenEntry] = []
    lost: list[str] = []
    for entry in snapshot.entries:
        try:
            entries.append(entry if isinstance(entry, TokenEntry) else TokenEntry.from_dump(_dump(entry)))
        except BadRecord as error:
            lost.append(f"{error.reason}:{_name_of(entry)}{error}")
        except Exception as error:  # a record of a kind never seen costs its rollout and says which it was
            lost.append(f"write_failed:{_name_of(entry)}{type(error).__name__}: {error}")
    return TokenCaptureSnapshot(
        rollout_id=key,
        entries=tuple(entries),
        incomplete=bool(snapshot.incomplete) or bool(lost),
        snapshot_id=snapshot.snapshot_id,
        version=int(version),
        reasons=(*told, *lost),
    )


def _counts(version: Any) -> bool:
    """Whether a source's version can be written into a row and be given back to it: a count, of numpy's too."""
    return isinstance(version, int | np.integer) and not isinstance(version, bool) and 0 <= int(version) < 2**63


def _name_of(entry: Any) -> str:
    """The call of a foreign record, where it tells."""
    call_id = entry.get("model_call_id") if isinstance(entry, Mapping) else getattr(entry, "model_call_id", None)
    return f"{call_id}: " if isinstance(call_id, str) else ""


def _dump(entry: Any) -> Mapping[str, Any]:
    """A foreign record's fields; NeMo Gym's name of the parent decision is read as ours, and none as none."""
    dump = dict(entry if isinstance(entry, Mapping) else entry.model_dump())
    if "parent_resolution" in dump and "parent_decision" not in dump:
        dump["parent_decision"] = dump.pop("parent_resolution") or "unresolved"
    return dump


def _explain(built: Built, snapshot: TokenCaptureSnapshot) -> str:
    """One line for people: the reasons, and the calls that they are about."""
    about = [f"{call}: {what}" for call, what in built.metrics.parent_link_failures.items()]
    said = [*about, *built.metrics.incomplete_reasons]
    found = ", ".join(built.reasons if isinstance(built, Masked) else ())
    return f"{snapshot.rollout_id}: masked: {found}" + (f" ({'; '.join(said)})" if said else "")


def _without_capture(row: Mapping[str, Any], reason: str, error: str) -> Delivered:
    response = row.get("response")
    return {
        "rebuilt_response": _stripped(response) if isinstance(response, Mapping) else None,
        "mask_sample": True,
        "error": error,
        "metrics": {"mask_reasons": [reason], "snapshot_id": None, "version": None, "format": None},
    }


def _carries_tokens(row: Mapping[str, Any], response: Mapping[str, Any]) -> bool:
    """Native ids, or traces of ours: an agent can write anything into a response, but no `_ng_*` key into a row."""
    return is_native(response.get("output")) or ("_ng_token_capture" in row and holds_traces(response))


def _stripped(response: Mapping[str, Any]) -> dict[str, Any] | None:
    """The response of a masked row without stray token fields; None when it has none."""
    output = response.get("output")
    clean = without_tokens(output)
    if clean is output and TRACES not in response:
        return None
    kept = {name: value for name, value in response.items() if name != TRACES}
    return {**kept, "output": clean} if "output" in response else kept


async def _drop(rollout_id: str, source: TokenSource, snapshot_id: str, version: int, timeout_s: float | None) -> bool:
    try:
        dropped = source.drop(rollout_id, snapshot_id=snapshot_id, version=version)
        return bool(await within(timeout_s, dropped, "drop"))
    except (Exception, asyncio.CancelledError) as error:  # the row is safe, the evidence is kept: fails no rollout
        if is_callers(error):
            raise
        log.warning("capture of %s: not retired: %s: %s", rollout_id, type(error).__name__, error)
        return False
