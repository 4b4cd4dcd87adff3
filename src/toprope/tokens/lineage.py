"""Whose continuation is this call? Decided when its reply is known, from recorded ids and the request's items.

The parent is the recorded call whose prompt + generation is the longest prefix of this prompt, id by id, and whose
items account for everything model-authored in the request. Never by text alone, never at a predicted offset. Pure:
who waits for pending writes and who stores the answer is the recorder's affair; where the engine was given its prompt
ids by us they prove nothing, and the model server matches on items instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from toprope.tokens.asked import Asked
from toprope.tokens.entry import ParentDecision, TokenEntry, as_ids
from toprope.tokens.hashing import BLOCK_IDS, ChainHash, Ids
from toprope.tokens.items import CountedMarks, content_of, item_digests
from toprope.tokens.sent import SentItems
from toprope.tokens.shown import Said, ShownBeginning, ShownTurns, shown_beginning
from toprope.tokens.strands import Node, Strand

FIRST_CALL: Final = "first_call"
CONTINUES_NOTHING: Final = "continues_nothing"
LONGEST_PREFIX: Final = "longest_prefix"
INTERCHANGEABLE: Final = "interchangeable"
TOKEN_IN: Final = "token_in"
"""The engine was given the parent's ids, and the parent was found by items: such ids prove nothing by themselves."""
UNRECORDED_TURN: Final = "unrecorded_turn"
HISTORY_REWRITTEN: Final = "history_rewritten"
AMBIGUOUS_PARENT: Final = "ambiguous_parent"
DEFERRED: Final = "deferred"
"""What a recorder that cannot see other writers' calls records beside `unresolved`: decided over the whole snapshot."""
DEFERRED_ALL_TOLD: Final = "deferred:all_told"
"""The same, where a call that was begun has a record or its rollout is incomplete: nothing can have been aborted."""

_RECENT_REQUESTS = 4  # conversations that take turns within one rollout: an agent and a few sub-agents


@dataclass(frozen=True, slots=True)
class ParentChoice:
    """The decision for one call, and what its record takes over from it.

    `reason` is one of this module's names; `history_rewritten` is followed by `:<call>@<position>`, the recorded call
    whose ids the prompt leaves and the first differing position. `prompt_hash` is the chain hash state of the whole
    prompt, made from the parent's: `prompt_hash.extend(generation).hexdigest()` is the entry's `chain_hash`, and
    `suffix_start` where a delta prompt begins (0 without a parent). `item_digests` is what the entry stores: the marks
    of the request that its parent does not account for. `asked` are all of them and `beginning` what a root was shown,
    both for `LineageHistory.add`. `doubtful` is that beginning where a call that was open when this one began may have
    said a part of it, should it be lost; None where that cannot be.
    """

    decision: ParentDecision
    parent_call_id: str | None
    reason: str
    prompt_hash: ChainHash
    suffix_start: int = 0
    item_digests: tuple[str, ...] = ()
    asked: Asked | None = None
    beginning: Said = ()
    doubtful: ShownBeginning | None = None


@dataclass(frozen=True, slots=True)
class _Request:
    """A recent request: the next one of its conversation begins with the same items."""

    sent: SentItems
    asked: Asked


