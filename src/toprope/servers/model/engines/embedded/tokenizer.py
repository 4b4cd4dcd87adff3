"""The model's tokenizer, built from the keys of the model file.

Ordinary text never becomes a special token here, whatever it says: a user or a tool that writes `<|im_end|>` gets the
letters. Special ids are put in by the template alone. Left to others: what a conversation looks like (`template`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from toprope.errors.tree import EngineUnavailable
from toprope.servers.model.engines.embedded.gguf import GgufFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT, TURN_START, TURN_END = 0, 1, 2
STOP_IDS = frozenset({TURN_END, END_OF_TEXT})
_CONTROL = 3
"""llama.cpp's token type for special tokens."""


def build_tokenizer(file: GgufFile) -> Tokenizer:
    """A `tokenizers.Tokenizer` with the file's vocabulary: single digits, then byte-level BPE (pre "smollm")."""
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    except ImportError as error:
        raise EngineUnavailable(
            "The embedded engine needs the package tokenizers; install it with `pip install 'toprope[embedded]'`."
        ) from error
    tokens: list[str] = file.keys["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ", 1)) for pair in file.keys["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = file.keys["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _bytes_of_letters() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte (openai/gpt-2 `encoder.py`): itself if printable, else 256 + n."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


class Vocabulary:
    """Text to ids, ids to bytes and text."""

    def __init__(self, file: GgufFile) -> None:
        self._tokenizer = build_tokenizer(file)
        self.definition: str = self._tokenizer.to_str()
        """The tokenizer as JSON, for a grammar or for a model directory beside another engine."""
        self._tokenizer.encode_special_tokens = True
        letters = _bytes_of_letters()
        kinds = file.keys["tokenizer.ggml.token_type"]
        self._bytes = [
            b"" if kind == _CONTROL else bytes(letters[letter] for letter in token)
            for token, kind in zip(file.keys["tokenizer.ggml.tokens"], kinds, strict=True)
        ]

    def encode(self, text: str) -> list[int]:
        """The ids of ordinary text; no special token among them, none added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def bytes_of(self, token: int) -> bytes:
        """What one id stands for; nothing for a special token. It may end inside a UTF-8 sequence."""
        return self._bytes[token]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; special tokens are left out, broken UTF-8 shows as U+FFFD."""
        return b"".join(self._bytes[token] for token in ids).decode("utf-8", "replace")
