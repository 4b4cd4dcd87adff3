"""An independent implementation, on the same weights, gives the logprobs that the embedded engine reported.

The independent one is transformers' Llama on torch, CPU, float32, fed with the exported weights and with the ids as
delivered. The threshold is the engines' own: float32 against float32 stays below 1e-3 nats (seen: 1e-4), a wrong or
shifted token is off by whole nats.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Callable, Iterator
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from toprope.launch.config import load_configuration
from toprope.launch.run import RunJob
from toprope.servers.model.engines.base import EngineRequest, SampledTokens
from toprope.servers.model.engines.embedded.engine import EmbeddedEngine
from toprope.wire.responses import Item, ResponsesRequest, Tool

THRESHOLD = 1e-3
ADD: Tool = {
    "type": "function",
    "name": "add",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}

Recompute = Callable[[list[int], int], NDArray[np.float64]]


@pytest.fixture(scope="module")
def recompute(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recompute]:
    """`recompute(ids, first)`: the logprobs of ids[first:], each given all before it."""
    import torch
    from transformers import AutoModelForCausalLM

    script = Path(__file__).parents[2] / "scripts/export_hf.py"
    spec = importlib.util.spec_from_file_location("export_hf", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("smollm2")
    module.export(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def run(ids: list[int], first: int) -> NDArray[np.float64]:
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, first - 1 : -1].double()
            chosen = torch.tensor(ids[first:])[:, None]
            return torch.log_softmax(logits, dim=-1).gather(1, chosen)[:, 0].numpy()

    yield run
    (folder / "model.safetensors").unlink()


@pytest.fixture(scope="module")
def delivered() -> list[SampledTokens]:
    """Three free replies side by side, and two forced calls, each with the turn after its result."""
    return asyncio.run(_deliver())


async def _deliver() -> list[SampledTokens]:
    engine = EmbeddedEngine(context=512, max_sequences=5)
    await engine.start()

    async def ask(session: str, items: tuple[Item, ...], **fields: object) -> tuple[tuple[Item, ...], SampledTokens]:
        reply = await engine.generate(EngineRequest(ResponsesRequest(items, **fields), "call", session, True))
        return reply.output, reply.tokens

    async def free(text: str, **fields: object) -> list[SampledTokens]:
        return [(await ask("free", ({"role": "user", "content": text},), max_output_tokens=48, **fields))[1]]

    async def tool(seed: int) -> list[SampledTokens]:
        asked: Item = {"role": "user", "content": f"Calculate {seed} + 8."}
        shared = {"tools": (ADD,), "seed": seed, "max_output_tokens": 60}
        (call,), first = await ask(f"tool-{seed}", (asked,), tool_choice="required", **shared)
        total = sum(json.loads(call["arguments"]).values())
        result: Item = {"type": "function_call_output", "call_id": call["call_id"], "output": str(total)}
        _, second = await ask(f"tool-{seed}", (asked, call, result), **shared)
        return [first, second]

    try:
        found = await asyncio.gather(
            free("Tell me a story about a whale.", seed=1),
            free("Name three colours, and why you like them.", seed=2, temperature=0.7, top_p=0.9),
            free("Write a very long poem.", seed=3, temperature=1.3, top_k=50),
            tool(3),
            tool(5),
        )
    finally:
        await engine.close()
    return [tokens for group in found for tokens in group]


@pytest.mark.promise("CP-14")
def test_an_independent_forward_pass_agrees_on_every_delivered_token(recompute, delivered) -> None:
    worst, count = 0.0, 0
    for tokens in delivered:
        prompt, ids = tokens.prompt_token_ids.tolist(), tokens.generation_token_ids.tolist()
        theirs = recompute(prompt + ids, len(prompt))
        assert len(theirs) == len(ids) == len(tokens.generation_log_probs)
        worst = max(worst, float(np.abs(theirs - tokens.generation_log_probs).max()))
        count += len(ids)
    assert count >= 200
    assert worst < THRESHOLD


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Rows of the demo's configuration as they stand on disk: plain answers, and forced calls with the turn after."""
    out = tmp_path_factory.mktemp("run") / "out"
    tasks = "[{generate: sums, size: 4, seed: 1}, {generate: tool_sums, size: 4, seed: 1}]"
    with as_file(files("toprope.launch") / "demo.yaml") as demo:
        configuration = load_configuration(demo, [f"run.tasks={tasks}", "run.repeats=3", f"run.out={out}"], {})
    summary = asyncio.run(RunJob(configuration).collect())
    assert summary.exit_status == 0, summary.message
    return [json.loads(line) for line in (out / "results.jsonl").read_bytes().splitlines()]


@pytest.mark.promise("CP-14")
def test_the_rows_of_a_run_hold_what_an_independent_forward_pass_gives(recompute, rows) -> None:
    worst, count, turns = 0.0, 0, set()
    for row in rows:
        items = [item for item in row["response"]["output"] if "generation_token_ids" in item]
        turns.add(len(items))
        whole = items[-1]["prompt_token_ids"] + items[-1]["generation_token_ids"]
        theirs = recompute(whole, 1)  # each item's prompt extends the one before: one pass proves them all
        for item in items:
            start, ids = len(item["prompt_token_ids"]), item["generation_token_ids"]
            assert whole[: start + len(ids)] == item["prompt_token_ids"] + ids
            differences = np.abs(theirs[start - 1 : start - 1 + len(ids)] - item["generation_log_probs"])
            worst = max(worst, float(differences.max()))
            count += len(ids)
    assert turns >= {1, 2}
    assert count >= 200
    assert worst < THRESHOLD


@pytest.mark.promise("CP-14")
def test_the_turn_after_a_tool_continues_the_first_turns_ids(delivered) -> None:
    pairs = [(delivered[3], delivered[4]), (delivered[5], delivered[6])]
    for first, second in pairs:
        assert first.grammar_forced.any()
        said = [*first.prompt_token_ids, *first.generation_token_ids]
        assert list(second.prompt_token_ids[: len(said)]) == said


@pytest.mark.promise("CP-14")
def test_a_shift_by_one_token_fails_the_check(recompute, delivered) -> None:
    for tokens in delivered:
        prompt, ids = tokens.prompt_token_ids.tolist(), tokens.generation_token_ids.tolist()
        theirs = recompute(prompt[1:] + ids, len(prompt) - 1)
        shifted = np.abs(theirs - tokens.generation_log_probs).max()
        late = np.abs(recompute(prompt + ids, len(prompt))[1:] - tokens.generation_log_probs[:-1]).max()
        assert shifted > THRESHOLD
        assert late > 1.0
