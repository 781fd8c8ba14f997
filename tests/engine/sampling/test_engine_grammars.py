"""Grammars: places in them, their ends, refusals, and what is remembered of whom."""

import json

import numpy as np
import pytest

from kvell.engine.protocol.schemas.strict import StrictPart
from kvell.engine.protocol.structured_outputs import StructuredOutputs
from kvell.engine.sampling.grammars import Grammars
from kvell.errors import ChangeSomething
from kvell.models.text.tokenizer import Tokenizer
from tests.engine.sampling.random_schemas import random_schema
from tests.engine.sampling.walking import END, VOCAB, allowed, ids, masked, masks_of, release, walk


def test_any_object_is_an_object(grammars: Grammars, tokenizer: Tokenizer) -> None:
    asked = StructuredOutputs(json_object=True)
    start = allowed(grammars, asked, [])
    release(grammars, [1])
    assert all(tokenizer.decode([token]).startswith("{") for token in ids(start))
    known = tokenizer.encode('{"a": [1, {"b": null}], "c": "d"}').tolist()
    for end in range(1, len(known)):
        assert allowed(grammars, asked, known[:end])[known[end]]
    assert ids(allowed(grammars, asked, known)) == [END]
    release(grammars, [1])


@pytest.mark.parametrize("seed", range(8))
def test_a_matcher_made_anew_goes_on_like_the_one_that_read_along(
    grammars: Grammars, seed: int
) -> None:
    asked = StructuredOutputs(json=json.dumps(random_schema(seed)))
    output = walk(grammars, asked, seed)
    for end in range(len(output) + 1):
        along = allowed(grammars, asked, output[:end], handle=5)
        anew = allowed(grammars, asked, output[:end], handle=100 + end)
        assert np.array_equal(along, anew)
        release(grammars, [100 + end])
    release(grammars, [5])


def test_several_tokens_at_once_are_read_like_one_by_one(grammars: Grammars) -> None:
    asked = StructuredOutputs(json=json.dumps(random_schema(3)))
    output = walk(grammars, asked, 3)
    jump = allowed(grammars, asked, output[:-2], handle=6)
    for end in range(len(output) - 1):
        along = allowed(grammars, asked, output[:end], handle=7)
    assert np.array_equal(jump, along)
    assert np.array_equal(
        allowed(grammars, asked, output, handle=6), allowed(grammars, asked, output, handle=7)
    )
    release(grammars, [6, 7])


def test_release_forgets_a_request(grammars: Grammars, tokenizer: Tokenizer) -> None:
    yes, no = (StructuredOutputs(choice=(text,)) for text in ("yes", "no"))
    [first] = {tokenizer.decode([token])[0] for token in ids(allowed(grammars, yes, [], 9))}
    release(grammars, [8, 9])
    [second] = {tokenizer.decode([token])[0] for token in ids(allowed(grammars, no, [], 9))}
    assert (first, second) == ("y", "n")
    release(grammars, [9])


