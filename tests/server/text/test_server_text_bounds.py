"""Texts that are too long for a context: refused by length, or by counting slices."""

from pathlib import Path

import pytest
from tokenizers import AddedToken

from kvell.errors import ChangeSomething
from kvell.models.text.tokenizer import LOSSY_FACTOR, Tokenizer, most_token_bytes
from kvell.server.text.lanes import TextWork
from kvell.server.text.served_text import ServedText
from kvell.server.text.text_bounds import (
    ANY_TEXT_BYTES,
    LARGEST_TEXT_BYTES,
    RENDERED_FACTOR,
    SLICE_CHARS,
    ContextTooLong,
    TextBounds,
    chars_within,
)
from kvell.server.text.text_encoder import TextEncoder
from kvell.vocabulary import MIB


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.load(smollm2_path)


def test_the_longest_token_is_found_in_the_vocabulary(tokenizer: Tokenizer) -> None:
    assert tokenizer.most_token_bytes == 81, "a line break and 80 spaces"


def test_a_special_token_may_be_the_longest(smollm2_path: Path) -> None:
    backend = Tokenizer.load(smollm2_path).backend
    backend.add_tokens([AddedToken("<" + "é" * 100 + ">", special=True)])
    assert most_token_bytes(backend) == 202


@pytest.mark.parametrize("change", ["normalizer", "swallows"])
def test_a_tokenizer_that_drops_text_gets_a_factor(smollm2_path: Path, change: str) -> None:
    backend = Tokenizer.load(smollm2_path).backend
    if change == "swallows":
        backend.add_tokens([AddedToken("<mask>", lstrip=True)])
    else:
        from tokenizers import normalizers

        backend.backend_tokenizer.normalizer = normalizers.NFKC()
    assert most_token_bytes(backend) >= LOSSY_FACTOR * 81


def test_bounds_grow_with_the_context_up_to_a_largest_text() -> None:
    assert TextBounds(1000, 81).most_bytes == 81_000
    assert TextBounds(128 << 10, 128).most_bytes == LARGEST_TEXT_BYTES
    assert TextBounds(1 << 20, 128).most_bytes == 32 * MIB
    assert TextBounds(1000, 81).any_bytes == ANY_TEXT_BYTES
    assert TextBounds(8192, 81).memory_bytes == 216 * MIB


def test_lengths_are_of_utf8() -> None:
    bounds = TextBounds(10, 2)
    assert bounds.checked_bytes("prompt", "é" * 10) == 20
    with pytest.raises(ContextTooLong, match="send at most 7 tokens") as refused:
        bounds.checked_bytes("prompt", "é" * 11, answer_tokens=3)
    assert (refused.value.field, refused.value.bound) == ("prompt", "text_bytes")


def test_what_need_not_fit_has_a_bound_in_bytes() -> None:
    bounds = TextBounds(10, 2)
    assert bounds.checked_bytes("prompt", "x" * ANY_TEXT_BYTES, fits=False) == ANY_TEXT_BYTES
    with pytest.raises(ChangeSomething, match=f"send at most {ANY_TEXT_BYTES} bytes") as refused:
        bounds.checked_bytes("prompt", "x" * (ANY_TEXT_BYTES + 1), fits=False)
    assert refused.value.bound == "text_bytes"
    assert not isinstance(refused.value, ContextTooLong)


def test_a_conversation_is_bounded_before_it_is_rendered() -> None:
    bounds = TextBounds(10, 2)
    bounds.check_conversation("messages", chars=RENDERED_FACTOR * 20)
    with pytest.raises(ContextTooLong):
        bounds.check_conversation("messages", chars=RENDERED_FACTOR * 20 + 1)
    assert chars_within([{"role": "user", "content": [{"type": "text"}]}, 7, None]) == 23


def test_counting_ends_at_the_first_slice_too_many() -> None:
    counted: list[str] = []

    def count(piece: str) -> int:
        counted.append(piece)
        return len(piece)

    with pytest.raises(ContextTooLong):
        TextBounds(SLICE_CHARS, 100).check_slices("prompt", "x" * SLICE_CHARS * 20, count)
    assert list(map(len, counted)) == [SLICE_CHARS] * 3


def test_usual_texts_are_not_counted_first() -> None:
    def count(piece: str) -> int:
        raise AssertionError("the text is as long as texts are")

    TextBounds(SLICE_CHARS, 100).check_slices("prompt", "x" * SLICE_CHARS * 8, count)


async def test_all_that_fits_is_encoded_as_ever(tokenizer: Tokenizer) -> None:
    """A context full of the longest tokens, a long way beyond what texts usually are."""
    model = ServedText("m", 49_152, tokenizer)
    work = TextWork()
    encoder = TextEncoder(model, 1000, work)
    for text in ("\n" + " " * 80) * 999, " " * 64 * 999, "<|endoftext|>" * 999:
        ids = await encoder.encode("prompt", text)
        assert len(ids) <= 1000
        assert ids.tolist() == tokenizer.encode(text).tolist()
    with pytest.raises(ContextTooLong):
        await encoder.encode("prompt", "a b " * 10_000)
    work.close()
