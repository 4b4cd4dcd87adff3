"""Which call wrote the final output of a row, by what calls said and rows show. The weakest witness of step 6.

Sub-agents say what the main agent says, harnesses strip what they hand in, and a conversation that was compacted goes
on under a new first call. So a call is named only where every other reading of the row fails; else this is silent,
and what is left decides. Only verified evidence is read: what a record claims of its parent counts for nothing.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from toprope.tokens.entry import TokenEntry
from toprope.tokens.items import THOUGHT, content_of, is_model_authored, item_digests
from toprope.trajectory.evidence import Call, Evidence


@dataclass(frozen=True, slots=True)
class _Mark:
    """One model-authored item: kind and digest of its content, and its words where it is words alone.

    `texts` is all that a harness may cut an answer out of: words, or the values in the arguments of a call (many agents
    end with a tool that takes the answer); `plain` is the same without case, blanks and signs.
    """

    content: str
    words: str | None
    texts: tuple[str, ...]
    plain: tuple[str, ...]

    @property
    def is_thought(self) -> bool:
        return self.content.startswith(THOUGHT)

    @property
    def is_call(self) -> bool:
        return not self.content.startswith("message:")

    def says(self, shown: _Mark) -> bool:
        """Whether a row that hands in this shows that: agents strip blanks and renumber ids."""
        if self.content == shown.content:
            return True
        return self.words is not None and self.words == shown.words and self.is_thought == shown.is_thought

    def says_among(self, shown: _Mark) -> bool:
        """Whether a row that hands in a part of this shows that: tags are cut off, an answer is cut out."""
        if self.says(shown):
            return True
        if self.words is None or shown.words is None or self.is_thought != shown.is_thought:
            return False
        return _is_among(shown.words, self.words)

    def may_say(self, shown: _Mark) -> bool:
        """The same of a rival, of whom more is believed: other case, no markdown, an argument of a call."""
        return self.says_among(shown) or (self.is_thought == shown.is_thought and self.may_hold(shown))

    def may_hold(self, shown: _Mark) -> bool:
        """Whether the words of that stand anywhere in this, in a thought too."""
        if shown.words is None:
            return False
        words = shown.words.removesuffix("...").removesuffix("…").rstrip()  # as cut by length
        return any(_is_among(words, text) for text in self.texts) or (
            any(shown.plain) and not set(shown.plain).isdisjoint(self.plain)
        )


_Marks: TypeAlias = tuple[_Mark, ...]
_SIGNS = re.compile(r"[\W_]+")


def written_by(evidence: Evidence, entries: Sequence[TokenEntry], output: Any) -> tuple[str, ...]:
    """The calls (one, or several with equal ids) that wrote the row's final output; none where that is not certain.

    What a row shows before its final output must be its writer's own conversation; no other call may be read as the
    writer. A call that said the same may be one whose conversation shows all of this too, or goes on after a
    compaction from what others said, or has a history that nobody knows. Thoughts may be left out of a row, and
    those that no call had were written anew by the agent; both count for nothing. An output that cannot be read (kinds
    that are no strings, nesting beyond all measure) names nobody.
    """
    try:
        return _written_by(evidence, entries, output)
    except (TypeError, ValueError, RecursionError):
        return ()


def _written_by(evidence: Evidence, entries: Sequence[TokenEntry], output: Any) -> tuple[str, ...]:
    if not isinstance(output, list) or not all(isinstance(item, Mapping) for item in output):
        return ()
    whole = _Shown.of(output)
    said = _Said(evidence, entries, _kinds(output, whole.marks))
    for shown in (whole, whole.without_thoughts()):
        if shown.marks and (found := said.in_row(shown)) is not None:
            return found
    return ()


def _kinds(output: Sequence[Mapping[str, Any]], marks: _Marks) -> set[bool]:
    """Whether a row shows tool calls (True; the result of one tells as well), words (False), or both."""
    results = any(item.get("type", "message") not in ("message", "reasoning") for item in output)
    return {mark.is_call for mark in _spoken(marks)} | ({True} if results else set())


@dataclass(frozen=True, slots=True)
class _Shown:
    """What a row shows, and how many of it are its final output: none where a tool's result ends the row."""

    marks: _Marks
    ending: int

    @classmethod
    def of(cls, output: Sequence[Mapping[str, Any]]) -> _Shown:
        return cls(_marks(output), _ending(output))

    def without_thoughts(self) -> _Shown:
        spoken = len(_spoken(self.last))
        if not self.ending or spoken:
            return _Shown(_spoken(self.marks), spoken if self.ending else 0)
        return _Shown((), 0)

    @property
    def last(self) -> _Marks:
        """The final output; the last item that was said where a tool's result ends the row."""
        return self.marks[-max(1, self.ending) :]

    @property
    def before(self) -> _Marks:
        return self.marks[: -max(1, self.ending)]


