"""Which call wrote the final output of a row, by what calls said and rows show. The weakest witness of step 6.

Sub-agents say what the main agent says, harnesses strip what they hand in, and a conversation that was compacted goes
on under a new first call. So a call is named only where every other reading of the row fails; else this is silent,
and what is left decides. Only verified evidence is read: what a record claims of its parent counts for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from toprope.tokens.entry import TokenEntry
from toprope.tokens.items import is_model_authored
from toprope.trajectory.evidence import Call, Evidence
from toprope.trajectory.words import Heap, Joined, Mark, MarkReader, Marks, spoken


@dataclass(frozen=True, slots=True)
class Reading:
    """What a row tells of its last call.

    `writers` are the calls (one, or several with equal ids) that wrote its final output; none where that is not
    certain. `unread` are calls that may have written it though their clients had gone: a harness that closes a stream
    at its stop mark has read the reply. `read_too` says that a call that was read may have written it as well.
    """

    writers: tuple[str, ...] = ()
    unread: frozenset[str] = frozenset()
    read_too: bool = False


def written_by(evidence: Evidence, entries: Sequence[TokenEntry], output: Any) -> tuple[str, ...]:
    """The calls that wrote the row's final output; none where that is not certain."""
    return read_row(evidence, entries, output).writers


def read_row(evidence: Evidence, entries: Sequence[TokenEntry], output: Any) -> Reading:
    """What the final output of a row tells of its last call.

    What a row shows before its final output must be its writer's own conversation; no other call may be read as the
    writer. A call that said the same may be one whose conversation shows all of this too, or goes on after a
    compaction from what others said, or has a history that nobody knows. Thoughts may be left out of a row, and
    those that no call had were written anew by the agent; both count for nothing. An output that cannot be read (kinds
    that are no strings, nesting beyond all measure) tells nothing.
    """
    try:
        return _read_row(evidence, entries, output)
    except (TypeError, ValueError, RecursionError):
        return Reading()


def _read_row(evidence: Evidence, entries: Sequence[TokenEntry], output: Any) -> Reading:
    if not isinstance(output, list) or not all(isinstance(item, Mapping) for item in output):
        return Reading()
    reader = MarkReader()
    whole = _Shown.of(output, reader)
    said = _Said(evidence, entries, _kinds(output, whole.marks), reader)
    for shown in (whole, whole.without_thoughts()):
        if shown.marks and (found := said.in_row(shown)) is not None:
            return Reading(found, frozenset(said.unread), said.read_too)
    return Reading((), frozenset(said.unread), said.read_too)


def _kinds(output: Sequence[Mapping[str, Any]], marks: Marks) -> set[bool]:
    """Whether a row shows tool calls (True; the result of one tells as well), words (False), or both."""
    results = any(item.get("type", "message") not in ("message", "reasoning") for item in output)
    return {mark.is_call for mark in spoken(marks)} | ({True} if results else set())


@dataclass(frozen=True)
class _Shown:
    """What a row shows, and how many of it are its final output: none where a tool's result ends the row."""

    marks: Marks
    ending: int

    @classmethod
    def of(cls, output: Sequence[Mapping[str, Any]], reader: MarkReader) -> _Shown:
        return cls(reader.marks(output), _ending(output))

    def without_thoughts(self) -> _Shown:
        words = len(spoken(self.last))
        if not self.ending or words:
            return _Shown(spoken(self.marks), words if self.ending else 0)
        return _Shown((), 0)

    @cached_property
    def final(self) -> _Ending:
        return _Ending(self.last)

    @cached_property
    def transcript(self) -> _Ending:
        return _Ending(self.marks)

    @property
    def last(self) -> Marks:
        """The final output; the last item that was said where a tool's result ends the row."""
        return self.marks[-max(1, self.ending) :]

    @property
    def before(self) -> Marks:
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
    """What a conversation is asked for, of a rival or not; `told` is how many of it, from the first, a call's tells."""

    marks: Marks
    of_rival: bool = True
    told: dict[str, int] = field(default_factory=dict)

    def is_said(self, mark: Mark, at: int) -> bool:
        return mark.may_say(self.marks[at]) if self.of_rival else mark.says_among(self.marks[at])


