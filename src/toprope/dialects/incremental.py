"""Requests read as what they add to the one before them, so that a deep turn costs what a first one does. Pure.

An agent sends its whole conversation with every call. `RequestMemory` keeps the text of a conversation's last request.
Where the next one begins with the same bytes up to the end of the last message, those messages are not parsed,
converted or judged again: one memory compare, then a parse of the rest. What comes out is what a plain reading gives:

    {"model":"m","messages":[{...},{...}       ,{...}],"tools":[...]}
    ^ head                  ^start      cut ^  ^ what is new
    parsed is               {"model":"m","messages":["<nonce>"  ,{...}],"tools":[...]}

Equal bytes bring a parser to an equal state, so the text with one string in place of the known messages parses exactly
where the whole text does. The string is drawn at random; that it comes out first of the history proves that this array
is the history, and not one of the same name elsewhere or written over later in the text. What fails in any way is read
plainly, so errors are those of a plain reading. Left to others: what is known of items beside their form (`carry`).
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec
import numpy as np

from toprope.canonical.digest import digest_bytes, hash_on
from toprope.dialects.chat_history import items_from_messages
from toprope.dialects.chat_request import request_from_chat
from toprope.dialects.pivot import media_among
from toprope.dialects.responses import items_from_list, request_from_responses
from toprope.errors.tree import BadRequest
from toprope.wire.fields import read_object
from toprope.wire.responses import Item, ResponsesRequest

Carried = TypeVar("Carried")

_SMALL: Final = 4_096  # below this a plain reading takes no longer
_BRANCHES: Final = 4  # conversations that take turns within one rollout: an agent and a few sub-agents
_SPACE: Final = b" \t\r\n"
_object = msgspec.json.Decoder(dict[str, Any])
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _ToItems(Protocol):
    def __call__(self, entries: Sequence[Any], first: int, open_calls: list[str]) -> tuple[Item, ...]: ...


@dataclass(frozen=True, slots=True)
class _Form:
    """How a dialect's history is read: its field, its entries as items, the rest of the body round them."""

    field: str
    to_items: _ToItems
    request: Callable[[Mapping[str, Any], tuple[Item, ...] | None], ResponsesRequest]


_FORMS: Mapping[str, _Form] = {
    "chat": _Form(
        "messages",
        lambda entries, first, open_calls: items_from_messages(entries, first=first, open_calls=open_calls),
        request_from_chat,
    ),
    "responses": _Form("input", lambda entries, first, _: items_from_list(entries, first), request_from_responses),
}
"""The dialects whose history grows at its end. Others are read by the reader that the caller gives."""


class _Grown:
    """A list that shares its beginning with the list that it continues, and is made whole when somebody looks."""

    __slots__ = ("_before", "_own", "count")

    def __init__(self, own: Sequence[Any], before: _Grown | None = None) -> None:
        self._own, self._before = tuple(own), before
        self.count: int = len(self._own) + (before.count if before is not None else 0)

    def all(self) -> tuple[Any, ...]:
        parts, at = [self._own], self._before
        while at is not None:
            parts.append(at._own)
            at = at._before
        if len(parts) > 1:  # the longest part first: it is copied once
            self._own = parts[-1] + tuple(each for part in reversed(parts[:-1]) for each in part)
            self._before = None
        return self._own


class ReadRequest(Generic[Carried]):
    """A request that was read.

    `settings` is the pivot with the items that are new in `input`, `request` with all of them, `body` what the client
    sent; the latter two take time with the conversation's length and are made when first asked for. Messages and items
    in them are read-only: the next request shares them. `digest` is the SHA-256 of the body's bytes, `media` whether
    any item holds an image, sound or file, `carried` what `carry` made of the items; None where nothing is remembered
    (a short request, nobody's, or one of a dialect or text that is read plainly).
    """

    def __init__(
        self,
        settings: ResponsesRequest,
        digest: str,
        *,
        media: bool,
        carried: Carried | None = None,
        body: dict[str, Any],
        history: tuple[str, _Grown, _Grown] | None = None,
    ) -> None:
        """`history` is the name of the body's field that is to hold the whole history, its entries and their items."""
        self.settings, self.digest, self.media, self.carried = settings, digest, media, carried
        self._body, self._history = body, history

    @cached_property
    def request(self) -> ResponsesRequest:
        """The whole pivot."""
        return self.settings if self._history is None else replace(self.settings, input=self._history[2].all())

    @cached_property
    def body(self) -> dict[str, Any]:
        """The whole body as it was sent, keys in its order."""
        if self._history is not None:
            field, entries, _ = self._history
            self._body[field] = list(entries.all())
        return self._body


