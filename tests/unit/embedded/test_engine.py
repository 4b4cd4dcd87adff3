"""What the embedded engine promises: seeds, sharing of passes, cancellation, limits, turns that continue."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from toprope.errors.tree import ConfigError, EngineUnavailable, ModelContextLength, ModelRejected
from toprope.servers.model.engines.base import EngineRequest
from toprope.servers.model.engines.embedded.engine import EmbeddedEngine
from toprope.wire.responses import ResponsesRequest

STORY = "Tell me a story about the sea."


def same(one, other) -> bool:
    return (
        np.array_equal(one.tokens.prompt_token_ids, other.tokens.prompt_token_ids)
        and np.array_equal(one.tokens.generation_token_ids, other.tokens.generation_token_ids)
        and np.array_equal(one.tokens.generation_log_probs, other.tokens.generation_log_probs)
    )


async def test_a_reply_carries_its_ids_one_finite_logprob_each_and_the_end_of_turn_id(talk) -> None:
    reply = await talk("Say hi.", temperature=0.0, max_output_tokens=200)
    ids = talk.ids(reply)
    assert reply.finish_reason == "stop"
    assert ids[-1] == 2
    assert 2 not in ids[:-1]
    assert len(ids) == len(talk.logprobs(reply)) == reply.usage.output_tokens
    assert len(talk.prompt(reply)) == reply.usage.input_tokens
    assert all(-50 < logprob <= 0 for logprob in talk.logprobs(reply))
    assert reply.tokens.grammar_forced is None
    assert reply.output[0]["status"] == "completed"


async def test_a_seed_gives_the_same_bits_alone_in_a_ragged_batch_and_after_its_prompt_was_kept(talk) -> None:
    said = [STORY, "What is 2 + 5?", "List the planets, then say which one is the largest of them all.", STORY]
    alone = [await talk(text, seed=n, max_output_tokens=16 + 4 * n) for n, text in enumerate(said)]
    together = await asyncio.gather(*[talk(text, seed=n, max_output_tokens=16 + 4 * n) for n, text in enumerate(said)])
    assert all(same(one, other) for one, other in zip(alone, together, strict=True))
    assert talk.ids(alone[0]) != talk.ids(alone[3])[:16]


async def test_without_a_seed_two_replies_differ(talk) -> None:
    one, other = await asyncio.gather(talk(STORY), talk(STORY))
    assert talk.ids(one) != talk.ids(other)


async def test_a_reused_prefix_shows_in_no_logprob(talk) -> None:
    """The second prompt shares the system turn and half the user turn with the first; a fresh engine shares nothing."""
    first, second = STORY + " Make it short.", STORY + " Make it long, with a whale in it."
    await talk(first, seed=1, max_output_tokens=2)
    reused = await talk(second, seed=1)
    fresh = EmbeddedEngine(context=256, max_sequences=1)
    await fresh.start()
    try:
        request = ResponsesRequest((talk.user(second),), seed=1, max_output_tokens=32)
        computed = await fresh.generate(EngineRequest(request, "call-2"))
    finally:
        await fresh.close()
    assert same(reused, computed)


async def test_eight_requests_at_once_share_their_passes(talk) -> None:
    before = talk.engine.forward_passes
    replies = await asyncio.gather(
        *[talk(f"Write a very long poem about the number {n}.", seed=n) for n in range(8)],
    )
    assert all(len(talk.ids(reply)) == 32 for reply in replies)
    assert talk.engine.forward_passes - before <= 48


async def test_more_requests_than_rows_wait_and_are_all_answered(talk) -> None:
    replies = await asyncio.gather(*[talk(STORY, seed=n, max_output_tokens=3 + n % 4) for n in range(20)])
    assert [len(talk.ids(reply)) for reply in replies] == [3 + n % 4 for n in range(20)]
    alone = await talk(STORY, seed=19, max_output_tokens=6)
    assert same(alone, replies[19])


async def test_cancelling_a_running_or_a_waiting_request_frees_its_place(talk) -> None:
    """Eight places, nine endless requests; unless places come free, the last request waits for minutes."""

    def ask(words: str, tokens: int) -> asyncio.Task:
        return asyncio.create_task(talk(words, max_output_tokens=tokens))

    endless = [ask(f"Count from {n} on, never stop.", 900) for n in range(7)]
    await ask("First come, first served.", 1)  # answered: the seven before it run
    assert talk.engine.running == 7
    endless += [ask(f"Count from {n} down, never stop.", 900) for n in range(2)]
    await asyncio.sleep(0)  # lets the two reach the engine: one finds a place, one waits
    for task in endless:
        task.cancel()
    gone = await asyncio.gather(*endless, return_exceptions=True)
    assert all(isinstance(one, asyncio.CancelledError) for one in gone)
    before = talk.engine.forward_passes
    assert len(talk.ids(await talk(STORY, max_output_tokens=4))) <= 4
    # The pass that ran at the time of the cancellation, one for the prompt, one an id.
    assert talk.engine.forward_passes - before <= 1 + 1 + 4


async def test_a_stop_text_cuts_the_text_and_not_the_ids(talk, vocabulary) -> None:
    whole = await talk(STORY, temperature=0.0, max_output_tokens=24)
    words = talk.text(whole)
    stop = words[20:27]
    cut = await talk(STORY, temperature=0.0, max_output_tokens=24, stop=(stop, "never said by anyone"))
    assert talk.text(cut) == words[: words.index(stop)]
    assert cut.finish_reason == "stop"
    ids = talk.ids(cut)
    assert talk.ids(whole)[: len(ids)] == ids
    assert stop in vocabulary.decode(ids)
    assert stop not in vocabulary.decode(ids[:-1])


async def test_temperature_and_cuts_change_the_choice_and_never_the_logprob(talk) -> None:
    greedy = await talk(STORY, temperature=0.0, max_output_tokens=12)
    one = await talk(STORY, temperature=2.0, top_k=1, seed=5, max_output_tokens=12)
    narrow = await talk(STORY, temperature=0.7, top_p=1e-6, seed=6, max_output_tokens=12)
    assert same(one, greedy)
    assert same(narrow, greedy)
    assert min(talk.logprobs(greedy)) < -0.01


async def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(talk) -> None:
    with pytest.raises(ModelContextLength, match=r"has \d{4} tokens.*context is 1024 tokens") as caught:
        await talk("word " * 1500)
    assert (caught.value.status, caught.value.kind) == (400, "model_context_length")


async def test_a_long_prompt_is_fed_in_pieces_and_ends_at_the_context(talk) -> None:
    reply = await talk("word " * 960, max_output_tokens=None, seed=3)
    assert reply.finish_reason in ("length", "stop")
    total = len(talk.prompt(reply)) + len(talk.ids(reply))
    assert total == 1024 if reply.finish_reason == "length" else total < 1024
    assert len(talk.prompt(reply)) > 960


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": -1.0}, "temperature is -1"),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"max_output_tokens": 0}, "max_output_tokens is 0"),
        ({"tool_choice": "required"}, "no tools"),
        ({"tool_choice": "sometimes"}, "'sometimes'"),
        ({"tool_choice": {"type": "function", "name": "sub"}}, "'sub'; the request's functions are none"),
        ({"tools": ({"type": "web_search"},)}, "web_search"),
    ],
)
async def test_a_request_that_cannot_be_served_is_refused_in_words(talk, fields, words) -> None:
    with pytest.raises(ModelRejected, match=words) as caught:
        await talk("Hi", **fields)
    assert caught.value.status == 400


async def test_an_image_is_refused_by_its_kind(talk) -> None:
    content = [{"type": "input_image", "image_url": "data:"}]
    with pytest.raises(ModelRejected, match="input_image"):
        await talk([{"type": "message", "role": "user", "content": content}])


async def test_the_next_turn_continues_the_sampled_ids_and_not_their_text(talk, vocabulary) -> None:
    """At a high temperature the sampled ids are seldom those that the text would be tokenised to."""
    first = await talk(STORY, session="s-1", temperature=1.6, seed=11, max_output_tokens=40)
    said = talk.prompt(first) + talk.ids(first)
    assert vocabulary.encode(vocabulary.decode(talk.ids(first))) != talk.ids(first)
    history = [talk.user(STORY), *first.output, talk.user("Go on.")]
    second = await talk(history, session="s-1", max_output_tokens=1)
    closing = [198] if first.finish_reason == "stop" else [2, 198]
    tail = [1, *vocabulary.encode("user\nGo on."), 2, 198, 1, *vocabulary.encode("assistant\n")]
    assert talk.prompt(second) == said + closing + tail
    stranger = await talk(history, session="s-2", max_output_tokens=1)
    assert talk.prompt(stranger) != talk.prompt(second)
    assert vocabulary.decode(talk.prompt(stranger)) == vocabulary.decode(talk.prompt(second))


async def test_an_edited_turn_is_tokenised_as_any_text(talk, vocabulary) -> None:
    first = await talk(STORY, session="s-3", seed=1, max_output_tokens=8)
    edited = {**first.output[0], "content": [{"type": "output_text", "text": "Something else."}]}
    second = await talk([talk.user(STORY), edited, talk.user("Go on.")], session="s-3", max_output_tokens=1)
    turn = [1, *vocabulary.encode("assistant\nSomething else."), 2, 198]
    prefix = talk.prompt(first)[: -len(vocabulary.encode("assistant\n")) - 1]
    assert talk.prompt(second)[: len(prefix) + len(turn)] == prefix + turn


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"context": 0}, "context is 0; it must be 1 to 8192"),
        ({"max_sequences": 1000}, "max_sequences is 1000"),
        ({"threads": 0}, "threads is 0"),
        ({"backend": "torch"}, "'onnxruntime' or 'numpy'"),
        ({"model": "smollm3"}, "known is 'smollm2-135m'"),
    ],
)
def test_a_setting_out_of_range_is_named_with_what_is_accepted(fields, words) -> None:
    with pytest.raises(ConfigError, match=words):
        EmbeddedEngine(**fields)


async def test_an_engine_without_its_weights_says_so_and_leaves_no_thread(tmp_path) -> None:
    engine = EmbeddedEngine(weights=tmp_path / "none.gguf")
    with pytest.raises(EngineUnavailable, match=r"none\.gguf"):
        await engine.start()
    with pytest.raises(EngineUnavailable, match="not running"):
        await engine.generate(EngineRequest(ResponsesRequest(()), "c"))
    await engine.close()
    assert not engine._thread.is_alive()


async def test_the_numpy_backend_gives_the_same_ids_and_closing_it_refuses_what_is_open(talk) -> None:
    engine = EmbeddedEngine(context=512, max_sequences=1, backend="numpy")
    before = set(threading.enumerate())
    await engine.start()
    (worker,) = set(threading.enumerate()) - before
    request = ResponsesRequest((talk.user(STORY),), max_output_tokens=8, seed=4)
    reply = await engine.generate(EngineRequest(request, "c"))
    other = await talk(STORY, max_output_tokens=8, seed=4)
    assert talk.ids(reply) == talk.ids(other)
    assert np.abs(reply.tokens.generation_log_probs - other.tokens.generation_log_probs).max() < 1e-3
    request = ResponsesRequest((talk.user("Count on and on."),), max_output_tokens=400)
    asked = [asyncio.create_task(engine.generate(EngineRequest(request, f"c{n}"))) for n in range(2)]
    await asyncio.create_task(engine.close())
    for one in asked:
        with pytest.raises(EngineUnavailable, match="was closed"):
            await one
    assert not worker.is_alive()
    with pytest.raises(EngineUnavailable, match="not running"):
        await engine.generate(EngineRequest(request, "late"))
    await engine.close()
