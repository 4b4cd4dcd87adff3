"""Taking a secret out of what a stranger says: out of texts, and out of the texts in a JSON body, however escaped.

JSON may write `t` as `\\u0074`, and a text that is JSON again (arguments of a tool) may write that escaped once more.
Who means to hide a secret (backwards, in base64) can: this is for echoes. Left to others: what is secret.
"""

from __future__ import annotations

import json
import re

from toprope.canonical.json import NotJson
from toprope.http.jsonbody import decode_any, encode

_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""A text of a JSON body, or one that never ends: looked for from each quote in it, that would take its square."""
_ESCAPED = re.compile(rb"\\u00[2-7]")
"""A character that needs no escape, or one that writes escapes, written as one."""


class Mask:
    """Puts `instead` where `secret` stands, a text of letters, digits, `-` and `_`."""

    def __init__(self, secret: str, instead: str) -> None:
        self._secret = secret.encode()
        self._instead = instead
        # A run of backslashes is looked at from its first one only: from each, a long one would take its square.
        each = (rf"(?:{re.escape(char)}|(?<!\\)\\++u00(?i:{ord(char):02x}))" for char in secret)
        self._pattern = re.compile("".join(each))

    def text(self, text: str) -> str:
        """`text` without the secret."""
        return self._pattern.sub(lambda _: self._instead, text)

    def body(self, body: bytes) -> bytes:
        """`body` without the secret, in the same JSON otherwise; what is no JSON is taken for a text."""
        if self._surely_without(body):
            return body
        masked = _TEXT.sub(self._literal, body)
        try:
            decode_any(masked)
        except NotJson:
            return self.text(body.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
        return masked

    def _surely_without(self, data: bytes) -> bool:
        return self._secret not in data and _ESCAPED.search(data) is None

    def _literal(self, found: re.Match[bytes]) -> bytes:
        literal = found[0]
        if self._surely_without(literal):
            return literal
        try:
            text = json.loads(literal)
        except ValueError:  # no JSON: the whole body is taken for a text then
            return literal
        masked = self.text(text)
        return literal if masked == text else encode(masked)
