"""Text out of token ids, piece by piece: never half a character, always the whole text."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.errors import ChangeSomething
from kvell.models.text.answer_text import StopStrings
from kvell.models.text.detokenizer import (
    SLICE_TOKENS,
    IncrementalDetokenizer,
    byte_alphabet,
    decode_in_slices,
    spelled_bytes,
    token_bytes,
)
from kvell.models.text.end_tokens import eos_token_ids
from kvell.models.text.tokenizer import Tokenizer
from tests.depth import many, some
from tests.models.loading.texts import BYTE_FALLBACK, REPLACEMENT, TRICKY, byte_fallback_tokenizer


def pieces(tokenizer: Tokenizer, ids: list[int], skip_special: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special)
    return [*(detokenizer.push([token]) for token in ids), detokenizer.finish()]


@many()
@given(st.lists(st.integers(0, 49_151), max_size=40), st.booleans())
def test_random_ids_of_the_real_tokenizer(
    smollm2_tokenizer: Tokenizer, ids: list[int], skip_special: bool
) -> None:
    assert "".join(pieces(smollm2_tokenizer, ids, skip_special)) == smollm2_tokenizer.decode(
        ids, skip_special
    )


@many()
@given(st.lists(st.integers(0, 16 + 256), max_size=30), st.booleans())
def test_special_tokens_and_lone_bytes_of_the_real_tokenizer(
    smollm2_tokenizer: Tokenizer, ids: list[int], skip_special: bool
) -> None:
    assert "".join(pieces(smollm2_tokenizer, ids, skip_special)) == smollm2_tokenizer.decode(
        ids, skip_special
    )


@many()
@given(st.text(max_size=30))
def test_pieces_of_any_text_are_whole_characters(smollm2_tokenizer: Tokenizer, text: str) -> None:
    ids = smollm2_tokenizer.encode(text).tolist()
    got = pieces(smollm2_tokenizer, ids)
    whole = smollm2_tokenizer.decode(ids)
    assert "".join(got) == whole
    # The vocabulary lacks a few bytes, so not every text survives encoding.
    assert REPLACEMENT in whole or not any(REPLACEMENT in piece for piece in got)


def test_emoji_and_cjk_come_back_as_they_were(smollm2_tokenizer: Tokenizer) -> None:
    ids = smollm2_tokenizer.encode(TRICKY).tolist()
    got = pieces(smollm2_tokenizer, ids)
    assert "".join(got) == TRICKY
    assert "" in got[:-1], "nothing was ever held back: the text is too easy"
    assert got[-1] == ""


def test_half_a_character_is_held_back_until_the_end(smollm2_tokenizer: Tokenizer) -> None:
    ids = smollm2_tokenizer.encode("😀").tolist()
    assert len(ids) > 1
    detokenizer = IncrementalDetokenizer(smollm2_tokenizer)
    assert detokenizer.push(ids[:-1]) == ""
    assert detokenizer.finish() == smollm2_tokenizer.decode(ids[:-1])


def test_ids_outside_the_vocabulary_make_no_text(smollm2_tokenizer: Tokenizer) -> None:
    ids = [*smollm2_tokenizer.encode("Hi").tolist(), 49_152, 60_000]
    assert "".join(pieces(smollm2_tokenizer, ids)) == "Hi"


@many()
@given(
    st.lists(
        st.one_of(
            st.integers(0, len(BYTE_FALLBACK.backend) - 1),
            st.sampled_from([0xF0, 0x9F, 0x98, 0x80, 0xC3, 0xA9, 0x20]),
            st.integers(256, len(BYTE_FALLBACK.backend) - 1),
        ),
        max_size=25,
    ),
    st.booleans(),
)
def test_random_ids_of_a_byte_fallback_tokenizer(ids: list[int], skip_special: bool) -> None:
    assert "".join(pieces(BYTE_FALLBACK, ids, skip_special)) == BYTE_FALLBACK.decode(
        ids, skip_special
    )


def byte_fallback_ids(*spellings: str) -> list[int]:
    return [BYTE_FALLBACK.backend.convert_tokens_to_ids(spelling) for spelling in spellings]


@pytest.mark.parametrize(
    ("prompt", "answer", "text"),
    [
        (["Hi"], ["▁the", "▁cat"], " the cat"),
        (["<s>"], ["▁the", "▁cat"], "the cat"),
        (["<s>", "Hi", "<s>"], ["▁the"], " the"),
        (["▁"], ["▁the"], " the"),
        (["Hi", "<0xC3>"], ["<0xA9>", "s"], REPLACEMENT + "s"),
    ],
)
def test_the_first_space_of_an_answer_is_kept_behind_a_text(
    prompt: list[str], answer: list[str], text: str
) -> None:
    before, ids = byte_fallback_ids(*prompt), byte_fallback_ids(*answer)
    for after in (before, np.asarray(before, np.int32)):
        detokenizer = IncrementalDetokenizer(BYTE_FALLBACK, after=after)
        assert detokenizer.push(ids) + detokenizer.finish() == text


def test_a_token_has_its_space() -> None:
    tokens = byte_fallback_ids("▁the", "s", "▁▁", "<0xC3>")
    spelled = [token_bytes(BYTE_FALLBACK, token) for token in tokens]
    assert spelled == [b" the", b"s", b"  ", b"\xc3"]


def test_byte_tokens_are_given_out_as_one_character() -> None:
    ids = [BYTE_FALLBACK.backend.convert_tokens_to_ids("Hi"), 0xC3, 0xA9]
    the = BYTE_FALLBACK.backend.convert_tokens_to_ids("▁the")
    assert pieces(BYTE_FALLBACK, [*ids, the]) == ["Hi", "", "", "é the", ""]


def test_a_token_is_looked_up_once() -> None:
    tokenizer = byte_fallback_tokenizer()
    asked: list[int] = []
    backend = tokenizer.backend

    class Counting:
        def convert_ids_to_tokens(self, token_id: int) -> str | None:
            asked.append(token_id)
            token: str | None = backend.convert_ids_to_tokens(token_id)
            return token

    again = Tokenizer(Counting(), frozenset())
    assert [again.spelling(token) for token in (256, 65, 256, 65)] == [
        tokenizer.spelling(token) for token in (256, 65, 256, 65)
    ]
    assert asked == [256, 65]


def test_context_is_bounded() -> None:
    """A long output must not be decoded again and again from its start."""
    detokenizer = IncrementalDetokenizer(BYTE_FALLBACK)
    the = BYTE_FALLBACK.backend.convert_tokens_to_ids("▁the")
    seen: list[int] = []
    decode = BYTE_FALLBACK.backend.decode

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(BYTE_FALLBACK.backend, name)

        def decode(self, ids: list[int], **named: Any) -> Any:
            seen.append(len(ids))
            return decode(ids, **named)

    detokenizer = IncrementalDetokenizer(Tokenizer(Counting(), frozenset()))
    assert detokenizer.push([the] * 50) + detokenizer.finish() == "the" + " the" * 49
    assert max(seen) <= 3


def test_byte_alphabet_is_a_bijection() -> None:
    assert sorted(byte_alphabet().values()) == list(range(256))
    assert spelled_bytes("Ġdé") == b" d" + bytes([0xE9])
    assert spelled_bytes("日") == "日".encode()


def test_encode_gives_int32(smollm2_tokenizer: Tokenizer) -> None:
    ids = smollm2_tokenizer.encode("Hello world")
    assert ids.dtype == np.int32
    assert smollm2_tokenizer.decode(ids) == "Hello world"


def test_chat_ends_where_the_assistant_speaks(smollm2_tokenizer: Tokenizer) -> None:
    ids = smollm2_tokenizer.encode_chat([{"role": "user", "content": "Hi!"}])
    assert ids.dtype == np.int32
    text = smollm2_tokenizer.decode(ids, skip_special_tokens=False)
    assert text.endswith("<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n")
    assert set(smollm2_tokenizer.eos_token_ids) <= set(ids.tolist())


def test_chat_that_the_template_refuses(smollm2_tokenizer: Tokenizer) -> None:
    bad: list[Any] = [{"content": 3}, {"role": 1}]
    with pytest.raises(ChangeSomething) as caught:
        smollm2_tokenizer.encode_chat(bad)
    assert caught.value.field == "messages"


def test_chat_without_a_template() -> None:
    assert not BYTE_FALLBACK.has_chat_template
    with pytest.raises(ChangeSomething, match="no chat template"):
        BYTE_FALLBACK.encode_chat([{"role": "user", "content": "Hi"}])


def test_directory_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ChangeSomething, match="no tokenizer"):
        Tokenizer.load(tmp_path)


def test_damaged_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    with pytest.raises(ChangeSomething, match=r"tokenizer\.json: is not valid JSON") as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [
        ('{"eos_token_id": [7, 9]}', '{"eos_token_id": 2}', {7, 9}),
        ("{}", '{"eos_token_id": 2}', {2}),
        ("{}", '{"text_config": {"eos_token_id": 0}}', {0}),
        ("{}", "{}", set()),
    ],
)
def test_eos_ids_of_a_directory(
    tmp_path: Path, generation: str, config: str, ids: set[int]
) -> None:
    (tmp_path / "generation_config.json").write_text(generation)
    (tmp_path / "config.json").write_text(config)
    assert eos_token_ids(tmp_path) == ids


@some()
@given(st.lists(st.integers(0, 300), min_size=1, max_size=40), st.integers(1, 8))
def test_ids_are_decoded_in_slices_as_they_are_together(
    smollm2_tokenizer: Tokenizer, ids: list[int], repeated: int
) -> None:
    for tokenizer in (smollm2_tokenizer, BYTE_FALLBACK):
        known = [each for each in ids if tokenizer.spelling(each) is not None]
        many = known * (repeated * SLICE_TOKENS // max(1, len(known)) + 1)
        whole = tokenizer.decode(many, skip_special_tokens=False)
        assert decode_in_slices(tokenizer, many) == whole


def run_stops(stops: tuple[str, ...], pushes: list[str], passed: int = 0) -> tuple[str, bool]:
    matcher, given_out, stopped = StopStrings(stops), "", False
    for number, text in enumerate(pushes):
        emitted, stopped = matcher.push(text, may_end=number >= passed)
        given_out += emitted
        if stopped:
            break
    return given_out + matcher.finish(), stopped


def by_character(stops: tuple[str, ...], text: str, passed: int = 0) -> tuple[str, bool]:
    """What stop strings mean, said slowly: grow the text by one character at a time."""
    for end in range(passed + 1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], True
    return text, False


@many()
@given(
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    st.lists(st.text("ab\n", max_size=4), max_size=8),
    st.integers(0, 4),
)
def test_stopping_does_not_depend_on_the_cuts(
    stops: list[str], pushes: list[str], passed: int
) -> None:
    expected = by_character(tuple(stops), "".join(pushes), len("".join(pushes[:passed])))
    assert run_stops(tuple(stops), pushes, passed) == expected


def test_nothing_of_a_stop_string_is_given_out() -> None:
    matcher = StopStrings(("</s>", "User:"))
    assert matcher.push("fine <") == ("fine ", False)
    assert matcher.push("/") == ("", False)
    assert matcher.push("b> Us") == ("</b> ", False)
    assert matcher.push("er: more") == ("", True)
    assert matcher.push("again") == ("", True)
    assert matcher.finish() == ""


def test_the_stop_string_that_ended_the_text_is_known() -> None:
    for text, found in (("a END b", "END"), ("a longer END", "longer END"), ("a EN", None)):
        matcher = StopStrings(("END", "longer END", "never"))
        for character in text:
            matcher.push(character)
        assert matcher.found == found


def test_held_text_comes_at_the_end_if_no_stop_string_does() -> None:
    matcher = StopStrings(("END",))
    assert matcher.push("the EN") == ("the ", False)
    assert matcher.finish() == "EN"


def test_without_stop_strings_text_passes_through() -> None:
    assert StopStrings(()).push("anything") == ("anything", False)


@given(st.text(max_size=40))
def test_bytes_of_tokens_join_to_the_text(smollm2_tokenizer: Tokenizer, text: str) -> None:
    ids = smollm2_tokenizer.encode(text, add_special_tokens=False).tolist()
    joined = b"".join(token_bytes(smollm2_tokenizer, token) for token in ids)
    expected = smollm2_tokenizer.decode(ids, skip_special_tokens=False)
    assert joined.decode(errors="replace") == expected


def test_bytes_of_special_and_unknown_tokens(smollm2_tokenizer: Tokenizer) -> None:
    [end] = smollm2_tokenizer.encode("<|im_end|>", add_special_tokens=False)
    assert token_bytes(smollm2_tokenizer, int(end)) == b"<|im_end|>"
    assert token_bytes(smollm2_tokenizer, 10**6) == b""


def test_settings_are_json_and_tell_no_places(smollm2_path: Path) -> None:
    found = Tokenizer.load(smollm2_path).settings()
    assert msgspec.json.decode(msgspec.json.encode(found)) == found
    assert found["eos_token"] == "<|im_end|>"
    assert "<|im_start|>" in str(found["chat_template"])
    assert str(smollm2_path) not in str(found)


def test_a_templates_own_fields_are_not_the_callers(smollm2_tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    plain = smollm2_tokenizer.encode_chat(messages).tolist()
    assert smollm2_tokenizer.encode_chat(messages, fields={"colour": "red"}).tolist() == plain
    with pytest.raises(ChangeSomething, match="chat_template_kwargs=tokenize"):
        smollm2_tokenizer.encode_chat(messages, fields={"tokenize": True})
    opened = smollm2_tokenizer.encode_chat(messages, opens_answer=False).tolist()
    assert plain[: len(opened)] == opened and len(opened) < len(plain)
