"""A `direct_http` grant: `POST <base_url>/<tool>` with its headers and cookies, and how a reply is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toprope.errors.body import shorten
from toprope.errors.kinds import Delivery, Kind
from toprope.errors.tree import PeerError, TransportError
from toprope.http.cookies import merge_cookies
from toprope.http.reply import Reply
from toprope.protocol.grants import DirectHttpGrant
from toprope.protocol.headers import PROTOCOL
from toprope.tools.outcome import ToolResult, ToolUnavailable
from toprope.tools.spec import TOOL_ERROR_TYPE

if TYPE_CHECKING:
    from toprope.http.client import Client

_INFRASTRUCTURE_STATUSES = frozenset({401, 407, 408, 425, 429})
_INFRASTRUCTURE_KINDS = frozenset(
    {Kind.SESSION_LOST, Kind.SESSION_EXPIRED, Kind.FORBIDDEN, Kind.CONFLICT, Kind.CAPACITY, Kind.TOOL_UNAVAILABLE}
)
# What a server of ours says to the caller's choice of tool or size of arguments: the model's to mend.
_ABOUT_THE_CALL = frozenset({404, 405, 413})


class DirectHttpTools:
    """The tools behind one grant. Which ones there are stands in the task."""

    transport = "direct_http"

    def __init__(self, grant: DirectHttpGrant, client: Client) -> None:
        self.name = grant.name
        self.had_cookies = bool(grant.cookies)
        self.cookies = dict(grant.cookies)
        self._headers = {**grant.headers, "content-type": "application/json"}
        # The role stamps the rollout where the grant's URL does not carry it already.
        self._peer = client.peer(grant.base_url, "resources")

    async def call(self, name: str, arguments: bytes) -> ToolResult:
        """Call the tool. Raises `ToolUnavailable` where what came back is not the tool's own word."""
        try:
            reply = await self._peer.request(
                "POST", f"/{name}", body=arguments, headers=self._headers, cookies=self.cookies or None
            )
        except TransportError as error:
            raise ToolUnavailable(f"tool {name}: {error.message}", delivery=error.delivery) from error
        self.cookies = merge_cookies(self.cookies, reply)
        return _result(name, reply)


def _result(name: str, reply: Reply) -> ToolResult:
    if reply.status < 400:
        return ToolResult(reply.text)
    info = reply.error_info()
    trouble = reply.status >= 500 or reply.status in _INFRASTRUCTURE_STATUSES or info.kind in _INFRASTRUCTURE_KINDS
    if trouble or (info.kind is not None and _refused(reply)):
        raise ToolUnavailable(
            f"tool {name}: {reply.url} answered {reply.status}: {info.message}",
            delivery=Delivery.DELIVERED,
            upstream_status=reply.status,
        )
    return ToolResult(info.message if info.kind is not None else shorten(reply.text), is_error=True)


def _refused(reply: Reply) -> bool:
    """Whether a server of ours refused a request before any tool ran; an error of its tools says that it is one."""
    if PROTOCOL not in reply.headers or reply.status in _ABOUT_THE_CALL:
        return False
    try:
        return bool(reply.json()["error"].get("type") != TOOL_ERROR_TYPE)
    except (PeerError, TypeError, KeyError, AttributeError):
        return True
