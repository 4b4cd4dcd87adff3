"""A trace as a trainer reads it in `response.output`: model items, each generation carrying its triple.

The form is NeMo Gym's: each generated item has the contiguous `prompt_token_ids`, its `generation_token_ids` and its
`generation_log_probs`, so that prompt + generation of what went before begins the next prompt. It is quadratic in the
conversation; `size` says how big before anything is built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from toprope.tokens.entry import BadRecord, TokenEntry, as_ids, as_log_probs
from toprope.tokens.items import is_model_authored
from toprope.trajectory.trace import Trace

TRIPLE = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
TOKEN_FIELDS = (*TRIPLE, "routed_experts", "grammar_forced")
TRACES = "_ng_traces"
"""The key of a rebuilt response under which native traces stand when `output` carries no ids."""


def project(trace: Trace, entries: Mapping[str, TokenEntry]) -> list[dict[str, Any]]:
    """The output items of a trace that owns all its spans; `entries` by call id. Content is what was captured."""
    ids = trace.token_ids.tolist()
    output: list[dict[str, Any]] = []
    for call_id, start, end in trace.stretches():
        entry = entries[call_id]
        items, carrier = _items(entry)
        item = items[carrier]
        item["prompt_token_ids"] = ids[:start]
        item["generation_token_ids"] = ids[start:end]
        item["generation_log_probs"] = trace.logprobs[start:end].tolist()
        if entry.routed_experts is not None:
            item["routed_experts"] = _plain(entry.routed_experts)
        if entry.grammar_forced is not None:
            item["grammar_forced"] = entry.grammar_forced.astype(np.uint8).tolist()
        output.extend(items)
    return output


def content_only(traces: Sequence[Trace], entries: Mapping[str, TokenEntry]) -> list[dict[str, Any]]:
    """The output items of the first trace without any ids, for rows whose ids stand in native traces."""
    return [item for call_id in traces[0].call_ids for item in _items(entries[call_id])[0]]


def size(trace: Trace, entries: Mapping[str, TokenEntry]) -> int:
    """Bytes of JSON that `project` would make, to within a few bytes an item; linear in the trace."""
    # An id takes its digits and a comma; upto[k] is what the first k ids take.
    digits = 2 + sum((trace.token_ids >= 10**power).astype(np.int64) for power in range(1, 10))
    upto = np.concatenate([[0], np.cumsum(digits)])
    total = 0
    for call_id, start, end in trace.stretches():
        entry = entries[call_id]
        total += int(upto[end]) + len(msgspec.json.encode(trace.logprobs[start:end].tolist()))
        total += len(msgspec.json.encode((entry.output_items, _plain(entry.routed_experts)))) + 80
        total += 2 * (end - start) if entry.grammar_forced is not None else 0
    return total


def usage(traces: Sequence[Trace], recorded: Any) -> dict[str, Any]:
    """Responses usage of a rebuilt row: input is the first prompt of the first trace, output all generated tokens.

    The details that the format demands are kept from the row's own usage where it has them.
    """
    first = traces[0].spans[0].start
    generated = sum(end - start for trace in traces[:1] for _, start, end in trace.stretches())
    generated += sum(int(trace.loss_mask.sum()) for trace in traces[1:])
    known = recorded if isinstance(recorded, Mapping) else {}
    return {
        "input_tokens": first,
        "input_tokens_details": known.get("input_tokens_details") or {"cached_tokens": 0},
        "output_tokens": generated,
        "output_tokens_details": known.get("output_tokens_details") or {"reasoning_tokens": 0},
        "total_tokens": first + generated,
    }


def read_triple(item: Any) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.float64]] | None:
    """The prompt ids, generated ids and logprobs that an output item carries, of shapes (P,), (G,), (G,); None if none.

    Raises `BadRecord`, `TypeError`, `ValueError` or `OverflowError` for a part of a triple, lists of other things than
    ids and logprobs, an empty prompt before a generation, and lengths that differ.
    """
    present = [name for name in TRIPLE if isinstance(item, Mapping) and item.get(name) is not None]
    if not present:
        return None
    if len(present) < len(TRIPLE):
        raise ValueError(f"half a bundle: only {', '.join(present)}")
    prompt, generated = as_ids(item[TRIPLE[0]], TRIPLE[0]), as_ids(item[TRIPLE[1]], TRIPLE[1])
    log_probs = as_log_probs(numbers(item[TRIPLE[2]], TRIPLE[2]))
    if len(generated) != len(log_probs):
        raise ValueError(f"{len(generated)} generated ids but {len(log_probs)} logprobs")
    if len(generated) and not len(prompt):
        raise ValueError(f"{len(generated)} generated ids after no prompt")
    return prompt, generated, log_probs


def numbers(values: Any, name: str) -> Any:
    """`values`, a JSON list of numbers. Raises `TypeError` where a reader would convert: texts, booleans, null."""
    if not isinstance(values, list) or not set(map(type, values)) <= {int, float}:
        raise TypeError(f"{name} must be a list of numbers")
    return values


def is_native(output: Any) -> bool:
    """Whether a row's output carries ids of its own: a generation in a triple that reads, and none that does not.

    Triples that are all empty lists are a client's defaults: they name no token. Linear in the ids that stand there.
    """
    try:
        triples = [read_triple(item) for item in output] if isinstance(output, list) else []
    except (BadRecord, TypeError, ValueError, OverflowError):
        return False
    return any(triple is not None and len(triple[1]) for triple in triples)


def holds_traces(response: Mapping[str, Any]) -> bool:
    """Whether a response carries native traces; an empty list is none."""
    traces = response.get(TRACES)
    return isinstance(traces, list) and any(isinstance(each, Mapping) and each.get("token_ids") for each in traces)


def without_tokens(output: Any) -> Any:
    """`output` without any token field; the same object when it has none."""
    if not isinstance(output, list):
        return output
    if not any(isinstance(item, Mapping) and any(name in item for name in TOKEN_FIELDS) for item in output):
        return output
    return [
        {key: value for key, value in item.items() if key not in TOKEN_FIELDS} if isinstance(item, Mapping) else item
        for item in output
    ]


def _plain(experts: Any) -> Any:
    """Stores keep routed experts as an array where they came as one; rows are JSON."""
    return experts.tolist() if isinstance(experts, np.ndarray) else experts


def _items(entry: TokenEntry) -> tuple[list[dict[str, Any]], int]:
    """Copies of a call's model items without token fields, and which of them carries its ids.

    A generation that came out as no item at all (an end token alone) gets an empty message to carry it.
    """
    kept = [
        (index, {key: value for key, value in item.items() if key not in TOKEN_FIELDS})
        for index, item in enumerate(entry.output_items)
        if is_model_authored(item) or index == entry.token_item_index
    ]
    items = [item for _, item in kept]
    if not items:
        items.append({"type": "message", "role": "assistant", "status": "completed", "content": []})
    wanted = entry.token_item_index
    carrier = next((at for at, (index, _) in enumerate(kept) if index == wanted), len(items) - 1)
    if "role" in items[carrier]:
        items[carrier].setdefault("type", "message")
    return items, carrier