class LineageHistory:
    """The recorded calls of one rollout, indexed as they arrive. Memory is the distinct ids plus a node a call.

    `unseen`: calls that came to nothing may have gone before those that are told here (another writer's, an earlier
    process's). A first request with model-authored items is then nobody's root: they may be such a call's.
    """

    def __init__(self, *, unseen: bool = False) -> None:
        self.unseen = unseen
        self._trunk = Strand(start=0)
        self._nodes: dict[str, Node] = {}
        self._shown_turns = ShownTurns()
        self._contents: set[str] = set()
        self._recent: list[_Request] = []

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, call_id: object) -> bool:
        return call_id in self._nodes

    def add(
        self,
        entry: TokenEntry,
        asked: Asked | None = None,
        *,
        chain: ChainHash | None = None,
        beginning: Said = (),
    ) -> None:
        """Index one recorded call; `entry` has its whole prompt. A call id that is there already changes nothing.

        `asked` and `beginning` are those of the `ParentChoice`, whose `item_digests` the entry has. Without them these
        serve, which is enough to rebuild a history after a restart. `chain` is the state of the entry's chain hash,
        from whoever made it of the `ParentChoice` of this history: the parent's ids were compared then and are not
        compared again. Raises `ValueError` for a delta prompt.
        """
        if entry.prompt_is_delta:
            raise ValueError(f"call {entry.model_call_id}: lineage needs the whole prompt, not a delta")
        if entry.model_call_id in self._nodes:
            return
        parent = self._nodes.get(entry.parent_call_id or "") if entry.parent_decision == "resolved" else None
        said = entry.item_digests
        wrote = item_digests(entry.output_items)
        new = parent_seen(parent).missing(said) if parent is not None and said else said
        self._contents.update(content_of(mark) for mark in (*said, *wrote))
        prompt, generated = entry.prompt_token_ids, entry.generation_token_ids
        if entry.parent_decision == "root" and said:
            self._shown_turns.add_root(tuple(said), prompt, beginning)
        # `decide` compared the ids of the parent that it found; a claim from elsewhere is compared here.
        after = parent if chain is not None or self._is_begun_by(prompt, parent) else None
        if chain is None:
            chain = self.prompt_hash(after, prompt).extend(generated)
        node = Node(
            call_id=entry.model_call_id,
            prompt_len=len(prompt),
            cum_len=len(prompt) + len(generated),
            strand=self._trunk,
            blocks=chain.blocks,
            parent=parent,
            own_request=tuple(new),
            own_output=wrote,
            asked=asked,
        )
        self._nodes[node.call_id] = node
        if len(generated) == 0:
            return  # structural: never anybody's parent
        added = np.concatenate([prompt[after.cum_len if after is not None else 0 :], generated])
        node.strand = self._insert(added, after)
        node.strand.place(node)
        # The bag moves down a straight chain instead of being copied at every call.
        node.seen = parent_seen(parent, take=True) if parent is not None else CountedMarks()
        node.seen.add(node.own_request, node.own_output)

    def note_unrecorded(self, items: Sequence[Mapping[str, Any]] = ()) -> None:
        """A call with this request went upstream and left no record (aborted): part of its reply may be kept.

        Where its `items` are not told, any beginning that shows turns may go on from it.
        """
        self._shown_turns.note_lost(items, first=not self._nodes)

    # -- questions ----------------------------------------------------------------------------------------------

    def candidates(self, prompt: NDArray[np.uint32]) -> tuple[Node, ...]:
        """The calls whose prompt + generation is the longest recorded prefix of `prompt`."""
        for strand, reach in reversed(self._walk(prompt)):
            end = strand.last_end(reach)
            if end is not None:
                return tuple(strand.calls[end])
        return ()

    def first_difference(self, prompt: NDArray[np.uint32]) -> tuple[str | None, int]:
        """The recorded call that `prompt` follows longest before it leaves it, and the position where it does."""
        path = self._walk(prompt)
        strand, reach = path[-1]
        end = strand.next_end(reach)
        if end is not None:
            return min(node.call_id for node in strand.calls[end]), reach
        for fork_at, fork in sorted((key[0], fork) for key, fork in strand.forks.items() if key[0] >= reach):
            if fork.ends and fork_at >= reach:
                return min(node.call_id for node in fork.calls[fork.ends[0]]), reach
        return None, reach

    def was_shown(self, asked: tuple[str, ...]) -> bool:
        """Whether all model-authored items of a request stand in the request of one recorded root."""
        return not asked or self._shown_turns.hold(asked)

    def is_root_prompt(self, asked: tuple[str, ...], prompt: NDArray[np.uint32]) -> bool:
        """Whether a recorded root had this very prompt and was shown `asked`."""
        return self._shown_turns.is_root_prompt(asked, prompt)

    def judged(self, beginning: Said) -> ShownBeginning:
        """What a request shows, and whether a recorded root began so."""
        return self._shown_turns.judged(beginning)

    def is_nobodys_reply(self, shown: ShownBeginning) -> bool:
        """Whether no lost call can have said what a beginning shows: where some are not known, any may have."""
        return not self.unseen and self._shown_turns.is_nobodys_reply(shown)

    def all_recorded(self, asked: Sequence[str]) -> bool:
        """Whether the content of every mark was seen in some recorded call of this rollout."""
        return all(content_of(mark) in self._contents for mark in asked)

    def asked_by(self, items: Sequence[Mapping[str, Any]]) -> Asked:
        """The marks of a request with these items; what a recent one began with is not digested again."""
        request = tuple(items)
        known = _Request(SentItems(), Asked())
        for each in sorted(self._recent, key=lambda recent: len(recent.sent.items), reverse=True):
            if each.sent.begin(request):
                known = each
                break
        asked = known.asked.extended(item_digests(request[len(known.sent.items) :]))
        others = [each for each in self._recent if each is not known]
        self._recent = [*others[1 - _RECENT_REQUESTS :], _Request(known.sent.continued(request), asked)]
        return asked

    def accounts_for(self, node: Node, asked: Asked) -> bool:
        """Whether every mark of a request stands in the request or output of `node` or of the calls before it."""
        # What the parent's own request held is accounted for already; left is what was added to it.
        added = asked.since(node.asked) if node.asked is not None else None
        if added is not None and not CountedMarks(sampled=node.own_output).missing(added):
            return True
        return not parent_seen(node).missing(asked.all())

    def begun_by(self, call_id: str, prompt: NDArray[np.uint32]) -> Node | None:
        """That call, if it is recorded and `prompt` begins with its ids; else None."""
        node = self._nodes.get(call_id)
        return node if self._is_begun_by(prompt, node) else None

    def prompt_hash(self, parent: Node | None, prompt: NDArray[np.uint32]) -> ChainHash:
        """The chain hash state of `prompt`, which begins with `parent`'s ids if there is one."""
        if parent is None:
            return ChainHash.of(prompt)
        done = parent.cum_len - parent.cum_len % BLOCK_IDS
        tail = prompt[done : parent.cum_len]
        return ChainHash.resume(parent.cum_len, parent.blocks, tail).extend(prompt[parent.cum_len :])

    # -- the tree -----------------------------------------------------------------------------------------------

    def _walk(self, ids: NDArray[np.uint32], after: Node | None = None) -> list[tuple[Strand, int]]:
        """The strands that `ids` follow, each with the position up to which they do.

        From the trunk on, or from where the call `after` ends; `ids` then are what comes after it.
        """
        begin = after.cum_len if after is not None else 0
        strand, reach = (after.strand if after is not None else self._trunk), begin
        path = []
        while True:
            reach += strand.followed_by(reach - strand.start, ids[reach - begin :])
            path.append((strand, reach))
            fork = strand.forks.get((reach, int(ids[reach - begin]))) if reach - begin < len(ids) else None
            if fork is None:
                return path
            strand = fork

    def _insert(self, ids: NDArray[np.uint32], after: Node | None) -> Strand:
        """The strand on which `ids` (after that call, if any) end, grown or forked as needed."""
        strand, reach = self._walk(ids, after)[-1]
        rest = ids[reach - (after.cum_len if after is not None else 0) :]
        if len(rest) == 0:
            return strand
        if reach == strand.start + strand.size:
            strand.append(rest)
            return strand
        fork = Strand(start=reach)
        fork.append(rest)
        strand.forks[reach, int(rest[0])] = fork
        return fork

    def _is_begun_by(self, prompt: NDArray[np.uint32], node: Node | None) -> bool:
        if node is None or node.cum_len not in node.strand.calls:
            return False
        return any(strand is node.strand and reach >= node.cum_len for strand, reach in self._walk(prompt))


