"""The run directory: which file is where.

    DIR/manifest.json     what was to be run: tasks, repeats, settings, versions (digests)
        tasks.jsonl       the tasks as they were planned, one a line
        journal.jsonl     dispatches, sessions, outcomes, in order; synced
        results.jsonl     one row a rollout with a verdict
        failures.jsonl    one row an attempt without one
        summary.json      what the readers make of the four above
        capture.sqlite    the capture store; or captures/, one set of files a rollout (store: jsonl)
        logs/             logs of servers
        signing.key       the key of session cookies, readable by the owner only

Left to others: what stands in each file. `docs/reference/run-directory.md` says it for readers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from toprope.errors.tree import ConfigError


@dataclass(frozen=True, slots=True)
class RunDir:
    """The paths of one run directory."""

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))

    @property
    def manifest(self) -> Path:
        return self.path / "manifest.json"

    @property
    def tasks(self) -> Path:
        return self.path / "tasks.jsonl"

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def results(self) -> Path:
        return self.path / "results.jsonl"

    @property
    def failures(self) -> Path:
        return self.path / "failures.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def capture_db(self) -> Path:
        return self.path / "capture.sqlite"

    @property
    def capture_files(self) -> Path:
        return self.path / "captures"

    @property
    def logs_dir(self) -> Path:
        return self.path / "logs"

    @property
    def signing_key(self) -> Path:
        return self.path / "signing.key"

    def held(self) -> list[str]:
        """The names of what a run has written here: a run may only start where this is empty."""
        files = (self.manifest, self.journal, self.results, self.failures)
        return [file.name for file in files if file.exists() and (file == self.manifest or file.stat().st_size > 0)]

    def refuse_used(self) -> None:
        """Raise `ConfigError` (exit status 2) if a run stands here already: finished rows are never overwritten."""
        held = self.held()
        if held:
            raise ConfigError(
                f"{self.path} already holds a run ({', '.join(held)}). "
                "Choose a new directory: what a finished run wrote is never overwritten or deleted."
            )

    def require_run(self) -> None:
        """Raise `ConfigError` unless a run was started here."""
        if not self.manifest.exists():
            raise ConfigError(
                f"{self.path} holds no run: manifest.json is missing. Accepted: a directory made by a run."
            )
