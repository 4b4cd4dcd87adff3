"""One rollout as people read it: what was said, what each call cost, which tools ran, what came of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from toprope.cli.tables import columns
from toprope.telemetry.calls import ModelCallRecord

_HIDDEN = frozenset({"response", "responses_create_params", "ng_agent_observations", "reward", "mask_sample"})


def render(row: Mapping[str, Any], task_input: Mapping[str, Any], calls: Sequence[ModelCallRecord]) -> str:
    """A result or failure row, the input of its task, and its model calls, as text that ends with a newline."""
    lines = [*_head(row), ""]
    params = row.get("responses_create_params") or task_input.get("responses_create_params") or {}
    given = params.get("input")
    for item in given if isinstance(given, list) else [{"role": "user", "content": given}]:
        lines += _item(item, {})
    response = row.get("response") or row.get("partial_response") or {}
    observed = (row.get("ng_agent_observations") or {}).get("records") or []
    tools = {record.get("call_id"): record for record in observed if record.get("kind") == "tool_call"}
    for item in response.get("output") or []:
        lines += _item(item, tools)
    lines += ["", *_verdict(row, task_input)]
    if calls:
        lines += ["", _calls(calls).rstrip()]
    return "\n".join(lines) + "\n"


def _head(row: Mapping[str, Any]) -> Iterator[str]:
    task = row["_ng_task_id"]
    who = f"rollout {row['_ng_rollout_id']}, attempt {row['_ng_attempt_index']}"
    yield f"{who}, task {task['taskset']} {task['task_id']}"


def _item(item: Mapping[str, Any], tools: Mapping[Any, Mapping[str, Any]]) -> Iterator[str]:
    kind = item.get("type", "message")
    if kind == "message":
        yield from _said(str(item.get("role", "assistant")), _text(item.get("content")) + _tokens(item))
    elif kind == "reasoning":
        thought = _text(item.get("content") or item.get("summary"))
        yield from _said("thought", thought + _tokens(item))
    elif kind == "function_call":
        yield from _said("assistant", f"{item.get('name')}({item.get('arguments')}){_tokens(item)}")
        record = tools.get(item.get("call_id"))
        if record is not None:
            how = "ok" if record.get("ok") else f"error {record.get('error') or ''}".rstrip()
            yield from _said("tool", f"{record.get('name')}: {how}, {1000 * record.get('duration_s', 0.0):.1f} ms")
    elif kind == "function_call_output":
        yield from _said("tool", _text(item.get("output")))
    else:
        yield from _said(str(kind), "(an item of a kind that is not shown)")


def _said(who: str, text: str) -> Iterator[str]:
    first, *rest = text.split("\n")
    yield f"{who:>10}  {first}"
    for line in rest:
        yield f"{'':>10}  {line}"


def _tokens(item: Mapping[str, Any]) -> str:
    ids, log_probs = item.get("generation_token_ids"), item.get("generation_log_probs")
    if not ids or not log_probs:
        return ""
    forced = sum(bool(flag) for flag in item.get("grammar_forced") or ())
    by_grammar = f", {forced} of them by grammar" if forced else ""
    mean = sum(log_probs) / len(log_probs)
    prompt = len(item.get("prompt_token_ids") or ())
    return f"\n[{prompt} prompt tokens, {len(ids)} sampled{by_grammar}, mean logprob {mean:.3f}]"


def _verdict(row: Mapping[str, Any], task_input: Mapping[str, Any]) -> Iterator[str]:
    if "failure_kind" in row:
        again = "it would not be tried again" if row.get("terminal") else "it could be tried again"
        yield f"failed: {row['failure_kind']} at {row.get('stage')}; {again}"
        yield f"  {row.get('failure_reason')}"
        return
    masked = ", masked" if row.get("mask_sample") else ""
    yield f"reward {row.get('reward')}{masked}"
    own = task_input.get("task_data") or {}
    for key, value in row.items():
        if key not in _HIDDEN and not key.startswith("_ng_") and key not in own:
            yield f"  {key}: {value}"
    capture = row.get("_ng_token_capture") or {}
    for reason in capture.get("mask_reasons") or ():
        yield f"  masked by capture: {reason}"


def _calls(calls: Sequence[ModelCallRecord]) -> str:
    rows = [
        [
            call.server,
            call.dialect,
            call.status,
            call.input_tokens,
            call.output_tokens,
            call.finish_reason,
            f"{call.ended - call.started:.3f} s",
            call.error,
        ]
        for call in calls
    ]
    return columns(["model call", "dialect", "status", "prompt", "generated", "finish", "took", "error"], rows)


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(
            str(part.get("text", f"<{part.get('type')}>")) if isinstance(part, dict) else str(part) for part in content
        )
    return "" if content is None else str(content)
