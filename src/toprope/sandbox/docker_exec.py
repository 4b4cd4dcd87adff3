"""One program in a container: started, read, counted, killed with everything in the container, through the SDK's calls.

Left to others: time, what the program is (`docker`).
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import Any

from toprope.sandbox.spec import WORKDIR, Aspect, Kept


@dataclass(eq=False)
class Exec:
    """One exec. Its program waits at the pipe `go`. Methods block; another thread may call `kill` during `read`."""

    api: Any
    container: str
    keep: int
    most: int
    go: int
    killed_by: str | None = None

    def __post_init__(self) -> None:
        self._data = (bytearray(), bytearray())
        self._totals = [0, 0]

    def read(self, command: list[str], env: dict[str, str], user: str) -> tuple[int | None, bool]:
        """The exec's status, and whether the container ran out of memory; on return its output is read."""
        handle = self.api.exec_create(self.container, command, environment=env, workdir=WORKDIR, user=user)["Id"]
        if self.killed_by is None:
            output = self.api.exec_start(handle, stream=True, demux=True)
            os.write(self.go, b"go\n")
            for chunks in output:
                for stream, chunk in enumerate(chunks):
                    if chunk:
                        self._totals[stream] += len(chunk)
                        self._data[stream].extend(chunk[: self.keep - len(self._data[stream])])
                if sum(self._totals) > self.most:
                    self.kill(Aspect.OUTPUT)
        status = self.api.exec_inspect(handle)["ExitCode"]
        state = self.api.inspect_container(self.container)["State"]
        return status, bool(state.get("OOMKilled"))

    def kill(self, reason: str) -> None:
        """Kill everything in the container."""
        errors = importlib.import_module("docker.errors")
        self.killed_by = self.killed_by or reason
        try:
            self.api.kill(self.container, "SIGKILL")
        except errors.APIError:
            pass  # it is dead already, or removed

    def revive(self) -> None:
        """Start the container again, after its processes were killed."""
        self.api.wait(self.container)
        self.api.start(self.container)

    def kept(self) -> tuple[Kept, Kept]:
        """What is kept of stdout and stderr."""
        return Kept(bytes(self._data[0]), self._totals[0]), Kept(bytes(self._data[1]), self._totals[1])
