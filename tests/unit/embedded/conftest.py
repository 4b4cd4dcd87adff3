"""One engine for all tests of this folder: loading takes seconds, and an engine serves any number of event loops."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest

from toprope.servers.model.engines.base import EngineReply, EngineRequest
from toprope.servers.model.engines.embedded.engine import EmbeddedEngine
from toprope.servers.model.engines.embedded.gguf import GgufFile
from toprope.servers.model.engines.embedded.tokenizer import Vocabulary
from toprope.servers.model.engines.embedded.weights import MODEL, Weights, find_weights, load_weights, open_weights
from toprope.wire.responses import Item, ResponsesRequest, Tool


class Talk:
    """Short ways to ask the engine and to read its replies."""

    add: ClassVar[Tool] = {
        "type": "function",
        "name": "add",
        "description": "Adds two numbers.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    }

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.engine = engine

    async def __call__(self, said: str | Sequence[Item], *, session: str | None = None, **fields: Any) -> EngineReply:
        items = (self.user(said),) if isinstance(said, str) else tuple(said)
        request = ResponsesRequest(items, **({"max_output_tokens": 32} | fields))
        return await self.engine.generate(EngineRequest(request, "call-1", session, want_tokens=True))

    def user(self, text: str) -> Item:
        return {"type": "message", "role": "user", "content": text}

    def result(self, call: Item, output: str) -> Item:
        return {"type": "function_call_output", "call_id": call["call_id"], "output": output}

    def text(self, reply: EngineReply) -> str:
        return "".join(item["content"][0]["text"] for item in reply.output if item["type"] == "message")

    def prompt(self, reply: EngineReply) -> list[int]:
        return reply.tokens.prompt_token_ids.tolist()

    def ids(self, reply: EngineReply) -> list[int]:
        return reply.tokens.generation_token_ids.tolist()

    def logprobs(self, reply: EngineReply) -> list[float]:
        return reply.tokens.generation_log_probs.tolist()

    def arguments(self, reply: EngineReply) -> dict[str, int]:
        return json.loads(reply.output[-1]["arguments"])


@pytest.fixture(scope="session")
def weights_file() -> GgufFile:
    return open_weights(find_weights(MODEL, None))


@pytest.fixture(scope="session")
def weights(weights_file: GgufFile) -> Weights:
    return load_weights(weights_file)


@pytest.fixture(scope="session")
def vocabulary(weights_file: GgufFile) -> Vocabulary:
    return Vocabulary(weights_file)


@pytest.fixture(scope="session")
def engine() -> Iterator[EmbeddedEngine]:
    made = EmbeddedEngine(context=1024, max_sequences=8)
    asyncio.run(made.start())
    yield made
    asyncio.run(made.close())


@pytest.fixture
def talk(engine: EmbeddedEngine) -> Talk:
    return Talk(engine)
