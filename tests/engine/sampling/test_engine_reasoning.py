"""Grammars that begin behind an answer's reasoning, wherever and in whatever tokens that ends."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import AddedToken

from kvell.engine.protocol.structured_outputs import Reasoning, StructuredOutputs
from kvell.engine.sampling.grammars import Allowed, Grammars
from kvell.models.text.tokenizer import Tokenizer
from tests.depth import few
from tests.engine.sampling.random_schemas import random_schema
from tests.engine.sampling.walking import END, VOCAB, ids, masked, masks_of, release, walk

START, STOP = "<think>", "</think>"
INSIDE, CHOSEN = Reasoning((STOP,)), Reasoning((STOP,), START)
HARMONY = Reasoning(("<|channel|>final", "<|message|>"))
YES = StructuredOutputs(choice=("yes", "no"))
JSON_TEXT = StructuredOutputs(json='{"type": "string", "maxLength": 9}')
PIECES = ["<", "/", "</", "think", ">", "</thin", "</think", " >", "\n", " so ", "{", '"', "é", "7"]
"""Thoughts made of these come near to an end again and again."""
thoughts = st.lists(st.sampled_from(PIECES), max_size=20).map("".join)


@pytest.fixture(scope="module")
def tagged(smollm2_path: Path) -> Tokenizer:
    """The packaged model's tokenizer with a token for each tag, and those of gpt-oss."""
    tokenizer = Tokenizer.load(smollm2_path)
    tags = [AddedToken(tag, special=False, normalized=False) for tag in (START, STOP)]
    tokenizer.backend.add_tokens(tags)
    special = [
        AddedToken(f"<|{name}|>", special=True, normalized=False)
        for name in ("start", "channel", "message", "end")
    ]
    tokenizer.backend.add_tokens(special, special_tokens=True)
    return tokenizer


@pytest.fixture(scope="module")
def tagged_grammars(tagged: Tokenizer) -> Grammars:
    return Grammars(tagged.as_json, VOCAB + 6, [END])


def behind(asked: StructuredOutputs, reasoning: Reasoning) -> StructuredOutputs:
    return replace(asked, reasoning=reasoning)


def encoded(tokenizer: Tokenizer, *texts: str) -> list[int]:
    return [
        token
        for text in texts
        for token in tokenizer.encode(text, add_special_tokens=False).tolist()
    ]


def masks(
    grammars: Grammars, asked: StructuredOutputs, output: list[int], handle: int = 1
) -> dict[int, Allowed | None]:
    return masks_of(grammars, [masked(handle, asked, output)])


def mask(grammars: Grammars, asked: StructuredOutputs, output: list[int], handle: int) -> Allowed:
    found = masks(grammars, asked, output, handle)[handle]
    assert found is not None
    return found


def is_free(
    grammars: Grammars, asked: StructuredOutputs, output: list[int], handle: int = 1
) -> bool:
    return not masks(grammars, asked, output, handle)


@pytest.mark.parametrize("has_tags", [False, True], ids=["tags of pieces", "tags of one token"])
@given(thought=thoughts, seed=st.integers(0, 200), is_chosen=st.booleans())
@few()
def test_thoughts_are_free_and_what_follows_is_as_without_them(
    grammars: Grammars,
    tagged_grammars: Grammars,
    tokenizer: Tokenizer,
    tagged: Tokenizer,
    has_tags: bool,
    thought: str,
    seed: int,
    is_chosen: bool,
) -> None:
    """A matcher that read along and one that is made anew agree at every token."""
    by, text = (tagged_grammars, tagged) if has_tags else (grammars, tokenizer)
    assume((thought + STOP).index(STOP) == len(thought))  # it holds no end itself
    is_chosen = is_chosen and has_tags
    bare = StructuredOutputs(json=json.dumps(random_schema(seed)))
    asked = behind(bare, CHOSEN if is_chosen else INSIDE)
    answer = walk(grammars, bare, seed)
    free = encoded(text, *([START] if is_chosen else []), thought, STOP)
    for end in range(int(is_chosen), len(free)):
        assert is_free(by, asked, free[:end], 5)
        assert is_free(by, asked, free[:end], 100 + end)
    for end in range(len(answer) + 1):
        output = free + answer[:end]
        along, anew = mask(by, asked, output, 5), mask(by, asked, output, 6)
        release(by, [6])
        assert np.array_equal(along, anew)
        assert np.array_equal(along, mask(by, bare, answer[:end], 7))
    release(by, [5, 7, *range(100, 100 + len(free))])


@given(thought=thoughts, cuts=st.lists(st.integers(1, 9), min_size=1))
@few()
def test_how_an_output_was_cut_into_calls_does_not_matter(
    grammars: Grammars, tokenizer: Tokenizer, thought: str, cuts: list[int]
) -> None:
    asked = behind(JSON_TEXT, INSIDE)
    output = encoded(tokenizer, thought, STOP, '"a')
    whole = masks(grammars, asked, output, 1)
    end = 0
    while end < len(output):
        end = min(len(output), end + cuts[end % len(cuts)])
        pieces = masks(grammars, asked, output[:end], 2)
    release(grammars, [1, 2])
    assert bool(whole) == bool(pieces)
    for one, other in zip(whole.values(), pieces.values(), strict=True):
        assert (one is None) == (other is None)
        assert one is None or (other is not None and np.array_equal(one, other))


