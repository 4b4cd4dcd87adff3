"""The one codec of the path prefix, on raw paths."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toprope.correlation.ids import capture_key
from toprope.correlation.path import RolloutPath, format_prefix, has_prefix, parse_path

MALFORMED = [
    "/ng-rollout",
    "/ng-rollout/",
    "/ng-rollout/4-2",
    "/ng-rollout//v1/chat/completions",
    "/ng-rollout/%2e%2e/v1/chat/completions",
    "/ng-rollout/../v1/chat/completions",
    "/ng-rollout/4%2f2/v1/chat/completions",
    "/ng-rollout/4-2%0a/v1/chat/completions",
    "/ng-rollout/4-2%00/v1/chat/completions",
    "/ng-rollout/%34-2/v1/chat/completions",
    "/ng-rollout/.hidden/v1/chat/completions",
    "/ng-rollout/x-a1-a2/v1/chat/completions",
    "/ng-rollout/" + "a" * 201 + "/v1/chat/completions",
    "/ng-rollout/4-2/training-token-capture",
    "/ng-rollout/training-token-capture/v1/chat/completions",
    "/ng-rollout/training-token-capture-a1/v1/chat/completions",
    "/ng-rollout/training-token-capture/training-token-capture/v1/x",
    "/ng-rollout/4-2/ng-rollout/5-1/v1/chat/completions",
    "/ng-rollout/4-2/training-token-capture/ng-rollout/5-1/v1/x",
    "/ng-rollout/4-2/%6eg-rollout/5-1/v1/x",
    "/ng-rollout/4-2//ng-rollout/5-1/v1/x",
    "/ng-rollout/4-2/v1/%2e%2e/verify",
    "/ng-rollout/4-2/../verify",
    "/ng-rollout/4-2/v1/./verify",
    "/ng-rollout/4-2/..%2fverify",
    "/ng-rollout/4-2/..%5cverify",
    "/%6eg-rollout/4-2/v1/chat/completions",
    "/ng%2drollout/4-2/v1/chat/completions",
    "/%6Eg-rollout/4-2/v1/chat/completions",
    "//ng-rollout/4-2/v1/chat/completions",
    "/.//ng-rollout/4-2/v1/x",
    "/./ng-rollout/4-2/v1/x",
    "/v1/../ng-rollout/4-2/v1/x",
    "/v1/%2e%2e/ng-rollout/4-2/v1/x",
    "/%2fng-rollout/4-2/v1/x",
    "/x%2f..%2fng-rollout/4-2/v1/x",
]


@pytest.mark.promise("ID-1")
@pytest.mark.parametrize("path", MALFORMED)
def test_a_prefix_that_is_malformed_or_hidden_is_refused(path: str) -> None:
    with pytest.raises(ValueError):
        parse_path(path)


def test_a_prefix_whose_id_was_left_out_says_where_the_id_belongs() -> None:
    with pytest.raises(ValueError, match="reserved; it stands after the id, as in /ng-rollout/<rollout id>/training-"):
        parse_path("/ng-rollout/training-token-capture/v1/chat/completions")


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1/chat/completions",
        "/ng-rollouts/4-2/v1",
        "/ng-rollout-x/y",
        "/NG-ROLLOUT/4-2/v1/x",
        "/v1/ng-rollout/4-2",
        "/files/a%2fb",
        "/files/a%",
        "/files/%zz",
        "/a//b",
        "/.well-known/thing",
        "/%256eg-rollout/4-2/v1/x",
        "",
    ],
)
def test_a_path_without_prefix_is_none(path: str) -> None:
    assert parse_path(path) is None


@pytest.mark.parametrize(
    ("path", "parsed"),
    [
        ("/ng-rollout/4-2/v1/chat/completions", RolloutPath("4-2", False, "/v1/chat/completions")),
        ("/ng-rollout/4-2/training-token-capture/v1/responses", RolloutPath("4-2", True, "/v1/responses")),
        ("/ng-rollout/4-2/training-token-captured/x", RolloutPath("4-2", False, "/training-token-captured/x")),
        ("/ng-rollout/x-a3/seed_session", RolloutPath("x-a3", False, "/seed_session")),
        ("/ng-rollout/4-2/", RolloutPath("4-2", False, "/")),
        ("/ng-rollout/4-2/files/a%2fb%20c", RolloutPath("4-2", False, "/files/a%2fb%20c")),
        ("/ng-rollout/4-2/a..b/.well-known", RolloutPath("4-2", False, "/a..b/.well-known")),
    ],
)
def test_a_prefixed_path_comes_apart_and_the_rest_stays_raw(path: str, parsed: RolloutPath) -> None:
    assert parse_path(path) == parsed


@pytest.mark.promise("ID-1")
@given(
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
    st.integers(0, 10**9),
    st.booleans(),
    st.sampled_from(["/v1/chat/completions", "/", "/tool", "/training-token", "/a%20b"]),
)
def test_what_format_writes_parse_reads(rollout: str, attempt: int, capture: bool, rest: str) -> None:
    try:
        key = capture_key(rollout, attempt)
    except ValueError:
        return
    prefix = format_prefix(key, capture=capture)
    assert has_prefix(prefix + rest)
    assert parse_path(prefix + rest) == RolloutPath(key, capture, rest)


@given(st.text(alphabet="/ng-rolut42.%2efa\\x", max_size=40))
def test_no_path_makes_the_parser_fail_in_another_way(path: str) -> None:
    for text in (path, "/ng-rollout/" + path):
        try:
            found = parse_path(text)
        except ValueError:
            continue
        assert found is None or text == format_prefix(found.key, capture=found.capture) + found.rest


@pytest.mark.parametrize("key", ["a/b", "", "x-a1-a2", "a%20"])
def test_the_sender_refuses_to_write_what_is_no_key(key: str) -> None:
    with pytest.raises(ValueError):
        format_prefix(key)
