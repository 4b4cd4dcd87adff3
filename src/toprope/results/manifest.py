"""The manifest: what a run was asked to do, written once before anything is dispatched.

Values that change what a reward means are kept as digests, key by key, so that a resumed run can name the ones that
differ without storing what they are. Left to others: what the run did (`journal`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from toprope.canonical.digest import digest_value
from toprope.errors.tree import ConfigError
from toprope.storage.atomic import replace_file

SCHEMA = 1


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`expected` = `tasks` * `repeats`; `settings` and `servers` are digests and versions by dotted key."""

    run_id: str
    name: str
    started_at: str
    toprope: str
    tasks: int
    tasks_digest: str
    repeats: int
    expected: int
    max_attempts: int
    min_coverage: float
    pass_threshold: float
    captured_tasks: int
    settings: dict[str, str] = {}
    servers: dict[str, str] = {}
    schema: int = SCHEMA


def setting_digests(settings: Mapping[str, Any]) -> dict[str, str]:
    """The digest of every leaf of `settings`, by dotted key."""
    return {key: digest_value(value) for key, value in sorted(_leaves(settings, ""))}


def _leaves(value: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        name = f"{prefix}{key}"
        if isinstance(inner, Mapping) and inner:
            yield from _leaves(inner, f"{name}.")
        else:
            yield name, inner


def write_manifest(path: Path, manifest: Manifest) -> None:
    """On return the manifest survives a power cut, whole or not at all. Blocks: not for an event loop."""
    replace_file(path, msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")


def read_manifest(path: Path) -> Manifest:
    """Read a manifest. Raises `ConfigError` for a missing, damaged or newer one."""
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); accepted: a directory made by a run.") from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigError(f"{path}: this is no manifest of a run ({error}).") from error
    if manifest.schema > SCHEMA:
        raise ConfigError(f"{path}: schema {manifest.schema} is newer than this program, which reads up to {SCHEMA}.")
    return manifest
