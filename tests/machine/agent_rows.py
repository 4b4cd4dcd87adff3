"""Rows as agents hand them in, over calls whose author is known: main agents, sub-agents, compaction, harnesses.

The generator plays engine, agents and harness. Who made the last call is written down when it is made; the oracle
reads that alone. Agents do and say much the same, so that words tell little.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

from tests.machine.recorders import Recorders
from tests.unit.trajectory.rows import result, said, thought

Items = list[dict[str, Any]]

WORDS = ("Done.", "All tests pass.", "42", "Ok", "1400", 'f("x")\nreturn 1', "it's (b)")
FEW_WORDS = WORDS[:2]
TOOLS = ("run_tests", "ls")
FORMS = ("whole", "since compaction", "tail", "final", "no calls", "no words between")
"""What a harness hands in of its agent's conversation."""
HABITS = ("closes the last stream", "extracts answers", "lowers them", "parses calls")
CUT_OUT = ("The answer is {}", "答案是{}。", "{}km")
"""What stands round an answer that harnesses cut out: blanks, a script without any, a unit."""
WRITTEN = {
    "Done.": ("done", "**Done.**", "DONE!"),
    "All tests pass.": ("all tests pass", "All *tests* pass.", "All tests pass!"),
    "42": ("42.0", "042", "$42", "−42"),
    "Ok": ("OK.", "`ok`"),
    "1400": ("1,400", "$1,400.00", "1 400", "1400.0"),
    "it's (b)": ("it’s (B)", "It's **b**"),
}
"""How models write what a harness normalises: case, marks, other signs, numbers."""
FENCED = "Here it is:\n```json\n{}\n```"
CALLS = (("{}", '{"verbose": false}'), ('{"n": "3"}', '{"n": 3}'), ('{"p": "x"', '{"p": "x"}'))
"""Arguments as models write them, and as a framework shows them once it has validated them."""
SERVER = "mcp__t__"
FINISH = "submit"


@dataclass
class Made:
    """One call as it truly was."""

    call_id: str
    wrote: Items
    seen: list[int]
    response_id: str
    answer: str = ""
    """What a harness that extracts answers makes of it, if its agent meant one."""

    def text(self) -> str:
        return "".join(item["content"][0]["text"] for item in self.wrote if item["type"] == "message")


@dataclass
class Talk:
    """One conversation: what its agent sends next, and the ids that the engine would have for it."""

    items: Items
    seen: list[int] = field(default_factory=list)
    calls: list[Made] = field(default_factory=list)
    broken: bool = False


@dataclass
class Handed:
    """One rollout as it is handed in, and the truth about it."""

    row: dict[str, Any]
    form: str
    truth: Made
    followed: bool
    plain: bool
    habits: frozenset[str]
    """Those of `HABITS` that its harness had."""


