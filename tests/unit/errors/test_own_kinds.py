"""A kind of an environment's own carries its server's name, wherever it comes out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from toprope.errors.kinds import is_kind, known_kind
from toprope.errors.tree import TopropeError
from toprope.http.client import Client, Peer
from toprope.servers.resources.environment import Environment, Verdict
from toprope.servers.resources.server import ResourcesServer


@pytest.mark.parametrize(
    ("kind", "known"),
    [
        ("agent_failed", "agent_failed"),
        ("box_lost", "boxes:box_lost"),
        ("other:box_lost", "other:box_lost"),
        ("no words, please", "internal"),
        ("", "internal"),
    ],
)
def test_a_kind_is_the_enums_or_carries_the_servers_name(kind: str, known: str) -> None:
    assert known_kind(kind, "boxes") == known
    assert is_kind(known)


class Boxes(Environment):
    """Has troubles of its own."""

    def verify(self, state: Any, task: dict[str, Any], response: dict[str, Any]) -> Verdict:
        if task["raises"]:
            raise TopropeError("the box is gone", kind="box_lost", status=503, retryable=True)
        return Verdict(reward=0.0, failure_kind="box_small", failure_reason="the box was too small")


@pytest.fixture
async def boxes() -> AsyncIterator[Peer]:
    async with Client() as client:
        server = ResourcesServer(name="boxes", environment=Boxes(), signing_key=b"k" * 32)
        client.register("inline://boxes", server.app)
        await server.app.start()
        yield client.peer("inline://boxes", "resources")
        await server.app.stop()


@pytest.mark.promise("EP-9")
async def test_an_environments_own_kind_reaches_its_failure_and_its_verdict(boxes: Peer) -> None:
    body: dict[str, Any] = {"responses_create_params": {}, "response": {"output": []}}
    failed = await boxes.request("POST", "/verify", body={**body, "raises": True})
    assert (failed.status, failed.error_info().kind, failed.error_info().retryable) == (503, "boxes:box_lost", True)
    verdict = (await boxes.request("POST", "/verify", body={**body, "raises": False})).json()
    assert (verdict["failure_kind"], verdict["reward"]) == ("boxes:box_small", 0.0)
