"""Tools from type hints: what a model is told, and what it is told when its arguments are wrong."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import pytest

from toprope.errors.tree import ToolError
from toprope.servers.resources.environment import Environment
from toprope.tools.spec import RESERVED_NAMES, tool, tools_of


class Point(msgspec.Struct):
    x: int
    y: int = 0


class Board:
    @tool
    def move(self, state: Any, piece: str, to: Point, unit: Literal["cm", "mm"] = "cm") -> str:
        """Move a piece.

        It stays on the board.
        """
        return piece

    @tool(name="look-around", description="See everything.")
    async def look(self, state: Any) -> str:
        return ""

    @tool
    def count(self, state: Any, n: Annotated[int, "how many"], tags: list[str] = []) -> int:  # noqa: B006
        "Count."
        return n


def test_the_schema_comes_from_the_hints_and_the_description_from_the_docstring() -> None:
    spec = tools_of(Board)["move"]
    assert spec.description == "Move a piece.\n\nIt stays on the board."
    assert spec.parameters["required"] == ["piece", "to"]
    assert spec.parameters["additionalProperties"] is False
    assert spec.parameters["properties"]["piece"] == {"type": "string"}
    assert spec.parameters["properties"]["to"] == {"$ref": "#/$defs/Point"}
    assert spec.parameters["$defs"]["Point"]["properties"]["x"] == {"type": "integer"}
    assert spec.parameters["properties"]["unit"] == {"enum": ["cm", "mm"], "default": "cm"}


def test_a_string_in_annotated_describes_the_argument() -> None:
    assert tools_of(Board)["count"].parameters["properties"]["n"] == {"type": "integer", "description": "how many"}


def test_a_tool_may_have_another_name_and_no_arguments() -> None:
    spec = tools_of(Board)["look-around"]
    assert (spec.attribute, spec.is_async, spec.description) == ("look", True, "See everything.")
    assert spec.as_tool(strict=True) == {
        "type": "function",
        "name": "look-around",
        "description": "See everything.",
        "parameters": {"type": "object", "properties": {}, "required": [], "additionalProperties": False},
        "strict": True,
    }


def test_arguments_are_read_strictly_and_typed() -> None:
    assert tools_of(Board)["move"].read(b'{"piece": "rook", "to": {"x": 1}}') == {
        "piece": "rook",
        "to": Point(1, 0),
        "unit": "cm",
    }
    assert tools_of(Board)["look-around"].read(b"") == {}


def test_a_mutable_default_is_fresh_in_every_call() -> None:
    spec = tools_of(Board)["count"]
    spec.read(b'{"n": 1}')["tags"].append("dirty")
    assert spec.read(b'{"n": 1}')["tags"] == []


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"n": "3"}', "Expected `int`, got `str` - at `$.n`"),
        (b'{"n": true}', "Expected `int`, got `bool`"),
        (b"{}", "missing required field `n`"),
        (b'{"n": 1, "m": 2}', "unknown field `m`"),
        (b'{"n": 1', "not valid JSON"),
        (b'{"n": ' + b"1" * 5_000 + b"}", "not valid JSON: an integer has 5000 digits"),
        (b"[1]", "Expected `object`"),
    ],
)
def test_a_wrong_argument_is_named_in_words_for_the_model(body: bytes, said: str) -> None:
    with pytest.raises(ToolError) as caught:
        tools_of(Board)["count"].read(body)
    assert said in caught.value.message
    assert "count" in caught.value.message


@pytest.mark.parametrize("name", sorted(RESERVED_NAMES))
def test_a_tool_named_as_a_route_of_ours_is_refused_when_the_class_is_made(name: str) -> None:
    with pytest.raises(TypeError, match="is a route of the server"):

        class Bad(Environment):
            @tool(name=name)
            def method(self, state: Any) -> None: ...


def test_hints_and_kinds_that_json_cannot_fill_are_refused_when_the_class_is_made() -> None:
    with pytest.raises(TypeError, match="needs a type hint"):

        class NoHint(Environment):
            @tool
            def method(self, state: Any, x) -> None: ...  # type: ignore[no-untyped-def]

    with pytest.raises(TypeError, match="cannot be filled from JSON"):

        class Star(Environment):
            @tool
            def method(self, state: Any, *x: int) -> None: ...

    with pytest.raises(TypeError, match="expected \\(self, state"):

        class NoState(Environment):
            @tool
            def method(self) -> None: ...

    with pytest.raises(TypeError, match="two tools are named"):

        class Twice(Environment):
            @tool(name="same")
            def one(self, state: Any) -> None: ...

            @tool(name="same")
            def two(self, state: Any) -> None: ...


def test_the_states_own_type_may_be_local_to_a_function() -> None:
    class Local:
        pass

    class Fine(Environment):
        @tool
        def method(self, state: Local, n: int) -> int:
            return n

    assert list(Fine.class_tools) == ["method"]
