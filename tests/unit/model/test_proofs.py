"""What is found out about an engine: once for all who ask, kept, and forgotten where the engine failed."""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.unit.model.required import PATH, converse, required_before

from toprope.errors.tree import EngineUnavailable, ModelRejected
from toprope.servers.model.engines.proofs import REFUSED_S, UNANSWERED_S, Proofs
from toprope.testing.upstream import UpstreamReply, completion
from toprope.testing.vllm_stand_in import VllmStandIn


class Asked:
    """What is asked: `said` once `may_say` is set; `count` times so far."""

    def __init__(self, said=None, *, held=False):
        self.said, self.count, self.begun, self.may_say = said, 0, asyncio.Event(), asyncio.Event()
        if not held:
            self.may_say.set()

    async def __call__(self):
        self.count += 1
        self.begun.set()
        await self.may_say.wait()
        if isinstance(self.said, Exception):
            raise self.said
        return self.said


@pytest.mark.parametrize("said", [None, "it differs"])
async def test_who_asks_together_waits_for_one_answer_and_it_is_kept(said):
    proofs, asked = Proofs(), Asked(said, held=True)
    waiting = [asyncio.create_task(proofs.why_not("k", asked)) for _ in range(64)]
    await asked.begun.wait()
    asked.may_say.set()
    assert await asyncio.gather(*waiting) == [said] * 64
    assert await proofs.why_not("k", asked) == said
    assert asked.count == 1
    assert await proofs.why_not("other", asked) == said
    assert asked.count == 2


async def test_who_leaves_does_not_take_the_answer_away_from_the_others():
    proofs, asked = Proofs(), Asked(held=True)
    first = asyncio.create_task(proofs.why_not("k", asked))
    await asked.begun.wait()
    second = asyncio.create_task(proofs.why_not("k", asked))
    first.cancel()
    await asyncio.wait([first])
    assert first.cancelled()
    asked.may_say.set()
    assert await second is None
    assert asked.count == 1


async def test_an_answer_that_nobody_waits_for_any_more_is_kept():
    proofs, asked = Proofs(), Asked(held=True)
    only = asyncio.create_task(proofs.why_not("k", asked))
    await asked.begun.wait()
    only.cancel()
    await asyncio.wait([only])
    asked.may_say.set()
    assert await proofs.why_not("k", asked) is None
    assert asked.count == 1


@pytest.mark.parametrize(
    ("error", "kept_s"),
    [(EngineUnavailable("down", upstream_status=503), UNANSWERED_S), (ModelRejected("no"), REFUSED_S)],
)
async def test_a_failure_is_told_again_for_a_while_and_then_forgotten(error, kept_s):
    now = 0.0
    proofs, asked = Proofs(clock=lambda: now), Asked(error)
    for later in (0.0, kept_s - 0.1):
        now = later
        with pytest.raises(type(error), match=error.message) as raised:
            await proofs.why_not("k", asked)
        assert raised.value.upstream_status == error.upstream_status
    assert asked.count == 1
    now, asked.said = kept_s, None
    assert await proofs.why_not("k", asked) is None
    assert asked.count == 2


async def test_nothing_is_asked_any_more_once_they_are_closed():
    proofs, asked = Proofs(), Asked(held=True)
    waiting = asyncio.create_task(proofs.why_not("k", asked))
    await asked.begun.wait()
    await proofs.close()
    await asyncio.wait([waiting])
    assert waiting.cancelled()


class Proved(VllmStandIn):
    """Answers the calls that prove settings with `answer`, where there is one; `proofs` came so far. `reads` names a
    field that calls render into their prompts and `/tokenize` is not told of."""

    answer: UpstreamReply | None = None
    reads = ""
    proofs = 0

    def prompt_of(self, body):
        ids = super().prompt_of(body)
        return [*ids, 7] if self.reads in body and "kv_transfer_params" not in body else ids

    def _chat(self, request):
        body = request.json()
        if request.path != "/tokenize" and body["messages"] == [{"role": "user", "content": "1"}]:
            self.proofs += 1
            if self.answer is not None:
                return self.answer
        return super()._chat(request)


