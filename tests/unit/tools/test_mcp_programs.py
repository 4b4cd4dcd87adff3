"""MCP programs that say something odd: trouble with a name, at once; or borne, where servers really do it."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from toprope.errors.tree import TopropeError
from toprope.http.client import Client
from toprope.protocol.grants import McpGrant, Stdio
from toprope.tools.access import ToolAccess
from toprope.tools.outcome import ToolResult, ToolUnavailable

PROGRAM = str(Path(__file__).with_name("odd_program.py"))
NO_MESSAGE = "what came is no message of MCP"
NO_JSON = "what came is no JSON"
FLOOD = "more than 10000 messages or 67108864 bytes that answer no open request"


@asynccontextmanager
async def odd(manner: str) -> AsyncIterator[ToolAccess]:
    program = Stdio(sys.executable, [PROGRAM, manner])
    async with Client() as client:
        access = await ToolAccess.open([McpGrant("odd", program)], client, stdio=[program])
        try:
            yield access
        finally:
            await access.close()


async def call(access: ToolAccess) -> ToolResult:
    async with asyncio.timeout(60):  # where nobody says that the answer cannot come, it would wait for ever
        return await access.call("add", "{}", offered=frozenset({"add"}))


@pytest.mark.promise("EP-19")
@pytest.mark.parametrize(
    ("manner", "why"),
    [
        ("print", NO_JSON + ": 'Traceback"),
        ("noise", NO_JSON + ": 'noise'"),
        ("no text", NO_JSON),
        ("not a number", NO_JSON),
        ("batch", NO_MESSAGE),
        ("a number", NO_MESSAGE),
        ("a name", NO_MESSAGE),
        ("null", NO_MESSAGE),
        ("both", NO_MESSAGE),
        ("no version", NO_MESSAGE),
        ("version 1.0", NO_MESSAGE),
        ("no id", NO_MESSAGE),
        ("the id as a fraction", NO_MESSAGE),
        ("no id, an error", "a request of id None"),
        ("the id as text", "none of that id is open"),
        ("blank lines", FLOOD),
        ("notifications", FLOOD),
        ("questions", FLOOD),
    ],
)
async def test_what_cannot_be_an_answer_is_trouble_at_once_and_for_all_later_calls(
    manner: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with odd(manner) as access:
        for _ in range(2):
            with pytest.raises(ToolUnavailable, match=why) as caught:
                await call(access)
            assert caught.value.retryable
            assert len(caught.value.message) < 400
    loud = [record for record in caplog.records if record.levelno >= logging.WARNING]
    # asyncio's own words are left out: they are of whatever an earlier test left to the collector.
    assert [record for record in loud if record.name != "asyncio"] == [], "the SDK logs tracebacks"


async def test_an_answer_that_comes_before_its_question_keeps_the_grant_from_opening() -> None:
    with pytest.raises(TopropeError, match="a request of id 1, and none of that id is open") as caught:
        async with odd("early answer"):
            raise AssertionError("it opened")
    assert (caught.value.kind, caught.value.retryable) == ("grant_unavailable", True)


async def test_a_banner_is_skipped_and_said_in_one_short_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with odd("banner of 99") as access:
        assert (await call(access)).text == "5"
    (record,) = [record for record in caplog.records if record.name == "toprope.tools"]
    assert "grant odd: its program wrote a line that is no message: 'Welcome, line 0" in record.getMessage()
    assert len(record.getMessage()) < 400


async def test_more_than_a_hundred_lines_of_it_are_no_banner() -> None:
    with pytest.raises(TopropeError, match=NO_JSON) as caught:
        async with odd("banner of 101"):
            raise AssertionError("it opened")
    assert (caught.value.kind, caught.value.retryable) == ("grant_unavailable", True)


@pytest.mark.parametrize(("manner", "text"), [("talks", "5"), ("asks", "result error error error")])
async def test_who_talks_or_asks_within_reason_is_heard_and_answered(manner: str, text: str) -> None:
    async with odd(manner) as access:
        for _ in range(3):
            assert (await call(access)).text == text


@pytest.mark.parametrize("manner", ["a plain schema", "a costly schema"])
async def test_no_result_is_checked_against_a_schema_of_the_programs(manner: str) -> None:
    async with odd(manner) as access:
        assert (await call(access)).text == "5"
