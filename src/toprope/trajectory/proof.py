"""Prove a delivered row against the receipts of its capture. Pure; used by `audit`.

Receipts stand in the store, not in the row, so that a row whose ids and whose own digests were both changed is still
found. Every generated id and logprob of a row must have been sampled by a recorded call, exactly once, under the very
prompt that the row shows; and what recorded calls sampled on the way to the row's last token must be in the loss.

Receipts hold ids, logprobs and the order of calls, and nothing else: weight versions, routed experts, forced positions
and roles are held to their form here. Their values are vouched for by the digest of the row alone.
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
from toprope.trajectory.project import TRACES, numbers, read_triple

_ROLES = ("terminal", "sub_agent", "before_compaction", "abandoned_retry")
_UNNAMED = "only_chain"
"""The terminal method that says that nothing named the last call."""


@dataclass(frozen=True, slots=True)
class Breach:
    """One thing that a row shows and its receipts do not bear out.

    `kind`: malformed, not_contiguous, not_sampled, sampled_twice, logprobs_differ, unsampled_in_loss, left_out,
    masked_with_tokens, nothing_delivered, terminal_differs, count_differs. `where` is a path inside the row.
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
    _against_metrics(check, capture if isinstance(capture, Mapping) else None)
    check.left_out()
    return check.breaches


def _against_metrics(check: _Check, capture: Mapping[str, Any] | None) -> None:
    """Hold what was found against what the row's own metrics say; a row without any was not rebuilt by us."""
    if capture is None:
        return
    masked = bool(capture.get("mask_reasons"))
    if masked and check.generated:
        check.say("masked_with_tokens", "response", "the row is masked by capture and carries token ids all the same")
    said = capture.get("generated_tokens_delivered", check.generated)
    if (said != check.generated or isinstance(said, bool)) and not check.breaches:
        message = f"{check.generated} generated ids, but _ng_token_capture counts {said!r} delivered"
        check.say("count_differs", "_ng_token_capture.generated_tokens_delivered", message)
    if not masked and not check.generated and not check.breaches:
        check.say("nothing_delivered", "response", "the row is not masked by capture, and no sampled token is in it")
    terminal = capture.get("terminal")
    if not masked and isinstance(terminal, Mapping) and not check.breaches:
        check.ends_with(terminal.get("call_id"), named=terminal.get("method") != _UNNAMED)


@dataclass(frozen=True, slots=True)
class _Sequence:
    """One conversation of a row: its (T,) ids, where the loss is, and the recorded call that it ends with, if any."""

    ids: NDArray[np.uint32]
    in_loss: NDArray[np.bool_]
    last: str | None
    where: str


