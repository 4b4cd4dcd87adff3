"""The native trace: one conversation as one token sequence, each token once.

Values and their JSON; who decides which calls make a trace is `build`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from toprope.tokens.entry import TokenEntry
from toprope.trajectory.evidence import Call

Role = Literal["terminal", "sub_agent", "before_compaction", "abandoned_retry"]


@dataclass(frozen=True, slots=True)
class Span:
    """Positions [start, end) of a trace that `call` sampled, under `weight_version` of the weights where known."""

    call: str
    start: int
    end: int
    weight_version: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """A safe chain of calls, root to leaf.

    Shapes: `token_ids` (T,) uint32; `loss_mask` (T,) bool, True exactly where this trace owns a sampled token;
    `logprobs` (T,) float64 in nats as captured, 0 where the mask is False. `spans` are all sampled stretches in order,
    also those that another trace owns (mask False there). `grammar_forced` (T,) bool or None when no grammar ran.
    """

    trace_id: str
    call_ids: tuple[str, ...]
    token_ids: NDArray[np.uint32]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float64]
    spans: tuple[Span, ...]
    role: Role = "terminal"
    mask_sample: bool = False
    reasons: tuple[str, ...] = ()
    grammar_forced: NDArray[np.bool_] | None = None

    def stretches(self) -> list[tuple[str, int, int]]:
        """`(call, start, end)` of each call's whole generation, weight versions joined."""
        joined: list[tuple[str, int, int]] = []
        for span in self.spans:
            if joined and joined[-1][0] == span.call:
                joined[-1] = (span.call, joined[-1][1], span.end)
            else:
                joined.append((span.call, span.start, span.end))
        return joined

    def as_json(self) -> dict[str, Any]:
        """The trace as plain JSON values, the fields of capture.md by name.

        `logprobs` are one number for each 1 of `loss_mask`, in order: a token that nobody sampled has none. A span's
        `call` is its place in `call_ids`; `weight_version` stands where it is known.
        """
        place = {call: index for index, call in enumerate(self.call_ids)}
        out: dict[str, Any] = {
            "trace_id": self.trace_id,
            "call_ids": list(self.call_ids),
            "token_ids": self.token_ids.tolist(),
            "loss_mask": self.loss_mask.astype(np.uint8).tolist(),
            "logprobs": self.logprobs[self.loss_mask].tolist(),
            "spans": [
                {"call": place[s.call], "start": s.start, "end": s.end}
                | ({} if s.weight_version is None else {"weight_version": s.weight_version})
                for s in self.spans
            ],
            "role": self.role,
            "mask_sample": self.mask_sample,
            "reasons": list(self.reasons),
        }
        if self.grammar_forced is not None:
            out["grammar_forced"] = self.grammar_forced.astype(np.uint8).tolist()
        return out


def make_trace(rollout_id: str, path: Sequence[Call], role: Role, owns: Callable[[Call], bool]) -> Trace:
    """Lay a verified path out as one sequence; generations that `owns` accepts are trained on.

    `path` runs from the first call of a conversation to its leaf, each call's `lead` following its parent.
    """
    total = path[-1].cum_len
    token_ids = np.empty(total, dtype=np.uint32)
    loss_mask = np.zeros(total, dtype=np.bool_)
    log_probs = np.zeros(total, dtype=np.float64)
    forced = np.zeros(total, dtype=np.bool_) if any(call.entry.grammar_forced is not None for call in path) else None
    spans: list[Span] = []
    at = 0
    for call in path:
        start, end = at + len(call.lead), at + len(call.lead) + len(call.generated)
        token_ids[at:start] = call.lead
        token_ids[start:end] = call.generated
        if owns(call):
            loss_mask[start:end] = True
            log_probs[start:end] = call.entry.generation_log_probs
        if forced is not None and call.entry.grammar_forced is not None:
            forced[start:end] = call.entry.grammar_forced
        spans.extend(_spans(call.entry, start, end))
        at = end
    for array in (token_ids, loss_mask, log_probs):
        array.flags.writeable = False
    return Trace(
        trace_id=f"{rollout_id}:{path[-1].id}",
        call_ids=tuple(call.id for call in path),
        token_ids=token_ids,
        loss_mask=loss_mask,
        logprobs=log_probs,
        spans=tuple(spans),
        role=role,
        grammar_forced=forced,
    )


def _spans(entry: TokenEntry, start: int, end: int) -> list[Span]:
    """One span a weight version, gaps without one; a version list that does not fit the generation says nothing."""
    at, size, out = 0, end - start, []
    for piece in entry.weight_versions:
        if not at <= piece.start < piece.end <= size:
            return [Span(entry.model_call_id, start, end)]
        if piece.start > at:
            out.append(Span(entry.model_call_id, start + at, start + piece.start))
        out.append(Span(entry.model_call_id, start + piece.start, start + piece.end, piece.version))
        at = piece.end
    if at < size:
        out.append(Span(entry.model_call_id, start + at, end))
    return out
