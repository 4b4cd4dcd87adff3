"""What came of one tool call: text for the model, or trouble that is none of the model's business."""

from __future__ import annotations

from dataclasses import dataclass

from toprope.errors.kinds import Kind
from toprope.errors.tree import TopropeError


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the model is told. `is_error` is for the record; the text says it too."""

    text: str
    is_error: bool = False


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
