"""What came of one tool call: text for the model, or trouble that is none of the model's business."""

from __future__ import annotations

from dataclasses import dataclass

from toprope.errors.kinds import Kind
from toprope.errors.tree import TopropeError

MAX_OUTPUT_CHARS = 256 * 1024
"""Of one tool's output that a model is told, unless its agent says otherwise: more than most contexts hold."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the model is told. `is_error` and `left_out` (characters) are for the record; the text says both too."""

    text: str
    is_error: bool = False
    left_out: int = 0

    def cut(self, most: int) -> ToolResult:
        """The same with the first `most` characters of its text; what was left out is said after them."""
        more = len(self.text) - most
        if more <= 0:
            return self
        return ToolResult(f"{self.text[:most]}\n[{more} more characters left out]", self.is_error, more)


class ToolUnavailable(TopropeError):
    """A tool could not be reached, or its server broke: 502, retryable, never shown to the model."""

    kind = Kind.TOOL_UNAVAILABLE
    status = 502
    retryable = True


class GrantUnavailable(TopropeError):
    """A grant cannot be established. Another attempt helps only where its server could not be reached."""

    kind = Kind.GRANT_UNAVAILABLE
    status = 422
    retryable = False
