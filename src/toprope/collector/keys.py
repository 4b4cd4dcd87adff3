"""Capture keys of dispatched rows are new: what an earlier run left is set aside, or the run is refused.

Left to others: what `supersede` does (the source), which rows are selected (`plan`).
"""

from __future__ import annotations

import logging

from toprope.capture.bounds import within
from toprope.capture.protocols import CaptureLister, CaptureReader, SupersedingSource, TokenSource
from toprope.collector.plan import Plan
from toprope.correlation.ids import capture_key, parse_capture_key
from toprope.errors.tree import ConfigError

log = logging.getLogger(__name__)


async def require_new_keys(plan: Plan, source: TokenSource) -> None:
    """Refuse a run of which a selected rollout's key, of any attempt, is used already; nothing where the source can
    set it aside. A source that can neither list nor read while open cannot be asked."""
    if isinstance(source, SupersedingSource):
        return
    selected = {rollout.rollout_id for rollout in plan.rollouts() if rollout.task.selected}
    if isinstance(source, CaptureLister):
        for info in await source.list_captures(retired=True):
            if not info.abandoned and _rollout_of(info.rollout_id) in selected:
                raise _used(info.rollout_id)
    elif isinstance(source, CaptureReader):
        for rollout_id in sorted(selected):
            key = capture_key(rollout_id, 0)
            if await source.open_entries(key):
                raise _used(key)


async def make_new(key: str, source: TokenSource, timeout_s: float) -> str | None:
    """On return what stood under `key` is set aside where the source can do that.

    The text of the failure is returned, not raised: it costs the row, not the run.
    """
    if not isinstance(source, SupersedingSource):
        return None
    try:
        aside = await within(timeout_s, source.supersede(key), "supersede")
    except Exception as error:  # a failing transport masks one row
        log.warning("rollout %s: what an earlier run left under its key could not be set aside: %s", key, error)
        return f"{key}: what an earlier run left could not be set aside: {type(error).__name__}: {error}"
    if aside is not None:
        log.warning("rollout %s: an earlier run left evidence under this key; it is kept as %s", key, aside)
    return None


def _rollout_of(key: str) -> str | None:
    try:
        return parse_capture_key(key).rollout_id
    except ValueError:
        return None


def _used(key: str) -> ConfigError:
    return ConfigError(
        f"the capture store already holds calls of the key {key!r}, and its source cannot set them aside. "
        "Choose another run id (or `_ng_rollout_id`), or a source with `supersede`."
    )
