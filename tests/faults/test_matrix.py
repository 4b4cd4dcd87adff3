"""Faults x stages x protocols, generated: what becomes of each episode, of its sessions, and of what it did.

The table below is the specification's failure table spelled out for each call and fault. It is data, and knows nothing
of how the servers come to it. Every cell is one episode over real sockets; all run once, at the start.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from toprope.errors.kinds import is_kind

from .front import Fault
from .house import House, a_house

TABLE = """
# call            fault           met once                                       met at every attempt
seed              refused         result                                         seed transport_unreachable again not_sent
seed              500             result                                         seed seed_failed again delivered
seed              429             result                                         seed seed_failed again delivered
seed              dropped_before  result                                         seed transport_dropped again possibly_delivered
seed              dropped_after   result                                         seed transport_dropped again possibly_delivered
seed              cut             result                                         seed transport_dropped again delivered
seed              hang            seed episode_timeout again possibly_delivered  seed episode_timeout again possibly_delivered
seed              wrong_id        seed bad_reply never delivered                 seed bad_reply never delivered
seed              garbage         seed bad_reply never delivered                 seed bad_reply never delivered

agent_seed        refused         result                                         agent transport_unreachable again not_sent
agent_seed        500             result                                         agent agent_failed again delivered
agent_seed        429             result                                         agent agent_failed again delivered
agent_seed        dropped_before  result                                         agent transport_dropped again possibly_delivered
agent_seed        dropped_after   result                                         agent transport_dropped again possibly_delivered
agent_seed        cut             result                                         agent transport_dropped again delivered
agent_seed        hang            agent episode_timeout again possibly_delivered agent episode_timeout again possibly_delivered
agent_seed        wrong_id        agent bad_reply never delivered                agent bad_reply never delivered
agent_seed        garbage         agent bad_reply never delivered                agent bad_reply never delivered

activation        refused         result                                         agent transport_unreachable again not_sent
activation        500             result                                         agent agent_failed again delivered
activation        429             result                                         agent agent_failed again delivered
activation        dropped_before  result                                         agent transport_dropped again possibly_delivered
activation        dropped_after   result                                         agent transport_dropped again possibly_delivered
activation        cut             result                                         agent transport_dropped again delivered
activation        hang            agent agent_timeout again possibly_delivered   agent agent_timeout again possibly_delivered
activation        garbage         agent bad_reply never delivered                agent bad_reply never delivered

tool              refused         result                                         agent tool_unavailable again delivered
tool              500             agent tool_unavailable again delivered         agent tool_unavailable again delivered
tool              429             agent tool_unavailable again delivered         agent tool_unavailable again delivered
tool              dropped_before  agent tool_unavailable again delivered         agent tool_unavailable again delivered
tool              dropped_after   agent tool_unavailable again delivered         agent tool_unavailable again delivered
tool              cut             agent tool_unavailable again delivered         agent tool_unavailable again delivered
tool              hang            agent agent_timeout again possibly_delivered   agent agent_timeout again possibly_delivered

agent_close       refused         result                                         cleanup transport_unreachable again not_sent
agent_close       500             result                                         cleanup session_release_failed again delivered
agent_close       429             result                                         cleanup session_release_failed again delivered
agent_close       dropped_before  result                                         cleanup transport_dropped again possibly_delivered
agent_close       dropped_after   result                                         cleanup transport_dropped again possibly_delivered
agent_close       cut             result                                         cleanup transport_dropped again delivered
agent_close       hang            result                                         cleanup transport_timeout again possibly_delivered
agent_close       wrong_id        cleanup bad_reply again delivered              cleanup bad_reply again delivered
agent_close       garbage         cleanup bad_reply again delivered              cleanup bad_reply again delivered

verify            refused         result                                         verification transport_unreachable again not_sent
verify            500             verification verify_failed again delivered     verification verify_failed again delivered
verify            429             verification verify_failed again delivered     verification verify_failed again delivered
verify            dropped_before  verification transport_dropped again possibly_delivered  verification transport_dropped again possibly_delivered
verify            dropped_after   verification transport_dropped again possibly_delivered  verification transport_dropped again possibly_delivered
verify            cut             verification transport_dropped again delivered verification transport_dropped again delivered
verify            hang            verification verify_timeout again possibly_delivered     verification verify_timeout again possibly_delivered
verify            garbage         verification bad_reply never delivered         verification bad_reply never delivered

