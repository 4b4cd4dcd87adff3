"""Errors in the shape and with the status and headers that client libraries act on."""

from __future__ import annotations

import pytest

from toprope.dialects.errors import error_headers, error_status, openai_error
from toprope.errors.body import read_error_body
from toprope.errors.kinds import Kind
from toprope.errors.tree import (
    BadRequest,
    CaptureClosed,
    Conflict,
    EngineError,
    EngineUnavailable,
    LimitReached,
    ModelAuth,
    ModelContextLength,
    ModelQuota,
    TooLarge,
)


@pytest.mark.parametrize(
    "error", [BadRequest("x"), CaptureClosed("x"), LimitReached("x"), TooLarge("x"), Conflict("x")]
)
def test_a_refusal_of_ours_is_a_4xx_that_no_client_repeats(error):
    status = error_status(error)
    assert 400 <= status < 500
    assert status not in (408, 409, 425, 429)
    assert error_headers(error, status)["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ModelAuth("x", upstream_status=403), 403),
        (ModelQuota("x", upstream_status=429), 429),
        (ModelContextLength("x", upstream_status=400), 400),
        (EngineError("x", upstream_status=422), 422),
    ],
)
def test_a_terminal_provider_error_keeps_its_status_and_says_so(error, status):
    assert error_status(error) == status
    assert error_headers(error, status)["x-should-retry"] == "false"


def test_a_passing_provider_error_may_be_repeated_and_says_when():
    error = EngineUnavailable("x", upstream_status=429, headers={"Retry-After": "7"})
    assert error_status(error) == 503
    assert error_headers(error, 503) == {"retry-after": "7"}
    assert error_headers(EngineUnavailable("x"), 503) == {"retry-after": "1"}


def test_409_never_leaves_a_model_server():
    assert error_status(EngineUnavailable("x", upstream_status=409)) == 503
    assert error_status(EngineError("x", upstream_status=409)) == 400


def test_the_body_is_openais_and_ours_at_once():
    body = openai_error(ModelContextLength("too long", upstream_status=400), 400)
    assert body["error"].keys() >= {"message", "type", "param", "code"}
    assert body["error"]["code"] == "context_length_exceeded"
    read = read_error_body(400, body, "")
    assert (read.kind, read.retryable, read.upstream_status) == (Kind.MODEL_CONTEXT_LENGTH, False, 400)
