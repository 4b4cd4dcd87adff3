"""What a recorder knows of one rollout: its recorded calls, their prompts, and how much of it others may have written.

It changes in memory only. Left to others: who reads the store and when, and when a rollout is forgotten (`recorder`).
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from toprope.capture.prompts import PromptArena
from toprope.capture.protocols import BeginAck
from toprope.tokens.lineage import LineageHistory, ParentChoice
from toprope.tokens.sampled import SampledTokens


class Rollout:
    """What the recorder knows of one key. Forgetting it is safe at any time: the store can tell all of it again."""

    __slots__ = ("arena", "calls", "entries", "history", "lock", "shared", "size", "synced", "told")

    def __init__(self, *, all_told: bool) -> None:
        # Until the store says otherwise somebody may have been here: another worker, or this one before it forgot.
        self.history = LineageHistory(unseen=not all_told)
        self.arena = PromptArena()
        self.calls = 0  # calls and entries that the store held when it last answered
        self.entries = 0
        self.told = (0, 0)  # the most calls and the most entries that the store ever said
        self.synced = 0  # entries, from the first on, that were read from the store
        self.shared = True  # the store may hold what is not in the index
        self.size = 0  # ids in the index, about
        self.lock = asyncio.Lock()

    def laid_out(self, call_id: str, choice: ParentChoice, tokens: SampledTokens) -> SampledTokens:
        """`tokens` with the prompt as a view of memory that it shares with its parent's, whose ids it begins with.

        A store that compares the two then has nothing to compare, and a thousand turns are not held a thousand times.
        """
        parent = choice.parent_call_id if choice.parent_call_id in self.arena else None
        suffix = tokens.prompt_token_ids[choice.suffix_start if parent is not None else 0 :]
        whole = self.arena.place(call_id, parent, suffix, tokens.generation_token_ids)
        return replace(tokens, prompt_token_ids=whole)

    def is_outlived(self, ack: object, told: tuple[int, int]) -> bool:
        """Whether the key was made new since: a store that had said `told` before the call began now holds less."""
        return isinstance(ack, BeginAck) and (ack.calls < told[0] or ack.entries < told[1])

    def learn_from_begin(self, ack: object) -> None:
        """Compare what the store holds with what this recorder put there: more means another writer.

        A store that does not say leaves that open: what it holds is read, and what was aborted stays unknown.
        """
        if not isinstance(ack, BeginAck):
            self.shared = True
            return
        self.told = (max(self.told[0], ack.calls), max(self.told[1], ack.entries))
        more = ack.calls > self.calls + 1 or ack.entries > self.entries
        all_recorded = ack.calls - ack.entries <= 1  # but for the call that begins here
        if self.calls == 0:
            self.shared = more
            self.history.unseen &= not all_recorded
        elif more:
            self.shared = True
            self.history.unseen |= not all_recorded
        self.calls = max(self.calls + 1, ack.calls)
        self.entries = max(self.entries, ack.entries)


def place_of(ack: object, told: tuple[int, int]) -> int:
    """As the how-manieth of its rollout a call began before anything of it was recorded; 0 where that is not known.

    `told`: the most calls and entries that the store had said before. A call that does not come after all of those was
    begun once already, or the key was made new. Not seen is a key made new elsewhere in which others began as many
    calls as were told here and recorded none: what they lost may stand in the next call here.
    """
    return ack.calls if isinstance(ack, BeginAck) and ack.entries == 0 and ack.calls > told[0] else 0
