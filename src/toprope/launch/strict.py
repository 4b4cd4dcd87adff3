"""Plain values into typed settings, strictly: an error names file, key path, the value and what would be accepted.

Left to others: which settings there are (`config`), where the values come from (`load`), constructors (`construct`).
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from toprope.errors.tree import ConfigError


class FromEnvironment(str):
    """A whole value that came from `${NAME}`: text, which may stand for a number or a flag where one is expected."""


@dataclass(frozen=True, slots=True)
class Where:
    """A place in a configuration: the file's name and the keys that lead there."""

    file: str
    keys: tuple[str, ...] = ()

    def at(self, key: object) -> Where:
        """The place one key further in."""
        return Where(self.file, (*self.keys, str(key)))

    def __str__(self) -> str:
        return f"{self.file}: {'.'.join(self.keys)}" if self.keys else self.file


def nearest(name: str, valid: Iterable[str]) -> str:
    """What to say about a name that is not among `valid`: the nearest one if there is one, and all of them."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}accepted: {', '.join(names) or 'nothing'}"


def shown(value: Any) -> str:
    """`value` as an error shows it, on one line and bounded."""
    text = repr(str(value)) if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def read(value: Any, kind: Any, where: Where) -> Any:
    """`value` as a `kind` (a msgspec Struct, a container of them, or a leaf type). Raises `ConfigError`."""
    bare = _bare(kind)
    if _is_struct(bare):
        return _read_struct(value, bare, where)
    if get_origin(bare) in (Union, types.UnionType):
        return _read_union(value, kind, bare, where)
    if get_origin(bare) is dict:
        items = _mapping(value, where)
        return {key: read(item, get_args(bare)[1], where.at(key)) for key, item in items.items()}
    if get_origin(bare) is list and isinstance(value, list):
        return [read(item, get_args(bare)[0], where.at(index)) for index, item in enumerate(value)]
    return leaf(value, kind, where)


def _read_struct(value: Any, kind: type[msgspec.Struct], where: Where) -> msgspec.Struct:
    items = _mapping(value, where)
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    refuse_unknown(items, fields, where)
    for name, field in fields.items():
        if field.required and name not in items:
            raise ConfigError(f"{where.at(name)}: this key is required; accepted: {type_name(field.type)}.")
    hints = _hints(kind)
    values = {name: read(item, hints[name], where.at(name)) for name, item in items.items()}
    try:
        return kind(**values)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def refuse_unknown(items: Iterable[str], valid: Iterable[str], where: Where) -> None:
    """Raise `ConfigError` for the first of `items` that is not `valid`, with the nearest name that is."""
    names = set(valid)
    for key in items:
        if key not in names:
            raise ConfigError(f"{where.at(key)}: there is no key {key!r} here; {nearest(str(key), names)}.")


def _read_union(value: Any, kind: Any, bare: Any, where: Where) -> Any:
    members = get_args(bare)
    shapes: dict[type, Any] = {}
    for member in members:
        origin = get_origin(_bare(member)) or _bare(member)
        if _is_struct(origin):
            shapes[dict] = member
        elif origin in (dict, list):
            shapes.setdefault(origin, member)
    chosen = shapes.get(type(value))
    return read(value, chosen, where) if chosen is not None else leaf(value, kind, where)


def leaf(value: Any, kind: Any, where: Where) -> Any:
    """`value` as a leaf type; text that came whole from the environment may stand for a number or a flag."""
    from_environment = isinstance(value, FromEnvironment)
    try:
        return msgspec.convert(str(value) if from_environment else value, kind, strict=not from_environment)
    except msgspec.ValidationError as error:
        choices = [] if get_origin(_bare(kind)) is list else _choices(kind)
        if choices and isinstance(value, str):
            raise ConfigError(f"{where}: {shown(value)} is not accepted; {nearest(value, choices)}.") from error
        reason = str(error).partition(" - at `")[0].replace("`", "")
        inner = str(error).partition(" - at `$")[2].rstrip("`")
        raise ConfigError(
            f"{where}{inner}: {shown(value)} is not accepted: {reason[:1].lower()}{reason[1:]}; "
            f"accepted: {_described(kind)}."
        ) from error


def _described(kind: Any) -> str:
    """The type of a value by the title that its declaration gives it, else by its name."""
    titles = [each.title for each in get_args(kind)[1:] if isinstance(each, msgspec.Meta) and each.title]
    return titles[0] if titles else type_name(kind)


def type_name(kind: Any) -> str:
    """A type as a reader of YAML says it."""
    bare = _bare(kind)
    origin, arguments = get_origin(bare), get_args(bare)
    if origin is Literal:
        return " | ".join(str(value) for value in arguments)
    if origin in (Union, types.UnionType):
        return " | ".join(type_name(member) for member in arguments if member is not type(None))
    if origin is list:
        return f"list of {type_name(arguments[0])}"
    if origin is dict:
        return "mapping" if arguments[1] is Any else f"mapping of names to {type_name(arguments[1])}"
    if _is_struct(bare):
        return "{" + ", ".join(field.name for field in msgspec.structs.fields(bare)) + "}"
    names = {str: "text", int: "whole number", float: "number", bool: "true | false", dict: "mapping", Any: "anything"}
    return names.get(bare, getattr(bare, "__name__", str(bare)))


def _mapping(value: Any, where: Where) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: {shown(value)} is not accepted; accepted: a mapping of keys to values.")
    for key in value:
        if not isinstance(key, str):
            raise ConfigError(f"{where}: the key {key!r} is not text; write it in quotes.")
    return dict(value)


def _bare(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _choices(kind: Any) -> list[str]:
    bare = _bare(kind)
    if get_origin(bare) is Literal:
        return [str(value) for value in get_args(bare)]
    return [choice for inner in get_args(bare) for choice in _choices(inner)]


@cache
def _hints(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)
