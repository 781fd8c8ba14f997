"""Bounds of bodies: what is refused and by which name, and that all else passes."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.errors import ChangeSomething
from kvell.server.access.bodies import (
    FEW,
    LONGEST_BYTES,
    SHORT_BYTES,
    WHOLE,
    BodyBounds,
    check_body,
)

BOUNDS = BodyBounds()
SMALL = BodyBounds(depth=5, fields=8, parts=40, elements=20, elements_by_field={"prompt": 60})


def refusal(body: bytes, bounds: BodyBounds = BOUNDS) -> ChangeSomething:
    with pytest.raises(ChangeSomething) as caught:
        check_body(body, bounds)
    return caught.value


def written(**fields: object) -> bytes:
    return json.dumps(fields).encode()


def nested(depth: int, opening: str, closing: str) -> bytes:
    return f'{{"model":"m","x":{opening * depth}1{closing * depth}}}'.encode()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (written(model="m", stop=["x"] * 100_000), "stop"),
        (written(stop=["x"] * 4097), "stop"),
        (written(logit_bias={str(i): 1 for i in range(100_000)}, model="m"), "logit_bias"),
        (written(metadata=[[1] * 10] * 1000), "metadata"),
        (written(prompt=["a"] * 70_000), "prompt"),
        (written(prompt=[0] * 1_100_000), "prompt"),
        (written(prompt=[[]] * 70_000), "prompt"),
        (written(messages=[1] * 20_000), "messages"),
        (written(**{f"f{i}": [""] * 4000 for i in range(40)}), WHOLE),
        (written(**{f"f{i}": {f"{j}": "" for j in range(4000)} for i in range(20)}), WHOLE),
    ],
)
def test_too_many_elements_are_refused_by_the_fields_name(body: bytes, field: str) -> None:
    error = refusal(body)
    assert error.field == field
    assert error.problem.startswith("has more than ")


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
def test_depth_is_refused_by_the_fields_name(opening: str, closing: str) -> None:
    depth = 100_000
    error = refusal(nested(depth, opening, closing))
    assert (error.field, error.problem) == ("x", "is nested more than 64 deep")
    assert refusal(nested(64, "[", "]")).field == "x"
    check_body(nested(63, "[", "]"), BOUNDS)


def test_too_many_fields_are_refused() -> None:
    check_body(written(**{f"f{i}": [1, 2, 3] for i in range(256)}), BOUNDS)
    error = refusal(written(**{f"f{i}": [1, 2, 3] for i in range(257)}))
    assert (error.field, error.problem) == (WHOLE, "has more than 256 fields")


def test_values_are_no_fields() -> None:
    blank = b" " * SHORT_BYTES  # looked at closely
    texts = written(**{f"f{i}": "a, b" for i in range(256)})
    check_body(texts + blank, BOUNDS)
    numbers = written(**{f"f{i}": i for i in range(257)})
    assert refusal(numbers + blank).field == WHOLE


@pytest.mark.parametrize(("count", "field"), [(2, None), (3, "x")])
def test_parts_are_counted_to_the_last(count: int, field: str | None) -> None:
    """An array and its strings are parts; here are three at most."""
    body = written(model="m", x=["a"] * count) + b" " * SHORT_BYTES
    bounds = BodyBounds(parts=3)
    if field is None:
        check_body(body, bounds)
    else:
        assert refusal(body, bounds).field == field


@pytest.mark.parametrize("extra", [1, LONGEST_BYTES // 2, LONGEST_BYTES - 100])
@pytest.mark.parametrize("character", ["A", "é", ","])
def test_a_string_that_is_too_long_is_refused_by_name(character: str, extra: int) -> None:
    letters = (LONGEST_BYTES + extra) // len(character.encode())
    image = {"type": "image_url", "image_url": {"url": character * letters}}
    body = json.dumps({"model": "m", "messages": [{"content": [image]}]}, ensure_ascii=False)
    error = refusal(body.encode())
    assert error.field == "messages"
    assert "string of more than" in error.problem


def test_a_long_string_passes() -> None:
    check_body(written(prompt="a, b\n" * (LONGEST_BYTES // 6 - 10)), BOUNDS)


def test_a_long_blank_is_refused() -> None:
    assert refusal(b"{" + b" " * (LONGEST_BYTES + 1) + b"}").field == WHOLE
    assert refusal(b'{"a":1' + b" " * (2 * LONGEST_BYTES) + b"}").problem.endswith("white space")


@pytest.mark.parametrize(
    "body", [b"[]", b"null", b"1", b'"x"', b" ", b"", b"\xef\xbb\xbf[1]", b"x{"]
)
def test_what_is_no_object_is_no_request(body: bytes) -> None:
    assert refusal(body).problem == "is not valid JSON"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_other_encodings_are_refused_since_they_hide_brackets(encoding: str) -> None:
    body = '{"a":[1]}'.encode(encoding)
    assert json.loads(body) == {"a": [1]}  # a reader would have taken it
    assert refusal(body).problem == "is not UTF-8"


def test_a_mark_of_utf_8_is_no_fault() -> None:
    check_body(b"\xef\xbb\xbf" + written(prompt="x"), BOUNDS)


def test_a_string_without_its_end_is_read_once() -> None:
    assert refusal(b'{"a":"' + b'\\"' * 600_000).problem == "is not valid JSON"


def test_commas_and_brackets_in_strings_do_not_count() -> None:
    text = '[{"a": [1, 2, 3]}, ' * (FEW * 20)
    check_body(written(prompt=text, stop=[text, '\\"[,'], model="m"), BOUNDS)


def test_a_field_in_a_field_has_the_outer_ones_name() -> None:
    body = written(tools=[{"stop": list(range(17_000))}])
    assert refusal(body).field == "tools"


def test_a_repeated_field_is_counted_each_time() -> None:
    many = ",".join("1" for _ in range(5000))
    body = f'{{"stop":[{many}],"stop":[]}}'.encode()
    assert refusal(body).field == "stop"


def test_a_long_or_strange_name_is_cut() -> None:
    name = "é" * 200
    error = refusal(written(**{name: list(range(5000))}))
    assert len(error.field) <= 400
    assert len(refusal(b'{"\xff\xfe":[' + b"1," * 5000 + b"1]}").field) <= 4


def measured(value: Any) -> tuple[int, int, int]:
    """Depth, parts and commas with brackets of a value, by its structure."""
    if isinstance(value, str):
        return 0, 1, 0
    if not isinstance(value, list | dict):
        return 0, 0, 0
    inner = list(value.values()) if isinstance(value, dict) else value
    below = [measured(one) for one in inner]
    depth = 1 + max((one[0] for one in below), default=0)
    names = len(value) if isinstance(value, dict) else 0
    parts = 1 + names + sum(one[1] for one in below)
    elements = 1 + max(0, len(value) - 1) + sum(one[2] for one in below)
    return depth, parts, elements


texts = st.text('",:[]{}\\ ab\n', max_size=6)
values = st.recursive(
    st.one_of(st.integers(-9, 9), st.none(), st.booleans(), texts),
    lambda inner: st.one_of(
        st.lists(inner, max_size=12), st.dictionaries(texts, inner, max_size=6)
    ),
    max_leaves=80,
)
names = st.one_of(st.just("prompt"), texts)


@given(st.dictionaries(names, values, max_size=10), st.sampled_from([None, 1]), st.booleans())
def test_a_body_passes_if_and_only_if_its_structure_is_within_bounds(
    fields: dict[str, Any], indent: int | None, plain: bool
) -> None:
    body = json.dumps(fields, indent=indent, ensure_ascii=plain).encode()
    is_within = len(fields) <= SMALL.fields
    for name, value in fields.items():
        depth, parts, elements = measured(value)
        # A field's own text is one of its parts; its name is not, nor are its commas outside.
        is_within &= depth + 1 <= SMALL.depth
        is_within &= parts <= SMALL.parts
        is_within &= elements <= SMALL.elements_by_field.get(name, SMALL.elements)
    body += b" " * SHORT_BYTES  # short bodies with few elements are not looked at closely
    try:
        check_body(body, SMALL)
    except ChangeSomething as error:
        assert not is_within, error
    else:
        assert is_within


@given(st.binary(max_size=60), st.sampled_from([b"{", b'{"a":', b'{"a":"', b'{"prompt":[']))
def test_whatever_comes_it_passes_or_is_refused(tail: bytes, head: bytes) -> None:
    try:
        check_body(head + tail, BOUNDS)
    except ChangeSomething as error:
        assert error.remedy


@given(st.integers(0, FEW * 2))
def test_the_fast_way_refuses_nothing_and_lets_nothing_through(count: int) -> None:
    body = written(stop=[0] * count, x=[[]] * (count // 20))
    check_body(body, BOUNDS)


HALVES = (
    *(r'{"a": "\ud800"}', r'{"\uDFFF": 1}', r'{"a": "\ud83c x"}', r'{"a": "\ud83c\ud83c\udfd4"}'),
    *(r'{"a": "\udfd4\ud83c"}', r'{"a": "\\\ud800"}', '{"a": "\ud800"}', '{"\udfff": 1}'),
)
WHOLES = (
    *(r'{"a": "\ud83c\udfd4"}', r'{"a": "\uD83C\uDFD4\ud83c\udfd4"}', r'{"a": "\\ud800"}'),
    *(r'{"a": "\\\\ud800 \u00e9"}', '{"a": "\ud7ff\ue000 🏔 한국어"}', r'{"a": "\u D800"}'),
)


@pytest.mark.parametrize("text", HALVES)
def test_half_a_character_is_refused(text: str) -> None:
    body = text.encode(errors="surrogatepass")
    assert "surrogate" in refusal(body).problem
    with pytest.raises(UnicodeEncodeError):  # it would only show when the text is used
        json.dumps(json.loads(body), ensure_ascii=False).encode()


@pytest.mark.parametrize("text", WHOLES)
def test_whole_characters_pass(text: str) -> None:
    check_body(text.encode(), BodyBounds())


@given(st.text(st.sampled_from('\\\\\\\\ud8dDcC00"x')))
def test_what_passes_is_text_that_utf_8_can_say(text: str) -> None:
    body = b'{"a": "' + text.encode() + b'"}'
    try:
        told = json.loads(body)
    except ValueError:
        return
    try:
        str(told["a"]).encode()
    except UnicodeEncodeError:
        assert "surrogate" in refusal(body).problem
    else:
        check_body(body, BodyBounds())


@pytest.mark.parametrize(
    "piece", ["a" * 99_999 + "\\n", '\\"', "\\ud83d\\ude00", "é€" * 700 + "\\\\"]
)
def test_a_long_string_with_escapes_is_one_string(piece: str) -> None:
    text = piece * (3_000_000 // len(piece))
    check_body(f'{{"model":"{text}","n":1}}'.encode(), BOUNDS)
    told = refusal(f'{{"model":"{text}'.encode())
    assert (told.field, told.problem) == (WHOLE, "is not valid JSON")


@pytest.mark.parametrize("end", ["\\", '\\"', "x\\"])
def test_a_body_that_ends_in_an_escape_names_its_last_string(end: str) -> None:
    padding = "x" * SHORT_BYTES  # a short body is left to the parser
    assert "last string" in str(refusal(f'{{"a":"{padding}","model":"{end}'.encode()))


def test_half_a_character_far_into_a_long_body_is_refused() -> None:
    text = "\\ud83d\\ude00" * 200_000 + "\\ud83d" + "x" * 70_000
    told = refusal(f'{{"model":"{text}"}}'.encode())
    assert told.problem == "has an unpaired surrogate, which is not a character"
