"""Flat rows and the records behind them, in a shorthand. Shared by tests, no test itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.unit.trajectory.golden import entry

from toprope.tokens.entry import TokenEntry
from toprope.trajectory.evidence import read
from toprope.trajectory.terminal import TerminalWitnesses, witnesses_of


def said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}


def called(call_id: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "add", "arguments": "{}"}


def result(call_id: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": "3"}


def held(*outputs: list[dict[str, Any]]) -> list[TokenEntry]:
    """A chain c0, c1, ... whose calls wrote these outputs; response ids resp-0, resp-1, ..."""
    calls = tree(**{f"c{at}": (f"c{at - 1}" if at else None, output) for at, output in enumerate(outputs)})
    return [replace(call, response_id=f"resp-{at}") for at, call in enumerate(calls)]


def row(output: Any, **more: Any) -> dict[str, Any]:
    response = {"id": more.pop("id", "resp-of-the-agent"), "output": output, **more.pop("response", {})}
    return {"response": response, **more}


def tree(**calls: tuple[str | None, list[dict[str, Any]]]) -> list[TokenEntry]:
    """Calls by id as (parent, what it wrote), recorded in this order; each samples an id that no other does."""
    made: dict[str, TokenEntry] = {}
    for at, (call_id, (parent, output)) in enumerate(calls.items()):
        before = made[parent] if parent else None
        seen = [*before.prompt_token_ids.tolist(), *before.generation_token_ids.tolist()] if before else []
        about = {"decision": "resolved" if parent else "root", "t": at}
        record = entry(call_id, [*seen, 100 + at], [200 + at], parent, about)
        made[call_id] = replace(record, output_items=tuple(output), token_item_index=None)
    return list(made.values())


def claims(row: dict[str, Any], entries: list[TokenEntry]) -> TerminalWitnesses:
    """What the witnesses of a row say, by these records."""
    return witnesses_of(row, read("r", entries), entries)
