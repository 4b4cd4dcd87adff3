"""A reward is a finite JSON number, and nothing else ever becomes one."""

from __future__ import annotations

import pytest

from toprope.errors.kinds import Kind, Stage
from toprope.errors.tree import PeerError
from toprope.http.reply import Reply
from toprope.servers.environment.judging import failure_of, read_verdict


@pytest.mark.promise("EP-17")
@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"reward": NaN}', "NaN"),
        ('{"reward": Infinity}', "Infinity"),
        ('{"reward": -Infinity}', "-Infinity"),
        ('{"reward": null}', "null"),
        ('{"reward": "0.5"}', '"0.5"'),
        ('{"reward": true}', "true"),
        ('{"reward": 1e400}', "1e400"),
        ('{"reward": -1e400, "more": NaN}', "-1e400"),
        ('{"reward": [1.0]}', "[1.0]"),
        ("{}", "absent"),
        ('{"reward": 1' + "0" * 400 + "}", "1000"),
    ],
)
def test_what_is_no_finite_number_is_refused_with_its_value(text: str, named: str) -> None:
    with pytest.raises(PeerError) as caught:
        read_verdict(Reply(200, text.encode(), url="http://r/verify"))
    assert caught.value.kind == Kind.BAD_REWARD
    assert not caught.value.retryable
    assert f"the reward {named}" in caught.value.message


@pytest.mark.promise("EP-17")
@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"reward": 1.0, "parts": [1.0, NaN]}', "NaN"),
        ("not json", "not json"),
        ("[0.5]", "[0.5]"),
        ("0.5", "0.5"),
        ("", "no JSON"),
        ('{"reward": 1.0', "reward"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused_whatever_stands_in_it(text: str, named: str) -> None:
    with pytest.raises(PeerError) as caught:
        read_verdict(Reply(200, text.encode()))
    assert (caught.value.kind, caught.value.retryable) == (Kind.BAD_REPLY, False)
    assert named in caught.value.message


@pytest.mark.parametrize("text", ['{"reward": 0}', '{"reward": -1.5}', '{"reward": 1e-300, "x": 18446744073709551617}'])
def test_a_finite_number_is_a_reward_and_every_field_is_kept(text: str) -> None:
    verdict = read_verdict(Reply(200, text.encode()))
    assert isinstance(verdict["reward"], int | float)
    assert verdict.get("x", 2**64 + 1) == 2**64 + 1


def test_an_error_that_is_not_ours_is_a_terminal_bug_with_its_text() -> None:
    failure = failure_of(KeyError("oops"), Stage.VERIFICATION)
    assert (failure.failure_kind, failure.terminal, failure.failure_reason) == ("internal", True, "KeyError: 'oops'")
