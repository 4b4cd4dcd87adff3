"""What one rollout may spend at a model server: calls, generated tokens, seconds. A call over it is refused in words.

Captured calls are counted from the record, so that a restart or another worker forgets nothing; others in memory. A
refusal ends the trajectory (`truncated:limit_reached`); the chain before it stays trainable, so none may come too
early: no call counts twice, however many ask at once. Calls that are under way elsewhere at that moment are not seen:
with several workers as many calls more may pass.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from toprope.errors.tree import ConfigError, LimitReached
from toprope.servers.model.call import ModelCall
from toprope.servers.model.engines.base import EngineReply
from toprope.tokens.entry import TokenEntry

ReadRecord = Callable[[str, int], Awaitable[Sequence[TokenEntry]]]
_MAX_ROLLOUTS = 16_384


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """Bounds of one rollout; None: unbounded. `seconds` run from its first call here; `tokens` are generated ones.

    A call that is under way when `tokens` or `seconds` run out ends undisturbed. Raises `ConfigError` below 1 call or
    token, or for no time at all.
    """

    calls: int | None = None
    tokens: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("calls", "tokens", "seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"limits.{name}: {value!r} is not accepted; expected more than 0, or nothing")

    @property
    def any(self) -> bool:
        """Whether anything is bounded."""
        return self.calls is not None or self.tokens is not None or self.seconds is not None


class _Spent:
    __slots__ = ("calls", "first", "read", "running", "tokens")

    def __init__(self, first: float) -> None:
        self.calls = 0  # ended ones, of the record or counted here
        self.tokens = 0
        self.read = 0  # entries of the record that are counted
        self.running: dict[str, bool] = {}  # ids of calls under way, and whether the record will tell of them
        self.first = first

    def learn(self, entries: Sequence[TokenEntry], since: int) -> None:
        """Count what the record held after its first `since` entries, unless another call did meanwhile."""
        for entry in entries[self.read - since :]:
            self.read += 1
            self.calls += 1
            self.tokens += len(entry.generation_token_ids)
            self.first = min(self.first, entry.created_at)
            self.running.pop(entry.model_call_id, None)  # it is recorded, though its turn may not be over


class Budgets:
    """The budgets of one server."""

    def __init__(self, limits: RolloutLimits) -> None:
        self.limits = limits
        self._rollouts: OrderedDict[str, _Spent] = OrderedDict()

    async def admit(self, call: ModelCall, read: ReadRecord | None) -> None:
        """On return one more call of its rollout counts as running, until `ended`. `read` gives the record, where the
        call will be found there.

        Raises `LimitReached` naming what is used up.
        """
        if call.rollout_id is None or not self.limits.any:
            return
        spent = self._rollouts.setdefault(call.rollout_id, _Spent(call.started))
        self._rollouts.move_to_end(call.rollout_id)
        if len(self._rollouts) > _MAX_ROLLOUTS:
            self._rollouts.popitem(last=False)
        if read is not None:
            since = spent.read
            spent.learn(await read(call.rollout_id, since), since)
        self._check(spent, call.started)
        spent.running[call.call_id] = read is not None

    def ended(self, call: ModelCall, made: EngineReply | None) -> None:
        """An admitted call ended, with this reply or with none."""
        spent = self._rollouts.get(call.rollout_id or "")
        if spent is None:
            return
        told = spent.running.pop(call.call_id, True)
        if made is not None and not told:
            spent.calls += 1
            spent.tokens += made.usage.output_tokens or (
                0 if made.tokens is None else len(made.tokens.generation_token_ids)
            )

    def _check(self, spent: _Spent, now: float) -> None:
        limits = self.limits
        if limits.calls is not None and spent.calls + len(spent.running) >= limits.calls:
            raise LimitReached(f"this rollout has had its {limits.calls} model calls (limits.calls)")
        if limits.tokens is not None and spent.tokens >= limits.tokens:
            raise LimitReached(
                f"this rollout has generated {spent.tokens} tokens; {limits.tokens} are allowed (limits.tokens)"
            )
        if limits.seconds is not None and now - spent.first >= limits.seconds:
            raise LimitReached(f"this rollout has had its {limits.seconds:g} seconds of model calls (limits.seconds)")
