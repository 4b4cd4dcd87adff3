"""Which call a row's content names, on a transport that decides parents at once and on ones that decide at freeze.

A main agent and its sub-agents do and say the same; the harness compacts, strips and hands in a part. Named is the
main agent's last call, or nothing is trained.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from tests.machine.recorders import Beginless, Plain
from tests.unit.trajectory.rows import called, result, said, thought

from toprope.capture.delivery import finalize_rollout_token_capture
from toprope.capture.memory_store import MemoryStore
from toprope.capture.recorder import CallEvidence, Recorder
from toprope.tokens.sampled import SampledTokens

Calls = dict[str, tuple[str | None, list[dict[str, Any]]]]
REWRITTEN = "rewritten"
"""Begins the name of a call before which the template writes its parent's turn anew, with other ids."""

SEVERAL = ("several_chains", "several_roots")
TESTS = [called("a"), result("a"), said("All tests pass.")]
DONE = [called("a"), result("a"), said("Done.")]

CASES: dict[str, tuple[Calls, list[dict[str, Any]], str | tuple[str, ...]]] = {
    "a sub-agent says later what the main agent said": (
        {"m1": (None, [called("a")]), "m2": ("m1", [said("Done.")]), "s1": (None, [said("Done.")])},
        DONE,
        "m2",
    ),
    "compaction, and a sub-agent did and said the same": (
        {
            "m1": (None, [called("a")]),
            "s1": (None, [called("b")]),
            "s2": ("s1", [said("All tests pass.")]),
            "m2": (None, [said("All tests pass.")]),
        },
        TESTS,
        SEVERAL,
    ),
    "compaction after two turns, and a sub-agent did and said the same": (
        {
            "m0": (None, [said("plan")]),
            "m1": ("m0", [called("a")]),
            "s1": (None, [called("b")]),
            "s2": ("s1", [said("All tests pass.")]),
            "m2": (None, [said("All tests pass.")]),
        },
        [said("plan"), *TESTS],
        SEVERAL,
    ),
    "compaction, and a sub-agent in the background ends later": (
        {"m1": (None, [called("a")]), "m2": (None, [said("Done.")]), "s2": (None, [said("Done.")])},
        DONE,
        SEVERAL,
    ),
    "the harness strips the reply, which a sub-agent said so": (
        {
            "m0": (None, [said("plan")]),
            "m1": ("m0", [called("a")]),
            "m2": ("m1", [said("Done.\n")]),
            "s1": (None, [called("b")]),
            "s2": ("s1", [said("Done.")]),
        },
        [said("plan"), *DONE],
        "m2",
    ),
    "the harness strips the reply, and a sub-agent did and said the same": (
        {
            "m1": (None, [called("a")]),
            "m2": ("m1", [said("Done.\n")]),
            "s1": (None, [called("b")]),
            "s2": ("s1", [said("Done.")]),
        },
        DONE,
        SEVERAL,
    ),
    "the harness strips the reply, which a sub-agent says last": (
        {"m1": (None, [called("a")]), "m2": ("m1", [said("Done.\n")]), "s2": (None, [said("Done.")])},
        DONE,
        "m2",
    ),
    "the harness cuts tags off the reply, which a sub-agent said so": (
        {"m1": (None, [called("a")]), "m2": ("m1", [said("<think>so</think>Done.")]), "s2": (None, [said("Done.")])},
        [said("Done.")],
        SEVERAL,
    ),
    "the row shows the last tool call of a longer history": (
        {
            "m1": (None, [called("a")]),
            "m2": ("m1", [called("b")]),
            "m3": ("m2", [said("Ok")]),
            "s1": (None, [called("c")]),
            "s2": ("s1", [said("Ok")]),
        },
        [called("b"), result("b"), said("Ok")],
        SEVERAL,
    ),
    "a template that drops thinking hides what the main agent continued": (
        {
            "m1": (None, [thought("t"), called("a")]),
            "rewritten m2": ("m1", [said("Done.")]),
            "s1": (None, [said("Done.")]),
        },
        DONE,
        ("unresolved_parent", "history_rewritten", *SEVERAL),
    ),
    "the answer is an argument of a finish tool, and a sub-agent did and said the same": (
        {
            "m1": (None, [called("a")]),
            "s1": (None, [called("b")]),
            "s2": ("s1", [said("42")]),
            "m2": ("m1", [{**called("c"), "name": "submit", "arguments": '{"answer": "42"}'}]),
        },
        [called("a"), result("a"), said("42")],
        SEVERAL,
    ),
    "the answer is cut out of a script without blanks, and a sub-agent did and said the same": (
        {
            "m1": (None, [called("a")]),
            "s1": (None, [called("b")]),
            "s2": ("s1", [said("42")]),
            "m2": ("m1", [said("答案是42。")]),
        },
        [called("a"), result("a"), said("42")],
        SEVERAL,
    ),
    "a title call was cut inside its thought": (
        {"t": (None, [thought("cut")]), "m1": (None, [called("a")]), "m2": ("m1", [said("Done.")])},
        DONE,
        "m2",
    ),
    "one conversation": ({"m1": (None, [called("a")]), "m2": ("m1", [said("Done.")])}, DONE, "m2"),
    "other ends": (
        {
            "m1": (None, [called("a")]),
            "s1": (None, [called("b")]),
            "s2": ("s1", [said("Nothing left.")]),
            "m2": ("m1", [said("Done.")]),
        },
        DONE,
        "m2",
    ),
    "other ends, of which one may be cut out of the other": (
        {
            "m1": (None, [called("a")]),
            "s1": (None, [called("b")]),
            "s2": ("s1", [said("Sub done.")]),
            "m2": ("m1", [said("Done.")]),
        },
        DONE,
        SEVERAL,
    ),
    "the final output alone, which one call said": (
        {"m1": (None, [called("a")]), "s1": (None, [said("Sub done.")]), "m2": ("m1", [said("All good.")])},
        [said("All good.")],
        "m2",
    ),
    "compaction, and the row shows what came after": (
        {
            "m1": (None, [called("a")]),
            "m2": ("m1", [said("so far")]),
            "k1": (None, [said("on")]),
            "k2": ("k1", [said("end")]),
        },
        [said("on"), {"role": "user", "content": "go"}, said("end")],
        "k2",
    ),
}

