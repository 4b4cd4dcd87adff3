"""That a record comes back as it was put: ids of every size, texts of every kind, replies without tokens.

What passes with small ids and English words fails in the field: vocabularies have more than 65,536 tokens, tools print
what they like, and an engine may stop before its first token. Plain async functions like those of `capture_checks`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from toprope.capture.protocols import AbortingSink, CaptureReader
from toprope.testing.capture_kit import Connect, Scale, Skipped, client, demand, new_key, sample_entry
from toprope.tokens.entry import TokenEntry

_IDS = (0, 1, 255, 256, 65_535, 65_536, 151_643, 2**31 - 1, 2**31, 2**32 - 1)
"""The ends of every integer that an id may be stored in."""

_TEXTS = (
    "\U0001f600 \U0001d49c \U0010ffff",  # beyond the basic plane: two units of UTF-16, four bytes of UTF-8
    "before\x00after",  # where C ends a text
    "\x01\x1b[0m\x7f\x85\r\n\r\t\ufeff\ufffd\uffff",
    "e\u0301 \u00e9 \u212b \u00c5",  # one look, several texts
    " a blank at both ends ",
    "\\u0000 \\n \"quoted\" 'quoted' {}",
)
_LONG = 150_000
"""Characters of a reply: a file that a tool was told to write, longer than a field of 65,535."""


async def ids_of_every_size_come_back(connect: Connect, scale: Scale) -> None:
    async with client(connect) as one, client(connect) as other:
        ids = np.array(_IDS, dtype=np.uint32)
        sides = {"prompt": (ids, (7,) * len(ids)), "generation": ((1, 2, 3), ids), "both": (ids, ids[::-1])}
        for side, (prompt, generated) in sides.items():
            entry = sample_entry(new_key(), "c1", prompt=prompt, generated=len(_IDS))
            entry = replace(entry, generation_token_ids=np.asarray(generated, dtype=np.uint32))
            await one.sink.put(entry)
            back = (await other.source.freeze(entry.rollout_id)).entries[0]
            for name in ("prompt_token_ids", "generation_token_ids"):
                was, now = getattr(entry, name).tolist(), getattr(back, name).tolist()
                demand(was == now, f"{name} (large ones in {side}) were {was} and came back as {now}")


async def texts_of_every_kind_come_back(connect: Connect, scale: Scale) -> None:
    async with client(connect) as one, client(connect) as other:
        key = new_key()
        texts = {f"c{n}": text for n, text in enumerate((*_TEXTS, "x" * _LONG + "y", "\U0001f600" * (_LONG // 4)))}
        put = {name: _saying(sample_entry(key, name), text) for name, text in texts.items()}
        for entry in put.values():
            await one.sink.put(entry)
        back = {entry.model_call_id: entry for entry in (await other.source.freeze(key)).entries}
        demand(back.keys() == put.keys(), f"{sorted(put)} were put, {sorted(back)} came back")
        for name, entry in put.items():
            text = texts[name]
            for field in ("output_items", "extra", "sampling", "model", "response_id"):
                same = getattr(back[name], field) == getattr(entry, field)
                demand(same, f"{field} with the text {text[:30]!r} ({len(text)} characters) came back changed")


def _saying(entry: TokenEntry, text: str) -> TokenEntry:
    """The record with `text` wherever a text may stand."""
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
    call = {"type": "function_call", "call_id": text[:40], "name": "write", "arguments": text}
    told: dict[str, Any] = {"output_items": (said, call), "token_item_index": 1, "extra": {text[:40]: [text]}}
    return replace(entry, sampling={"stop": [text[:40]]}, model=text[:40], response_id=text[:40], **told)


async def a_call_that_sampled_nothing_is_kept(connect: Connect, scale: Scale) -> None:
    """Without it the prompt of its retry has a parent that nobody holds, and a counted call is missing."""
    async with client(connect) as one, client(connect) as other:
        key = new_key()
        put = [sample_entry(key, "c1"), sample_entry(key, "c2", prompt=(1, 2, 3, 100, 101, 7), generated=0)]
        put.append(replace(sample_entry(key, "c3", generated=0), output_items=(), token_item_index=None))
        for entry in put:
            await one.sink.put(entry)
        snapshot = await other.source.freeze(key)
        back = sorted(snapshot.entries, key=lambda entry: entry.model_call_id)
        demand(back == put, f"of a call and two that sampled nothing {[e.model_call_id for e in back]} came back whole")
        demand(not snapshot.incomplete, "a call that sampled nothing counts as lost")


async def what_is_read_while_open_is_what_was_put(connect: Connect, scale: Scale) -> None:
    """Lineage looks for parents here, and retries for answers: with whole prompts, whoever read the reply."""
    async with client(connect) as one, client(connect) as other:
        readers = [each.source for each in (one, other) if isinstance(each.source, CaptureReader)]
        if len(readers) < 2:
            raise Skipped("the source has no open_entries")
        key = new_key()
        prompt = np.array((*_IDS, 1, 2, 3), dtype=np.uint32)
        put = [sample_entry(key, "c1", prompt=prompt)]
        for n, (generated, told) in enumerate(((2, {}), (2, {"client_gone": True}), (0, {}), (3, {})), start=2):
            parent = put[-1] if len(put[-1].generation_token_ids) else put[-2]
            whole = np.concatenate([parent.prompt_token_ids, parent.generation_token_ids, np.array([n, n], np.uint32)])
            place: dict[str, Any] = {"parent_decision": "resolved", "parent_call_id": parent.model_call_id}
            put.append(sample_entry(key, f"c{n}", prompt=whole, generated=generated, **place, **told))
        if isinstance(one.sink, AbortingSink):
            await one.sink.abort_call(key, "c3", reason="client_gone")
        for entry in put:
            await one.sink.put(entry)
        for reader in readers:
            for since in range(len(put) + 1):
                found = await reader.open_entries(key, since)
                names = [entry.model_call_id for entry in found]
                demand(
                    len(found) == len(put) - since, f"after the first {since} of {len(put)} entries {names} are read"
                )
                for entry, due in zip(found, put[since:], strict=True):
                    demand(not entry.prompt_is_delta, f"{entry.model_call_id} is read without its whole prompt")
                    demand(entry == due, f"{due.model_call_id} is read changed while its rollout is open")
