"""What an answer's tokens become: where they stand in its text, and what may not be in it."""

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.errors import ChangeSomething
from kvell.models.text.answer_text import AnswerText, EndTokens, StopStrings
from kvell.models.text.bad_words import bad_word_tokens
from kvell.models.text.detokenizer import IncrementalDetokenizer, token_bytes
from kvell.models.text.token_offsets import token_offsets
from kvell.models.text.tokenizer import Tokenizer
from tests.depth import many
from tests.models.loading.texts import BYTE_FALLBACK, TRICKY

NOTHING = EndTokens()


def offsets(tokenizer: Tokenizer, ids: list[int], *, skips: bool = True) -> list[int]:
    follow = token_offsets(tokenizer, skip_special_tokens=skips)
    return [follow.push(token) for token in ids]


@pytest.mark.parametrize("text", [TRICKY, "我能吞下玻璃 🙂🙃 ok", "🧑🏽‍🚀"])
def test_a_token_is_where_the_characters_before_it_end(
    smollm2_tokenizer: Tokenizer, text: str
) -> None:
    ids = smollm2_tokenizer.encode(text, add_special_tokens=False).tolist()
    pieces = [token_bytes(smollm2_tokenizer, token) for token in ids]
    assert any(not _is_text(piece) for piece in pieces), "some are parts of characters"
    whole = codecs.getincrementaldecoder("utf-8")()
    expected, chars = [], 0
    for piece in pieces:
        expected.append(chars)
        chars += len(whole.decode(piece))
    assert offsets(smollm2_tokenizer, ids) == expected
    assert chars == len(text)


@pytest.mark.parametrize(
    ("min_tokens", "shown"), [(0, "x "), (2, "x "), (3, "x END y "), (9, "x END y END z")]
)
def test_no_stop_string_ends_an_answer_before_its_fewest_tokens(
    smollm2_tokenizer: Tokenizer, min_tokens: int, shown: str
) -> None:
    ids = [
        token
        for word in ("x ", "END", " y ", "END", " z")
        for token in smollm2_tokenizer.encode(word, add_special_tokens=False).tolist()
    ]
    for cut in range(1, len(ids)):
        detokenizer = IncrementalDetokenizer(smollm2_tokenizer)
        answer = AnswerText(detokenizer, ("END",), NOTHING, min_tokens)
        text = answer.push(ids[:cut]) + answer.push(ids[cut:]) + answer.finish()
        assert text == shown


def _is_text(data: bytes) -> bool:
    return "\ufffd" not in data.decode(errors="replace")


@many()
@given(st.lists(st.integers(0, 49_151), max_size=30))
def test_whatever_ids_come_a_whole_token_is_found_at_its_offset(
    smollm2_tokenizer: Tokenizer, ids: list[int]
) -> None:
    text = smollm2_tokenizer.decode(ids)
    for token, start in zip(ids, offsets(smollm2_tokenizer, ids), strict=True):
        data = token_bytes(smollm2_tokenizer, token)
        if token not in smollm2_tokenizer.special_ids and _is_text(data):
            assert text[start:].startswith(data.decode())


def test_special_tokens_take_room_only_where_they_are_shown(smollm2_tokenizer: Tokenizer) -> None:
    ids = smollm2_tokenizer.encode("a<|im_end|>b", add_special_tokens=False).tolist()
    assert offsets(smollm2_tokenizer, ids) == [0, 1, 1]
    assert offsets(smollm2_tokenizer, ids, skips=False) == [0, 1, 1 + len("<|im_end|>")]


def test_tokens_that_spell_bytes_as_numbers_are_parts_of_characters_too() -> None:
    names = ["▁the", *(f"<0x{byte:02X}>" for byte in "é🙂".encode()), "▁cat", "s"]
    ids = [BYTE_FALLBACK.backend.convert_tokens_to_ids(name) for name in names]
    assert BYTE_FALLBACK.decode(ids) == "theé🙂 cats"
    assert offsets(BYTE_FALLBACK, ids) == [0, 3, 3, 4, 4, 4, 4, 5, 9]


def test_an_answer_that_is_cut_within_a_character_ends_as_transformers_decodes_it(
    smollm2_tokenizer: Tokenizer,
) -> None:
    ids = smollm2_tokenizer.encode("a🙂", add_special_tokens=False).tolist()
    assert len(ids) > 2
    for end in range(1, len(ids) + 1):
        answer = AnswerText(IncrementalDetokenizer(smollm2_tokenizer), (), NOTHING)
        shown = answer.push(ids[:end])
        assert shown == ("a🙂" if end == len(ids) else "a"), "no half of it is shown before"
        assert shown + answer.finish() == smollm2_tokenizer.backend.decode(ids[:end])


@pytest.mark.parametrize("includes", [False, True])
def test_a_stop_string_is_found_and_perhaps_shown(includes: bool) -> None:
    stops = StopStrings(("END", "ND"), includes=includes)
    assert (*stops.push("the E"), stops.found) == ("the ", False, None)
    assert stops.push("ND, and more") == ("END" if includes else "", True)
    assert stops.found == "END", "the longer of two that end there"
    assert stops.push("more") == ("", True)


def test_bad_words_have_their_tokens_with_a_space_before_and_without(
    smollm2_tokenizer: Tokenizer,
) -> None:
    def ids(text: str) -> tuple[int, ...]:
        return tuple(smollm2_tokenizer.encode(text, add_special_tokens=False).tolist())

    def encode(text: str) -> tuple[int, ...]:
        return ids(text)

    found = bad_word_tokens(("Paris", " Paris", "Ouagadougou", "  "), encode)
    expected = ["Paris", " Paris", "Ouagadougou", " Ouagadougou", "  ", "   "]
    assert found == tuple(map(ids, expected))
    assert len(ids("Ouagadougou")) > 1
    assert bad_word_tokens((), encode) == ()


def test_a_bad_word_that_has_no_tokens_is_refused() -> None:
    with pytest.raises(ChangeSomething, match="bad_words='x': has no tokens"):
        bad_word_tokens(("x",), lambda text: ())