TRANSPORTS = {"with a reader": MemoryStore, "NeMo Gym's signatures": Plain, "no intents": Beginless}


async def delivered(calls: Calls, output: list[dict[str, Any]], transport: str, **how: Any) -> dict[str, Any]:
    store, ids, clock = MemoryStore(), itertools.count(1), itertools.count(1)
    read_back = TRANSPORTS[transport] is MemoryStore
    sink: Any = store if read_back else TRANSPORTS[transport](store)
    recorder = Recorder(sink, reader=store if read_back else None, clock=lambda: float(next(clock)))
    asked: dict[str, tuple[list[dict[str, Any]], list[int]]] = {}
    for call_id, (parent, wrote) in calls.items():
        items, seen = asked[parent] if parent else ([{"role": "user", "content": f"task of {call_id}"}], [])
        if call_id.startswith(REWRITTEN):
            seen = [*seen[:-1], next(ids)]
        prompt, generated = [*seen, next(ids)], [next(ids)]
        sampled = SampledTokens(np.array(prompt, np.uint32), np.array(generated, np.uint32), np.array([-0.5]))
        await recorder.begin("r", call_id)
        await recorder.record(CallEvidence("r", call_id, "m", items, wrote, sampled))
        results = [result(item["call_id"]) for item in wrote if item["type"] == "function_call"]
        asked[call_id] = ([*items, *wrote, *(results or [{"role": "user", "content": "go"}])], prompt + generated)
    row = {"_ng_rollout_id": "r", "response": {"id": "the harness's", "output": output}}
    done = await finalize_rollout_token_capture(row, store, settle_s=0, format="trace", **how)
    assert done is not None
    return dict(done)


@pytest.mark.promise("CP-9")
@pytest.mark.parametrize("transport", list(TRANSPORTS))
@pytest.mark.parametrize("name", list(CASES))
async def test_the_last_call_that_is_named_is_the_agents_own(name: str, transport: str) -> None:
    calls, output, wanted = CASES[name]
    done = await delivered(calls, output, transport)
    metrics = done["metrics"]
    if isinstance(wanted, tuple):
        assert set(metrics["mask_reasons"]) == set(wanted)
        return
    assert not done["mask_sample"], metrics
    assert metrics["terminal"] == {"method": "content", "call_id": wanted, "reason": None}
    (trace,) = done["rebuilt_response"]["_ng_traces"]
    own: list[str] = []
    at = wanted
    while at:
        own.insert(0, at)
        at = calls[at][0] or ""
    assert trace["call_ids"] == own


@pytest.mark.parametrize("transport", list(TRANSPORTS))
async def test_where_nobody_is_named_no_chain_of_many_is_called_the_terminal_one(transport: str) -> None:
    calls, output, _ = CASES["compaction, and a sub-agent did and said the same"]
    done = await delivered(calls, output, transport, deliver="all_chains")
    traces = done["rebuilt_response"]["_ng_traces"]
    assert [(trace["role"], trace["call_ids"]) for trace in traces] == [
        ("sub_agent", ["m1"]),
        ("sub_agent", ["m2"]),
        ("sub_agent", ["s1", "s2"]),
    ]
