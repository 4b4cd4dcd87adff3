"""Which weights the engine had when a call was sampled, as the trainer that loads them says.

A change is told to the server, not to the call: one that was in flight when it came was sampled under the old weights
up to a position that nobody knows. Its span says both, `old..new`, so that a trainer can tell it from a clean one; one
that ends under the name it began with, after others in between, `old..between..old`.
"""

from __future__ import annotations

from toprope.tokens.entry import WeightSpan

UNKNOWN = "unknown"
"""What stands for weights that had no name yet when a straddled call began."""


class WeightVersions:
    """The versions of one engine. Nothing is stamped before the first was told."""

    def __init__(self, version: str | None = None) -> None:
        self.current = version
        self.changes = 0
        self.straddled = 0
        self._before = version

    def loaded(self, version: str) -> str | None:
        """From now on calls are sampled under `version`; the one before is returned. The same again: no change."""
        before = self.current
        if version != before:
            self.changes += 1
            self._before, self.current = before, version
        return before

    def spans(self, began_under: str | None, generated: int, *, changes: int) -> tuple[WeightSpan, ...]:
        """The spans of a call with `generated` tokens that began under `began_under`, after so many `changes`, and
        ends now."""
        if self.current is None or not generated:
            return ()
        if changes == self.changes:
            return (WeightSpan(0, generated, self.current),)
        self.straddled += 1
        seen = [began_under or UNKNOWN, self.current]
        if began_under == self.current:
            seen.insert(1, self._before or UNKNOWN)
        return (WeightSpan(0, generated, "..".join(seen)),)
