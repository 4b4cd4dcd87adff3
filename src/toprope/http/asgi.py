"""The few ASGI names that this room speaks in, and the key under which a scope carries its rollout."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

ROLLOUT_KEY = "toprope.rollout"
"""In a scope: the `RolloutContext` that a layer parsed. It lives as long as the request and crosses no transport."""

CAPTURE_STATE = "training_token_capture"
"""In `scope["state"]`: whether the path asked for token capture."""
