"""Grants: what the environment lets the agent reach. `kind` and `transport` always stand in the JSON."""

from __future__ import annotations

import re
from typing import Any, TypeAlias

import msgspec

GRANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""What names a grant, uniquely in its session."""


class DirectHttpGrant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="direct_http"):
    """Tools as plain HTTP routes: `POST <base_url>/<tool>` with these headers and cookies.

    The tools' own specifications are in the task's `responses_create_params.tools`.
    """

    name: str
    base_url: str
    required: bool = True
    cookies: dict[str, str] = {}
    headers: dict[str, str] = {}


class StreamableHttp(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="transport", tag="streamable_http"
):
    """An MCP server over streamable HTTP."""

    url: str
    headers: dict[str, str] = {}


class Stdio(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="transport", tag="stdio"):
    """An MCP server started by the agent, if its own configuration lists the command."""

    command: str
    args: list[str] = []
    env: dict[str, str] = {}
    cwd: str | None = None


class McpGrant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="mcp"):
    """Tools behind an MCP server."""

    name: str
    connection: StreamableHttp | Stdio
    required: bool = True


Grant: TypeAlias = DirectHttpGrant | McpGrant


class DirectSandbox(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="direct"):
    """How to borrow a sandbox that the resources server owns."""

    provider_config_ref: str
    descriptor: dict[str, Any]


class SandboxAccess(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A borrowed sandbox and the directory to work in."""

    connection: DirectSandbox
    workdir: str