def parent_seen(node: Node, *, take: bool = False) -> CountedMarks:
    """All marks that stand on the way to `node`: of its request, its output and of the calls before it.

    `take` hands over the bag itself, which `node` then no longer keeps; asked again, it is made anew.
    """
    if node.seen is not None:
        bag = node.seen
        if take:
            node.seen = None
        return bag
    bag, at = CountedMarks(), node
    while True:
        bag.add(at.own_request, at.own_output)
        if at.parent is None:
            return bag
        at = at.parent


def decide(
    history: LineageHistory,
    request_items: Sequence[Mapping[str, Any]],
    prompt_ids: Ids,
) -> ParentChoice:
    """Whose continuation a call with these request items and these whole prompt ids, (P,) as the engine saw them, is.

    `root`: nothing is recorded yet, or the request continues nothing and all its model-authored items stand in the
    request of a recorded root, where no lost call can have said them. `resolved`: one recorded call with a generation
    is the longest prefix (or several that are interchangeable: the smallest id) and accounts for every model-authored
    item. Else `unresolved`.
    """
    asked = history.asked_by(request_items)
    return decide_asked(history, asked, as_ids(prompt_ids, "prompt_token_ids"), items=request_items)


def decide_asked(
    history: LineageHistory,
    asked: Asked,
    prompt: NDArray[np.uint32],
    *,
    continues: str | None = None,
    items: Sequence[Mapping[str, Any]] = (),
    before_any_reply: bool = False,
) -> ParentChoice:
    """`decide` for a request whose marks are known already.

    `continues` names the recorded call whose ids the engine was given because its items are the request's: that call
    is the parent, or none is. Without `items` a beginning that shows turns is known by its ids alone once one is lost.
    `before_any_reply`: the request came when no call of the rollout can have said anything, so that it holds no turn of
    one, whenever it is recorded.
    """
    if continues is not None:
        given = history.begun_by(continues, prompt)
        if given is None:
            return _orphan(history, prompt, "unresolved", UNRECORDED_TURN, asked)
        return ParentChoice(
            decision="resolved",
            parent_call_id=continues,
            reason=TOKEN_IN,
            prompt_hash=history.prompt_hash(given, prompt),
            suffix_start=given.cum_len,
            asked=asked,
        )
    first = len(history) == 0
    found = () if first else history.candidates(prompt)
    if not found:
        marks = asked.all()
        if first or before_any_reply or history.was_shown(marks):
            reason = FIRST_CALL if first else CONTINUES_NOTHING
            return _beginning(history, reason, asked, marks, prompt, items, certain=before_any_reply)
        if history.all_recorded(marks):
            call, position = history.first_difference(prompt)
            where = f":{call}@{position}" if call is not None else f":@{position}"
            return _orphan(history, prompt, "unresolved", HISTORY_REWRITTEN + where, asked)
        return _orphan(history, prompt, "unresolved", UNRECORDED_TURN, asked)
    if len({node.prompt_len for node in found}) > 1:
        return _orphan(history, prompt, "unresolved", AMBIGUOUS_PARENT, asked)
    fitting = [node for node in found if history.accounts_for(node, asked)]
    if not fitting:
        return _orphan(history, prompt, "unresolved", UNRECORDED_TURN, asked)
    parent = min(fitting, key=lambda node: node.call_id)
    return ParentChoice(
        decision="resolved",
        parent_call_id=parent.call_id,
        reason=INTERCHANGEABLE if len(found) > 1 else LONGEST_PREFIX,
        prompt_hash=history.prompt_hash(parent, prompt),
        suffix_start=parent.cum_len,
        asked=asked,
    )


def _beginning(
    history: LineageHistory,
    reason: str,
    asked: Asked,
    marks: tuple[str, ...],
    prompt: NDArray[np.uint32],
    items: Sequence[Mapping[str, Any]],
    *,
    certain: bool,
) -> ParentChoice:
    """The decision for a request that is a root, unless a lost call may have said what it shows."""
    if not marks:
        return _orphan(history, prompt, "root", reason, asked)
    shown = history.judged(shown_beginning(items, marks))
    # Whatever is lost: the ids of a root are a root's.
    certain = certain or history.is_root_prompt(marks, prompt)
    if not certain and not history.is_nobodys_reply(shown):
        return _orphan(history, prompt, "unresolved", UNRECORDED_TURN, asked)
    return _orphan(history, prompt, "root", reason, asked, shown.said, None if certain else shown)


def _orphan(
    history: LineageHistory,
    prompt: NDArray[np.uint32],
    decision: ParentDecision,
    reason: str,
    asked: Asked,
    beginning: Said = (),
    doubtful: ShownBeginning | None = None,
) -> ParentChoice:
    hashed = history.prompt_hash(None, prompt)
    return ParentChoice(decision, None, reason, hashed, 0, asked.all(), asked, beginning, doubtful)
