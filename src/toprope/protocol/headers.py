"""The headers in which our extensions travel, so that closed bodies stay as strangers know them."""

from __future__ import annotations

PROTOCOL = "x-toprope-protocol"
PROTOCOL_VERSION = "1"
SESSION = "x-toprope-session"
CLOSE_TOKEN = "x-toprope-close-token"
ACTIVATION = "x-toprope-activation"
LEASE = "x-toprope-lease"
INCLUDE = "x-toprope-include"
CLIENT_SESSION = "x-session-id"
SHOULD_RETRY = "x-should-retry"
