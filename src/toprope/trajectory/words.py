"""What calls said, as rows may show it: told exactly of the writer of a row, and with lenience of its rivals.

Whoever hands in a row cuts answers out of sentences, tags and JSON, writes numbers and signs anew, and shows tool
calls as a framework parsed them. So what may be read into a rival is wide, and what makes a writer is narrow. Pure;
which call is which is decided in `content`.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeAlias

from toprope.tokens.items import THOUGHT, content_of, item_digests

_APART = "\0"
"""Stands between texts that are searched as one; no part is found across it."""
_POINT = "ˑ"
"""The decimal point where signs are dropped: a letter, and in no text."""
_SIGNS = re.compile(rf"(?:[^\w{_APART}]|_)+")
_ASCII_SIGNS = bytes(each for each in range(1, 128) if not chr(each).isalnum())
_NUMBER = re.compile(
    r"(?:\d{1,2}(?:,\d\d)+,\d{3}(?!\d)(?:\.\d+)?"  # as in India: 1,40,000.5
    r"|\d+(?:[.,'’ ]\d{3}(?!\d))*(?:[.,]\d+)?"
    r"|(?<!\d)[.,]\d+)"  # after a digit it is the next number's, or a second fraction
    r"(?:e[+-]?\d{1,2}(?!\w))?"
)
_DIGIT = re.compile(r"(?![0-9])\d")
_MARKS = str.maketrans("٫٬", ".,")
"""The decimal point and the separator of thousands that go with Arabic digits."""
_FOLDED = str.maketrans(
    {
        **dict.fromkeys("‐‑‒–—―−﹘", "-"),
        **dict.fromkeys("‘’‚‛′`´", "'"),
        **dict.fromkeys("“”„‟″«»", '"'),
        "\N{VARIATION SELECTOR-16}": None,
    }
)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_TAG = re.compile(rf"<[^<>{_APART}]{{1,200}}>")
_CUT = ("...", "…")
_SHORT = 3
"""Letters of a word that stands in too many others, once its case is gone, to be cut out of the middle of one."""
_TRIES = 256
"""Places that are looked at: repeated without end, such a text may hold anything, and is searched for seconds."""


@dataclass(frozen=True, eq=False)
class _Letters:
    """Letters and digits of a text alone, without case and accents, and what was between them."""

    source: str

    @cached_property
    def text(self) -> str:
        if self.source.isascii():  # ten times as fast
            return self.source.encode().translate(None, _ASCII_SIGNS).decode()
        return _SIGNS.sub("", self.source)

    @cached_property
    def gaps(self) -> frozenset[int]:
        """The places in `text` before which signs or blanks were left out."""
        return frozenset(accumulate(map(len, _SIGNS.split(self.source))))

    def hold(self, part: str, *, was_cut: bool) -> bool:
        """Whether `part`, letters too, may be cut out of this: not of a longer number nor, if short, of a word.

        One that was cut by its length ends anywhere.
        """
        if not part:
            return False
        if len(part) > _SHORT and not part[0].isdecimal() and (was_cut or not part[-1].isdecimal()):
            return part in self.text
        at = self.text.find(part)
        for _ in range(_TRIES):
            if at < 0:
                return False
            edges = (at,) if was_cut else (at, at + len(part))
            if not any(self._is_inside(edge, len(part) <= _SHORT) for edge in edges):
                return True
            at = self.text.find(part, at + 1)
        return True

    def _is_inside(self, edge: int, short: bool) -> bool:
        """Whether an edge is inside a number or, where the part is short, a word of a script that has case."""
        if not 0 < edge < len(self.text):
            return False
        before, after = self.text[edge - 1], self.text[edge]
        one_number = before.isdecimal() and after.isdecimal()
        one_word = short and before.upper() != before and after.upper() != after
        return (one_number or one_word) and edge not in self.gaps


@dataclass(frozen=True, eq=False)
class Text:
    """A text with one space for each blank, and what it may be once undone and normalised.

    `was_cut` says that whoever showed it cut it by its length.
    """

    raw: str
    was_cut: bool = False

    @cached_property
    def _letters(self) -> _Letters:
        return _Letters(unicodedata.normalize("NFKD", self.raw).casefold())  # accents become signs

    @cached_property
    def _signs(self) -> str:
        """All of it without blanks, with one kind of dashes and quotes: for answers that have no letters."""
        return "".join(unicodedata.normalize("NFKC", self.raw.translate(_FOLDED)).split())

    @cached_property
    def _numbered(self) -> tuple[_Letters, ...]:
        """The letters as they are and, if that differs, with numbers written one way."""
        source = self._letters.source
        if not source.isascii():
            source = _DIGIT.sub(lambda found: str(unicodedata.decimal(found[0])), source).translate(_MARKS)
        numbered = _NUMBER.sub(_number, source)
        return (self._letters,) if numbered == self._letters.source else (self._letters, _Letters(numbered))

    @cached_property
    def _undone(self) -> tuple[Text, ...]:
        """The same without the escapes of JSON (twice: JSON in JSON), and then without tags and entities."""
        found = [self.raw]
        for undo in (_unescaped, _unescaped, html.unescape, lambda text: _TAG.sub(" ", text)):
            if (undone := undo(found[-1])) != found[-1]:
                found.append(undone)
        return (self, *map(Text, found[1:]))

    def may_hold(self, part: Text) -> bool:
        """Whether `part` may be cut out of this, however it was quoted here and normalised there."""
        if _is_among(part.raw, self.raw):
            return True
        parts = {letters.text for text in part._undone for letters in text._numbered}
        signs = {text._signs for text in part._undone if not text._letters.text} - {""}
        has_numbers = any(map(str.isdecimal, part.raw))
        for text in self._undone:
            if any(each in text._signs for each in signs):
                return True
            for letters in text._numbered if has_numbers else (text._letters,):
                if any(letters.hold(each, was_cut=part.was_cut) for each in parts):
                    return True
        return False


@dataclass(frozen=True, eq=False)
class Mark:
    """One model-authored item: `key` is equal for items that say the same; its words where it is words alone.

    Agents strip blanks and renumber ids, so that neither tells items apart. `text` is all that a harness may cut an
    answer out of: words, or what stands in the arguments of a call (many agents end with a tool that takes the
    answer). `name` is a call's.
    """

    key: tuple[bool, str | None, str]
    words: str | None
    text: Text
    name: str
    _may_be: dict[Mark, bool] = field(default_factory=dict)

    @property
    def is_thought(self) -> bool:
        return self.key[0]

    @property
    def is_call(self) -> bool:
        return bool(self.name)

    @property
    def is_picture(self) -> bool:
        """Whether it is a message, or a thought, that holds more than words."""
        return self.words is None and not self.is_call

    def says_among(self, shown: Mark) -> bool:
        """Whether a row that hands in a part of this shows that: tags are cut off, an answer is cut out."""
        if self.key == shown.key:
            return True
        if self.words is None or shown.words is None or self.is_thought != shown.is_thought:
            return False
        return _is_among(shown.words, self.words)

    def may_say(self, shown: Mark) -> bool:
        """The same of a rival, of whom more is believed: it is read with lenience, and calls by their names alone."""
        if self.is_thought != shown.is_thought:
            return False
        if self.key == shown.key:
            return True
        if shown.is_call:
            return self.is_call and _may_be_called(self.name, shown.name)
        return self.may_hold(shown)

    def may_hold(self, shown: Mark) -> bool:
        """Whether the words of that stand anywhere in this, in a thought too; pictures beside them are not compared."""
        found = shown._may_be.get(self)
        if found is None:
            found = self.is_picture and shown.is_picture
            if shown.words is not None:
                found = self.text.may_hold(shown.cut)
            shown._may_be[self] = found
        return found

    @cached_property
    def cut(self) -> Text:
        """Its words without the dots of whoever cut them by length."""
        words = self.words or ""
        for dots in _CUT:
            words = words.removesuffix(dots)
        return Text(words.rstrip(), words != self.words)


Marks: TypeAlias = tuple[Mark, ...]


class Heap:
    """Many marks at once: whether any of them may say what a row shows, in a time that does not grow with each."""

    def __init__(self, marks: Iterable[Mark]) -> None:
        held = set(marks)
        self._keys = {mark.key for mark in held}
        self._names = {mark.name for mark in held if mark.is_call}
        texts = {of: [mark.text.raw for mark in held if mark.is_thought == of] for of in (False, True)}
        self._texts = {of: Text(_APART.join(sorted(each))) for of, each in texts.items()}
        self._pictures = {mark.is_thought for mark in held if mark.is_picture}
        self._found: dict[Mark, bool] = {}

    def may_say(self, shown: Mark) -> bool:
        if shown not in self._found:
            self._found[shown] = self._may_say(shown)
        return self._found[shown]

    def _may_say(self, shown: Mark) -> bool:
        if shown.key in self._keys:
            return True
        if shown.is_call:
            return any(_may_be_called(name, shown.name) for name in self._names)
        if shown.words is None:
            return shown.is_thought in self._pictures
        return self._texts[shown.is_thought].may_hold(shown.cut)


class MarkReader:
    """Reads the marks of items. Items that say the same have one mark, so that they are compared once."""

    def __init__(self) -> None:
        self._marks: dict[tuple[str, str | None, str, str], Mark] = {}

    def marks(self, items: Sequence[Mapping[str, Any]]) -> Marks:
        """One for each model-authored item, in order. Raises TypeError, ValueError or RecursionError on nonsense."""
        return tuple(self._mark(digest, item) for item in items for digest in item_digests([item]))

    def _mark(self, digest: str, item: Mapping[str, Any]) -> Mark:
        content, words = content_of(digest), _words(item)
        text = _APART.join(_values(item)) if words is None else words
        name = "" if content.startswith(("message:", THOUGHT)) else _name(item)
        held = self._marks.get((content, words, text, name))
        if held is None:
            key = (content.startswith(THOUGHT), words, content if words is None else "")
            held = self._marks[content, words, text, name] = Mark(key, words, Text(text), name)
        return held


@dataclass(frozen=True, slots=True)
class Joined:
    """Words of several items as one: how a harness shows a reply in parts, or one that was cut and went on.

    `wholes` are they joined with a blank and without.
    """

    parts: Marks
    wholes: Marks

    @classmethod
    def of(cls, parts: Marks, reader: MarkReader) -> Joined | None:
        """None where there is nothing to join."""
        if len(parts) < 2:
            return None
        texts = (between.join(mark.words or "" for mark in parts) for between in (" ", ""))
        return cls(parts, reader.marks([{"type": "message", "content": text} for text in texts]))

    def may_say(self, shown: Mark) -> bool:
        """Whether only the whole may: what one part may say is no more the whole's."""
        if shown.words is None or not any(mark.may_say(shown) for mark in self.wholes):
            return False
        return not any(mark.may_say(shown) for mark in self.parts)