def _ending(output: Sequence[Mapping[str, Any]]) -> int:
    """How many model-authored items are the final output; none where a tool's result ends it, which a later call read.

    What stands before a tool's result or a user's turn is an earlier call's.
    """
    count = 0
    for item in reversed(output):
        if is_model_authored(item):
            count += 1
        elif count or item.get("type", "message") != "message":
            break
    return count


@dataclass(frozen=True, slots=True)
class _Sought:
    """What a conversation is asked for, of a rival or not, and the answers: is all before `end` above a call."""

    marks: _Marks
    of_rival: bool = True
    answers: dict[tuple[str, int], bool] = field(default_factory=dict)

    def is_said(self, mark: _Mark, at: int) -> bool:
        return mark.may_say(self.marks[at]) if self.of_rival else mark.says_among(self.marks[at])


class _Said:
    """What each call said, and all that was said in its conversation up to it.

    Tool calls, and words, are left out where a row shows none: whoever hands in words alone hides the turns without.
    `shows_calls` says which of the two it shows (False: words).
    """

    def __init__(self, evidence: Evidence, entries: Sequence[TokenEntry], shows_calls: set[bool]) -> None:
        def visible(marks: _Marks) -> _Marks:
            return tuple(mark for mark in marks if mark.is_thought or mark.is_call in shows_calls)

        self._calls = evidence.calls
        self._all = {call.id: _marks(call.entry.output_items) for call in evidence.calls.values()}
        self._marks = {call_id: visible(marks) for call_id, marks in self._all.items()}
        self._hides_some = {call_id for call_id, marks in self._all.items() if marks != self._marks[call_id]}
        aside = (entry for entry in entries if entry.model_call_id in evidence.aside)
        self._aside = [_marks(entry.output_items) for entry in aside]
        self._speaker: dict[str, str] = {}
        self._actor: dict[str, str] = {}
        self._length: dict[str, int] = {}
        self._unknown: dict[str, bool] = {}
        for call in evidence.calls.values():
            self._measure(call)

    def in_row(self, shown: _Shown) -> tuple[str, ...] | None:
        """The writer of a row; `()` where several may be, None where the row is nobody's as it stands."""
        last, whole = _Sought(shown.last), _Sought(shown.marks, of_rival=False)
        alike = [call for call in self._calls.values() if self._counts(call) and self._may_show(call, last)]
        writers = [call for call in alike if self._shows(call, shown, whole)]
        if not writers:
            return None
        if any(not _is_unread(call) for call in writers):
            alike, writers = ([call for call in each if not _is_unread(call)] for each in (alike, writers))
        first = writers[0]
        if any(not _spoken(marks) or any(mark.may_say(shown.last[-1]) for mark in marks) for marks in self._aside):
            return ()  # of a record that was set aside nobody knows the conversation
        rivals = self._rivals(first, alike, shown)
        if rivals:
            if self._reach(first, shown.marks) is None:
                return ()
            rest = _Sought(shown.marks[self._told_elsewhere(first, shown) :])
            if any(self._may_show(rival, rest) for rival in rivals):
                return ()
        return tuple(sorted(call.id for call in writers))

    def _counts(self, call: Call) -> bool:
        """Whether a call can be a conversation's last: one that neither sampled nor said anything leaves no trace."""
        return not call.is_empty or self._speaks(call.id)

    def _speaks(self, call_id: str) -> bool:
        return bool(_spoken(self._marks[call_id]))

    def _shows(self, call: Call, shown: _Shown, whole: _Sought) -> bool:
        """Whether this call said the final output and no more, and all that the row shows is its conversation."""
        if call.id in self._hides_some:  # it went on, or was out of steps
            return False
        if not shown.ending:  # whoever read the tool's result spoke last, and that is not in the row
            return self._reach(call, shown.marks) == "whole"
        return self._reach(call, shown.last) is not None and self._may_show(call, whole)

    def _rivals(self, first: Call, alike: list[Call], shown: _Shown) -> list[Call]:
        """Other calls that may have said the row's last words.

        Calls of its own conversation that came before and only said something longer are none.
        """
        others = [call for call in alike if _sample(call) != _sample(first)]
        if not others:
            return []
        kin = {call.id for call in first.path()}
        return [call for call in others if call.id not in kin or self._reach(call, shown.last) is not None]

    def _told_elsewhere(self, first: Call, shown: _Shown) -> int:
        """How much of a row's beginning others said too, so that it may be what stood before a compaction."""
        own = {call.id for call in first.path()}
        told = [*self._aside, *(marks for call_id, marks in self._marks.items() if call_id not in own)]
        others = {mark for marks in told for mark in marks}
        for at, wanted in enumerate(shown.before):
            if wanted not in others and not any(mark.may_say(wanted) for mark in others):
                return at
        return len(shown.before)

    def _may_show(self, call: Call, sought: _Sought) -> bool:
        """Whether a row of this call's conversation may show this, with anything left out and items cut down.

        The call itself said the last of it, or nobody else after that, or it may stand in what the row does not show.
        What stands before a boundary may be anything, and so may what was said where the row hides what was done.
        """
        end = len(sought.marks)
        if not any(sought.is_said(mark, -1) for mark in self._marks[self._speaker[call.id]]):
            if not sought.of_rival or not self._may_end_unseen(call, sought.marks[-1]):
                return False
            if self._actor[call.id] in self._hides_some:
                return True
            end -= 1
        if self._unknown[call.id] or end == 0:
            return True
        return self._length[call.id] >= end and self._is_above(call, sought, end)

    def _may_end_unseen(self, call: Call, last: _Mark) -> bool:
        """Whether a conversation may end with these words though no turn in the row's sight says them.

        They may be an argument of its last call or, where a call was nothing else, a thought. Whoever said nothing, or
        did last what the row hides, may have said anything.
        """
        actor = self._actor[call.id]
        unseen = [*_spoken(self._all[actor]), *(() if _spoken(self._all[call.id]) else self._all[call.id])]
        if any(mark.may_hold(last) for mark in unseen):
            return True
        return not call.children and (not self._speaks(self._speaker[call.id]) or actor in self._hides_some)

    def _is_above(self, call: Call, sought: _Sought, end: int) -> bool:
        """Whether the first `end` of this stand in order in what was said up to the end of this call."""
        passed, found = [], False
        for each in _upwards(call):
            if (each.id, end) in sought.answers:
                found = sought.answers[each.id, end]
                break
            passed.append((each.id, end))
            for mark in reversed(self._marks[each.id]):
                if end and sought.is_said(mark, end - 1):
                    end -= 1
            if end == 0:
                found = True
                break
        sought.answers.update(dict.fromkeys(passed, found))
        return found

    def _reach(self, call: Call, wanted: _Marks) -> Literal["whole", "part"] | None:
        """Whether this is what was said up to the end of this call, all of it or its end; thoughts may be left out."""
        at = len(wanted)
        if self._length[call.id] < at:
            return None
        for each in _upwards(call):
            for mark in reversed(self._marks[each.id]):
                if at and mark.says(wanted[at - 1]):
                    at -= 1
                elif not mark.is_thought:
                    return "part" if at == 0 and each.id != self._speaker[call.id] else None
        if at:
            return None
        return "part" if self._unknown[call.id] else "whole"

    def _measure(self, call: Call) -> None:
        """Note who spoke last up to a call, how many items were said, and whether a boundary hides what came before."""
        trail = []
        for each in _upwards(call):
            if each.id in self._length:
                break
            trail.append(each)
        for each in reversed(trail):
            before = each.parent
            self._speaker[each.id] = self._speaker[before.id] if before and not self._speaks(each.id) else each.id
            acts = bool(_spoken(self._all[each.id]))
            self._actor[each.id] = self._actor[before.id] if before and not acts else each.id
            self._length[each.id] = len(self._marks[each.id]) + (self._length[before.id] if before else 0)
            self._unknown[each.id] = any(each.faults_here()) or (self._unknown[before.id] if before else False)


