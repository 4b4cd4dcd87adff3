"""What checks of capture transports are made of: clients, sizes, sample entries, and demands.

Left to others: the checks (`capture_checks`, `capture_table`, `capture_deaths`), running them (`capture_suite`).
"""

from __future__ import annotations

import inspect
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from toprope.capture.protocols import TokenSink, TokenSource
from toprope.tokens.entry import TokenEntry


class Nonconforming(AssertionError):
    """The transport breaks a promise; the message says which and how."""


class Skipped(Exception):
    """The check does not apply to this transport; the message says why."""


@dataclass(frozen=True, slots=True)
class Transport:
    """One client's two ends; they may be one object."""

    sink: TokenSink
    source: TokenSource

    async def close(self) -> None:
        """Close both ends."""
        await self.sink.close()
        if id(self.source) != id(self.sink):
            await self.source.close()


Connect: TypeAlias = Callable[[], Awaitable[Transport]]


@dataclass(frozen=True, slots=True)
class Scale:
    """How hard to try. The defaults take a few seconds on a local disk; the suite's full size is `Scale.full()`.

    `tears` is at how many places of the last write a file is torn, at most.
    """

    races: int = 50
    chain: int = 200
    entries: int = 500
    writers: int = 16
    big: int = 50_000
    tears: int = 40

    @classmethod
    def full(cls) -> Scale:
        """1,000 races, chains 1,000 deep, 10,000 entries, one entry of 500,000 tokens, a tear at every byte."""
        return cls(races=1000, chain=1000, entries=10_000, writers=64, big=500_000, tears=1_000_000)


Check: TypeAlias = Callable[[Connect, Scale], Awaitable[None]]


def sample_entry(key: str, call_id: str, *, prompt: Any = (1, 2, 3), generated: int = 2, **fields: Any) -> TokenEntry:
    """An entry with `generated` ids whose logprobs no f32 can hold."""
    return TokenEntry(
        rollout_id=key,
        model_call_id=call_id,
        model="suite",
        created_at=1.5,
        prompt_token_ids=np.asarray(prompt, dtype=np.uint32),
        generation_token_ids=np.arange(100, 100 + generated, dtype=np.uint32),
        generation_log_probs=-np.arange(1, generated + 1, dtype=np.float64) / 10,
        output_items=({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": call_id}]},),
        token_item_index=0,
        **fields,
    )


def new_key() -> str:
    """A capture key that nobody used."""
    return f"suite.{secrets.token_hex(6)}"


def takes(target: Any, name: str) -> bool:
    """Whether a callable takes the keyword `name`; False for None."""
    if target is None:
        return False
    parameters = inspect.signature(target).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def demand(truth: bool, what: str) -> None:
    """Raise `Nonconforming(what)` unless it holds."""
    if not truth:
        raise Nonconforming(what)


@asynccontextmanager
async def client(connect: Connect) -> AsyncIterator[Transport]:
    """One more client, closed at the end."""
    transport = await connect()
    try:
        yield transport
    finally:
        await transport.close()


async def refused(action: Awaitable[Any], what: str) -> None:
    """Raise `Nonconforming(what)` unless the action raises; which error is the transport's own affair."""
    try:
        await action
    except Exception:
        return
    raise Nonconforming(what)


async def frozen_ids(transport: Transport, key: str) -> list[str]:
    """The call ids of a key's snapshot."""
    return [entry.model_call_id for entry in (await transport.source.freeze(key)).entries]