def test_the_model_may_begin_to_reason_or_answer_at_once(
    tagged_grammars: Grammars, tagged: Tokenizer
) -> None:
    asked = behind(YES, CHOSEN)
    [start] = encoded(tagged, START)
    first = mask(tagged_grammars, asked, [], 1)
    bare = mask(tagged_grammars, YES, [], 2)
    assert not bare[start] and first[start]
    assert set(ids(first)) == {*ids(bare), start}
    answered = encoded(tagged, "y")
    at_once = mask(tagged_grammars, asked, answered, 1)
    assert np.array_equal(at_once, mask(tagged_grammars, YES, answered, 2))
    assert not at_once[start], "an answer that has begun is bound to its end"
    release(tagged_grammars, [1, 2])
    assert np.array_equal(mask(tagged_grammars, asked, answered, 1), at_once)
    assert is_free(tagged_grammars, asked, [start], 3)
    assert is_free(tagged_grammars, asked, [start, *encoded(tagged, "yes")], 3)
    release(tagged_grammars, [1, 3])


def test_without_a_token_for_the_tag_there_is_no_such_choice(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    """A model that never learned the tag would begin it by accident and never end it."""
    asked = behind(YES, CHOSEN)
    assert len(encoded(tokenizer, START)) > 1
    for output in ([], encoded(tokenizer, "y")):
        assert np.array_equal(mask(grammars, asked, output, 1), mask(grammars, YES, output, 2))
    release(grammars, [1, 2])


def test_any_token_may_come_while_the_model_reasons_also_one_that_ends_the_answer(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    asked = behind(YES, INSIDE)
    long = encoded(tokenizer, "no yes {" * 400)
    assert is_free(grammars, asked, [])
    assert is_free(grammars, asked, long)
    assert is_free(grammars, asked, [*long, END])
    release(grammars, [1])


HEADERS = [
    ("<|channel|>final", "<|message|>"),
    ("<|channel|>final", " <|constrain|>json", "<|message|>"),
]


@pytest.mark.parametrize("header", HEADERS)
def test_ends_come_one_after_the_other(
    tagged_grammars: Grammars, tagged: Tokenizer, header: tuple[str, ...]
) -> None:
    """As in gpt-oss: other messages come before that of the final channel."""
    asked = behind(YES, HARMONY)
    before = encoded(
        tagged, "<|channel|>", "analysis", "<|message|>", "final", "<|end|>", "<|start|>", *header
    )
    for end in range(len(before)):
        assert is_free(tagged_grammars, asked, before[:end])
    assert set(ids(mask(tagged_grammars, asked, before, 1))) == set(
        ids(mask(tagged_grammars, YES, [], 2))
    )
    release(tagged_grammars, [1, 2])


def test_the_rest_of_a_token_that_ends_the_reasoning_is_the_answers_beginning(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    asked = behind(JSON_TEXT, INSIDE)
    merged = tokenizer.backend.convert_tokens_to_ids('>"')
    output = [*encoded(tokenizer, "</", "think"), merged]
    assert tokenizer.decode(output) == '</think>"'
    assert is_free(grammars, asked, output[:-1])
    begun = encoded(tokenizer, '"')
    for more in ("", "ab", 'ab"'):
        text = encoded(tokenizer, more) if more else []
        found = mask(grammars, asked, output + text, 1)
        assert np.array_equal(found, mask(grammars, JSON_TEXT, begun + text, 2))
    release(grammars, [1, 2])


def test_a_rest_that_breaks_the_grammar_ends_the_answer(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    asked = behind(YES, INSIDE)
    merged = tokenizer.backend.convert_tokens_to_ids('>"')
    output = [*encoded(tokenizer, "</", "think"), merged]
    for more in ([], encoded(tokenizer, "yes")):
        assert masks(grammars, asked, output + more, 1) == {1: None}
    release(grammars, [1])


def test_blanks_in_the_token_that_ends_the_reasoning_are_no_answer(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    reasoning = behind(YES, Reasoning(("\n",)))
    blank = tokenizer.backend.convert_tokens_to_ids("ĊĊĠĠ")
    output = [*encoded(tokenizer, "Well"), blank]
    assert tokenizer.decode(output) == "Well\n\n  "
    first = mask(grammars, reasoning, output, 1)
    assert np.array_equal(first, mask(grammars, YES, [], 2))
    release(grammars, [1, 2])


def test_release_forgets_that_a_request_has_reasoned(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    asked = behind(YES, INSIDE)
    assert not is_free(grammars, asked, encoded(tokenizer, "a" + STOP))
    release(grammars, [1])
    assert is_free(grammars, asked, encoded(tokenizer, "another thought"))
    release(grammars, [1])


def test_a_grammar_is_tried_once_wherever_it_begins(tokenizer: Tokenizer) -> None:
    fresh = Grammars(tokenizer.as_json, VOCAB, [END])
    fresh.check(YES)
    for asked in (YES, behind(YES, INSIDE), behind(YES, CHOSEN)):
        assert fresh.known(asked)
        masks(fresh, asked, encoded(tokenizer, STOP) if asked.reasoning else [], hash(asked))
    fresh.close()


def test_requests_that_reason_and_those_that_do_not_share_a_batch(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    known = encoded(tokenizer, "a thought")
    wanted = [
        masked(1, behind(YES, INSIDE), known),
        masked(2, YES, []),
        masked(3, behind(YES, INSIDE), known + encoded(tokenizer, STOP)),
    ]
    found = masks_of(grammars, wanted)
    assert list(found) == [2, 3]
    two, three = found[2], found[3]
    assert two is not None and three is not None and np.array_equal(two, three)
    release(grammars, [1, 2, 3])


def test_a_model_with_too_few_logits_for_the_tag_has_no_such_choice(tagged: Tokenizer) -> None:
    narrow = Grammars(tagged.as_json, VOCAB, [END])
    first = mask(narrow, behind(YES, CHOSEN), [], 1)
    assert np.array_equal(first, mask(narrow, YES, [], 2))