def _upwards(call: Call) -> Iterator[Call]:
    """A call, the one that it continues, and so on."""
    at: Call | None = call
    while at is not None:
        yield at
        at = at.parent


def _is_unread(call: Call) -> bool:
    """Whether a call's client had gone and nobody continued it: its agent never saw what it said."""
    return call.entry.client_gone and not call.extended


def _sample(call: Call) -> tuple[int, str]:
    """What a call sampled and after what, by ids: equal for calls that are one to a trainer."""
    return call.prompt_len, call.digest()


def _marks(items: Sequence[Mapping[str, Any]]) -> _Marks:
    found = []
    for item in items:
        for mark in item_digests([item]):
            words = _words(item)
            texts = _values(item) if words is None else [words, *(_values({"": words}) if words[:1] in "{[" else ())]
            found.append(_Mark(content_of(mark), words, tuple(texts), tuple(map(_plain, texts))))
    return tuple(found)


def _spoken(marks: _Marks) -> _Marks:
    return tuple(mark for mark in marks if not mark.is_thought)


def _words(item: Mapping[str, Any]) -> str | None:
    """The words of a message or a thought, each blank one space; None where it is or holds anything else."""
    if item.get("type", "message") not in ("message", "reasoning"):
        return None
    content = item.get("content") or item.get("summary")
    parts = content if isinstance(content, list | tuple) else [content]
    texts = [part.get("text") or part.get("refusal") if isinstance(part, Mapping) else part for part in parts]
    words = [text for text in texts if isinstance(text, str)]
    return " ".join("".join(words).split()) if len(words) == len(texts) else None


