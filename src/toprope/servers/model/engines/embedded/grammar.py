"""Forces a reply to be one call of one of the given functions, by a grammar that llguidance runs.

The frame is the template's; a `strict` function's arguments follow its schema, any other's are some JSON object.
Left to others: what is done with ids that the grammar leaves no choice about (`sequence`).
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toprope.errors.tree import EngineUnavailable, ModelRejected
from toprope.servers.model.engines.embedded.template import CALL_CLOSE, CALL_OPEN, Function
from toprope.servers.model.engines.embedded.tokenizer import TURN_END, Vocabulary

_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_KEPT = 64


class Constraint:
    """What may come next in one sequence."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher = matcher
        self._size = vocabulary

    def forced(self) -> list[int]:
        """The ids that must come next because nothing else may; taken as said on return."""
        ids = [int(token) for token in self._matcher.compute_ff_tokens()]
        if ids:
            self._matcher.consume_tokens(ids)
        return ids

    def legal(self) -> NDArray[np.bool_]:
        """(vocabulary,) True where an id may come next."""
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return np.unpackbits(packed, bitorder="little")[: self._size].astype(np.bool_)

    def accept(self, token: int) -> None:
        """Takes `token` as said; it must be legal."""
        self._matcher.consume_token(token)
        if self._matcher.is_error():
            raise RuntimeError(f"the grammar refuses id {token}: {self._matcher.get_error()}")


class Grammars:
    """Compiles grammars for one vocabulary and keeps the latest ones."""

    def __init__(self, vocabulary: Vocabulary, size: int) -> None:
        self._vocabulary = vocabulary
        self._size = size
        self._tokenizer: Any = None
        self._compiled: OrderedDict[str, Any] = OrderedDict()

    def one_call(self, allowed: Sequence[Function]) -> Constraint:
        """A fresh constraint: exactly one call of one of `allowed`, then the end of the turn.

        Raises `ModelRejected` with llguidance's words for a schema that it cannot enforce.
        """
        grammar = _call_grammar(allowed)
        matcher = self._compiled.get(grammar)
        if matcher is None:
            matcher = self._compile(grammar, allowed)
            self._compiled[grammar] = matcher
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return Constraint(matcher.deep_copy(), self._size)

    def _compile(self, grammar: str, allowed: Sequence[Function]) -> Any:
        try:
            import llguidance
        except ImportError as error:
            raise EngineUnavailable(
                "A forced tool call needs the package llguidance; install it with `pip install 'toprope[embedded]'`."
            ) from error
        if self._tokenizer is None:
            self._tokenizer = llguidance.LLTokenizer(self._vocabulary.definition, eos_token=TURN_END)
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            names = ", ".join(repr(function.name) for function in allowed)
            raise ModelRejected(
                f"The parameters of {names} cannot be enforced on a forced call: {matcher.get_error().strip()} "
                "Use a schema that llguidance knows, or leave `strict` out."
            )
        return matcher


def _call_grammar(allowed: Sequence[Function]) -> str:
    """Lark text as llguidance reads it: a literal frame around the arguments, and the end of the turn."""
    calls = []
    for function in allowed:
        schema = {**(function.parameters if function.strict else {"type": "object"}), "x-guidance": _SEPARATORS}
        opening = f'{CALL_OPEN}\n{{"name": {json.dumps(function.name)}, "arguments": '
        calls.append(f"{json.dumps(opening)} %json {json.dumps(schema)} {json.dumps('}' + chr(10) + CALL_CLOSE)}")
    return "start: call <|im_end|>\ncall: " + "\n    | ".join(calls) + "\n"
