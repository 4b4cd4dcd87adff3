"""What a configuration grants, and what it says where the SDK is missing."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from toprope.errors.tree import ConfigError
from toprope.launch import grants
from toprope.launch.config import Configuration, read_configuration
from toprope.launch.grants import further_grant, stdio_programs
from toprope.protocol.grants import McpGrant, Stdio, StreamableHttp

SERVERS: dict[str, dict[str, Any]] = {
    "policy": {"role": "model", "engine": {"kind": "scripted"}},
    "books": {"role": "resources", "use": "ledger"},
    "clerk": {"role": "agent", "use": "tool_loop", "model": "policy"},
    "episode": {"role": "environment", "resources": "books", "agent": "clerk", "tools": ["mcp"]},
}


def configured(**changes: dict[str, Any]) -> Configuration:
    servers = {name: {**config, **changes.get(name, {})} for name, config in SERVERS.items()}
    return read_configuration({"servers": servers}, file="test.yaml", directory=Path())


@pytest.fixture
def no_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the extra was not installed."""
    monkeypatch.setattr(grants, "find_spec", lambda name: None)


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({}, "servers.episode.tools"),
        ({"episode": {"tools": [], "mcp_servers": {"a": {"url": "http://a/mcp"}}}}, "servers.episode.mcp_servers.a"),
        ({"episode": {"tools": []}, "books": {"mcp": True}}, "servers.books.mcp"),
    ],
)
def test_mcp_without_its_extra_is_one_clear_sentence(no_sdk: None, changes: dict[str, Any], place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configured(**changes)
    assert caught.value.message == (
        f"test.yaml: {place}: MCP needs the official SDK; `pip install toprope[mcp]` brings it."
    )


def test_direct_tools_need_no_extra(no_sdk: None) -> None:
    assert importlib.util.find_spec("mcp") is not None, "the tests themselves have it"
    assert configured(episode={"tools": ["direct_http"]})


def test_a_server_that_says_no_mcp_is_not_asked_for_it() -> None:
    with pytest.raises(ConfigError, match="'books', which says `mcp: false`"):
        configured(books={"mcp": False})


def test_an_environment_with_a_key_may_be_behind_grants() -> None:
    assert configured(books={"api_key": "k"}, episode={"tools": ["direct_http", "mcp"]})


def test_a_program_is_listed_as_a_line_or_in_full_and_granted_only_as_listed() -> None:
    listed = ["clock --utc 'a b'", {"command": "notes", "env": {"DIR": "/n"}, "cwd": "/"}]
    clock = {"command": "clock", "args": ["--utc", "a b"]}
    notes = {"command": "notes", "env": {"DIR": "/n"}, "cwd": "/", "required": False}
    found = configured(clerk={"mcp_stdio": listed}, episode={"mcp_servers": {"clock": clock, "notes": notes}})
    assert stdio_programs(found.servers["clerk"]) == (  # type: ignore[arg-type]
        Stdio("clock", ["--utc", "a b"]),
        Stdio("notes", [], {"DIR": "/n"}, "/"),
    )
    episode = found.servers["episode"]
    assert [further_grant(name, server) for name, server in episode.mcp_servers.items()] == [  # type: ignore[attr-defined]
        McpGrant("clock", Stdio("clock", ["--utc", "a b"])),
        McpGrant("notes", Stdio("notes", [], {"DIR": "/n"}, "/"), required=False),
    ]
    with pytest.raises(ConfigError, match="does not list"):
        configured(clerk={"mcp_stdio": listed}, episode={"mcp_servers": {"notes": {**notes, "env": {"DIR": "/"}}}})


def test_a_server_elsewhere_is_granted_by_its_url() -> None:
    found = configured(episode={"mcp_servers": {"maps": {"url": "https://maps/mcp", "headers": {"x-k": "1"}}}})
    episode = found.servers["episode"]
    assert further_grant("maps", episode.mcp_servers["maps"]) == (  # type: ignore[attr-defined]
        McpGrant("maps", StreamableHttp("https://maps/mcp", {"x-k": "1"}))
    )
