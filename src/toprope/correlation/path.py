"""The one codec of the path prefix `/ng-rollout/<capture key>[/training-token-capture]/<rest>`.

Works on the raw path, before percent-decoding could change a segment. Every role, sender and receiver uses it.
"""

from __future__ import annotations

from dataclasses import dataclass

from toprope.correlation.ids import CAPTURE_WORD, parse_capture_key

_HEAD = "/ng-rollout"
_CAPTURE = f"/{CAPTURE_WORD}"


@dataclass(frozen=True, slots=True)
class RolloutPath:
    """A prefixed path taken apart; `rest` begins with a slash and is still raw."""

    key: str
    capture: bool
    rest: str


def format_prefix(key: str, *, capture: bool = False) -> str:
    """The prefix for `key`, without a trailing slash. Raises `ValueError` if it is no capture key."""
    parse_capture_key(key)
    return f"{_HEAD}/{key}{_CAPTURE if capture else ''}"


def has_prefix(raw_path: str) -> bool:
    """Whether `raw_path` claims to carry a rollout prefix (it may still be malformed)."""
    return raw_path == _HEAD or raw_path.startswith(_HEAD + "/")


def parse_path(raw_path: str) -> RolloutPath | None:
    """Take a raw path (no query) apart. None without a prefix; `ValueError` where a prefix is malformed.

    A key that contains anything but the id alphabet, so also any percent-encoding, is malformed. A path whose head
    only becomes the prefix after decoding or dot-segment removal is not taken for one here; see `hides_prefix`.
    """
    if not has_prefix(raw_path):
        if hides_prefix(raw_path):
            raise ValueError(
                f"path {raw_path!r}: the rollout prefix must not be percent-encoded, doubled or behind dots"
            )
        return None
    key, slash, rest = raw_path[len(_HEAD) + 1 :].partition("/")
    parse_capture_key(key)
    if not slash:
        raise ValueError(f"path {raw_path!r}: nothing follows the rollout prefix")
    rest = "/" + rest
    capture = rest == _CAPTURE or rest.startswith(_CAPTURE + "/")
    if capture:
        rest = rest[len(_CAPTURE) :]
        if not rest:
            raise ValueError(f"path {raw_path!r}: nothing follows the rollout prefix")
    if has_prefix(rest) or (_is_odd(rest) and (hides_prefix(rest) or _has_dot_segment(rest))):
        raise ValueError(f"path {raw_path!r}: a second prefix or a dot segment follows the rollout prefix")
    return RolloutPath(key, capture, rest)


def hides_prefix(raw_path: str) -> bool:
    """Whether some reader on the way would turn this unprefixed path into a prefixed one.

    `/%6eg-rollout/..`, `//ng-rollout/..`, `/x/../ng-rollout/..`: decoding, joined slashes, resolved dot segments.
    """
    if not _is_odd(raw_path):
        return False
    segments: list[str] = []
    for segment in _unquote(raw_path.lower()).replace("\\", "/").split("/"):
        if segment == "..":
            del segments[-1:]
        elif segment not in ("", "."):
            segments.append(segment)
    return has_prefix("/" + "/".join(segments))


def _is_odd(path: str) -> bool:
    """Whether decoding or normalising could change `path` at all; most paths end here."""
    return "%" in path or "//" in path or "/." in path or "\\" in path


def _unquote(text: str) -> str:
    head, *parts = text.split("%")
    out = [head]
    for part in parts:
        try:
            out.append(chr(int(part[:2], 16)) + part[2:])
        except ValueError:
            out.append("%" + part)
    return "".join(out)


def _has_dot_segment(path: str) -> bool:
    return any(segment in (".", "..") for segment in _unquote(path.lower()).replace("\\", "/").split("/"))
