"""What a run shows while it works: a bar on a terminal, plain lines in a pipe, one JSON object a line with `--json`.

Observers only; nothing here can slow or change a run. Left to others: the figures (`collector.events.Progress`).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, TextIO

import msgspec

from toprope.cli.tables import age, run_table, shortened
from toprope.collector.events import Event, Finished, Progress, Retrying, RunStarted, Stopping, Warned
from toprope.collector.summary import Summary

PLAIN_EVERY_S = 5.0
"""A pipe gets a line at least every so many seconds while something happens."""


class Display:
    """An observer of a run and a context manager round it."""

    def __init__(self) -> None:
        self.progress = Progress()

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *exception: object) -> None:
        """On return nothing is drawn any more."""

    def __call__(self, event: Event) -> None:
        """Take one event in and show it."""
        self.progress(event)

    def finished(self, summary: Summary, directory: Path | None) -> None:
        """Show how the run ended, and where its files are."""

    def line(self) -> str:
        """The figures of the moment on one line."""
        p = self.progress
        reward = "-" if p.mean_reward is None else f"{p.mean_reward:.3f}"
        left = "-" if p.seconds_left is None else age(p.seconds_left)
        return (
            f"{p.done}/{p.expected} done, {p.failed} failed, {p.masked} masked, reward {reward}, "
            f"{p.per_second:.2f}/s, {left} left"
        )


class JsonLines(Display):
    """Every event as one JSON object: `{"event": "finished", ...}`."""

    def __init__(self, out: TextIO) -> None:
        super().__init__()
        self._out = out

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        name = type(event).__name__
        snake = "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")
        value: dict[str, Any] = {"event": snake, "at": round(time.time(), 3), **msgspec.to_builtins(event)}
        self._out.write(msgspec.json.encode(value).decode() + "\n")
        self._out.flush()


class PlainLines(Display):
    """A line at the start, at the end and now and then, for pipes and logs."""

    def __init__(self, out: TextIO) -> None:
        super().__init__()
        self._out = out
        self._last = 0.0

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        if isinstance(event, RunStarted):
            self._say(
                f"run {event.run_id}: {event.tasks} tasks x {event.repeats}, {event.concurrency} at once, "
                f"in {event.directory}"
            )
        elif isinstance(event, Finished) and time.monotonic() - self._last >= PLAIN_EVERY_S:
            self._say(self.line())
        elif isinstance(event, Retrying | Stopping | Warned) or (
            isinstance(event, Finished) and event.outcome == "failed"
        ):
            self._say(news(event))

    def finished(self, summary: Summary, directory: Path | None) -> None:
        self._say(self.line())
        tell_end(summary, directory, self._out)

    def _say(self, text: str) -> None:
        self._last = time.monotonic()
        self._out.write(text + "\n")
        self._out.flush()


class Bar(Display):
    """A bar on a terminal, with news above it."""

    def __init__(self) -> None:
        super().__init__()
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(BarColumn(bar_width=30), TextColumn("{task.description}"), refresh_per_second=5)
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        if isinstance(event, RunStarted):
            self._bar.console.print(f"run {event.run_id} in {event.directory}", highlight=False, markup=False)
        elif isinstance(event, Retrying | Stopping | Warned) or (
            isinstance(event, Finished) and event.outcome == "failed"
        ):
            self._bar.console.print(news(event), highlight=False, markup=False)
        p = self.progress
        self._bar.update(self._task, total=p.expected or None, completed=p.done, description=self.line())

    def finished(self, summary: Summary, directory: Path | None) -> None:
        tell_end(summary, directory, sys.stdout)


def display(*, as_json: bool) -> Display:
    """The display that fits: JSON if asked for, a bar on a terminal, else plain lines."""
    if as_json:
        return JsonLines(sys.stdout)
    return Bar() if sys.stdout.isatty() else PlainLines(sys.stdout)


def news(event: Event) -> str:
    """One line about an event that a reader wants to know at once."""
    if isinstance(event, Retrying):
        return f"retry of {event.rollout_id} in {event.delay_s:.1f} s ({event.kind}): {shortened(event.reason, 200)}"
    if isinstance(event, Finished):
        return f"failed {event.rollout_id} ({event.kind}): {shortened(event.reason or '', 200)}"
    if isinstance(event, Warned):
        return f"warning: {event.message}"
    if isinstance(event, Stopping):
        # Captured calls are waited for, up to the drain bound: somebody at a keyboard must know the way out.
        wait = "Calls under way are closed first; Ctrl-C again ends at once. " if event.reason == "interrupted" else ""
        return f"stopping ({event.reason}): nothing more is started. {wait}{event.message}".rstrip()
    return type(event).__name__


def tell_end(summary: Summary, directory: Path | None, out: TextIO) -> None:
    """The table of the run, its message, and where to look."""
    out.write(run_table(summary))
    out.write(f"{summary.message}\n")
    if directory is not None:
        out.write(f"files: {directory}  (toprope show {directory}; toprope audit {directory})\n")
    out.flush()
