"""One YAML file into plain values: strict YAML, `--set` changes, `${NAME}` and `${NAME:default}`.

Order: parse, then `--set`, then the environment, so that both sources may use it. Left to others: which keys there
are (`config`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from toprope.errors.tree import ConfigError
from toprope.launch.strict import FromEnvironment, Where, shown

_REFERENCE = re.compile(r"\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::(?P<default>[^}]*))?\}")


MAX_VALUES = 50_000
"""Values that a configuration may hold once its aliases (`*name`) are followed: a few lines of YAML can stand for
billions. The longest configuration we know of has some 2 000; reading this many takes a few seconds."""


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML that refuses a key written twice; the later one would silently win."""

    composed = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.composed += 1
        _refuse_too_many(self.composed)
        return super().compose_node(parent, index)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        _refuse_too_many(len(node.value))  # `<<` copies what it merges, each time anew before PyYAML 6.0.4

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = getattr(key_node, "value", None)
            line = key_node.start_mark.line + 1
            if isinstance(key, str) and key != "<<" and seen.setdefault(key, line) != line:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice, in lines {seen[key]} and {line}", key_node.start_mark
                )
        return super().construct_mapping(node, deep=deep)


def load_values(path: Path, sets: Sequence[str], environ: Mapping[str, str]) -> dict[str, Any]:
    """The file's values with `sets` (`a.b=c`) and the environment applied. Raises `ConfigError` naming the place."""
    where = Where(str(path))
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path}: the configuration cannot be read: {reason}; accepted: one YAML file.") from error
    try:
        values = parse_yaml(text, where)
        if not isinstance(values, dict):
            raise ConfigError(
                f"{path}: the file holds {shown(values)}; accepted: a mapping with the keys servers and run."
            )
        for setting in sets:
            apply_set(values, setting)
        expanded = expand(values, environ, where)
    except RecursionError as error:
        raise ConfigError(
            f"{path}: a value is nested too deeply, or an alias (*name) stands inside its own anchor (&name)."
        ) from error
    assert isinstance(expanded, dict)
    return expanded


def parse_yaml(text: str, where: Where) -> Any:
    """One YAML document as plain values. Raises `ConfigError` with line and column."""
    try:
        value = yaml.load(text, Loader=_StrictLoader)
        _count(value, 0)
        return value
    except _TooMany as error:
        raise ConfigError(
            f"{where}: the YAML holds more than {MAX_VALUES} values once its aliases (*name) are followed; accepted: "
            "fewer; long lists belong into files of their own."
        ) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{where}{place}: this is not YAML: {error.problem or error.context}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: this is not YAML: {error}") from error


class _TooMany(Exception):
    """More than `MAX_VALUES`."""


def _refuse_too_many(count: int) -> None:
    if count > MAX_VALUES:
        raise _TooMany


def _count(value: Any, before: int) -> int:
    """`before` and how many values `value` holds, an aliased one as often as it is named. Raises `_TooMany`."""
    count = before + 1
    _refuse_too_many(count)
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            count = _count(item, count)
    return count


def apply_set(values: dict[str, Any], setting: str) -> None:
    """Apply one `a.b=c` in place; `c` is read as YAML. A number addresses a list's item."""
    where = Where(f"--set {setting}")
    path, equals, text = setting.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"{where}: accepted: KEY=VALUE, where KEY is a path with dots, such as run.repeats=8.")
    value = parse_yaml(text, where)
    place: Any = values
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        if isinstance(place, list):
            if not key.isdecimal() or int(key) >= len(place):
                raise ConfigError(f"{where}: {key!r} is no index of a list with {len(place)} items.")
            key_or_index: Any = int(key)
        elif isinstance(place, dict):
            key_or_index = key
            if not last and place.get(key) is None:
                place[key] = {}
        else:
            raise ConfigError(f"{where}: {'.'.join(keys[:depth])} is {shown(place)} and has no keys.")
        if last:
            place[key_or_index] = value
        else:
            place = place[key_or_index]


def expand(value: Any, environ: Mapping[str, str], where: Where) -> Any:
    """`value` with every `${NAME}` and `${NAME:default}` replaced.

    Raises `ConfigError` if one is unset, and for what YAML can say and no setting be: dates, sets, bytes, .inf, .nan.
    """
    if isinstance(value, dict):
        return {key: expand(item, environ, where.at(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [expand(item, environ, where.at(index)) for index, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where}: {value} is not accepted; accepted: a finite number.")
    if value is not None and not isinstance(value, str | int | float):
        raise ConfigError(
            f"{where}: {shown(value)} is a YAML {type(value).__name__}; accepted: text (in quotes), a number, "
            "true or false, a list, a mapping."
        )
    if not isinstance(value, str) or "${" not in value:
        return value

    def replace(match: re.Match[str]) -> str:
        name, default = match["name"], match["default"]
        found = environ.get(name, default)
        if found is None:
            raise ConfigError(
                f"{where}: the environment variable {name} is not set; set it, or write ${{{name}:default}}."
            )
        return found

    if "${" in _REFERENCE.sub("", value):
        raise ConfigError(
            f"{where}: {shown(value)} holds a '${{' that begins no reference; accepted: ${{NAME}} or ${{NAME:default}} "
            "(where a literal '${' is meant: ${DOLLAR:$}{)."
        )
    whole = _REFERENCE.fullmatch(value)
    text = _REFERENCE.sub(replace, value)
    return FromEnvironment(text) if whole else text
