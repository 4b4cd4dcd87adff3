"""Capture transports by name: from `module:Class` and keyword arguments to the conformance suite.

The suite is in `toprope.testing`, which sees everything and which nothing here may import; it is loaded by name, as a
plug-in is.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from toprope.errors.tree import ConfigError
from toprope.launch.construct import importable


def arguments(text: str) -> Mapping[str, Any]:
    """Keyword arguments from JSON. Raises `ConfigError` for anything but an object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f'--kwargs: not JSON ({error}); accepted: an object, like {{"path": "/tmp/try.db"}}.'
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(f'--kwargs: {text} is no object; accepted: keyword arguments, like {{"path": "..."}}.')
    return value


async def check_transport(
    sink: str, source: str | None, kwargs: Mapping[str, Any], *, quick: bool, tell: Callable[[Any], None]
) -> bool:
    """Whether the transport passes every check; `tell` hears of each outcome as it comes.

    Raises `ConfigError` for a name that cannot be loaded or an argument that nothing takes.
    """
    importable(Path.cwd())
    suite = importlib.import_module("toprope.testing.capture_suite")
    endpoints = importlib.import_module("toprope.testing.capture_endpoints").Endpoints(sink, source, kwargs)
    await (await endpoints()).close()  # what cannot be built is said once, and not by every check
    outcomes = await suite.run_suite(endpoints, None if quick else suite.Scale.full(), tell=tell)
    return all(outcome.result != "failed" for outcome in outcomes)
