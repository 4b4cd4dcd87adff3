"""From capture keys to file names, and back. Pure.

A key of lower-case letters, digits, `.`, `_`, `-` and `~` is its own stem, as in NeMo Gym. Everything else, capital
letters too, is written as `%xx`, so that no two keys share a file even where file names ignore case, and no key leaves
the directory. A stem that would be too long ends in the key's hash. `<key>~<n>`, evidence set aside, is the key's stem
with `~<n>`.
"""

from __future__ import annotations

import hashlib
import re

LONGEST_STEM = 212
"""Bytes of a stem: with `~<n>` and the longest ending it stays under the 255 bytes that file systems allow."""

TOKENS = ".tokens.jsonl"
INTENTS = ".tokens.intents"
STATE = ".tokens.state.json"
INCOMPLETE = ".tokens.incomplete"
LOCK = ".tokens.lock"
ABORTED = ".tokens.aborted"
BEGUN = ".tokens.begun"
RECEIPTS = ".tokens.receipts"
FENCE = ".tokens.fence"

PAYLOAD = (TOKENS, INTENTS, BEGUN, ABORTED, INCOMPLETE)
"""What goes when a rollout is retired."""

_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789._-~")
_SET_ASIDE = re.compile(r"(?P<key>.*)~(?P<n>[1-9][0-9]*)", re.DOTALL)
_FOREIGN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_ESCAPED = re.compile(r"%([0-9a-f]{2})")


def stem_of(key: str) -> str:
    """The stem of the key's files; injective (up to SHA-256), safe in any directory."""
    base, number = set_aside(key)
    raw = base.encode("utf-8", "surrogatepass")
    stem = "".join(chr(byte) if byte in _PLAIN else f"%{byte:02x}" for byte in raw)
    if stem.startswith("."):
        stem = "%2e" + stem[1:]
    if not stem:
        stem = "%"
    if len(stem) > LONGEST_STEM:
        stem = f"{stem[:120]}%-{hashlib.sha256(raw).hexdigest()}"
    return stem if number is None else f"{stem}~{number}"


def foreign_stem_of(key: str) -> str | None:
    """How NeMo Gym names the key's files, where that differs from `stem_of`; None where it does not or cannot."""
    if _FOREIGN.fullmatch(key) and len(key) <= LONGEST_STEM and stem_of(key) != key:
        return key
    return None


def key_of(stem: str) -> str | None:
    """The key of a stem; None where only a hash of it is left. Of NeMo Gym's stems too."""
    base, number = set_aside(stem)
    if "%-" in base:
        return None
    if base == "%":
        base = ""
    raw = re.sub(rb"%([0-9a-f]{2})", lambda match: bytes([int(match[1], 16)]), base.encode("utf-8", "surrogateescape"))
    key = raw.decode("utf-8", "surrogatepass") if _ESCAPED.search(base) else base
    return key if number is None else f"{key}~{number}"


def set_aside(key: str) -> tuple[str, int | None]:
    """A key taken apart: (`key`, n) for `<key>~<n>`, (`key`, None) otherwise. Works on stems too."""
    match = _SET_ASIDE.fullmatch(key)
    return (match["key"], int(match["n"])) if match else (key, None)


def stem_in(name: str, ending: str) -> str | None:
    """The stem in a file name with that ending; None for other names."""
    return name[: -len(ending)] if name.endswith(ending) and not name.startswith(".") else None