class _Ending:
    """Marks that conversations may end with: `held` is how many of them, from the first and without thoughts, each
    call's ends with.

    Each mark of a conversation is looked at once, also where it repeats itself (the automaton of Knuth, Morris and
    Pratt).
    """

    def __init__(self, marks: Marks) -> None:
        self.marks = marks
        self.keys = [mark.key for mark in spoken(marks)]
        self.held: dict[str, int] = {}
        self._next: dict[tuple[int, Any], int] = {}
        self._shorter = [0] * (len(self.keys) + 1)
        at = 0
        for place in range(1, len(self.keys)):
            at = self.step(at, self.keys[place], below=place)
            self._shorter[place + 1] = at

    def step(self, at: int, key: Any, below: int | None = None) -> int:
        """How many stand at the end once this follows an end of `at` of them."""
        found = self._next.get((at, key)) if below is None else None
        if found is None:
            end, start = len(self.keys), at
            while at and (at == end or self.keys[at] != key):
                at = self._shorter[at]
            found = at + (at < end and self.keys[at] == key)
            if below is None:
                self._next[start, key] = found
        return found


class _Said:
    """What each call said, and all that was said in its conversation up to it.

    Tool calls, and words, are left out where a row shows none: whoever hands in words alone hides the turns without.
    `shows_calls` says which of the two it shows (False: words).
    """

    def __init__(
        self, evidence: Evidence, entries: Sequence[TokenEntry], shows_calls: set[bool], reader: MarkReader
    ) -> None:
        def visible(marks: Marks) -> Marks:
            return tuple(mark for mark in marks if mark.is_thought or mark.is_call in shows_calls)

        self._calls = evidence.calls
        self._all = {call.id: reader.marks(call.entry.output_items) for call in evidence.calls.values()}
        self._marks = {call_id: visible(marks) for call_id, marks in self._all.items()}
        self._joined = {call.id: self._joins(call, reader) for call in evidence.calls.values()}
        self._hides_some = {call_id for call_id, marks in self._all.items() if marks != self._marks[call_id]}
        aside = (entry for entry in entries if entry.model_call_id in evidence.aside)
        self._aside = [reader.marks(entry.output_items) for entry in aside]
        self._speaker: dict[str, str] = {}
        self._actor: dict[str, str] = {}
        self._length: dict[str, int] = {}
        self._words: dict[str, int] = {}
        self._unknown: dict[str, bool] = {}
        self._retried = _retried(self._calls.values()) | self._said_again()
        self.unread: set[str] = set()
        self.read_too = False
        for call in evidence.calls.values():
            self._measure(call)

    def _joins(self, call: Call, reader: MarkReader) -> tuple[Joined, ...]:
        """The words of a call as one, and behind those of the call above it where no tool's result is between."""
        own, above = _words_of(self._all[call.id]), call.parent
        before: Marks = ()
        if own and above is not None and not any(mark.is_call for mark in self._all[above.id]):
            before = _words_of(self._all[above.id])
        joined = [Joined.of(own, reader), Joined.of((*before, *own), reader) if before else None]
        return tuple(each for each in joined if each is not None)

    def _is_joined(self, call_id: str, sought: _Sought, at: int) -> bool:
        """Whether a rival may have said one of the things sought in several items."""
        return sought.of_rival and any(joined.may_say(sought.marks[at]) for joined in self._joined[call_id])

    def in_row(self, shown: _Shown) -> tuple[str, ...] | None:
        """The writer of a row; `()` where several may be, None where the row is nobody's as it stands."""
        last, whole = _Sought(shown.last), _Sought(shown.marks, of_rival=False)
        alike = [call for call in self._calls.values() if self._counts(call) and self._may_show(call, last)]
        holders = [call for call in self._calls.values() if self._holds(call, shown.marks[-1])]
        self.unread.update(call.id for call in holders if call.is_unread)
        self.read_too = self.read_too or not all(call.is_unread for call in holders)
        writers: list[Call] = []
        for call in alike:
            if self._shows(call, shown, whole):
                writers.append(call)
                if _sample(call) != _sample(writers[0]):
                    return ()
        if not writers:
            return None
        first = writers[0]
        if any(not spoken(marks) or any(mark.may_say(shown.last[-1]) for mark in marks) for marks in self._aside):
            return ()  # of a record that was set aside nobody knows the conversation
        rivals = self._rivals(first, alike, shown)
        if rivals:
            if self._reach(first, shown.transcript) is None:
                return ()
            rest = _Sought(shown.marks[self._told_elsewhere(first, shown) :])
            if any(self._may_show(rival, rest) for rival in rivals):
                return ()
        return tuple(sorted(call.id for call in writers))

    def _counts(self, call: Call) -> bool:
        """Whether a call can be a conversation's last: one that neither sampled nor said anything leaves no trace.

        One that nobody read and that was asked again is none.
        """
        return call.id not in self._retried and (not call.is_empty or self._speaks(call.id))

    def _said_again(self) -> set[str]:
        """The unread calls whose very words another said after the same call, and was read.

        A client that asks again may write the time, or a reminder, anew: then its prompt has other ids.
        """
        read = {self._answer(call) for call in self._calls.values() if not call.is_unread}
        return {call.id for call in self._calls.values() if call.is_unread and self._answer(call) in read - {None}}

    def _answer(self, call: Call) -> tuple[str, tuple[Any, ...]] | None:
        """What a call continues, and all that it said; None where it said nothing, or its history is not known."""
        said = tuple(mark.key for mark in spoken(self._all[call.id]))
        return (call.parent.id, said) if said and call.parent is not None else None

    def _holds(self, call: Call, last: Mark) -> bool:
        """Whether a call said this somewhere: how the harness of a client that had gone read it nobody knows."""
        if call.id in self._retried:
            return False
        if any(joined.may_say(last) for joined in self._joined[call.id]):
            return True
        return any(mark.may_say(last) or mark.may_hold(last) for mark in self._all[call.id])

    def _speaks(self, call_id: str) -> bool:
        return bool(spoken(self._marks[call_id]))

    def _shows(self, call: Call, shown: _Shown, whole: _Sought) -> bool:
        """Whether this call said the final output and no more, and all that the row shows is its conversation."""
        if call.id in self._hides_some:  # it went on, or was out of steps
            return False
        if not shown.ending:  # whoever read the tool's result spoke last, and that is not in the row
            return self._reach(call, shown.transcript) == "whole"
        return self._reach(call, shown.final) is not None and self._may_show(call, whole)

    def _rivals(self, first: Call, alike: list[Call], shown: _Shown) -> list[Call]:
        """Other calls that may have said the row's last words.

        Calls of its own conversation that came before and only said something longer are none.
        """
        others = [call for call in alike if _sample(call) != _sample(first)]
        if not others:
            return []
        kin = {call.id for call in first.path()}
        return [call for call in others if call.id not in kin or self._reach(call, shown.final) is not None]

    def _told_elsewhere(self, first: Call, shown: _Shown) -> int:
        """How much of a row's beginning others said too, so that it may be what stood before a compaction."""
        own = {call.id for call in first.path()}
        told = [*self._aside, *(marks for call_id, marks in self._marks.items() if call_id not in own)]
        told += [each.wholes for call_id, joined in self._joined.items() if call_id not in own for each in joined]
        others = Heap(mark for marks in told for mark in marks)
        for at, wanted in enumerate(shown.before):
            if not others.may_say(wanted):
                return at
        return len(shown.before)

    def _may_show(self, call: Call, sought: _Sought) -> bool:
        """Whether a row of this call's conversation may show this, with anything left out and items cut down.

        The call itself said the last of it, or nobody else after that, or it may stand in what the row does not show.
        What stands before a boundary may be anything, and so may what was said where the row hides what was done.
        """
        end = len(sought.marks)
        speaker = self._speaker[call.id]
        is_said = any(sought.is_said(mark, -1) for mark in self._marks[speaker])
        if not is_said and not self._is_joined(speaker, sought, -1):
            if not sought.of_rival or not self._may_end_unseen(call, sought.marks[-1]):
                return False
            if self._actor[call.id] in self._hides_some:
                return True
            end -= 1
        if self._unknown[call.id] or end == 0:
            return True
        return self._told(call, sought) >= end

    def _may_end_unseen(self, call: Call, last: Mark) -> bool:
        """Whether a conversation may end with these words though no turn in the row's sight says them.

        They may be an argument of its last call or, where a call was nothing else, a thought. Whoever said nothing, or
        did last what the row hides, may have said anything; not one whose client left once it had read the words.
        """
        actor = self._actor[call.id]
        unseen = [*spoken(self._all[actor]), *(() if spoken(self._all[call.id]) else self._all[call.id])]
        if any(mark.may_hold(last) for mark in unseen):
            return True
        if call.children or call.is_unread:
            return False
        return not self._speaks(self._speaker[call.id]) or actor in self._hides_some

    def _told(self, call: Call, sought: _Sought) -> int:
        """How many of these, from the first, stand in order in what was said up to the end of this call."""
        for each in _downwards(call, sought.told):
            at = sought.told[each.parent.id] if each.parent is not None else 0
            for mark in self._marks[each.id]:
                if at < len(sought.marks) and sought.is_said(mark, at):
                    at += 1
            if at < len(sought.marks) and self._is_joined(each.id, sought, at):
                at += 1
            sought.told[each.id] = at
        return sought.told[call.id]

    def _reach(self, call: Call, ending: _Ending) -> Literal["whole", "part"] | None:
        """Whether this is what was said up to the end of this call, all of it or its end; thoughts may be left out."""
        words = len(ending.keys)
        if self._length[call.id] < len(ending.marks) or self._ends_with(call, ending) < words:
            return None
        if words < len(ending.marks) and not self._holds_thoughts(call, ending.marks):
            return None
        if self._words[call.id] == words:
            return "part" if self._unknown[call.id] else "whole"
        return "part" if len(spoken(self._marks[self._speaker[call.id]])) <= words else None

    def _ends_with(self, call: Call, ending: _Ending) -> int:
        """How many of the words and tool calls of this, from the first, end this conversation."""
        for each in _downwards(call, ending.held):
            at = ending.held[each.parent.id] if each.parent is not None else 0
            for mark in spoken(self._marks[each.id]):
                at = ending.step(at, mark.key)
            ending.held[each.id] = at
        return ending.held[call.id]

    def _holds_thoughts(self, call: Call, wanted: Marks) -> bool:
        """Whether the thoughts of a row stand where the row has them, between words that are this conversation's."""
        at = len(wanted)
        for each in _upwards(call):
            for mark in reversed(self._marks[each.id]):
                if at and mark.key == wanted[at - 1].key:
                    at -= 1
                elif not mark.is_thought:
                    return at == 0
        return at == 0

    def _measure(self, call: Call) -> None:
        """Note who spoke last up to a call, how many items were said, and whether a boundary hides what came before."""
        for each in _downwards(call, self._length):
            before = each.parent
            self._speaker[each.id] = self._speaker[before.id] if before and not self._speaks(each.id) else each.id
            acts = bool(spoken(self._all[each.id]))
            self._actor[each.id] = self._actor[before.id] if before and not acts else each.id
            self._length[each.id] = len(self._marks[each.id]) + (self._length[before.id] if before else 0)
            words = len(spoken(self._marks[each.id]))
            self._words[each.id] = words + (self._words[before.id] if before else 0)
            self._unknown[each.id] = any(each.faults_here()) or (self._unknown[before.id] if before else False)


