"""Names in a configuration become objects; a wrong argument is refused by name before the constructor runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toprope.errors.tree import ConfigError
from toprope.launch.construct import build, find, importable
from toprope.launch.strict import FromEnvironment, Where
from toprope.servers.model.engines.openai import OpenAIEngine
from toprope.servers.model.engines.vllm import VllmEngine

WHERE = Where("run.yaml", ("servers", "policy", "engine"))


class Engine:
    def __init__(self, *, base_url: str, max_batch: int = 8, client: Any = None) -> None:
        if max_batch > 64:
            raise ValueError(f"max_batch {max_batch} is over 64")
        self.base_url, self.max_batch, self.client = base_url, max_batch, client


def test_offered_collaborators_are_given_only_to_those_who_ask() -> None:
    engine = build(Engine, {"base_url": "http://a"}, WHERE, offered={"client": "ours", "clock": "unasked"})
    assert (engine.base_url, engine.client) == ("http://a", "ours")


def test_text_from_the_environment_becomes_the_type_that_the_constructor_names() -> None:
    engine = build(Engine, {"base_url": FromEnvironment("7"), "max_batch": FromEnvironment("7")}, WHERE)
    assert (engine.base_url, engine.max_batch) == ("7", 7)


@pytest.mark.promise("UX-2")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"base_url": "x", "max_bach": 3}, "engine.max_bach: Engine has no such setting; did you mean 'max_batch'"),
        ({"max_batch": 3}, "engine.base_url: Engine needs this setting"),
        ({"base_url": "x", "max_batch": "many"}, "engine.max_batch: 'many' is not accepted"),
        ({"base_url": "x", "client": "mine"}, "engine.client: Engine has no such setting"),
        ({"base_url": "x", "max_batch": 65}, "engine: Engine refuses its settings: max_batch 65 is over 64"),
    ],
)
def test_a_wrong_argument_names_its_key_and_the_nearest_valid_one(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(Engine, given, WHERE, offered={"client": "ours"})


@pytest.mark.promise("UX-2")
@pytest.mark.parametrize("kind", [OpenAIEngine, VllmEngine])
def test_what_only_a_program_can_give_is_no_setting(kind: type[OpenAIEngine]) -> None:
    for name in ("paus", "pause"):
        with pytest.raises(ConfigError, match=f"engine.{name}: {kind.__name__} has no such setting") as caught:
            build(kind, {"base_url": "http://a:1/v1", name: 3}, WHERE, offered={"client": None})
        accepted = caught.value.message.partition("accepted: ")[2]
        assert "replicas" in accepted
        assert "pause" not in accepted


def test_a_list_of_base_urls_is_called_so() -> None:
    with pytest.raises(ConfigError, match=r"engine.replicas: 'x' is not accepted: .*accepted: a list of base URLs\.$"):
        build(VllmEngine, {"base_url": "http://a:1/v1", "replicas": "x"}, WHERE, offered={"client": None})


def test_an_unknown_entry_point_shows_the_nearest_installed_one() -> None:
    with pytest.raises(ConfigError, match=r"'scriptd' is not installed; did you mean 'scripted'\?.*or module:Class"):
        find("scriptd", "toprope.engines", WHERE)


def test_a_class_beside_the_configuration_is_found(tmp_path: Path) -> None:
    (tmp_path / "my_engines_beside.py").write_text("class Mine:\n    pass\n")
    importable(tmp_path)
    assert find("my_engines_beside:Mine", "toprope.engines", WHERE).__name__ == "Mine"
    with pytest.raises(ConfigError, match=r"my_engines_beside:Other' cannot be loaded: .*'Other'"):
        find("my_engines_beside:Other", "toprope.engines", WHERE)
    with pytest.raises(ConfigError, match="No module named 'nowhere_at_all'"):
        find("nowhere_at_all:Class", "toprope.engines", WHERE)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("class Mine(:", r"SyntaxError: .*\(broken_module.py, line 1\)"),
        ("\nimport sys\nsys.exit(3)", r"SystemExit: 3 \(.*broken_module.py, line 3\)"),
        ("x = 1\nx.y.z = 1 / 0", r"ZeroDivisionError: division by zero \(.*broken_module.py, line 2\)"),
        (
            "from toprope import Environment, tool\nclass Mine(Environment):\n    @tool\n    def f(self, s, x): ...",
            r".*\bx\b.* \(.*broken_module.py, line \d\)",
        ),
    ],
    ids=["syntax", "exit", "code", "tool"],
)
def test_a_module_that_breaks_while_it_is_imported_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, says: str
) -> None:
    (tmp_path / "broken_module.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"broken_module:Mine' cannot be loaded: " + says):
        find("broken_module:Mine", "toprope.engines", WHERE)


@pytest.mark.parametrize("name", [":", "till:", ":Shop", "till:Shop:x", "a b:C", "../till:Shop"])
def test_a_name_that_is_no_module_and_class_is_refused_as_such(name: str) -> None:
    with pytest.raises(ConfigError, match="module:Class, such as till:Shop"):
        find(name, "toprope.environments", WHERE)