@dataclass(frozen=True, slots=True)
class _Known(Generic[Carried]):
    """A request that may be continued: its history stands in `text[start:cut]`.

    `text` is this conversation's own and grows with it, so that no body outlives its request: at a megabyte a call, to
    give memory back and to take it again costs as much as the comparison.
    """

    text: bytearray
    start: int
    cut: int
    hashed: Any  # SHA-256 of text[:cut]
    entries: _Grown
    items: _Grown
    open_calls: tuple[str, ...]
    media: bool
    carried: Carried

    def begins(self, data: bytes) -> bool:
        """Whether `data` holds this history, byte for byte, where it stands here."""
        cut, last = self.cut, slice(max(self.cut - 32, 0), self.cut)
        if data[last] != self.text[last]:
            return False  # the last bytes tell most conversations apart
        with memoryview(self.text) as whole, whole[:cut] as history:  # a view is not copied
            return data.startswith(history)


class RequestMemory(Generic[Carried]):
    """Reads requests, those of a known conversation by what they add.

    `carry(before, items)` makes what is known of a conversation from what was known of its beginning (None: nothing)
    and the items that came. `max_bytes` bounds the request texts that are held (their parsed values take some times
    that); the conversations not used for longest are forgotten, which costs time and nothing else.
    """

    def __init__(
        self, carry: Callable[[Carried | None, Sequence[Item]], Carried], *, max_bytes: int = 16 << 20
    ) -> None:
        self._carry = carry
        self._max_bytes = max_bytes
        self._bytes = 0
        self._known: OrderedDict[tuple[str, str], list[_Known[Carried]]] = OrderedDict()
        self._nonce = secrets.token_hex(16)

    @property
    def held_bytes(self) -> int:
        """The request texts that are held now."""
        return self._bytes

    def read(
        self,
        dialect: str,
        key: str | None,
        data: bytes,
        plainly: Callable[[dict[str, Any]], ResponsesRequest] | None = None,
    ) -> ReadRequest[Carried]:
        """The request in `data`; `key` names whose conversations it may continue (None: nobody's).

        `plainly` reads a dialect whose history is not known here to grow at its end. Raises `BadRequest` (400).
        """
        form = _FORMS.get(dialect)
        if form is None or plainly is not None:
            return self._whole(data, plainly or _no_dialect(dialect))
        if key is None or len(data) < _SMALL:
            return self._whole(data, lambda body: form.request(body, None))
        place = (dialect, key)
        for known in sorted(self._known.get(place, ()), key=lambda each: each.cut, reverse=True):
            if known.begins(data):
                found = self._continued(form, known, place, data)
                if found is not None:
                    return found
        return self._first(form, place, data)

    # -- readings -----------------------------------------------------------------------------------------------

    @staticmethod
    def _whole(data: bytes, reader: Callable[[dict[str, Any]], ResponsesRequest]) -> ReadRequest[Carried]:
        body = read_object(data)
        request = reader(body)
        return ReadRequest(request, digest_bytes(data), media=media_among(request.input), body=body)

    def _first(self, form: _Form, place: tuple[str, str], data: bytes) -> ReadRequest[Carried]:
        """A plain reading, remembered where the fast parser reads it and its history is a list of objects."""
        try:
            body = _object.decode(data)
            entries, open_calls = body[form.field], list[str]()
            items = form.to_items(entries, 0, open_calls) if isinstance(entries, list) else ()
            start, cut = _spot(data, form.field)
        except (msgspec.DecodeError, RecursionError, KeyError, BadRequest):
            return self._whole(data, lambda body: form.request(body, None))
        request, media = form.request(body, items), media_among(items)
        hashed, carried = hashlib.sha256(), self._carry(None, items)
        hash_on(hashed, memoryview(data)[:cut])
        text = bytearray(memoryview(data)[:cut])
        known = _Known(text, start, cut, hashed, _Grown(entries), _Grown(items), tuple(open_calls), media, carried)
        self._remember(place, known)
        return ReadRequest(request, _and(hashed, data, cut), media=media, carried=carried, body=body)

    def _continued(
        self, form: _Form, known: _Known[Carried], place: tuple[str, str], data: bytes
    ) -> ReadRequest[Carried] | None:
        """The reading of `data`, which begins with `known`'s history; None where only a plain reading can tell."""
        stand_in = b'"' + self._nonce.encode() + b'"'
        short = b"".join((data[: known.start], stand_in, data[known.cut :]))
        try:
            body = _object.decode(short)
            entries = body[form.field]
            if not isinstance(entries, list) or not entries or entries[0] != self._nonce:
                return None
            added, open_calls = entries[1:], list(known.open_calls)
            items = form.to_items(added, known.entries.count, open_calls)
            _, end = _spot(short, form.field) if added else (0, known.start + len(stand_in))
            settings = form.request(body, items)
        except (msgspec.DecodeError, RecursionError, KeyError, BadRequest):
            return None
        cut = end - known.start - len(stand_in) + known.cut
        new = memoryview(data)[known.cut : cut]
        hashed = known.hashed.copy()
        hash_on(hashed, new)
        known.text[known.cut :] = new
        now = _Known(
            known.text,
            known.start,
            cut,
            hashed,
            _Grown(added, known.entries),
            _Grown(items, known.items),
            tuple(open_calls),
            known.media or media_among(items),
            self._carry(known.carried, items),
        )
        self._remember(place, now, instead_of=known)
        history = (form.field, now.entries, now.items)
        digest = _and(hashed, data, cut)
        return ReadRequest(settings, digest, media=now.media, carried=now.carried, body=body, history=history)

    # -- what is held -------------------------------------------------------------------------------------------

    def forget(self, key: str) -> None:
        """Let go of the conversations of `key`: a request that would continue one is read plainly."""
        for dialect in _FORMS:
            self._let_go((dialect, key))

    def _remember(
        self, place: tuple[str, str], known: _Known[Carried], *, instead_of: _Known[Carried] | None = None
    ) -> None:
        kept = [each for each in self._known.pop(place, []) if each is not instead_of]
        self._known[place] = [*kept, known]
        self._bytes += known.cut - (instead_of.cut if instead_of is not None else 0)
        while len(self._known[place]) > _BRANCHES:
            self._bytes -= self._known[place].pop(0).cut
        while self._bytes > self._max_bytes and self._known:
            self._let_go(next(iter(self._known)))

    def _let_go(self, place: tuple[str, str]) -> None:
        self._bytes -= sum(each.cut for each in self._known.pop(place, ()))


