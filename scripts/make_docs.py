"""Writes the pages of docs/ that are made from the program. `make docs` runs it; tests compare every page.

Run: `python scripts/make_docs.py` writes what is behind; with `--check` it writes nothing and exits 1 if any page is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from toprope.cli.app import app
from toprope.cli.reference import render as commands
from toprope.dialects.losses import render_table
from toprope.errors.reference import page as failures
from toprope.launch.reference import render as configuration
from toprope.testing.lifecycle_drawing import drawing
from toprope.trajectory.reasons import page as mask_reasons

DOCS = Path(__file__).parents[1] / "docs"
EXAMPLES = DOCS.parent / "examples"


def between(word: str, made: str, page: str) -> str:
    """The page with what stands between its two markers made anew; everything outside them is written by hand."""
    begin, end = f"<!-- {word}: begin -->\n", f"<!-- {word}: end -->"
    head, found, rest = page.partition(begin)
    _, closed, tail = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"the two markers `{word}: begin` and `{word}: end` are missing")
    return head + begin + made + end + tail


def programs() -> str:
    """Each agent of `examples/programs` with its settings, and the script that it copies."""
    parts = []
    for path in sorted((EXAMPLES / "programs").glob("*.yaml")):
        comment, _, settings = path.read_text(encoding="utf-8").partition("role: agent\n")
        words = " ".join(line.removeprefix("# ") for line in comment.splitlines())
        parts.append(f"### {path.stem}\n\n{words}\n\n```text\nrole: agent\n{settings}```\n\n")
    return "\n" + "".join(parts)


PAGES: Mapping[str, Callable[[str], str]] = {
    "reference/cli.md": lambda _: commands(app),
    "reference/configuration.md": lambda _: configuration(),
    "reference/dialects.md": lambda _: render_table(),
    "reference/failures.md": lambda _: failures(),
    "reference/mask-reasons.md": lambda _: mask_reasons(),
    "explanation/custody.md": lambda page: between("drawn", drawing(), page),
    "how-to/connect-your-agent.md": lambda page: between("programs", programs(), page),
}
"""Each generated page, and what makes it from its present text."""


def behind() -> dict[Path, str]:
    """The pages that are not what the program says, with what they should be."""
    found = {}
    for name, make in PAGES.items():
        path = DOCS / name
        written = path.read_text(encoding="utf-8") if path.exists() else ""
        made = make(written)
        if made != written:
            found[path] = made
    return found


def main() -> int:
    """Write, or with `--check` only name, the pages that are behind."""
    check = "--check" in sys.argv[1:]
    found = behind()
    for path, text in found.items():
        if not check:
            path.write_text(text, encoding="utf-8")
        print(f"{path.relative_to(DOCS.parent)} {'is behind: run `make docs`' if check else 'written'}")
    return 1 if check and found else 0


if __name__ == "__main__":
    sys.exit(main())
