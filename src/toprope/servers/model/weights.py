"""Which weights the engine had when a call was sampled, as the trainer that loads them says.

A change is told to the server, not to the call: one that was in flight when it came was sampled under the old weights
up to a position that nobody knows. Its span says both, `old..new`, so that a trainer can tell it from a clean one.
"""

from __future__ import annotations

from toprope.tokens.entry import WeightSpan

UNKNOWN = "unknown"
"""What stands for weights that had no name yet when a straddled call began."""


class WeightVersions:
    """The versions of one engine. Nothing is stamped before the first was told."""

    def __init__(self, version: str | None = None) -> None:
        self.current = version
        self.straddled = 0

    def loaded(self, version: str) -> str | None:
        """From now on calls are sampled under `version`; the one before is returned. The same again: no change."""
        before, self.current = self.current, version
        return before

    def spans(self, began_under: str | None, generated: int) -> tuple[WeightSpan, ...]:
        """The spans of a call with `generated` tokens that began under `began_under` and ends now."""
        if self.current is None or not generated:
            return ()
        if began_under == self.current:
            return (WeightSpan(0, generated, self.current),)
        self.straddled += 1
        return (WeightSpan(0, generated, f"{began_under or UNKNOWN}..{self.current}"),)