resources_close   refused         result                                         result
resources_close   500             result                                         result
resources_close   429             result                                         result
resources_close   dropped_before  result                                         result
resources_close   dropped_after   result                                         result
resources_close   cut             result                                         result
resources_close   hang            result                                         result
resources_close   wrong_id        result                                         result
resources_close   garbage         result                                         result
"""  # noqa: E501

USER = """
# The model that plays the user, in `interactive`: whatever it fails with, another attempt may find it well.
user              refused         result                                         agent model_unavailable again not_sent
user              500             agent model_unavailable again delivered        agent model_unavailable again delivered
user              429             agent model_unavailable again delivered        agent model_unavailable again delivered
user              dropped_before  agent model_unavailable again possibly_delivered agent model_unavailable again possibly_delivered
user              dropped_after   agent model_unavailable again possibly_delivered agent model_unavailable again possibly_delivered
user              cut             agent model_unavailable again delivered        agent model_unavailable again delivered
user              hang            agent model_unavailable again possibly_delivered agent model_unavailable again possibly_delivered
user              garbage         agent model_unavailable again delivered        agent model_unavailable again delivered
"""  # noqa: E501

FLAT_SEED = """
# An older environment deduplicates nothing: its seed is sent again only with evidence that nothing was delivered.
seed              refused         result                                         seed transport_unreachable again not_sent
seed              500             seed seed_failed again delivered               seed seed_failed again delivered
seed              429             seed seed_failed again delivered               seed seed_failed again delivered
seed              dropped_before  seed transport_dropped again possibly_delivered seed transport_dropped again possibly_delivered
seed              dropped_after   seed transport_dropped again possibly_delivered seed transport_dropped again possibly_delivered
seed              cut             seed transport_dropped again delivered         seed transport_dropped again delivered
seed              hang            seed episode_timeout again possibly_delivered  seed episode_timeout again possibly_delivered
seed              garbage         seed bad_reply never delivered                 seed bad_reply never delivered
"""  # noqa: E501

ORDER = ["seed", "agent_seed", "user", "activation", "tool", "agent_close", "verify", "resources_close"]
PATHS = {
    "seed": "/seed_session",
    "agent_seed": "/v1/agent_sessions",
    "user": "/v1/responses",
    "activation": "/v1/responses",
    "tool": "/look",
    "agent_close": "/v1/agent_sessions/close",
    "verify": "/verify",
    "resources_close": "/close_session",
}
AFTER_THE_EFFECT = {"dropped_after", "hang_after", "cut", "wrong_id", "garbage"}
DOES = {"seed": "allocated", "activation": "activated", "tool": "looked", "verify": "verified"}
"""What a call does, where that is counted. The tool is called from within an activation."""


@dataclass(frozen=True)
class Cell:
    """One episode: `expected` is a line of the table's, `always` that every attempt meets the fault."""

    protocol: str
    call: str
    fault: str
    always: bool
    expected: str

    @property
    def key(self) -> str:
        how = "always" if self.always else "once"
        return f"{self.protocol}.{self.call}.{self.fault}.{how}".replace("_", "-")

    @property
    def hangs(self) -> bool:
        return self.fault in ("hang", "hang_after")

    @property
    def fails(self) -> bool:
        return self.expected != "result"


@dataclass(frozen=True)
class Seen:
    """What came of a cell."""

    outcome: dict[str, Any]
    did: dict[str, int]
    left: list[str]
    met: int


def read(table: str) -> Iterator[tuple[str, str, str, str]]:
    """The lines of a table: call, fault, and both expectations."""
    for line in table.splitlines():
        words = line.split()
        if not words or words[0] == "#":
            continue
        call, fault, *rest = words
        cut = 1 if rest[0] == "result" else 4
        yield call, fault, " ".join(rest[:cut]), " ".join(rest[cut:])
        if fault == "hang":  # for the caller a hang is one, whether or not the server has acted
            yield call, "hang_after", " ".join(rest[:cut]), " ".join(rest[cut:])


def cells() -> Iterator[Cell]:
    typed = list(read(TABLE))
    older = [*read(FLAT_SEED), *(row for row in typed if row[0] in ("activation", "tool", "verify"))]
    older += [row for row in typed if row[0] == "resources_close" and row[1] != "wrong_id"]
    talked = [*typed, *read(USER)]
    for protocol, rows in (("single_agent_turn", typed), ("interactive", talked), ("flat", older)):
        for call, fault, once, always in rows:
            yield Cell(protocol, call, fault, False, once)
            yield Cell(protocol, call, fault, True, always)


CELLS = list(cells())