class _Check:
    """Breaches found so far, and the receipts not used up yet."""

    def __init__(self, receipts: Sequence[Receipt]) -> None:
        self.breaches: list[Breach] = []
        self.generated = 0
        self._sequences: list[_Sequence] = []
        self._roles: list[str] = []
        self._by_hash: dict[str, list[Receipt]] = {}
        self._by_call = {receipt.model_call_id: receipt for receipt in receipts}
        self._used: set[str] = set()
        for receipt in receipts:
            self._by_hash.setdefault(receipt.chain_hash, []).append(receipt)

    def say(self, kind: str, where: str, message: str) -> None:
        self.breaches.append(Breach(kind, where, message))

    def ends_with(self, call_id: Any, *, named: bool) -> None:
        """The row's first sequence ends with the call that its metrics name, or with a twin that sampled the same."""
        if not self._sequences or not self._by_call:
            return
        first = self._sequences[0]
        receipt = self._by_call.get(call_id) if isinstance(call_id, str) else None
        if receipt is None or (receipt.chain_hash and receipt.chain_hash != ChainHash.of(first.ids).hexdigest()):
            message = f"the row does not end with call {call_id!r}, which _ng_token_capture names as its last"
            self.say("terminal_differs", first.where, message)
        roles = [role == "terminal" for role in self._roles]
        if sum(roles) > 1 or (named and roles and not roles[0]):
            self.say(
                "terminal_differs", first.where, "the trace of the named last call, and no other, has the role terminal"
            )

    def left_out(self) -> None:
        """Every generation on the way to the end of a sequence is in the loss, here or in another trace of the row.

        On the way stands a call whose ids the sequence begins with and that was recorded before its last call, or that
        the record links to it: what a later call sampled, the last one did not read. A retry of which another took the
        place has a twin with the same ids. Linear in the ids of the row: each place where a recorded call ended is
        hashed once a sequence.
        """
        if self.breaches:
            return
        ends: dict[int, list[Receipt]] = {}
        for receipt in self._by_call.values():
            if receipt.gen_len and receipt.model_call_id not in self._used:
                ends.setdefault(receipt.prompt_len + receipt.gen_len, []).append(receipt)
        used = {self._by_call[call_id].chain_hash for call_id in self._used}
        order = {call_id: place for place, call_id in enumerate(self._by_call)}
        places = sorted(ends)
        for each in self._sequences:
            state, linked = ChainHash(), self._linked(each.last)
            for end in places:
                if end > len(each.ids):
                    break
                state = state.extend(each.ids[state.count : end])
                digest = state.hexdigest()
                for receipt in ends[end] if digest not in used else ():
                    name, trained = receipt.model_call_id, each.in_loss[receipt.prompt_len : end].any()
                    before = name in linked or order[name] < order.get(each.last or "", 0)
                    if receipt.chain_hash == digest and before and not trained:
                        message = f"call {name} sampled ids {receipt.prompt_len}..{end}, which are not in the loss"
                        self.say("left_out", each.where, message)

    def _linked(self, call_id: str | None) -> set[str]:
        """The calls from which the record says that `call_id` goes on."""
        found: set[str] = set()
        while call_id is not None and call_id not in found and call_id in self._by_call:
            found.add(call_id)
            call_id = self._by_call[call_id].parent_call_id
        return found

    # -- items --------------------------------------------------------------------------------------------------

    def items(self, output: Sequence[Any], where: str) -> None:
        state, before = ChainHash(), np.zeros(0, dtype=np.uint32)
        spans: list[tuple[int, int]] = []
        last: str | None = None
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
            last = self._sampled(state, len(prompt), log_probs, at)
            before = np.concatenate([prompt, generated])
            spans.append((len(prompt), len(before)))
        if spans:
            in_loss = np.zeros(len(before), dtype=np.bool_)
            for start, end in spans:
                in_loss[start:end] = True
            self._sequences.append(_Sequence(before, in_loss, last, where))

    def _bundle(self, item: Any, at: str) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.float64]] | None:
        try:
            return read_triple(item)
        except (BadRecord, TypeError, ValueError, OverflowError) as error:
            self.say("malformed", at, str(error))
            return None

    def _sampled(self, state: ChainHash, prompt_len: int, log_probs: NDArray[np.float64], at: str) -> str | None:
        """The call that sampled this, used up now; None if none did."""
        shape = (prompt_len, len(log_probs))
        same_ids = [
            receipt
            for receipt in self._by_hash.get(state.hexdigest(), ())
            if (receipt.prompt_len, receipt.gen_len) == shape
        ]
        if not same_ids:
            self.say("not_sampled", at, "no recorded call sampled these ids after this prompt")
            return None
        digest = logprobs_hash(log_probs)
        same = [receipt for receipt in same_ids if receipt.logprobs_hash == digest]
        if not same:
            calls = ", ".join(receipt.model_call_id for receipt in same_ids)
            self.say("logprobs_differ", at, f"the logprobs are not those that call {calls} recorded")
            return None
        free = [receipt for receipt in same if receipt.model_call_id not in self._used]
        if not free:
            self.say("sampled_twice", at, f"call {same[0].model_call_id} stands in the row more than once")
            return None
        self._used.add(free[0].model_call_id)
        return free[0].model_call_id

    # -- traces -------------------------------------------------------------------------------------------------

    def trace(self, trace: Any, where: str) -> None:
        try:
            ids = as_ids(trace["token_ids"], "token_ids")
            outside = _bits(trace["loss_mask"], "loss_mask", len(ids))
            log_probs = as_log_probs(numbers(trace["logprobs"], "logprobs"))
            stretches = _stretches(trace["spans"], trace["call_ids"])
            _form(trace, len(ids))
        except (BadRecord, KeyError, TypeError, ValueError, OverflowError) as error:
            self.say("malformed", where, f"{type(error).__name__}: {error}")
            return
        if log_probs.shape != (int(outside.sum()),):
            self.say("malformed", where, "logprobs must be one number for each 1 of loss_mask")
            return
        if not outside.any():
            self.say("malformed", where, "a trace in which no token is trained on: its loss_mask is all 0")
            return
        self._sequences.append(_Sequence(ids, outside.copy(), stretches[-1][0] if stretches else None, where))
        self._roles.append(trace["role"])
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
        if position < len(ids):
            self.say(
                "malformed", where, f"{len(ids) - position} ids after the last span: no call sampled them or read them"
            )
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


def _bits(values: Any, name: str, size: int) -> NDArray[np.bool_]:
    """`values`, a JSON list of a 0 or a 1 for each of `size` ids. Raises `TypeError` for anything else."""
    fits = isinstance(values, list) and len(values) == size and set(map(type, values)) <= {int}
    if not fits or not set(values) <= {0, 1}:
        raise TypeError(f"{name} must be a 0 or a 1 for each of token_ids")
    return np.array(values, dtype=np.bool_)


def _form(trace: Mapping[str, Any], size: int) -> None:
    """What no receipt speaks about is in the form that delivery gives it. Raises `TypeError` if not."""
    if trace["role"] not in _ROLES:
        raise TypeError(f"role must be one of {', '.join(_ROLES)}")
    if trace.get("mask_sample", False) is not False or trace.get("reasons"):
        raise TypeError("a trace that is delivered is not masked")
    if "grammar_forced" in trace:
        _bits(trace["grammar_forced"], "grammar_forced", size)
    for span in trace["spans"]:
        if not isinstance(span.get("weight_version", ""), str):
            raise TypeError("weight_version must be a text")


def _stretches(spans: Any, call_ids: Any) -> list[tuple[str, int, int]]:
    """Spans joined by call, in order: each of `call_ids` once, in that order."""
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
    if [call for call, _, _ in out] != call_ids:
        raise TypeError("call_ids must be the calls of the spans, each once and in order")
    return out
