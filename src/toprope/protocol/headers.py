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
ADMIN_KEY = "x-toprope-admin-key"
TOOLS = "x-toprope-tools"
"""The tools-only credential of one session: given by a seed reply, carried by its grants, good for its tools alone."""