async def run_all() -> dict[str, Seen]:
    """Every cell once. A few are under way at a time; those that hang wait for their deadlines all together."""
    async with a_house() as house:
        bound = asyncio.Semaphore(8)
        found = await asyncio.gather(
            *(one(house, cell, bound) for cell in sorted(CELLS, key=lambda cell: not cell.hangs))
        )
    for cell in CELLS:  # the servers were stopped: what was left by a close that never came is released now
        if cell.protocol != "flat":
            assert house.did["released", cell.key] == house.did["allocated", cell.key], cell.key
    return dict(found)


async def one(house: House, cell: Cell, bound: asyncio.Semaphore) -> tuple[str, Seen]:
    activation = {"user": "", "activation": "2"}.get(cell.call) if cell.protocol == "interactive" else None
    fault = Fault(cell.fault, PATHS[cell.call], 1000 if cell.always else 1, activation)
    house.faults.planned[cell.key] = fault
    async with bound:
        run = asyncio.create_task(
            house.run(cell.protocol, cell.key, hurried=cell.call if cell.hangs else None, played=cell.call == "user")
        )
        waits = [run, asyncio.create_task(fault.was_met.wait())] if cell.hangs else [run]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    outcome = await run
    for each in waits:
        each.cancel()
    did = {what: count for (what, key), count in house.did.items() if key == cell.key}
    return cell.key, Seen(outcome, did, house.left(cell.key), fault.met)


@pytest.fixture(scope="module")
def seen() -> dict[str, Seen]:
    return asyncio.run(run_all())


def test_the_matrix_has_at_least_a_hundred_cells(say: Callable[[str], None]) -> None:
    counts = Counter(cell.protocol for cell in CELLS)
    say(f"fault matrix: {len(CELLS)} cells ({', '.join(f'{n} {name}' for name, n in counts.items())})")
    assert len({cell.key for cell in CELLS}) == len(CELLS) >= 100
    assert {cell.call for cell in CELLS} == set(ORDER)


@pytest.mark.promise("EP-2")
@pytest.mark.promise("EP-8")
@pytest.mark.promise("EP-9")
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.key)
def test_each_cell_ends_as_the_failure_table_says(cell: Cell, seen: dict[str, Seen]) -> None:
    found = seen[cell.key]
    assert found.met >= 1, "the fault was never met"
    result, failure = found.outcome["result"], found.outcome["failure"]
    if cell.fails:
        stage, kind, end, delivery = cell.expected.split()
        assert failure is not None, f"a reward came of it: {result['reward']}"
        told = (failure["stage"], failure["failure_kind"], failure["terminal"], failure["delivery"])
        assert told == (stage, kind, end == "never", delivery), failure["failure_reason"]
        assert is_kind(failure["failure_kind"])
        assert result is None
        assert "reward" not in failure
        assert ("partial_response" in failure) == keeps_partial(cell), failure
    else:
        assert failure is None, failure
        assert result["reward"] == 0.75
        assert result["response"]["output"][-1]["content"][0]["text"] == "I see: a room"
    assert found.did == expected_deeds(cell)
    assert found.left == expected_left(cell)


def keeps_partial(cell: Cell) -> bool:
    """Whether the agent had said something that is known: all of it, a first turn, or what its close brought back."""
    if cell.call in ("user", "tool", "agent_close", "verify"):
        return True
    return cell.call == "activation" and cell.protocol == "interactive"


def expected_deeds(cell: Cell) -> dict[str, int]:
    """How often each thing was done: at most once a call, whatever was sent again."""
    came = ORDER.index(cell.call)
    happened = set(ORDER[:came]) if cell.fails else set(ORDER)
    if cell.fails and cell.fault in AFTER_THE_EFFECT:
        happened.add(cell.call)
    if cell.call == "activation" and "activation" in happened:
        happened.add("tool")
    did = {DOES[call]: 1 for call in happened if call in DOES}
    if cell.call == "tool":
        did["activated"] = 1
    if cell.protocol == "interactive" and (not cell.fails or came >= ORDER.index("user")):
        did["activated"] = did.get("activated", 0) + 1  # the first turn
    if cell.protocol != "flat" and did.get("allocated") and "resources" not in expected_left(cell):
        did["released"] = 1
    return did


def expected_left(cell: Cell) -> list[str]:
    """Sessions that are left to expire: only where no close ever reached their server."""
    if not cell.always or cell.fault in AFTER_THE_EFFECT or cell.protocol == "flat":
        return []
    return {"agent_close": ["agent"], "resources_close": ["resources"]}.get(cell.call, [])
