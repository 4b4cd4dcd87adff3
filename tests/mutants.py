"""Unsafe variants of a room: copies of its modules in which one passage reads otherwise, and the check that tells.

A mutant is one replacement in the source of one module. A replacement that no longer applies fails, so that a list of
mutants cannot rot.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType


def mutated(room: str, order: Sequence[str], module: str, old: str, new: str) -> dict[str, ModuleType]:
    """Copies of the modules `order` of `room`, by short name and made in this order, in one of which `old` reads `new`.

    The copies import each other; the room itself is as it was on return. Fails unless `old` stands exactly once.
    """
    names = [f"{room}.{short}" for short in order]
    kept = {name: importlib.import_module(name) for name in names}
    copies: dict[str, ModuleType] = {}
    try:
        for short, name in zip(order, names, strict=True):
            source = Path(str(kept[name].__file__)).read_text()
            if short == module:
                assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {module}"
                source = source.replace(old, new)
            copies[short] = sys.modules[name] = ModuleType(name)
            copies[short].__file__ = kept[name].__file__
            setattr(sys.modules[room], short, copies[short])
            exec(compile(source, f"<{short} mutated>", "exec"), copies[short].__dict__)
        return copies
    finally:
        sys.modules.update(kept)
        for short, name in zip(order, names, strict=True):
            setattr(sys.modules[room], short, kept[name])


def killer(checks: Mapping[str, Callable[[], object]]) -> str | None:
    """The name of the first check that fails, with what it said; None where all pass."""
    for name, check in checks.items():
        try:
            check()
        except Exception as error:  # a crash is caught as well as a wrong answer
            return f"{name}: {type(error).__name__}: {error}"
    return None