def _words_of(marks: Marks) -> Marks:
    return tuple(mark for mark in spoken(marks) if mark.words)


def _upwards(call: Call) -> Iterator[Call]:
    """A call, the one that it continues, and so on."""
    at: Call | None = call
    while at is not None:
        yield at
        at = at.parent


def _downwards(call: Call, known: Mapping[str, Any]) -> list[Call]:
    """A call and those above it that are not known yet, the first of them first."""
    trail: list[Call] = []
    for each in _upwards(call):
        if each.id in known:
            break
        trail.append(each)
    return trail[::-1]


def _retried(calls: Iterable[Call]) -> set[str]:
    """The unread calls whose request was sent again, and read: it was not their words that were used."""
    unread = [call for call in calls if call.is_unread and call.fault is None]
    if not unread:
        return set()
    asked = {_asked(call) for call in calls if call.fault is None and not call.is_unread}
    return {call.id for call in unread if _asked(call) in asked}


def _asked(call: Call) -> tuple[str | None, bytes]:
    """What a call continues, and its prompt after that."""
    return call.parent.id if call.parent is not None else None, call.lead.tobytes()


def _sample(call: Call) -> tuple[int, str]:
    """What a call sampled and after what, by ids: equal for calls that are one to a trainer."""
    return call.prompt_len, call.digest()