def spoken(marks: Marks) -> Marks:
    """The marks without thoughts."""
    return tuple(mark for mark in marks if not mark.is_thought)


def _words(item: Mapping[str, Any]) -> str | None:
    """The words of a message or a thought, each blank one space; None where it is or holds anything else."""
    if item.get("type", "message") not in ("message", "reasoning"):
        return None
    content = item.get("content") or item.get("summary")
    parts = content if isinstance(content, list | tuple) else [content]
    texts = [_text_of(part) if isinstance(part, Mapping) else part for part in parts]
    words = [text for text in texts if isinstance(text, str)]
    return " ".join("".join(words).split()) if len(words) == len(texts) else None


def _text_of(part: Mapping[str, Any]) -> Any:
    return part.get("text") or part.get("refusal") or part.get("text")


def _values(item: Mapping[str, Any]) -> list[str]:
    """All strings and numbers in an item: JSON in its arguments as it stands there."""
    pending: list[Any] = [value for name, value in item.items() if name not in ("type", "id", "call_id", "name")]
    found = []
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            pending.extend(value.values())
        elif isinstance(value, list | tuple):
            pending.extend(value)
        elif value is not None:
            found.append(" ".join(str(value).split()))
    return found


def _name(item: Mapping[str, Any]) -> str:
    """The name of a call in small letters and digits, or its kind's: never empty."""
    name = item.get("name") or str(item.get("type", "")).removesuffix("_call")
    return _SIGNS.sub("", str(name).casefold()) or "?"


