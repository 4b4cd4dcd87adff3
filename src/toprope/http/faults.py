"""How an error becomes a reply: the typed body of `errors.body`, whoever raised it.

Terminal refusals also say `x-should-retry: false`, which client libraries obey.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from toprope.errors.body import as_toprope_error, error_body
from toprope.errors.tree import TopropeError
from toprope.http.reply import Reply, json_reply
from toprope.http.request import Request
from toprope.protocol.headers import SHOULD_RETRY

RenderError = Callable[[TopropeError, Request | None], Reply]

log = logging.getLogger("toprope.http")


def typed_error(error: TopropeError, request: Request | None = None) -> Reply:
    """The reply for an error of ours: its status, its headers, the typed body."""
    headers = dict(error.headers)
    if not error.retryable:
        headers[SHOULD_RETRY] = "false"
    return json_reply(error_body(error), error.status, headers=headers)


def reply_for(raised: BaseException, request: Request | None, render: RenderError, server: str) -> Reply:
    """A reply for anything that a handler raised. What is not ours is logged with its traceback."""
    error = as_toprope_error(raised)
    if error is not raised:
        where = f"{request.method} {request.path}" if request is not None else "a request"
        log.error("%s: %s raised %s", server, where, type(raised).__name__, exc_info=raised)
    try:
        return render(error, request)
    except Exception:  # a server's own rendering failed: say so in the log, answer in the common form
        log.exception("%s: rendering the error %r failed", server, error.message)
        return typed_error(error, request)
