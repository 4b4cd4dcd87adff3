"""From a name in a configuration to an object: entry points, `module:Class`, and constructors called by name.

A wrong argument is refused before the constructor runs, with the nearest valid name from its signature.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
import types
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import toprope
from toprope.errors.body import said_by
from toprope.errors.tree import ConfigError, TopropeError
from toprope.launch.strict import FromEnvironment, Where, leaf, nearest, shown

GROUPS = {
    "engine": "toprope.engines",
    "agent": "toprope.agents",
    "resources": "toprope.environments",
    "environment": "toprope.protocols",
}


def importable(*directories: Path) -> None:
    """Make modules beside a configuration importable, after everything that is installed."""
    for directory in directories:
        text = str(directory.resolve())
        if text not in sys.path:
            sys.path.append(text)


def find(name: str, group: str, where: Where) -> Callable[..., Any]:
    """What `name` stands for: an entry point of `group`, or `module:Class`. Raises `ConfigError`."""
    if ":" in name:
        module, _, attribute = name.partition(":")
        if not all(part.isidentifier() for path in (module, attribute) for part in path.split(".")):
            raise ConfigError(f"{where}: {shown(name)} is not accepted; accepted: module:Class, such as till:Shop.")
        return _load(EntryPoint(name, name, group), where)
    known = {point.name: point for point in entry_points(group=group)}
    if name not in known:
        raise ConfigError(f"{where}: {shown(name)} is not installed; {nearest(name, known)}, or module:Class.")
    return _load(known[name], where)


def _load(point: EntryPoint, where: Where) -> Callable[..., Any]:
    try:
        target: Any = importlib.import_module(point.module)
        for part in (point.attr or "").split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{where}: {shown(point.value)} cannot be loaded: {error}{_extra_hint(error)}.") from error
    except (Exception, SystemExit) as error:  # of the module's own code
        raise ConfigError(f"{where}: {shown(point.value)} cannot be loaded: {said_by(error)}{_at(error)}.") from error
    if not callable(target):
        raise ConfigError(f"{where}: {shown(point.value)} is {shown(target)}; accepted: a class.")
    found: Callable[..., Any] = target
    return found


def _at(error: BaseException) -> str:
    """The line of somebody's module in which `error` arose, where one is known and the error does not name it."""
    if isinstance(error, SyntaxError):
        return ""
    not_theirs = ("<", str(Path(toprope.__file__).parent))
    theirs = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(not_theirs)]
    return f" ({theirs[-1].filename}, line {theirs[-1].lineno})" if theirs else ""


def build(
    target: Callable[..., Any], given: Mapping[str, Any], where: Where, *, offered: Mapping[str, Any] | None = None
) -> Any:
    """`target(**given)`, with those of `offered` that it has parameters for. Raises `ConfigError` at `where`."""
    parameters = _parameters(target)
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    hints = _type_hints(target)
    named = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and not (_is_code(hints.get(name)) and parameter.default is not parameter.empty)
    }
    ours = {name: value for name, value in (offered or {}).items() if name in named}
    accepted = [name for name in named if name not in ours]
    for name in given:
        if name in ours or (name not in named and (name in parameters or not open_ended)):
            raise ConfigError(f"{where.at(name)}: {_title(target)} has no such setting; {nearest(name, accepted)}.")
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in given and name not in ours:
            raise ConfigError(f"{where.at(name)}: {_title(target)} needs this setting; accepted: {_hint(parameter)}.")
    typed = {name: _typed(value, hints.get(name), where.at(name)) for name, value in given.items()}
    try:
        return target(**typed, **ours)
    except TopropeError as error:
        raise ConfigError(f"{where}: {error.message}") from error
    except ImportError as error:
        raise ConfigError(f"{where}: {_title(target)} cannot start: {error}{_extra_hint(error)}.") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{where}: {_title(target)} refuses its settings: {error}") from error


def _parameters(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):
        return {}


def _type_hints(target: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(target.__init__ if inspect.isclass(target) else target, include_extras=True)
    except (NameError, TypeError, AttributeError):
        return {}  # annotations that cannot be resolved: the constructor itself judges the value


def _is_code(hint: Any) -> bool:
    """Whether only a program can give such a value, a clock for one; a configuration has no functions."""
    members = [each for each in (get_args(hint) or ()) if each is not type(None)] if _is_union(hint) else [hint]
    return bool(members) and all(get_origin(each) is Callable or each is Callable for each in members)


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _typed(value: Any, hint: Any, where: Where) -> Any:
    if hint is None:
        return _plain(value)
    try:
        return leaf(_plain(value) if not isinstance(value, FromEnvironment) else value, hint, where)
    except TypeError:
        return _plain(value)  # an annotation that is no JSON type: the constructor itself judges the value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, FromEnvironment) else value


def _title(target: Callable[..., Any]) -> str:
    return getattr(target, "__name__", repr(target))


def _hint(parameter: inspect.Parameter) -> str:
    annotation = parameter.annotation
    return "a value" if annotation is parameter.empty else str(getattr(annotation, "__name__", annotation))


def _extra_hint(error: Exception) -> str:
    extras = {
        "gymnasium": "gymnasium",
        "reasoning_gym": "reasoning-gym",
        "onnxruntime": "embedded",
        "tokenizers": "embedded",
        "llguidance": "embedded",
        "renderers": "renderers",
    }
    missing = getattr(error, "name", None)
    extra = extras.get((missing or "").partition(".")[0])
    return f"; install it with: pip install 'toprope[{extra}]'" if extra else ""
