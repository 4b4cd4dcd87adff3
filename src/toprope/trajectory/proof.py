"""Prove a delivered row against the receipts of its capture. Pure; used by `audit`.

Receipts stand in the store, not in the row, so that a row whose ids and whose own digests were both changed is still
found. Every generated id and logprob of a row must have been sampled by a recorded call, exactly once, under the very
prompt that the row shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toprope.tokens.entry import BadRecord, as_ids, as_log_probs
from toprope.tokens.hashing import ChainHash, begins_with, logprobs_hash
from toprope.tokens.snapshot import Receipt
from toprope.trajectory.project import TRACES, TRIPLE


@dataclass(frozen=True, slots=True)
class Breach:
    """One thing that a row shows and its receipts do not bear out.

    `kind`: malformed, not_contiguous, not_sampled, sampled_twice, logprobs_differ, unsampled_in_loss,
    masked_with_tokens, count_differs. `where` is a path inside the row.
    """

    kind: str
    where: str
    message: str


def check_row_against_receipts(row: Mapping[str, Any], receipts: Sequence[Receipt]) -> list[Breach]:
    """Every breach of one flat result row, in order; empty when the row is proven. Never raises on a bad row."""
    response = row.get("response")
    response = response if isinstance(response, Mapping) else {}
    output, traces = response.get("output"), response.get(TRACES)
    check = _Check(receipts)
    if isinstance(traces, list):
        for index, trace in enumerate(traces):
            check.trace(trace, f"response.{TRACES}[{index}]")
    if isinstance(output, list):
        check.items(output, "response.output")
    capture = row.get("_ng_token_capture")
    capture = capture if isinstance(capture, Mapping) else {}
    if capture.get("mask_reasons") and check.generated:
        check.say("masked_with_tokens", "response", "the row is masked by capture and carries token ids all the same")
    said = capture.get("generated_tokens_delivered", check.generated)
    if said != check.generated and not check.breaches:
        message = f"{check.generated} generated ids, but _ng_token_capture counts {said!r} delivered"
        check.say("count_differs", "_ng_token_capture.generated_tokens_delivered", message)
    return check.breaches


class _Check:
    """Breaches found so far, and the receipts not used up yet."""

    def __init__(self, receipts: Sequence[Receipt]) -> None:
        self.breaches: list[Breach] = []
        self.generated = 0
        self._by_hash: dict[str, list[Receipt]] = {}
        self._by_call = {receipt.model_call_id: receipt for receipt in receipts}
        self._used: set[str] = set()
        for receipt in receipts:
            self._by_hash.setdefault(receipt.chain_hash, []).append(receipt)

    def say(self, kind: str, where: str, message: str) -> None:
        self.breaches.append(Breach(kind, where, message))

    # -- items --------------------------------------------------------------------------------------------------

    def items(self, output: Sequence[Any], where: str) -> None:
        state, before = ChainHash(), np.zeros(0, dtype=np.uint32)
        for index, item in enumerate(output):
            at = f"{where}[{index}]"
            bundle = self._bundle(item, at)
            if bundle is None:
                continue
            prompt, generated, log_probs = bundle
            self.generated += len(generated)
            if begins_with(prompt, before):
                state = state.extend(prompt[len(before) :])
            else:
                self.say("not_contiguous", at, "the prompt does not begin with prompt + generation of the item before")
                state = ChainHash.of(prompt)
            state = state.extend(generated)
            self._sampled(state, len(prompt), log_probs, at)
            before = np.concatenate([prompt, generated])

    def _bundle(self, item: Any, at: str) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.float64]] | None:
        present = [name for name in TRIPLE if isinstance(item, Mapping) and item.get(name) is not None]
        if not present:
            return None
        if len(present) < len(TRIPLE):
            self.say("malformed", at, f"half a bundle: only {', '.join(present)}")
            return None
        try:
            prompt, generated = as_ids(item[TRIPLE[0]], TRIPLE[0]), as_ids(item[TRIPLE[1]], TRIPLE[1])
            log_probs = as_log_probs(item[TRIPLE[2]])
        except (BadRecord, TypeError, ValueError, OverflowError) as error:
            self.say("malformed", at, str(error))
            return None
        if len(generated) != len(log_probs):
            self.say("malformed", at, f"{len(generated)} generated ids but {len(log_probs)} logprobs")
            return None
        return prompt, generated, log_probs

    def _sampled(self, state: ChainHash, prompt_len: int, log_probs: NDArray[np.float64], at: str) -> None:
        shape = (prompt_len, len(log_probs))
        same_ids = [
            receipt
            for receipt in self._by_hash.get(state.hexdigest(), ())
            if (receipt.prompt_len, receipt.gen_len) == shape
        ]
        if not same_ids:
            self.say("not_sampled", at, "no recorded call sampled these ids after this prompt")
            return
        digest = logprobs_hash(log_probs)
        same = [receipt for receipt in same_ids if receipt.logprobs_hash == digest]
        if not same:
            calls = ", ".join(receipt.model_call_id for receipt in same_ids)
            self.say("logprobs_differ", at, f"the logprobs are not those that call {calls} recorded")
            return
        free = [receipt for receipt in same if receipt.model_call_id not in self._used]
        if not free:
            self.say("sampled_twice", at, f"call {same[0].model_call_id} stands in the row more than once")
            return
        self._used.add(free[0].model_call_id)

    # -- traces -------------------------------------------------------------------------------------------------

    def trace(self, trace: Any, where: str) -> None:
        try:
            ids = as_ids(trace["token_ids"], "token_ids")
            mask = np.asarray(trace["loss_mask"])
            log_probs = np.asarray(trace["logprobs"], dtype=np.float64)
            stretches = _stretches(trace["spans"], trace["call_ids"])
        except (BadRecord, KeyError, TypeError, ValueError, OverflowError) as error:
            self.say("malformed", where, f"{type(error).__name__}: {error}")
            return
        if mask.shape != ids.shape or not np.isin(mask, (0, 1)).all():
            self.say("malformed", where, "loss_mask must be a 0 or a 1 for each of token_ids")
            return
        outside = mask.astype(np.bool_)
        if log_probs.shape != (int(outside.sum()),):
            self.say("malformed", where, "logprobs must be one number for each 1 of loss_mask")
            return
        before = np.concatenate([[0], np.cumsum(outside)])  # logprobs that stand before a position
        state, position = ChainHash(), 0
        for call_id, start, end in stretches:
            at = f"{where}.spans[{call_id}]"
            if not position <= start < end <= len(ids):
                self.say("malformed", at, f"span {start}..{end} out of order or outside {len(ids)} ids")
                return
            state, position = state.extend(ids[position:end]), end
            owned = outside[start:end]
            self.generated += int(owned.sum())
            said = log_probs[before[start] : before[end]] if owned.any() else None
            self._span(call_id, state, start, end, said, at)
            if owned.any() and not owned.all():
                self.say("unsampled_in_loss", at, "the loss mask covers part of a generation")
            outside[start:end] = False
        if outside.any():
            position = int(outside.argmax())
            self.generated += int(outside.sum())
            self.say(
                "unsampled_in_loss", f"{where}.loss_mask[{position}]", "a token that no call sampled is in the loss"
            )

    def _span(
        self, call_id: str, state: ChainHash, start: int, end: int, log_probs: NDArray[np.float64] | None, at: str
    ) -> None:
        receipt = self._by_call.get(call_id)
        shape = (state.hexdigest(), start, end - start)
        if receipt is None or (receipt.chain_hash, receipt.prompt_len, receipt.gen_len) != shape:
            self.say("not_sampled", at, f"call {call_id} did not sample these ids after this prompt")
        elif log_probs is None:
            return
        elif receipt.logprobs_hash != logprobs_hash(log_probs):
            self.say("logprobs_differ", at, f"the logprobs are not those that call {call_id} recorded")
        elif call_id in self._used:
            self.say("sampled_twice", at, f"call {call_id} is trained on more than once")
        else:
            self._used.add(call_id)


def _stretches(spans: Any, call_ids: Any) -> list[tuple[str, int, int]]:
    """Spans joined by call, in order."""
    out: list[tuple[str, int, int]] = []
    for span in spans:
        place, start, end = span["call"], span["start"], span["end"]
        if any(type(number) is not int for number in (place, start, end)) or not 0 <= place < len(call_ids):
            raise TypeError("a span needs the place of its call in call_ids and two integers")
        call = call_ids[place]
        if not isinstance(call, str):
            raise TypeError(f"call_ids[{place}] is no call id")
        if out and out[-1][0] == call and out[-1][2] == start:
            out[-1] = (call, out[-1][1], end)
        else:
            out.append((call, start, end))
    return out
