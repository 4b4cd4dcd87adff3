"""Draws the life cycle of a capture for the docs, from the table that the stores obey.

`python -m toprope.testing.lifecycle_drawing` prints it; with `--write` it goes into docs/explanation/custody.md of the
current directory, between the two markers.
"""

from __future__ import annotations

import sys
from pathlib import Path

from toprope.tokens.lifecycle import TABLE, Phase, Reaction, Verb

PAGE = Path("docs/explanation/custody.md")
_BEGIN, _END = "<!-- drawn: begin -->\n", "<!-- drawn: end -->"

_MOVES: dict[Reaction, Phase] = {
    Reaction.NOTE_INTENT: Phase.OPEN,
    Reaction.STORE: Phase.OPEN,
    Reaction.CLOSE_INTENT: Phase.OPEN,
    Reaction.FIX: Phase.FROZEN,
    Reaction.RETIRE: Phase.RETIRED,
    Reaction.FORGET: Phase.FENCED,
    Reaction.LIFT: Phase.ABSENT,
    Reaction.SET_ASIDE: Phase.ABSENT,
}


def drawing() -> str:
    """A mermaid state diagram and the table in words."""
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> absent"]
    moves: dict[tuple[Phase, Phase], list[Verb]] = {}
    for (verb, phase), reaction in TABLE.items():
        target = Phase.OPEN if reaction is Reaction.MARK and phase is Phase.ABSENT else _MOVES.get(reaction, phase)
        if target is not phase:
            moves.setdefault((phase, target), []).append(verb)
    lines += [f"    {a} --> {b}: {', '.join(verbs)}" for (a, b), verbs in moves.items()]
    lines += ["```", "", "| call | " + " | ".join(Phase) + " |", "| --- " * (len(Phase) + 1) + "|"]
    for verb in Verb:
        cells = [TABLE.get((verb, phase), Reaction.REFUSE) for phase in Phase]
        lines.append(f"| `{verb}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    if "--write" not in sys.argv[1:]:
        sys.stdout.write(drawing())
        return
    page = PAGE.read_text("utf-8")
    head, _, rest = page.partition(_BEGIN)
    PAGE.write_text(head + _BEGIN + drawing() + rest[rest.index(_END) :], "utf-8")


if __name__ == "__main__":
    main()
