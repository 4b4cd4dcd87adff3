"""The pages that people follow are followed: every command and snippet runs, in order, as it is printed (UX-4).

What stands after the language of a fenced block says what it is; a block of code that says nothing is refused.

    sh run            executed by bash, in the page's own directory, after all that stands before it
    sh serve          one program, kept up until the page ends
    sh make           targets of the Makefile, which other tests run
    python run        executed by Python, likewise
    text out          what the block before it printed, line by line; `...` stands for anything
    <any> file=NAME   written to that file of the page's directory
    <any> example=P   is the file examples/P as it stands, and is written there too
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*/README.md"))
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs/start").glob("*.md")),
    *sorted((ROOT / "docs/how-to").glob("*.md")),
    *EXAMPLES,
]
CODE = {"sh", "bash", "console", "python", "yaml", "json", "jsonl", "toml"}
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)#\s]+)(?:#[^)]*)?\)")
PUBLISHED = "127.0.0.1:8010"
"""Where pages say that a server listens; a test takes any free port instead."""


@dataclass(frozen=True)
class Block:
    language: str
    action: str
    body: str


def blocks(page: Path) -> Iterator[Block]:
    for match in FENCE.finditer(page.read_text(encoding="utf-8")):
        language, _, action = match["info"].strip().partition(" ")
        yield Block(language, action.strip(), match["body"])


class Session:
    """One reader with one page: a directory, and the servers that were started on the way."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.printed = ""
        self.address = PUBLISHED
        self.servers: list[subprocess.Popen[str]] = []
        programs = Path(sys.executable).parent
        self.environ = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "POLICY_PORT": "0", "COLUMNS": "200"}

    def follow(self, block: Block) -> None:
        verb, _, value = block.action.partition("=")
        if verb == "file":
            (self.place / value).write_text(block.body, encoding="utf-8")
        elif verb == "example":
            assert (ROOT / "examples" / value).read_text(encoding="utf-8") == block.body, f"examples/{value} differs"
            (self.place / Path(value).name).write_text(block.body, encoding="utf-8")
        elif verb == "make":
            known = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            for line in block.body.splitlines():
                program, target = line.split("#")[0].split()
                assert program == "make"
                assert target in known
        elif verb == "serve":
            self._serve(block.body)
        elif verb == "out":
            self._compare(block.body)
        else:
            assert verb == "run"
            interpreter = {"sh": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}[block.language]
            done = subprocess.run(
                [*interpreter, block.body.replace(PUBLISHED, self.address)],
                cwd=self.place,
                env=self.environ,
                capture_output=True,
                text=True,
                timeout=600,
            )
            self.printed = done.stdout
            assert done.returncode == 0, f"{block.body}\n{done.stdout}\n{done.stderr}"

    def close(self) -> None:
        """Stop what was started, as Ctrl-C does, and hear how it ended."""
        for server in self.servers:
            server.send_signal(signal.SIGINT)
        for server in self.servers:
            _, said = server.communicate(timeout=60)
            assert server.returncode == 130, said

    def _serve(self, command: str) -> None:
        server = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=self.place,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.servers.append(server)
        assert server.stdout is not None
        self.printed = ""
        for line in server.stdout:
            self.printed += line
            if '"ready"' in line:
                break
        else:
            assert server.stderr is not None
            raise AssertionError(f"{command} ended: {server.stderr.read()}")
        found = re.search(r"http://([0-9.]+:\d+)", self.printed)
        assert found is not None
        self.address = found[1]
        self.printed = self.printed.replace(self.address, PUBLISHED)

    def _compare(self, shown: str) -> None:
        for line in shown.splitlines():
            pattern = re.escape(line.rstrip()).replace(re.escape("..."), ".*")
            assert re.search(rf"^{pattern}\s*$", self.printed, re.MULTILINE), f"not printed: {line}\n{self.printed}"


@pytest.mark.promise("UX-4")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_and_snippet_of_the_page_runs_as_printed(page: Path, tmp_path: Path) -> None:
    if page in EXAMPLES:
        shutil.copytree(page.parent, tmp_path, dirs_exist_ok=True)
    session = Session(tmp_path)
    try:
        for block in blocks(page):
            if block.action:
                session.follow(block)
    finally:
        session.close()


@pytest.mark.promise("UX-4")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_block_of_code_stands_on_the_page_without_being_checked(page: Path) -> None:
    unchecked = [block.body for block in blocks(page) if block.language in CODE and not block.action]
    assert unchecked == []


@pytest.mark.parametrize(
    "page",
    [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_every_link_leads_to_a_file(page: Path) -> None:
    targets = [match["target"] for match in LINK.finditer(FENCE.sub("", page.read_text(encoding="utf-8")))]
    missing = [
        target
        for target in targets
        if not target.startswith(("http", "mailto:")) and not (page.parent / target).exists()
    ]
    assert missing == []
