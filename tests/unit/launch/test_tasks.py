"""Tasks that environments make: no more than were asked for, and whatever making them raises is a refusal."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from toprope.errors.tree import ConfigError
from toprope.launch.config import read_configuration
from toprope.launch.parts import Parts
from toprope.launch.settings import RunConfig
from toprope.launch.tasks import gather_tasks
from toprope.protocol.episode import Task
from toprope.protocol.ids import TaskId
from toprope.servers.resources.environment import Environment


class Maker(Environment):
    """Makes what its test wants."""

    def __init__(self, make: Callable[[int], Iterator[Task]]) -> None:
        self.make = make

    def tasks(self, size: int, seed: int) -> Iterator[Task]:
        return self.make(size)


def one(number: int) -> Task:
    return Task(TaskId("t", str(number)), {"responses_create_params": {"input": "x"}})


def gather(make: Callable[[int], Iterator[Task]], tmp_path: Path, **source: Any) -> list[Any]:
    run = {"environment": "episode", "tasks": {"generate": "books", "size": 3, **source}}
    servers = {
        "policy": {"role": "model", "engine": {"kind": "scripted"}},
        "books": {"role": "resources", "use": "ledger"},
        "clerk": {"role": "agent", "use": "tool_loop", "model": "policy"},
        "episode": {"role": "environment", "resources": "books", "agent": "clerk"},
    }
    read = read_configuration({"servers": servers, "run": run}, file="run.yaml", directory=tmp_path)
    assert isinstance(read.run, RunConfig)
    return gather_tasks(read, read.run, Parts({}, {"books": Maker(make)}, {}, {}), file=None)


def test_a_maker_that_never_ends_is_refused_and_one_that_keeps_to_its_size_is_not(tmp_path: Path) -> None:
    assert len(gather(lambda size: map(one, range(size)), tmp_path)) == 3
    assert len(gather(lambda size: map(one, range(2)), tmp_path)) == 2
    with pytest.raises(ConfigError, match=r"'books' was asked for 3 tasks \(size\) and gives more"):
        gather(lambda size: map(one, itertools.count()), tmp_path)
    assert len(gather(lambda size: map(one, itertools.count()), tmp_path, limit=2)) == 2


@pytest.mark.promise("UX-2")
@pytest.mark.parametrize("fail", [lambda: sys.exit(3), lambda: next(iter(())), lambda: dict[str, int]()["x"]])
def test_whatever_a_maker_raises_is_a_refusal(fail: Callable[[], Any], tmp_path: Path) -> None:
    def make(size: int) -> Iterator[Task]:
        yield one(0)
        fail()

    with pytest.raises(ConfigError, match=r"'books' cannot make tasks: (SystemExit: 3|RuntimeError|KeyError: 'x')"):
        gather(make, tmp_path)