def _values(item: Mapping[str, Any]) -> list[str]:
    """All strings and numbers in an item, those in the JSON of its arguments too."""
    pending: list[Any] = [value for name, value in item.items() if name not in ("type", "id", "call_id", "name")]
    found = []
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            try:
                inner = json.loads(value) if value[:1] in ("{", "[") else value
            except (ValueError, RecursionError):
                inner = value
            if isinstance(inner, str):
                found.append(" ".join(inner.split()))
            else:
                pending.append(inner)
        elif isinstance(value, Mapping):
            pending.extend(value.values())
        elif isinstance(value, list | tuple):
            pending.extend(value)
        elif value is not None:
            found.append(str(value))
    return found


def _plain(text: str) -> str:
    """Letters and digits alone, without case: what is left of words however a harness normalises them."""
    return _SIGNS.sub("", unicodedata.normalize("NFKC", text).casefold())


def _is_among(words: str, text: str) -> bool:
    """Whether `words` may be cut out of `text`: anywhere, for scripts without blanks and harnesses that cut by length.

    A number is not cut out of a longer one: 4 is not in 14.
    """
    at = text.find(words)
    for _ in range(64):  # repeated without end such a text may hold anything, and is searched for seconds
        if at < 0:
            return False
        before, after = text[max(0, at - 1) : at], text[at + len(words) : at + len(words) + 1]
        longer_before = before.isdecimal() and words[:1].isdecimal()
        if not longer_before and not (after.isdecimal() and words[-1:].isdecimal()):
            return True
        at = text.find(words, at + 1)
    return True
