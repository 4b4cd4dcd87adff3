"""The runs of one handle: who may still start one, which go on, and how letting go ends them.

Shared by every kind of sandbox. Left to others: what a run does, and how it dies when its task is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from toprope.sandbox.spec import Completed, SandboxLost


class Runs:
    """`ended` says why no run may go on in the sandbox any more (`LeaseHome.end_reason`), or None while runs may."""

    def __init__(self, sandbox_id: str, ended: Callable[[], str | None]) -> None:
        self._sandbox_id = sandbox_id
        self._ended = ended
        self._going: set[asyncio.Task[Completed]] = set()
        self._let_go = False

    def require(self) -> None:
        """Return if a run may start. Raises `SandboxLost` if the handle was let go or the sandbox is gone."""
        if self._let_go:
            raise SandboxLost(f"sandbox {self._sandbox_id}: this handle was let go")
        if (reason := self._ended()) is not None:
            raise SandboxLost(f"sandbox {self._sandbox_id} is gone ({reason})")

    @contextmanager
    def using(self) -> Iterator[None]:
        """Around whatever touches the sandbox. Raises as `require`, and `SandboxLost` in the place of any error in a
        sandbox that went away meanwhile: "no such file" would be said of the program that should have written it."""
        self.require()
        try:
            yield
        except SandboxLost:
            raise
        except Exception as error:
            if (reason := self._ended()) is not None:
                raise SandboxLost(f"sandbox {self._sandbox_id} went away meanwhile ({reason})") from error
            raise

    async def track(self, work: Coroutine[Any, Any, Completed]) -> Completed:
        """The result of `work`, which is cancelled, once and to its end, if the caller is or the handle is let go.

        Who ends a sandbox says so first and then kills what runs in it, maybe between two looks of the run's own watch:
        a run that failed in a sandbox that is gone was killed by its end. Raises `SandboxLost` where letting go ended
        it.
        """
        task = asyncio.get_running_loop().create_task(work)
        self._going.add(task)
        task.add_done_callback(self._going.discard)
        try:
            done = await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():
                task.cancel()  # once: a second time would break into its clean-up
                await asyncio.wait({task})
            if self._let_go:
                raise SandboxLost(f"sandbox {self._sandbox_id}: this handle was let go while the run went on") from None
            raise
        if done.exit and done.killed_by is None and (reason := self._ended()) is not None:
            return replace(done, exit=None, killed_by=reason)
        return done

    async def let_go(self) -> None:
        """On return no run of this handle goes on, and none can start. Idempotent."""
        self._let_go = True
        going = list(self._going)
        for task in going:
            task.cancel()
        if going:
            await asyncio.wait(going)
