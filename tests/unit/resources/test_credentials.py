"""Tools-only credentials: whose they are, what they open, and until when."""

from __future__ import annotations

from typing import Any

import pytest

from toprope.errors.tree import Forbidden, SessionLost
from toprope.http.headers import Headers
from toprope.servers.resources.credentials import ToolCredentials

pytestmark = pytest.mark.promise("EP-19")


class Asked:
    """A request as the credentials see it."""

    def __init__(self, credential: str | None = None, path: str = "/add") -> None:
        self.path = path
        self.headers = Headers(() if credential is None else ((b"x-toprope-tools", credential.encode()),))


def named(credentials: ToolCredentials, asked: Any) -> str | None:
    return credentials.session_named(asked)


def test_a_revoked_credential_opens_nothing_and_nothing_is_kept_of_it() -> None:
    credentials = ToolCredentials(["/verify"])
    one, two = credentials.issue("one"), credentials.issue("two")
    assert (named(credentials, Asked(one)), named(credentials, Asked(two))) == ("one", "two")
    assert named(credentials, Asked()) is None
    credentials.revoke("one")
    credentials.revoke("one")
    credentials.revoke("never")
    with pytest.raises(SessionLost):
        named(credentials, Asked(one))
    assert not credentials.stands_for_key(Asked(one))  # type: ignore[arg-type]
    assert credentials.stands_for_key(Asked(two))  # type: ignore[arg-type]
    credentials.revoke("two")
    assert (credentials._sessions, credentials._digests) == ({}, {})


def test_a_second_credential_voids_the_first() -> None:
    credentials = ToolCredentials([])
    first, second = credentials.issue("one"), credentials.issue("one")
    with pytest.raises(SessionLost):
        named(credentials, Asked(first))
    assert named(credentials, Asked(second)) == "one"


def test_no_credential_opens_a_closed_path_known_or_not() -> None:
    credentials = ToolCredentials(["/verify"])
    known = credentials.issue("one")
    for credential in (known, "guessed"):
        for ask in (credentials.refuse, credentials.session_named):
            with pytest.raises(Forbidden):
                ask(Asked(credential, "/verify"))  # type: ignore[arg-type]
    with pytest.raises(Forbidden):
        credentials.stands_for_key(Asked(known, "/verify"))  # type: ignore[arg-type]
    credentials.refuse(Asked(None, "/verify"))  # type: ignore[arg-type]
