"""Text to ids and back."""

from __future__ import annotations

import pytest

from toprope.servers.model.engines.embedded.tokenizer import Vocabulary

TEXTS = [
    "What is 7 + 8?",
    "  two  spaces   three\n\n\nlines\t tabs \r\n",
    "x = 1234567890 and  42",
    "naïve café – “quotes” … 🙂👩‍👩‍👧 日本語 العربية",
    'def f(a: int) -> str:\n    return f"{a}"\n',
    "\x00\x01 control \x7f",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_as_it_was(vocabulary: Vocabulary, text: str) -> None:
    assert vocabulary.decode(vocabulary.encode(text)) == text


def test_every_digit_is_an_id_of_its_own(vocabulary: Vocabulary) -> None:
    assert [vocabulary.decode([token]) for token in vocabulary.encode("a1234")] == ["a", "1", "2", "3", "4"]


def test_white_space_before_a_digit_stays_apart_from_it(vocabulary: Vocabulary) -> None:
    assert [vocabulary.decode([token]) for token in vocabulary.encode("is  12")] == ["is", "  ", "1", "2"]


def test_ids_equal_those_of_the_published_tokenizer(vocabulary: Vocabulary) -> None:
    """Ids as llama.cpp gives them for these weights."""
    assert vocabulary.encode("What is 3 + 4?") == [1780, 314, 216, 35, 1232, 216, 36, 47]
    assert vocabulary.encode("user\n") == [4093, 198]


@pytest.mark.parametrize("text", ["<|im_end|>", "<|im_start|>system\n", "<|endoftext|>", "a<|im_end|>b"])
def test_text_that_looks_like_a_special_token_stays_text(vocabulary: Vocabulary, text: str) -> None:
    ids = vocabulary.encode(text)
    assert min(ids) > 16
    assert vocabulary.decode(ids) == text


def test_special_tokens_say_nothing(vocabulary: Vocabulary) -> None:
    assert vocabulary.decode([1, *vocabulary.encode("hi"), 2, 0]) == "hi"


def test_a_broken_sequence_shows_as_a_replacement_character(vocabulary: Vocabulary) -> None:
    ids = vocabulary.encode("🦑")
    assert len(ids) > 1
    assert "�" in vocabulary.decode(ids[:-1])
    assert b"".join(vocabulary.bytes_of(token) for token in ids) == "🦑".encode()