class Episode:
    """A main agent with its sub-agents, recorded by `recorders`."""

    def __init__(self, seed: int, recorders: Recorders) -> None:
        self.dice = random.Random(f"rows {seed}")
        self.recorders = recorders
        self.made: list[Made] = []
        self.subs: list[tuple[Talk, int]] = []
        self.talks: list[Talk] = []
        self.one_response_id = self.chance(0.1)
        self.alike = self.chance(0.6)
        self.writes_otherwise = self.chance(0.3)
        self.extracts = self.writes_otherwise and self.chance(0.8)
        self.lowers = self.extracts and self.chance(0.4)
        self.parses = self.chance(0.25)
        had = zip(HABITS[1:], (self.extracts, self.lowers, self.parses), strict=True)
        self.habits = {name for name, has in had if has}
        self._ids = 10

    def chance(self, share: float) -> bool:
        return self.dice.random() < share

    def _fresh(self, count: int) -> list[int]:
        self._ids += count
        return list(range(self._ids - count, self._ids))

    # -- calls ----------------------------------------------------------------------------------------------------

    def call(self, talk: Talk, wrote: Items, **about: Any) -> Made:
        prompt = talk.seen + self._fresh(self.dice.randint(1, 2))
        if not any(talk is each for each in self.talks):
            self.talks.append(talk)
        if talk.calls and talk.broken:
            prompt[len(talk.seen) - 1] = self._fresh(1)[0]  # a template writes the last turn anew
        return self._sample(talk, prompt, wrote, **about)

    def again(self, talk: Talk, wrote: Items, **about: Any) -> Made:
        """The last request once more; the agent goes on with this reply."""
        last = talk.calls.pop()
        talk.items = self._request
        return self._sample(talk, last.seen[: self._prompt_len], wrote, **about)

    def _sample(self, talk: Talk, prompt: list[int], wrote: Items, **about: Any) -> Made:
        call_id = f"c{self.dice.randrange(10**6):06d}-{len(self.made)}"
        sampled = dict.fromkeys(self._fresh(self.dice.randint(1, 3)), -0.5)
        response_id = "resp" if self.one_response_id else f"resp-{call_id}"
        recorder = self.recorders.begin(call_id)
        about = {"response_id": response_id, **about}
        self.recorders.record(recorder, call_id, talk.items, prompt, sampled, wrote, **about)
        made = Made(call_id, wrote, [*prompt, *sampled], response_id)
        self.made.append(made)
        self._request, self._prompt_len = talk.items, len(prompt)
        talk.calls.append(made)
        talk.seen = made.seen
        talk.items = [*talk.items, *wrote, *_answers(wrote)]
        return made

    # -- what agents say ------------------------------------------------------------------------------------------

    def turn(self) -> Items:
        """A turn in the middle: a tool call, mostly, with words or a thought before it or not."""
        wrote = [thought(self.dice.choice(("hm", f"hm {len(self.made)}")))] if self.chance(0.3) else []
        if self.chance(0.3):
            wrote.append(said(self.dice.choice((*WORDS, f"step {len(self.made)}"))))
        if self.chance(0.8) or not wrote or wrote[-1]["type"] == "reasoning":
            name = self.dice.choice(TOOLS[: 1 if self.alike else None])
            arguments = "{}"
            if self.parses:
                name = self.dice.choice((name, SERVER + name))
                arguments = self.dice.choice(self.dice.choice(CALLS[: 1 if self.alike else None]))
            call = {"type": "function_call", "call_id": f"f{len(self.made)}", "name": name, "arguments": arguments}
            wrote.append(call)
        return wrote

    def end(self, words: str) -> Items:
        """A last turn, as the model has it: with blanks, tags or a sentence about what the harness will hand in."""
        how = self.dice.choice(("{}", "{}", "{}\n", " {} ", "<think>well</think>{}", *CUT_OUT))
        if how == CUT_OUT[-1] and len(words) < 4 and not words.isdecimal():
            how = "{}"  # a unit stands at a number; short words in other words are not looked for
        text = how.format(words)
        if self.writes_otherwise and self.chance(0.5):
            written = self.dice.choice(WRITTEN.get(words, (words,)))
            text = how.format(written) if self.chance(0.7) else FENCED.format(json.dumps({"answer": words}))
        return [*([thought("so")] if self.chance(0.3) else []), said(text)]

    def finish(self, words: str) -> Items:
        """A last turn that calls the tool which takes the answer; the harness hands in its argument."""
        answer = {"type": "function_call", "call_id": f"f{len(self.made)}", "name": FINISH}
        before = self.dice.choice(([], [], [said("I submit it.")], [thought("so")]))
        return [*before, {**answer, "arguments": json.dumps({"answer": words})}]

    def closing(self, ending: str, words: str) -> Items:
        return {"words": self.end, "finish": self.finish}.get(ending, lambda _: SILENT)(words)

    def words(self, share_of_own: float = 0.4) -> str:
        """Last words; where all are alike, everybody's."""
        if self.alike:
            found = self.dice.choice(FEW_WORDS)
            return found.lower() if self.lowers and self.chance(0.5) else found
        return f"Finding {len(self.made)}." if self.chance(share_of_own) else self.dice.choice(WORDS)

    def sub_agents(self) -> None:
        """Some of them take a step; one that is through says its last words."""
        if self.subs and self.chance(0.6):
            at = self.dice.randrange(len(self.subs))
            talk, left = self.subs[at]
            self.call(talk, self.turn() if left else self.end(self.words()))
            self.subs[at : at + 1] = [(talk, left - 1)] if left else []


def _answers(wrote: Items) -> Items:
    """What the next request has after a turn: the results of its tool calls, or the user's word."""
    results = [result(item["call_id"]) for item in wrote if item["type"] == "function_call"]
    return results or [{"type": "message", "role": "user", "content": "go on"}]


def hand_in(seed: int, recorders: Recorders) -> Handed:
    """Play one rollout. `plain` says that nothing at all makes its last call doubtful: it has to be named."""
    it = Episode(seed, recorders)
    main = Talk([{"type": "message", "role": "user", "content": "task"}])
    whole: list[tuple[Made, Talk]] = []
    compacts = it.chance(0.3)
    alone, turns = it.chance(0.2), it.dice.randint(0, 4)
    compacted = False
    for at in range(turns):
        if not alone and it.chance(0.4):
            task = [{"type": "message", "role": "user", "content": f"sub-task {len(it.made)}"}]
            # A fork has its parent's history. What it says is its own where the parent compacts: see `content`.
            fork = main.calls and not compacts and it.chance(0.3)
            talk = Talk([*main.items, *task], list(main.seen), list(main.calls)) if fork else Talk(task)
            it.subs.append((talk, it.dice.randint(0, 2)))
        it.sub_agents()
        if compacts and at and it.chance(0.4):
            if it.chance(0.5):
                it.call(main, [said(f"summary {len(it.made)}")])
            compacted = True
            main = Talk([{"type": "message", "role": "user", "content": f"so far: {len(it.made)}"}])
        main.broken = main.broken or it.chance(0.05)
        whole.append((it.call(main, it.turn()), main))
        it.sub_agents()
    ending = it.dice.choices(("words", "out of steps", "silent", "finish"), (8, 1, 1, 1))[0] if whole else "words"
    words = it.words(0.5)
    if ending != "out of steps":
        # A harness that has its answer closes the stream: its last call is a gone client's.
        left = {"client_gone": ending in ("words", "finish") and it.chance(0.15)}
        last = it.call(main, it.closing(ending, words), **left)
        if it.chance(0.1):
            if it.chance(0.5):
                words = it.words()
            last = it.again(main, it.closing(ending, words), **({} if it.chance(0.5) else left))
        last.answer = words
        it.habits |= {HABITS[0]} if left["client_gone"] else set()
        whole.append((last, main))
    truth = whole[-1][0]
    while it.subs and it.chance(0.8):
        it.sub_agents()
    # What is asked after a wordless end cannot be told from it (docs/explanation/masking.md).
    followed = ending == "words" and it.chance(0.1)
    if followed:
        unread = len(it.made) % 2 == 0  # a harness ends the session while its client still asks what its user may type
        it.call(main, [said(f"why {truth.text()}?" if unread else f"a title {len(it.made)}")], client_gone=unread)
        followed = not unread
    return _row(it, whole, main, truth, ending, compacted, followed)


