"""Random call trees whose every token is labelled when it is sampled, and an oracle that reads labels only.

The generator plays engine, agent and, where it is given none, recorder. It never asks the builder anything, and the
oracle knows nothing of parents, claims or chains: it looks every delivered id up in the book of labels.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tests.machine.recorders import Recorders

from toprope.dialects.chat_history import items_from_messages
from toprope.tokens.entry import TokenEntry
from toprope.tokens.lineage import LineageHistory, decide
from toprope.tokens.snapshot import TokenCaptureSnapshot
from toprope.trajectory.terminal import TerminalWitnesses

Items = list[dict[str, Any]]


@dataclass
class Turn:
    """What truly happened in one call."""

    call_id: str
    prompt: list[int]
    gen: list[int]
    items: Items
    output: Items
    whole_path_recorded: bool
    recorded: bool = True
    kept: Items | None = None

    @property
    def after(self) -> Items:
        """The conversation as the agent keeps it, with what this call said; `kept` where it keeps that in its way."""
        return self.kept if self.kept is not None else [*self.items, *self.output]

    @property
    def seen(self) -> list[int]:
        return self.prompt + self.gen


@dataclass
class Book:
    """The labels: which ids some call sampled, with which logprob, and which calls were lost."""

    sampled: dict[int, dict[str, float]] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    given: set[int] = field(default_factory=set)

    def lost_ids(self) -> set[int]:
        return {token for token, by in self.sampled.items() if set(by) <= self.lost}


@dataclass
class Tree:
    book: Book
    turns: dict[str, Turn]
    snapshot: TokenCaptureSnapshot
    terminal: str | None
    harmed: set[str]


class World:
    """One rollout: an agent with its moods on top of an engine that never samples an id twice."""

    def __init__(self, seed: int, recorders: Callable[[random.Random], Recorders] | None = None) -> None:
        self.dice = random.Random(seed)
        self.recorders = recorders(self.dice) if recorders is not None else None
        self.overdue: list[Callable[[], None]] = []
        self.late: list[Callable[[], None]] = []
        self.book = Book()
        self.turns: dict[str, Turn] = {}
        self.history = LineageHistory()
        self.entries: list[TokenEntry] = []
        self.incomplete: list[str] = []
        self.harmed: set[str] = set()
        self._next = 10
        self._asides = 0
        self._terse = self.dice.random() < 0.25  # few words, said again and again, shown ones too
        self._calls = self.dice.choice(CALLS) if self.dice.random() < 0.5 else None

    def given(self, count: int) -> list[int]:
        ids = [self._fresh() for _ in range(count)]
        self.book.given.update(ids)
        return ids

    def _fresh(self) -> int:
        self._next += 1
        return self._next

    def call(
        self,
        prompt: list[int],
        items: Items,
        *,
        sound: bool,
        twin: Turn | None = None,
        empty: bool = False,
        **about: Any,
    ) -> Turn:
        """The engine samples and labels; the recorder decides and records, or the call is lost."""
        call_id = f"c{self.dice.randrange(10**6):06d}"
        while call_id in self.turns:
            call_id += "x"
        gen = [] if empty else list(twin.gen) if twin else [self._fresh() for _ in range(self.dice.randint(1, 4))]
        log_probs = [-0.01 * self.dice.randint(1, 500) for _ in gen]
        for token, log_prob in zip(gen, log_probs, strict=True):
            self.book.sampled.setdefault(token, {})[call_id] = log_prob
        text = self.dice.choice(["ok", "ok", "done"]) if self._terse else f"text of {call_id}"
        output = self._said(call_id, text) if gen else []
        if twin is not None and gen:
            output = twin.output
        turn = Turn(call_id, prompt, gen, items, output, sound)
        if output and output[0]["type"] == "function_call" and self._calls is not None:
            turn.kept = [*items, *self._calls(output[0], len(items)), result(output[0]["call_id"])]
        self.turns[call_id] = turn
        lost = about.pop("lose", False)
        if lost:
            turn.recorded = turn.whole_path_recorded = False
            turn.kept = self.dice.choice(KEEPINGS if self._calls is None else KEEPINGS[-8:])(items, text)
            self.book.lost.add(call_id)
        if self.recorders is not None:
            self._through(self.recorders, turn, dict(zip(gen, log_probs, strict=True)), **about)
            return turn
        if lost:
            self.history.note_unrecorded(items)
            if self.dice.random() < 0.5:
                self.incomplete.append(f"dangling_intent:{call_id}")
            return turn
        choice = decide(self.history, items, prompt)
        entry = TokenEntry(
            rollout_id="r",
            model_call_id=call_id,
            model="m",
            created_at=float(len(self.turns)),
            prompt_token_ids=prompt,
            generation_token_ids=gen,
            generation_log_probs=log_probs,
            output_items=tuple(output),
            token_item_index=0 if output else None,
            item_digests=choice.item_digests,
            parent_decision=choice.decision,
            parent_call_id=choice.parent_call_id,
            parent_resolution_reason=choice.reason,
            cum_len=len(prompt) + len(gen),
            chain_hash=choice.prompt_hash.extend(gen).hexdigest(),
            **about,
        )
        self.history.add(entry, choice.asked, beginning=choice.beginning)
        if choice.suffix_start and self.dice.random() < 0.4:
            entry = replace(entry, prompt_token_ids=prompt[choice.suffix_start :], prompt_is_delta=True)
        self.entries.append(entry)
        return turn

    def _said(self, call_id: str, text: str) -> Items:
        """What the engine makes of a generation: a reply, or a call, now and then one that was cut."""
        if self._calls is None or self.dice.random() < 0.4:
            return [{**assistant(text), "id": f"msg_{call_id}"}]
        arguments = _arguments(text)
        made = f"call_{call_id}" if self.dice.random() < 0.3 else "call_1"
        return [tool_call(made, arguments if self.dice.random() < 0.9 else arguments[:-2], self.dice.choice("fg"))]

    def _through(self, recorders: Recorders, turn: Turn, sampled: dict[int, float], **about: Any) -> None:
        late = about.pop("late", False)
        recorder = recorders.begin(turn.call_id, stream=about.pop("stream", True))
        if turn.recorded:
            record = partial(
                recorders.record, recorder, turn.call_id, turn.items, turn.prompt, sampled, turn.output, **about
            )
            if late:
                self.late.append(record)
            else:
                record()
            return
        self.overdue.append(lambda: recorders.lose(recorder, turn.call_id, turn.items))
        # Else its loss is noticed only after calls that came later.
        if self.dice.random() < 0.2:
            self.settle()

    def settle(self) -> None:
        """Every loss is noticed in the end."""
        while self.overdue:
            self.overdue.pop(0)()

    def frozen(self) -> TokenCaptureSnapshot:
        self.settle()
        for record in self.late:
            record()
        if self.recorders is not None:
            return self.recorders.frozen()
        return TokenCaptureSnapshot("r", tuple(self.entries), bool(self.incomplete), "s", 1, tuple(self.incomplete))

    # -- what an agent may do next ------------------------------------------------------------------------------

    def start(self, **about: Any) -> Turn:
        """A first call, a sub-agent's first call, or the first call after a compaction.

        Some show turns that nobody sampled. Those must train where nobody can have said anything before they came.
        """
        silent = not self.turns
        if self.recorders is not None:
            silent = self.recorders.knows_silence(self._asides) and self._asides == len(self.turns)
        shown: Items = []
        if self.dice.random() < (0.4 if self._terse or self._calls is not None else 0.15):
            text = "ok" if self._terse else "shown"
            shown = [user("for example"), *self.dice.choice(SHOWN if self._calls is not None else SHOWN[:1])(text)]
        return self.call(
            self.given(self.dice.randint(1, 3)), [*shown, user("task")], sound=not shown or silent, **about
        )

    def aside(self) -> Turn:
        """A call beside the conversation (a title) whose reply may come last of all."""
        self._asides += 1
        late = {"late": True, "stream": False} if self.recorders is not None else {}
        return self.call(self.given(2), [user("a title?")], sound=True, **late)

    def go_on(self, turn: Turn, **about: Any) -> Turn:
        items = [*turn.after, user(f"more {self._next}")]
        return self.call(
            turn.seen + self.given(self.dice.randint(0 if turn.gen else 1, 3)),
            items,
            sound=turn.whole_path_recorded,
            **about,
        )

    def carry_on(self, turn: Turn, **about: Any) -> Turn:
        """What this call said was cut short: it is sent back as the end of the request, to be gone on with."""
        if not turn.gen:
            return self.go_on(turn, **about)
        return self.call(turn.seen, turn.after, sound=turn.whole_path_recorded, **about)

    def again(self, turn: Turn, *, same: bool) -> Turn:
        """The same request once more."""
        return self.call(turn.prompt, turn.items, sound=turn.whole_path_recorded, twin=turn if same else None)

    def rewrite(self, turn: Turn) -> Turn:
        """The history goes back as text and comes out as other ids."""
        items = [*turn.after, user("more")]
        kept = turn.seen[: self.dice.randrange(len(turn.seen))]
        return self.call(kept + self.given(len(turn.seen) - len(kept) + 2), items, sound=False)

    def make_up(self, turn: Turn) -> Turn:
        """The harness writes a turn that nobody sampled."""
        made_up = assistant(f"I could not finish {self._next}.")
        return self.call(turn.seen + self.given(3), [*turn.after, made_up, user("go on")], sound=False)


def assistant(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": text}


def tool_call(call_id: str, arguments: str, name: str = "f") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def result(call_id: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": "done"}


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


def _extending(items: Items, text: str) -> Items:
    """Joined to the turn before it, whose id stays."""
    for at in range(len(items) - 1, -1, -1):
        if items[at].get("role") == "assistant" and isinstance(items[at]["content"], str):
            return [*items[:at], {**items[at], "content": f"{items[at]['content']} {text}"}, *items[at + 1 :]]
    return [*items, assistant(text)]


def _beside(items: Items, text: str) -> Items:
    """In a field of the turn before it."""
    for at in range(len(items) - 1, -1, -1):
        if items[at].get("role") == "assistant":
            return [*items[:at], {**items[at], "thinking": text}, *items[at + 1 :]]
    return [*items, *chat(thinking=text)]


def chat(*, first: int = 0, **fields: Any) -> Items:
    """An assistant message as a Chat program sends it, at place `first`."""
    return list(items_from_messages([{"role": "assistant", "content": "", **fields}], first=first))


def old_call(arguments: str, name: str = "f", *, first: int = 0) -> Items:
    """A call in the spelling that has no ids: we make one of its place."""
    return chat(first=first, function_call={"name": name, "arguments": arguments})


CALLS: tuple[Callable[[dict[str, Any], int], Items], ...] = (
    lambda call, at: [call],
    lambda call, at: [{**call, "call_id": "call_1"}],
    lambda call, at: [{**call, "call_id": f"call_{at}", "arguments": _anew(call["arguments"])}],
    lambda call, at: old_call(call["arguments"], call["name"], first=1),
    lambda call, at: chat(tool_calls=[{"function": {"name": call["name"], "arguments": call["arguments"]}}], first=at),
)
"""The ways in which agents send a call back: as it came, all under one id, renumbered and written anew, without one."""


def _anew(arguments: str) -> str:
    """Written anew, as programs do that have read them; what cannot be read they send as it is."""
    return arguments.replace(": ", ":") if arguments.endswith("}") else arguments


def _arguments(text: str) -> str:
    return json.dumps({"x": text})


SHOWN: tuple[Callable[[str], Items], ...] = (
    lambda text: [assistant(text)],
    lambda text: [tool_call("call_1", _arguments(text)), result("call_1")],
    lambda text: [*old_call(_arguments(text), first=1), result("call_h1_0")],
)
"""What nobody sampled and a first request holds."""


KEEPINGS: tuple[Callable[[Items, str], Items], ...] = (
    lambda items, text: [*items, assistant(text)],
    lambda items, text: [*items, assistant(text)],
    lambda items, text: [*items, *chat(content=text)],
    lambda items, text: [*items, *chat(thinking=text)],
    lambda items, text: [*items, *chat(reasoning_content=text)],
    lambda items, text: [*items, *chat(reasoning_details=[{"type": "reasoning.text", "text": text}])],
    lambda items, text: [*items, *chat(content=None, audio={"transcript": text})],
    lambda items, text: [*items, {"type": "message", "role": "assistant", "content": [], "a_field": {"of": text}}],
    lambda items, text: [*items, {"type": "message", "role": "ai", "content": text}],
    lambda items, text: [*items, {"type": "agent_output", "role": "", "text": text, "content": []}],
    _extending,
    _beside,
    lambda items, text: [*items, tool_call("call_1", _arguments(text)), result("call_1")],
    lambda items, text: [*items, tool_call("call_1", _arguments(text), "g"), result("call_1")],
    lambda items, text: [*items, *old_call(_arguments(text), first=1), result("call_h1_0")],
    lambda items, text: [*items, *chat(tool_calls=[{"function": {"name": "f", "arguments": _arguments(text)}}])],
)
"""The ways in which an agent keeps what it read of a call that then came to nothing."""


MOODS: dict[str, tuple[int, Callable[[World, Turn], Turn]]] = {
    "go_on": (40, lambda world, turn: world.go_on(turn)),
    "gone": (4, lambda world, turn: world.go_on(turn, client_gone=True)),
    "empty": (6, lambda world, turn: world.go_on(turn, empty=True)),
    "lose": (4, lambda world, turn: world.go_on(turn, lose=True)),
    "lose_going_on": (2, lambda world, turn: world.carry_on(turn, lose=True)),
    "carry_on": (2, lambda world, turn: world.carry_on(turn)),
    "again": (8, lambda world, turn: world.again(turn, same=False)),
    "twin": (3, lambda world, turn: world.again(turn, same=True)),
    "compact": (4, lambda world, turn: world.start()),
    "lose_start": (12, lambda world, turn: world.go_on(world.start(lose=True))),
    "rewrite": (3, lambda world, turn: world.rewrite(turn)),
    "make_up": (3, lambda world, turn: world.make_up(turn)),
}


def grow(seed: int, recorders: Callable[[random.Random], Recorders] | None = None) -> Tree:
    """One random rollout, its records damaged or not, in random order with random copies."""
    world = World(seed, recorders)
    dice = world.dice
    moods, weights = zip(*((mood, weight) for weight, mood in MOODS.values()), strict=True)
    calm = dice.random() < 0.35
    beside = not calm and dice.random() < 0.25
    if beside:
        world.aside()
    turns = [world.start(lose=not calm and dice.random() < (0.5 if beside else 0.15))]
    for _ in range(dice.randint(0, 9)):
        # Mostly where it left off, sometimes from any earlier turn: a fork.
        turn = turns[-1] if dice.random() < 0.8 else dice.choice(turns)
        mood = moods[0] if calm or (beside and len(turns) == 1) else dice.choices(moods, weights)[0]
        turns.append(mood(world, turn))
    frozen = world.frozen()
    entries = list(frozen.entries)
    if entries and dice.random() < 0.25:
        entries = _damage(world, entries)
    entries += dice.choices(entries, k=dice.randrange(3)) if entries else []
    dice.shuffle(entries)
    snapshot = replace(frozen, entries=tuple(entries))
    terminal = None if dice.random() < 0.5 else (turns[-1] if dice.random() < 0.7 else dice.choice(turns)).call_id
    return Tree(world.book, world.turns, snapshot, terminal, world.harmed)


def _damage(world: World, entries: list[TokenEntry]) -> list[TokenEntry]:
    """Break one record as transports and old writers do. A call behind a lost one keeps its honest decision."""
    dice = world.dice
    where = dice.randrange(len(entries))
    entry = entries[where]
    world.harmed.add(entry.model_call_id)
    if not world.turns[entry.model_call_id].whole_path_recorded:
        return entries
    kind = dice.choice(["missing", "other", "flip", "conflict", "ring", "gone", "logprob"])
    if kind == "missing":
        bad = replace(entry, parent_decision="resolved", parent_call_id="gone")
    elif kind in ("other", "ring"):
        other = dice.choice(entries)
        bad = replace(entry, parent_decision="resolved", parent_call_id=other.model_call_id)
        if kind == "ring" and other is not entry and world.turns[other.model_call_id].whole_path_recorded:
            ring = replace(other, parent_decision="resolved", parent_call_id=entry.model_call_id)
            world.harmed.add(other.model_call_id)
            entries = [ring if each is other else each for each in entries]
    elif kind == "gone":
        return entries[:where] + entries[where + 1 :]  # silently missing: its children name a parent that is not there
    elif kind == "flip":
        ids = entry.prompt_token_ids.tolist()
        if not ids:
            return entries
        ids[dice.randrange(len(ids))] += 10**6
        bad = replace(entry, prompt_token_ids=ids)
    elif kind == "conflict":
        ids = entry.generation_token_ids.tolist() or [10**6]
        ids[-1] += 10**6
        copy = replace(
            entry, generation_token_ids=ids, generation_log_probs=[-0.5] * len(ids), chain_hash=None, cum_len=None
        )
        return [*entries, copy]
    else:
        bad = replace(entry, model_call_id=entry.model_call_id, client_gone=not entry.client_gone)
    return [bad if each is entry else each for each in entries]


def breaches(tree: Tree, built: Any) -> list[str]:
    """What the labels say against a build; empty when it is safe."""
    traces = getattr(built, "traces", ())
    found: list[str] = []
    if traces and tree.snapshot.incomplete:
        found.append("trainable although the snapshot is incomplete")
    lost = tree.book.lost_ids()
    owned: Counter[int] = Counter()
    for trace in traces:
        mask, log_probs = trace.loss_mask.tolist(), trace.logprobs.tolist()
        for at, token in enumerate(trace.token_ids.tolist()):
            if token in lost:
                found.append(f"{token} was sampled by a lost call and is context")
            if token not in tree.book.sampled and token not in tree.book.given:
                found.append(f"{token} is nobody's")
            if mask[at]:
                owned[token] += 1
                if log_probs[at] not in tree.book.sampled.get(token, {}).values():
                    found.append(f"{token} is trained on and was not sampled with that logprob")
        leaf = tree.turns[trace.call_ids[-1]]
        if trace.token_ids.tolist() != leaf.seen:
            found.append(f"the trace is not what {leaf.call_id} saw and sampled")
    # No id is ever sampled anew but by a twin, and a twin's is the same token to a trainer: once, whoever sampled it.
    for token, count in owned.items():
        if count > 1:
            found.append(f"{token} is trained on {count} times")
    return found


def must_train(tree: Tree) -> bool:
    """Whether nothing at all speaks against training up to the named terminal."""
    turn = tree.turns.get(tree.terminal or "")
    return (
        turn is not None
        and turn.recorded
        and turn.whole_path_recorded
        and bool(turn.gen)
        and not tree.snapshot.incomplete
        and not tree.harmed
    )


def witnesses(tree: Tree) -> TerminalWitnesses:
    return TerminalWitnesses.naming(explicit=tree.terminal) if tree.terminal else TerminalWitnesses()
