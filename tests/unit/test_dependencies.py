"""Every dependency has its reason in the docs, a lower bound, and a pinned version for development."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
REQUIREMENTS = [
    *PROJECT["project"]["dependencies"],
    *(r for group in PROJECT["project"]["optional-dependencies"].values() for r in group),
    *(r for group in PROJECT["dependency-groups"].values() for r in group),
]


def _name(requirement: str) -> str:
    return re.match(r"[A-Za-z0-9._-]+", requirement)[0]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("requirement", REQUIREMENTS)
def test_a_dependency_has_a_lower_bound_a_reason_and_a_pin(requirement: str) -> None:
    name = _name(requirement)
    assert ">=" in requirement, f"{requirement} has no lower bound"
    table = (ROOT / "docs/reference/dependencies.md").read_text()
    assert f"| {name} |" in table, f"{name} has no row in docs/reference/dependencies.md"
    pins = {
        _normal(line.split("==")[0])
        for line in (ROOT / "requirements/lock.txt").read_text().splitlines()
        if "==" in line
    }
    assert _normal(name) in pins, f"{name} is not pinned in requirements/lock.txt"


def test_the_table_names_nothing_that_is_not_a_dependency() -> None:
    table = (ROOT / "docs/reference/dependencies.md").read_text()
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")]
    names = {row for row in rows if row not in ("package", "---")}
    assert names == {_name(requirement) for requirement in REQUIREMENTS}
