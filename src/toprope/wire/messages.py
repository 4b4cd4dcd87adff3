"""The Messages format: the names it uses for parts of a turn, tools and ends. Other people's wire; never converts.

Blocks are the dictionaries of the wire; unknown kinds and fields stay where they are. Source: Anthropic's Messages API
as its public client (2.14.0) spells it.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

Block: TypeAlias = dict[str, Any]
"""One content block: text, image, document, tool_use, tool_result, thinking, redacted_thinking or a foreign kind."""

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"]

ROLES = ("user", "assistant", "system", "developer")
"""Roles of an entry of `messages`. The last two are no part of the first API; Claude Code sends `system` since 2.1."""

BILLING_NONCE = "x-anthropic-billing-header:"
"""How the block begins that Claude Code puts before the system prompt; what follows differs in every request."""