def _may_be_called(name: str, shown: str) -> bool:
    """Whether a row may show a call under that name: without the prefix of a server, or with one."""
    return name.endswith(shown) or shown.endswith(name)


def _number(found: re.Match[str]) -> str:
    """A number without separators, zeros before it and zeros at the end of its fraction.

    The last separator is a decimal point wherever it may be one; that it separates thousands is what `_Letters` of
    the text as it stands read into it.
    """
    text, _, power = found[0].partition("e")
    marks = _SIGNS.findall(text)
    whole, fraction = text, ""
    if marks and marks[-1] in ".," and marks.count(marks[-1]) == 1:
        whole, _, fraction = text.rpartition(marks[-1])
    whole = _SIGNS.sub("", whole)
    if power:
        digits, point = whole + fraction, len(whole) + int(power)
        whole, fraction = digits[: max(0, point)].ljust(point, "0"), "0" * -point + digits[max(0, point) :]
    whole, fraction = whole.lstrip("0"), fraction.rstrip("0")
    return f"{whole}{_POINT}{fraction}" if fraction else whole or "0"


def _unescaped(text: str) -> str:
    """`text` as it is once read as the inside of a JSON string."""
    if "\\" not in text:
        return text
    undone = _ESCAPE.sub(lambda found: chr(int(found[1], 16)) if found[1] else _ESCAPED.get(found[2], found[2]), text)
    return undone.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # pairs become one character


def _is_among(words: str, text: str) -> bool:
    """Whether `words` may be cut out of `text`: anywhere, for scripts without blanks and harnesses that cut by length.

    A number is not cut out of a longer one: 4 is not in 14.
    """
    at = text.find(words)
    for _ in range(_TRIES):
        if at < 0:
            return False
        before, after = text[max(0, at - 1) : at], text[at + len(words) : at + len(words) + 1]
        longer_before = before.isdecimal() and words[:1].isdecimal()
        if not longer_before and not (after.isdecimal() and words[-1:].isdecimal()):
            return True
        at = text.find(words, at + 1)
    return True