def _spot(text: bytes, field: str) -> tuple[int, int]:
    """Where the entries of the list under `field` begin in an object's text, and where the last of them ends.

    Of a name that stands twice the last counts, as for every parser here. Raises `KeyError` for what is no list that
    ends with an object.
    """
    raw = memoryview(_fields.decode(text)[field])
    start = _address(raw) - _address(text)
    end = start + len(raw) - 1
    if not 0 <= start < end < len(text) or text[start] != ord("[") or text[end] != ord("]"):
        raise KeyError(field)
    while text[end - 1] in _SPACE:
        end -= 1
    if text[end - 1] != ord("}"):
        raise KeyError(field)
    return start + 1, end


def _address(data: bytes | memoryview) -> int:
    address: int = np.frombuffer(data, dtype=np.uint8).__array_interface__["data"][0]
    return address


def _and(hashed: Any, data: bytes, cut: int) -> str:
    """The digest of all of `data`; `hashed` is the hash of its first `cut` bytes and stays so."""
    whole = hashed.copy()
    hash_on(whole, memoryview(data)[cut:])
    return str(whole.hexdigest())


def _no_dialect(dialect: str) -> Callable[[dict[str, Any]], ResponsesRequest]:
    raise ValueError(f"dialect {dialect!r} is not read here: give `plainly`")
