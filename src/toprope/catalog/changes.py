"""A verdict on what an episode changed: which of the wanted changes it made, and what it changed beside them.

Shared by environments that are judged by how they are left (`workbench`, `user_sim`). Left to them: what a change is.
"""

from __future__ import annotations

from collections import Counter

from toprope.servers.resources.environment import Verdict


def judged_by_changes(wanted: Counter[str], done: Counter[str]) -> Verdict:
    """The reward is max(0, made - unwanted) / wanted, each a count of changes; `wanted` holds one at least.

    The row has `missed` and `unwanted`, lists of changes in the order of their words.
    """
    made, missed, unwanted = wanted & done, wanted - done, done - wanted
    components = {"made": made.total() / wanted.total(), "unwanted": float(unwanted.total())}
    return Verdict(
        reward=max(0, made.total() - unwanted.total()) / wanted.total(),
        reward_components=components,
        extra={"missed": sorted(missed.elements()), "unwanted": sorted(unwanted.elements())},
    )
