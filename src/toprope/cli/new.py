"""`toprope new`: files to begin with, that run as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Files to begin with, that run as they are.", no_args_is_help=True)

_FILES = {
    "environment.py.txt": "{name}.py",
    "run.yaml.txt": "{name}.yaml",
    "test.py.txt": "test_{name}.py",
    "tasks.jsonl.txt": "tasks.jsonl",
    "README.md.txt": "README.md",
}


@app.callback()
def _group() -> None:
    """Files to begin with, that run as they are."""


@app.command("environment")
def environment(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its name, and that of its folder and module.")],
    into: Annotated[Path, typer.Option("--into", metavar="DIR", help="Where the folder is made; absent: here.")] = Path(
        "."
    ),
) -> None:
    """Make a small environment with tasks, a configuration that runs, and a test with the conformance suite.

    \b
    toprope new environment shelf
    """
    made = make_environment(name, into)
    typer.echo(
        f"made {made}: {', '.join(sorted(path.name for path in made.iterdir()))}\n"
        f"next: cd {made}; toprope run {name}.yaml; toprope check {name}.yaml --environment {name}; python -m pytest"
    )


def make_environment(name: str, into: Path) -> Path:
    """The new folder `into/name`, whole or not at all. Raises `ConfigError` for a bad name or a place that is taken."""
    import os
    import shutil
    import tempfile
    from importlib.resources import files

    from toprope.errors.tree import ConfigError

    check_name(name)
    place = into / name
    if os.path.lexists(place):
        raise ConfigError(f"{place}: is there already, and nothing is written over; accepted: a name that is free.")
    word = "".join(part.capitalize() for part in name.split("_"))
    words = {"{{name}}": name, "{{Class}}": f"{word}Environment" if word in _MEANT_ALREADY else word}
    templates = files("toprope.cli").joinpath("new_environment")
    try:
        into.mkdir(parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=into))
        try:
            for source, target in _FILES.items():
                text = templates.joinpath(source).read_text(encoding="utf-8")
                for placeholder, word in words.items():
                    text = text.replace(placeholder, word)
                (making / target.format(name=name)).write_text(text, encoding="utf-8")
            making.chmod(0o755)
            os.rename(making, place)
        except BaseException:
            shutil.rmtree(making, ignore_errors=True)
            raise
    except OSError as error:
        raise ConfigError(f"{place}: cannot be made: {error.strerror}; accepted: a directory to write to.") from error
    return place


def check_name(name: str) -> None:
    """Raises `ConfigError` for what cannot name a module, or would hide one or be hidden by one."""
    import importlib.util
    import keyword
    import re
    import sys

    from toprope.errors.tree import ConfigError

    accepted = (
        "accepted: a small letter, then small letters, digits and single _, at most 40, such as shelf or my_shelf."
    )
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or len(name) > 40:
        raise ConfigError(f"NAME: {name!r} cannot name an environment; {accepted}")
    if keyword.iskeyword(name) or keyword.issoftkeyword(name) or name.startswith("test_") or name in _SERVERS:
        raise ConfigError(f"NAME: {name!r} has a meaning already; {accepted}")
    if name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None:
        raise ConfigError(f"NAME: {name!r} is a module that Python finds here already; accepted: a name that is free.")


_MEANT_ALREADY = frozenset({"True", "False", "None", "Environment", "ToolError", "Verdict", "Annotated"})
"""Words that cannot name a class, or that the new module uses."""
_SERVERS = frozenset({"policy", "solver", "episode", "tasks"})
"""Names that the configuration has already."""
