"""Tools as authors write them: the `tool` mark, and the specification made from a function's types and docstring.

A tool is a method `(self, state, <typed arguments>)` of an environment. Its JSON schema comes from the type hints by
`msgspec.json.schema_components`, its description from the docstring. Arguments are validated here, and what is wrong
with them is said in words that a model can read. Left to others: running it (`workers`, the resources server), routes
and grants.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, overload

import msgspec

from toprope.canonical import json
from toprope.errors.tree import ToolError

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "__toprope_tool__"
TOOL_ERROR_TYPE = "tool_error"
"""The `type` in the error body of a tool's own error, which is text for the model; no other error has it."""

_NAME_ALPHABET = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
RESERVED_NAMES = frozenset(
    {
        "aggregate_metrics",
        "close_session",
        "health",
        "livez",
        "mcp",
        "ng-rollout",
        "readyz",
        "run",
        "seed_session",
        "sessions",
        "v1",
        "verify",
    }
)
"""Names that a server of ours uses as a route; no tool may have them."""


@dataclass(frozen=True, slots=True)
class _Mark:
    name: str | None
    description: str | None


@overload
def tool(function: F, /) -> F: ...


@overload
def tool(*, name: str | None = None, description: str | None = None) -> Callable[[F], F]: ...


def tool(
    function: F | None = None, /, *, name: str | None = None, description: str | None = None
) -> F | Callable[[F], F]:
    """Mark a method as a tool: `@tool` or `@tool(name=..., description=...)`.

    The first parameter after `self` is the session's state; every further one needs a type hint that JSON can carry.
    A string in `Annotated[int, "the amount"]` describes an argument. Plain functions run in worker threads.
    """

    def mark(target: F) -> F:
        setattr(target, _MARK, _Mark(name, description))
        return target

    return mark if function is None else mark(function)


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """One tool of an environment class: what a model is told of it, and how its arguments are read."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    attribute: str
    is_async: bool
    arguments: type[msgspec.Struct]

    def as_tool(self, *, strict: bool = False) -> dict[str, Any]:
        """The entry for `tools` of a Responses request. `strict` asks the engine to hold to the schema."""
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
            "strict": strict,
        }

    def read(self, body: bytes) -> dict[str, Any]:
        """The arguments in `body` by name; an empty body is `{}`. Raises `ToolError` with what is wrong."""
        try:
            value = json.loads(body) if body.strip() else {}
            read = msgspec.convert(value, self.arguments)
        except json.NotJson as error:
            raise ToolError(f"{self.name}: the arguments are not valid JSON: {error}") from error
        except msgspec.ValidationError as error:
            raise ToolError(f"{self.name}: {error}. Accepted arguments: {self._accepted()}") from error
        return {field: getattr(read, field) for field in self.arguments.__struct_fields__}

    def _accepted(self) -> str:
        properties = self.parameters.get("properties", {})
        required = set(self.parameters.get("required", ()))
        parts = [f"{name}{'' if name in required else ' (optional)'}" for name in properties]
        return ", ".join(parts) or "none"


def tools_of(cls: type) -> dict[str, ToolSpec]:
    """The tools of `cls` and its bases, by name. Raises `TypeError` for a name or hint that cannot be served."""
    found: dict[str, ToolSpec] = {}
    for attribute in dir(cls):
        function = inspect.getattr_static(cls, attribute)
        mark = getattr(function, _MARK, None)
        if not isinstance(mark, _Mark):
            continue
        spec = _make_spec(cls, attribute, function, mark)
        if spec.name in found:
            raise TypeError(f"{cls.__name__}: two tools are named {spec.name!r}")
        found[spec.name] = spec
    return found


def _make_spec(cls: type, attribute: str, function: Callable[..., Any], mark: _Mark) -> ToolSpec:
    name = mark.name or attribute
    where = f"tool {cls.__name__}.{attribute}"
    if name in RESERVED_NAMES:
        raise TypeError(f"{where}: the name {name!r} is a route of the server; choose another")
    if not name or len(name) > 64 or not set(name) <= _NAME_ALPHABET:
        raise TypeError(f"{where}: the name {name!r} is not 1 to 64 letters, digits, '_' or '-'")
    arguments = _argument_struct(where, function, name)
    (schema,), components = msgspec.json.schema_components([arguments], ref_template="#/$defs/{name}")
    parameters = dict(components.pop(schema["$ref"].rpartition("/")[2]))
    parameters.pop("title", None)
    parameters.setdefault("properties", {})
    parameters.setdefault("required", [])
    if components:
        parameters["$defs"] = components
    description = inspect.cleandoc(mark.description or function.__doc__ or "")
    return ToolSpec(name, description, parameters, attribute, inspect.iscoroutinefunction(function), arguments)


def _argument_struct(where: str, function: Callable[..., Any], name: str) -> type[msgspec.Struct]:
    parameters = list(inspect.signature(function).parameters.values())
    if len(parameters) < 2:
        raise TypeError(f"{where}: expected (self, state, ...), found ({', '.join(map(str, parameters))})")
    wanted = parameters[2:]
    for parameter in wanted:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"{where}: argument {parameter} cannot be filled from JSON by name")
        if parameter.annotation is parameter.empty:
            raise TypeError(f"{where}: argument {parameter.name!r} needs a type hint")
    hints = _hints(where, function, [parameter.name for parameter in wanted])
    fields: list[Any] = []
    for parameter in wanted:
        hint = _described(hints[parameter.name])
        if parameter.default is parameter.empty:
            fields.append((parameter.name, hint))
        elif isinstance(parameter.default, list | dict | set):
            fields.append((parameter.name, hint, msgspec.field(default_factory=parameter.default.copy)))
        else:
            fields.append((parameter.name, hint, parameter.default))
    try:
        return msgspec.defstruct(f"{name}_arguments", fields, kw_only=True, forbid_unknown_fields=True)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{where}: {error}") from error


def _hints(where: str, function: Callable[..., Any], names: list[str]) -> dict[str, Any]:
    # Only the arguments' hints are resolved: the state's type may be local to a function and is not needed.
    holder = types.SimpleNamespace(__annotations__={name: function.__annotations__[name] for name in names})
    try:
        return typing.get_type_hints(holder, globalns=function.__globals__, include_extras=True)
    except NameError as error:
        raise TypeError(f"{where}: a type hint cannot be resolved: {error}") from error


def _described(hint: Any) -> Any:
    if typing.get_origin(hint) is not Annotated:
        return hint
    base, *extras = typing.get_args(hint)
    metas = [msgspec.Meta(description=extra) if isinstance(extra, str) else extra for extra in extras]
    return Annotated[(base, *metas)]