@pytest.mark.promise("MS-12")
async def test_rollouts_that_reach_their_second_turn_together_share_one_proof():
    upstream = Proved()
    async with required_before(upstream) as (peer, _, _):
        paths = [PATH.replace("/r/", f"/r{index}/") for index in range(16)]
        done = await asyncio.gather(*[converse(peer, path, {}, 2) for path in paths])
    assert {reply.status for replies in done for reply in replies} == {200}
    assert upstream.proofs == 1


@pytest.mark.promise("MS-12")
async def test_a_proof_may_wait_longer_than_the_probe_of_the_start():
    """It stands in the queue of a busy engine, as the call itself will."""
    async with required_before(Proved()) as (peer, _, engine):
        engine._probe_timeout_s = 1e-9
        assert [reply.status for reply in await converse(peer, PATH, {}, 2)] == [200, 200]


@pytest.mark.promise("MS-12")
async def test_required_answers_an_engine_that_does_not_answer_with_what_clients_repeat():
    upstream, now = Proved(), 0.0
    async with required_before(upstream, max_attempts=1) as (peer, store, engine):
        engine._tails._proofs._clock = lambda: now
        upstream.answer = UpstreamReply(b'{"error": {"message": "paused for new weights"}}', 503)
        first, second = await converse(peer, PATH, {}, 2)
        assert (first.status, second.status) == (200, 503)
        assert second.headers["retry-after"] == "1"
        assert "x-should-retry" not in second.headers
        assert "paused for new weights" in json.loads(second.body)["error"]["message"]
        upstream.answer, now = None, UNANSWERED_S
        history = [("user", "hi"), ("assistant", "hello"), ("user", "so?")]
        body = {"model": "m", "messages": [{"role": role, "content": text} for role, text in history]}
        assert (await peer.request("POST", PATH, body=json.dumps(body).encode())).status == 200
        before, after = await store.open_entries("r", 0)
        whole = [*before.prompt_token_ids.tolist(), *before.generation_token_ids.tolist()]
        assert after.prompt_token_ids.tolist()[: len(whole)] == whole
    assert upstream.proofs == 2


@pytest.mark.promise("MS-12")
async def test_a_proof_without_the_ids_of_its_prompt_is_no_no():
    upstream, now = Proved(), 0.0
    async with required_before(upstream, max_attempts=1) as (peer, _, engine):
        engine._tails._proofs._clock = lambda: now
        upstream.answer = completion({"role": "assistant", "content": "x"}, token_ids=[9], log_probs=[-0.5])
        _, second = await converse(peer, PATH, {}, 2)
        assert (second.status, second.headers["retry-after"]) == (503, "1")
        assert "without the ids of its prompt" in json.loads(second.body)["error"]["message"]
        upstream.answer, now = None, UNANSWERED_S
        assert [reply.status for reply in await converse(peer, PATH, {}, 2)] == [200, 200]


@pytest.mark.promise("MS-12")
async def test_a_proof_without_an_answer_ends_when_a_stream_without_a_byte_would():
    upstream = Proved()
    upstream.answer = UpstreamReply(b"", before=asyncio.Event().wait)
    async with required_before(upstream, idle_timeout_s=0.05) as (peer, _, _):
        _, second = await converse(peer, PATH, {}, 2)
    assert second.status == 503
    assert "within 0.05 s" in json.loads(second.body)["error"]["message"]


@pytest.mark.promise("MS-12")
async def test_settings_that_were_disproved_cost_no_other_generation():
    upstream = Proved()
    upstream.reads = "reasoning_effort"
    async with required_before(upstream) as (peer, _, _):
        for index in range(3):
            path = PATH.replace("/r/", f"/r{index}/")
            first, second = await converse(peer, path, {"reasoning_effort": "low"}, 2)
            assert (first.status, second.status) == (200, 422)
            assert second.headers["x-should-retry"] == "false"
            assert "other ids than its /tokenize" in json.loads(second.body)["error"]["message"]
    assert upstream.proofs == 1
