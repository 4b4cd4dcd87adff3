"""What a user sees when something is wrong: one paragraph on stderr, and the exit status of the contract.

0 coverage reached; 1 ran, but coverage was not reached or an audit failed; 2 bad configuration or input, nothing ran;
130 interrupted.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from toprope.errors.tree import ConfigError, EngineUnavailable, TopropeError

OK, NOT_REACHED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


@contextmanager
def reporting(*, debug: bool) -> Iterator[None]:
    """Turn what escapes the body into a paragraph and an exit status; the traceback is shown only with `debug`."""
    try:
        yield
    except TopropeError as error:
        _tell(error.message, debug)
        sys.exit(status_of(error))
    except KeyboardInterrupt:
        _tell("interrupted", debug)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        sys.exit(NOT_REACHED)  # the reader of our output left; there is nobody to tell
    except Exception as error:  # a bug of ours: named, without a page of frames
        _tell(f"internal error: {type(error).__name__}: {error}. Run again with --debug for the traceback", debug)
        sys.exit(NOT_REACHED)


def status_of(error: TopropeError) -> int:
    """The exit status of an error that ended a command: 2 if nothing ran because of it."""
    return BAD_INPUT if isinstance(error, ConfigError | EngineUnavailable) else NOT_REACHED


def _tell(message: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    print(f"toprope: {' '.join(message.split())}", file=sys.stderr, flush=True)
