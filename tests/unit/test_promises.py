"""`docs/promises.md` and the tests agree, in both directions."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (?P<id>[A-Z]{2}-\d+) \| (?P<held>yes|in part: .+?|not yet: .+?|by CI: .+?) \| (?P<text>.+) \|$")


def _promises() -> dict[str, str]:
    rows = {}
    for line in (ROOT / "docs/promises.md").read_text().splitlines():
        if re.match(r"\| [A-Z]{2}-\d+ ", line):
            match = ROW.match(line)
            assert match, f"a promise row that does not parse: {line}"
            assert match["id"] not in rows, f"{match['id']} stands twice"
            rows[match["id"]] = match["held"]
    return rows


def _named_in_tests() -> dict[str, list[str]]:
    named: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "promise"
                and ast.unparse(node.func).endswith("mark.promise")
            ):
                for argument in node.args:
                    named.setdefault(ast.literal_eval(argument), []).append(str(path.relative_to(ROOT)))
    return named


def test_every_promise_that_is_held_has_a_test() -> None:
    named = _named_in_tests()
    missing = [key for key, held in _promises().items() if held.startswith(("yes", "in part")) and key not in named]
    assert missing == []


def test_every_test_names_a_promise_that_exists_and_is_not_put_off() -> None:
    promises = _promises()
    unknown = {key: files for key, files in _named_in_tests().items() if key not in promises}
    assert unknown == {}
    early = {key: files for key, files in _named_in_tests().items() if promises[key].startswith("not yet")}
    assert early == {}, "these promises have tests: say in docs/promises.md what part of them is held"