def test_requests_of_one_batch_do_not_touch_each_other(grammars: Grammars) -> None:
    asked = [StructuredOutputs(json=json.dumps(random_schema(seed))) for seed in range(3)]
    outputs = [walk(grammars, one, seed) for seed, one in enumerate(asked)]
    halves = [output[: len(output) // 2] for output in outputs]
    wanted = [masked(20 + i, asked[i], halves[i]) for i in range(3)]
    together = masks_of(grammars, wanted)
    assert list(together) == [20, 21, 22]
    for index, handle in enumerate(together):
        mask = together[handle]
        assert mask is not None
        assert np.array_equal(mask, allowed(grammars, asked[index], halves[index], 30))
        release(grammars, [30, handle])


def test_after_the_end_only_end_tokens_are_allowed(tokenizer: Tokenizer) -> None:
    several = Grammars(tokenizer.as_json, VOCAB, [END, 0])
    asked = StructuredOutputs(choice=("yes",))
    done = tokenizer.encode("yes").tolist()
    assert ids(allowed(several, asked, done)) == [0, END]
    assert ids(allowed(several, asked, [*done, END])) == [0, END]
    assert ids(allowed(several, asked, [*done, END, END])) == [0, END]


INSIDE_STRINGS = [
    (StructuredOutputs(json='{"type": "string"}'), '"some te'),
    (StructuredOutputs(json='{"properties": {"a": {"type": "string"}}}'), '{"a": "'),
    (StructuredOutputs(json_object=True), '{"'),
    (StructuredOutputs(regex="(.|\n)*x"), "free text "),
    (StructuredOutputs(grammar="start: /(.|\\n)*x/"), "<|im_st"),
]


@pytest.mark.parametrize(("asked", "text"), INSIDE_STRINGS)
def test_special_tokens_are_no_part_of_a_text(
    grammars: Grammars, tokenizer: Tokenizer, asked: StructuredOutputs, text: str
) -> None:
    mask = allowed(grammars, asked, tokenizer.encode(text).tolist())
    release(grammars, [1])
    assert np.count_nonzero(mask) > 1000, "nearly all texts may come next"
    assert len(tokenizer.special_ids) > 10
    assert not any(mask[token] for token in tokenizer.special_ids)


BAD = [
    (StructuredOutputs(json='{"type":'), "json"),
    (StructuredOutputs(json='{"not": {}}'), "json"),
    (StructuredOutputs(json='{"$ref": "#/nowhere"}'), "json"),
    (StructuredOutputs(json="false"), "json"),
    (StructuredOutputs(regex="("), "regex"),
    (StructuredOutputs(regex="(?=a)b"), "regex"),
    (StructuredOutputs(grammar="start: nobody"), "grammar"),
    (StructuredOutputs(grammar="no grammar at all"), "grammar"),
]


@pytest.mark.parametrize(("asked", "kind"), BAD)
def test_what_cannot_be_followed_is_refused_by_name(
    grammars: Grammars, asked: StructuredOutputs, kind: str
) -> None:
    for _ in range(2):  # also when it is known already
        with pytest.raises(ChangeSomething, match=r"cannot be followed: .+; simplify it") as told:
            grammars.check(asked)
        assert told.value.field == f"structured_outputs.{kind}"
        assert "\n" not in str(told.value) and "state" not in str(told.value)


def test_an_error_names_what_the_client_sent(grammars: Grammars) -> None:
    for name in ("guided_regex", "response_format.json_schema.schema"):
        with pytest.raises(ChangeSomething, match="cannot be followed") as told:
            grammars.check(StructuredOutputs(regex="(", named=name))
        assert told.value.field == name


def test_a_strict_part_is_refused_by_the_place_of_what_is_not_enforced(grammars: Grammars) -> None:
    schema = json.dumps({"properties": {"a": {"format": "path"}, "b": {"type": "integer"}}})
    for path, field in (("properties.b.", None), ("", "x.properties.a.format")):
        asked = StructuredOutputs(json=schema, strict=(StrictPart(path, "x"),))
        if field is None:
            grammars.check(asked)
        else:
            with pytest.raises(ChangeSomething, match="cannot be enforced, and strict is") as told:
                grammars.check(asked)
            assert told.value.field == field


def test_each_keyword_that_is_not_followed_is_told_once(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    own = Grammars(tokenizer.as_json, VOCAB, [END])
    for keyword in ("path", "url"):
        schema = {"type": "string", "format": keyword, "not": {"const": keyword}}
        own.check(StructuredOutputs(json=json.dumps(schema)))
    own.close()
    told = [one.getMessage() for one in caplog.records if "do not enforce" in one.getMessage()]
    assert told == [
        "grammars do not enforce a schema keyword: format; answers may violate it",
        "grammars do not enforce a schema keyword: not; answers may violate it",
    ]


def test_a_model_without_an_end_follows_no_grammar(tokenizer: Tokenizer) -> None:
    with pytest.raises(ChangeSomething, match="needs a token that ends texts"):
        Grammars(tokenizer.as_json, VOCAB, []).check(StructuredOutputs(choice=("a",)))


def test_a_model_may_have_more_or_fewer_logits_than_its_tokenizer_has_tokens(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    wide = Grammars(tokenizer.as_json, VOCAB + 45, [END])
    wanted = masked(1, StructuredOutputs(regex="(.|\n)*"), [])
    mask = masks_of(wide, [wanted])[1]
    assert mask is not None
    assert mask.shape == (VOCAB + 45,)
    assert not mask[VOCAB:].any()
    assert np.array_equal(mask[:VOCAB], allowed(grammars, wanted.asked, [], 40))
    narrow = masks_of(Grammars(tokenizer.as_json, VOCAB - 45, [END]), [wanted])[1]
    assert narrow is not None
    assert np.array_equal(narrow, mask[: VOCAB - 45])
    release(grammars, [40])