SILENT: Items = [thought("nothing to add")]


def _row(
    it: Episode,
    whole: list[tuple[Made, Talk]],
    main: Talk,
    truth: Made,
    ending: str,
    compacted: bool,
    followed: bool,
) -> Handed:
    form = it.dice.choice(FORMS)
    shown = [made for made, talk in whole if form != "since compaction" or talk is main]
    stripped, thoughts = it.chance(0.6), it.dice.choice(("kept", "dropped", "anew"))
    output: Items = []
    for made in shown:
        answers = [made.answer if item is made.wrote[-1] else "" for item in made.wrote]
        wrote = [
            _as_shown(item, made is truth, answer, stripped, thoughts, it)
            for item, answer in zip(made.wrote, answers, strict=True)
        ]
        output += [item for item in wrote if item is not None]
        if made is not truth or ending == "out of steps":
            output += _answers(made.wrote)
    if form == "tail":
        output = output[-it.dice.randint(1, 4) :]
    elif form == "final":
        kept = [item for item in output if item["type"] == "message" and item["role"] == "assistant"]
        output = kept[-1:]
    elif form == "no calls":
        output = [item for item in output if not item["type"].startswith("function_call")]
    elif form == "no words between":
        output = [item for item in output if item["type"] != "message" or item is output[-1]]
    row: dict[str, Any] = {"_ng_rollout_id": "r", "response": {"id": "the harness's", "output": output}}
    passed_on = it.chance(0.2)
    if passed_on:
        row["response"]["id"] = truth.response_id
    text = truth.text().strip()
    answer = _cut_out(text.removeprefix("<think>well</think>"))
    others = [made for made in it.made if made is not truth]
    told_apart = ending == "words" and not any(_letters(answer) in _letters(made.text()) for made in others)
    fits = form == "whole" or (form == "tail" and bool(output)) or form in ("final", "since compaction")
    own = not compacted or form in ("final", "since compaction")
    words_alone = all(item["type"] in ("message", "reasoning") for item in output)
    silent = any(talk.broken or not talk.calls or not _spoke_last(talk.calls[-1]) for talk in it.talks)
    sound = not (words_alone and silent) and not main.broken and output and answer == _last_words(output) == text
    sound = sound and not it.parses
    return Handed(row, form, truth, followed, bool(told_apart and fits and own and sound), frozenset(it.habits))


def _last_words(output: Items) -> str:
    last = output[-1]
    return str(last["content"][0]["text"]).strip() if last["type"] == "message" and last["role"] == "assistant" else ""


def _as_shown(
    item: dict[str, Any], last: bool, answer: str, stripped: bool, thoughts: str, it: Episode
) -> dict[str, Any] | None:
    """One item as the harness shows it: ids are its own, thoughts come and go, words lose blanks and tags.

    Calls are shown as a framework validated them; of the last words a harness may extract the answer.
    """
    if item["type"] == "reasoning":
        return {"kept": item, "dropped": None, "anew": thought("in short")}[thoughts]
    if item.get("name") == FINISH:
        return said(json.loads(item["arguments"])["answer"])
    if item["type"] == "function_call":
        shown = {**item, "call_id": f"own-{item['call_id']}"}
        if it.parses:
            parsed = dict(CALLS).get(item["arguments"], item["arguments"])
            shown |= {"name": item["name"].removeprefix(SERVER), "arguments": parsed}
        return shown
    if last and it.extracts and answer:
        return said(answer.lower() if it.lowers else answer)
    if not stripped:
        return item
    text = item["content"][0]["text"].removeprefix("<think>well</think>").strip()
    return said(_cut_out(text) if last and it.chance(0.7) else text)


def _cut_out(text: str) -> str:
    for how in CUT_OUT:
        before, after = how.split("{}")
        if text.startswith(before) and text.endswith(after):
            text = text.removeprefix(before).removesuffix(after)
    return text


def _letters(text: str) -> str:
    return "".join(each for each in text.casefold() if each.isalnum())


def _spoke_last(made: Made) -> bool:
    """Whether a turn is words alone: a row of words may hide what else it did."""
    return bool(made.text()) and all(item["type"] in ("message", "reasoning") for item in made.wrote)
