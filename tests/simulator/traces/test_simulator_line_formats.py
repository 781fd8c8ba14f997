"""Formats of traces: told apart by all fields in any order, with units and blocks of each."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.errors import ChangeSomething
from kvell.simulator.traces.formats.line_formats import LineFormat, format_of
from kvell.simulator.traces.rows import TraceRow, ideal_hit_tokens
from kvell.simulator.traces.trace import FORMATS, read_trace

Read = Callable[..., list[TraceRow]]
Line = Mapping[str, object]
TALK = [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "c"}]


@dataclass(frozen=True)
class Published:
    """One format.

    :param line: a line with all fields of the format.
    :param optional: fields that it may lack.
    :param at: field of its time; "" if it has none.
    :param unit: seconds in which that counts.
    :param ids: field of the ids of blocks; "" if it has none.
    :param block_tokens: tokens of a block.
    """

    line: Line
    optional: frozenset[str] = frozenset()
    at: str = ""
    unit: float = 1.0
    ids: str = ""
    block_tokens: int = 0
    is_table: bool = False

    def text(self, lines: Iterable[Line]) -> str:
        several = [dict(line) for line in lines]
        if not self.is_table:
            return "".join(json.dumps(line) + "\n" for line in several)
        rows = [",".join(several[0]), *(",".join(map(str, line.values())) for line in several)]
        return "\n".join(rows)

    def required(self) -> list[str]:
        return [name for name in self.line if name not in self.optional]


PUBLISHED = {
    "Kvell's": Published(
        {
            "arrival_s": 2,
            "prompt_tokens": 600,
            "output_tokens": 5,
            "block_hashes": [1, 2],
            "block_tokens": 512,
            "session": "s",
            "images": [],
            "will_return": True,
            "continues": False,
        },
        frozenset(
            ("block_hashes", "block_tokens", "session", "images", "will_return", "continues")
        ),
        *("arrival_s", 1.0, "block_hashes", 512),
    ),
    "Mooncake's": Published(
        {"timestamp": 2000, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]},
        frozenset({"hash_ids"}),
        *("timestamp", 1e-3, "hash_ids", 512),
    ),
    "Qwen-Bailian's": Published(
        {
            "chat_id": 7,
            "parent_chat_id": -1,
            "timestamp": 2.0,
            "input_length": 30,
            "output_length": 5,
            "type": "text",
            "turn": 1,
            "hash_ids": [1, 2],
        },
        frozenset(),
        *("timestamp", 1.0, "hash_ids", 16),
    ),
    "ShareGPT's": Published({"conversations": TALK}),
    "Azure's": Published(
        {"TIMESTAMP": "2023-11-16 18:15:46", "ContextTokens": 600, "GeneratedTokens": 5},
        is_table=True,
    ),
    "BurstGPT's": Published(
        {
            "Timestamp": 2,
            "Session ID": "s",
            "Elapsed time": 1,
            "Model": "m",
            "Request tokens": 600,
            "Response tokens": 5,
            "Total tokens": 605,
            "Log Type": "API",
        },
        frozenset(("Session ID", "Elapsed time", "Model", "Total tokens", "Log Type")),
        *("Timestamp", 1.0),
        is_table=True,
    ),
}
TIMED = [name for name, each in PUBLISHED.items() if each.at]
HASHED = [name for name, each in PUBLISHED.items() if each.ids]
OF_LINES = [name for name, each in PUBLISHED.items() if not each.is_table]
CLOSED = [name for name in PUBLISHED if name != "ShareGPT's"]


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Read:
    path = tmp_path_factory.mktemp("traces") / "trace"

    def call(text: str, *args: Any, **more: Any) -> list[TraceRow]:
        path.write_text(text)
        return read_trace(path, *args, **more)

    return call


def plain(rows: list[TraceRow]) -> list[tuple[object, ...]]:
    return [
        (
            *(row.arrival_s, row.prompt_tokens, row.output_tokens, row.session),
            *(row.block_ids.tolist(), row.block_tokens, row.continues),
        )
        for row in rows
    ]


def changed(name: str, **fields: object) -> dict[str, object]:
    return {**PUBLISHED[name].line, **fields}


def refused(read: Read, text: str, **more: Any) -> ChangeSomething:
    with pytest.raises(ChangeSomething) as caught:
        read(text, **more)
    return caught.value


@pytest.mark.parametrize("name", TIMED)
def test_times_are_seconds_whatever_the_unit_of_the_format(read: Read, name: str) -> None:
    each = PUBLISHED[name]
    later = changed(name, **{each.at: 2 / each.unit + 90 / each.unit})
    first, second = (row.arrival_s for row in read(each.text([each.line, later])))
    assert second - first == pytest.approx(90.0)


@pytest.mark.parametrize("name", HASHED)
def test_blocks_have_the_size_of_the_format_or_of_the_flag(read: Read, name: str) -> None:
    each = PUBLISHED[name]
    tokens = "prompt_tokens" if name == "Kvell's" else "input_length"
    size = each.block_tokens
    blocks = ([5, 6, last] for last in (7, 8))
    text = each.text([changed(name, **{each.ids: ids, tokens: 3 * size}) for ids in blocks])
    assert ideal_hit_tokens(read(text)) == 2 * size
    assert ideal_hit_tokens(read(text, block_tokens=size // 2)) == size
    problem = refused(read, text, block_tokens=2 * size)
    assert f"{each.ids} are 3" in problem.problem and f"blocks of {2 * size}: 2" in problem.problem
    assert "--block-tokens" in problem.remedy


@given(st.sampled_from(list(PUBLISHED)), st.randoms())
def test_the_order_of_fields_does_not_matter(read: Read, name: str, chance: Any) -> None:
    each = PUBLISHED[name]
    items = list(each.line.items())
    chance.shuffle(items)
    assert plain(read(each.text([dict(items)] * 2))) == plain(read(each.text([each.line] * 2)))


@given(st.sampled_from(list(PUBLISHED)), st.data())
def test_a_file_may_lack_optional_fields_and_no_others(
    read: Read, name: str, data: st.DataObject
) -> None:
    each = PUBLISHED[name]
    lacks = data.draw(st.sets(st.sampled_from(list(each.line))))
    line = {field: value for field, value in each.line.items() if field not in lacks}
    needed = lacks - each.optional
    if name == "Kvell's" and "block_hashes" in line and "block_tokens" in lacks:
        needed = needed | {"block_tokens"}
    if name == "Qwen-Bailian's" and needed == {"chat_id", "parent_chat_id", "type", "turn"}:
        line["hash_ids"] = [1]  # these are the fields of a line of Mooncake's
        needed = set()
    if not needed:
        assert read(each.text([line]))
    elif line:
        error = refused(read, each.text([line]))
        assert str(error.value).endswith("trace:1") and error.remedy
        assert any(field in error.problem for field in {*needed, *line})


@pytest.mark.parametrize("name", CLOSED)
@pytest.mark.parametrize("extra", ["delay", "chat_id", "timestamp", "arrival_s", "Session ID"])
def test_a_field_that_the_format_does_not_have_is_named(read: Read, name: str, extra: str) -> None:
    each = PUBLISHED[name]
    if extra in each.line:
        return
    line = changed(name, **{extra: 1})
    error = refused(read, each.text([line]))
    assert extra in error.problem and name in error.problem
    assert "docs/replay.md" in error.remedy
    if not each.is_table:
        error = refused(read, each.text([each.line, line]))
        assert str(error.value).endswith("trace:2") and extra in error.problem


@pytest.mark.parametrize("first", OF_LINES)
@pytest.mark.parametrize("second", OF_LINES)
def test_a_line_of_another_format_than_the_first_is_refused(
    read: Read, first: str, second: str
) -> None:
    text = PUBLISHED[first].text([PUBLISHED[first].line, PUBLISHED[second].line])
    if first == second:
        assert len(read(text)) == 2
    else:
        error = refused(read, text)
        assert ":2" in str(error.value)


ALL_FIELDS = sorted({name for each in FORMATS for name in each.required | each.optional})


@given(st.sets(st.sampled_from([*ALL_FIELDS, "delay"])))
def test_a_line_fits_one_format_whose_fields_are_all_of_its_fields(fields: set[str]) -> None:
    fits = [
        each
        for each in FORMATS
        if each.required <= fields and (each.takes_more or fields <= each.required | each.optional)
    ]
    line = dict.fromkeys(fields)
    try:
        found: LineFormat | None = format_of("trace:1", line, FORMATS)
    except ChangeSomething as error:
        found = None
        assert error.field == "--trace" and error.remedy
    assert len(fits) <= 1, "no set of fields is that of two formats"
    if found is not None:
        assert fits == [found]
        assert not [each for each in FORMATS if each is not found and each.required <= fields] or (
            not found.takes_more
        )
    elif fits:
        assert fits[0].takes_more and sum(each.required <= fields for each in FORMATS) > 1


def test_conversations_with_all_fields_of_another_format_are_ambiguous(read: Read) -> None:
    line = {**PUBLISHED["Mooncake's"].line, "conversations": TALK}
    error = refused(read, json.dumps(line))
    assert "all fields of Mooncake's and ShareGPT's" in error.problem


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("TIMESTAMP,ContextTokens\n1,2\n", "it lacks GeneratedTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens,Timestamp\n1,2,3,4\n", "Timestamp is not"),
        ("Timestamp,Request tokens,Response tokens,Timestamp\n1,2,3,4\n", "has Timestamp twice"),
        ("\n", "holds no request"),
        ("{}\n", "fields of no known format (none)"),
        ('{"a": 1, "b": 2}\n', "fields of no known format (a, b)"),
    ],
)
def test_a_header_or_line_that_fits_nothing_says_why(read: Read, text: str, said: str) -> None:
    assert said in str(refused(read, text))


def test_an_error_lists_a_bounded_number_of_fields(read: Read) -> None:
    line = {f"{'x' * 500}{number}": 1 for number in range(5000)}
    assert len(refused(read, json.dumps(line)).problem) < 2000


@pytest.mark.parametrize("name", HASHED)
@pytest.mark.parametrize(
    ("ids", "same"),
    [
        (["0x1f", "2a"], [31, 42]),
        (["00001F", "0X2A"], [31, 42]),
        (["ffffffffffffffff", "8000000000000000"], [(1 << 64) - 1, 1 << 63]),
        (["ab" * 32, "cd" * 32], ["AB" * 32, "0x" + "CD" * 32]),
    ],
)
def test_ids_may_be_hexadecimal_texts(
    read: Read, name: str, ids: list[object], same: list[object]
) -> None:
    each = PUBLISHED[name]
    first, second = (
        read(each.text([changed(name, **{each.ids: some})]))[0].block_ids.tolist()
        for some in (ids, same)
    )
    assert first == second and len(set(first)) == 2


@pytest.mark.parametrize(
    "ids", [["g1"], ["0x"], [""], ["-1"], [1, "a"], ["a" * 129], [1 << 64], "ab"]
)
def test_other_ids_are_refused(read: Read, ids: object) -> None:
    error = refused(read, json.dumps(changed("Mooncake's", hash_ids=ids)))
    assert error.problem.startswith("hash_ids is not a list of whole numbers of 64 bits, or")


@given(st.lists(st.text("0123456789abcdef", min_size=1, max_size=80), min_size=1, max_size=9))
def test_hexadecimal_ids_are_equal_if_their_numbers_are(read: Read, ids: list[str]) -> None:
    line = changed("Mooncake's", hash_ids=ids, input_length=512 * len(ids))
    [row] = read(json.dumps(line))
    assert len(set(row.block_ids.tolist())) == len({int(each, 16) for each in ids})


def chat(number: int, parent: int, at: float, ids: list[int], turn: int = 1) -> dict[str, object]:
    fields: dict[str, object] = {"chat_id": number, "parent_chat_id": parent, "timestamp": at}
    return changed("Qwen-Bailian's", **fields, hash_ids=ids, input_length=16 * len(ids), turn=turn)


def test_turns_of_a_bailian_chat_are_turns_of_a_session(read: Read) -> None:
    lines = [
        chat(1, -1, 0.5, [1]),
        chat(2, -1, 0.6, [2]),
        chat(3, 1, 1.0, [1, 3], 2),
        chat(4, 3, 2.0, [1, 3, 4], 3),
        chat(9, 8, 2.5, [5], 2),
    ]
    rows = read(PUBLISHED["Qwen-Bailian's"].text(lines))
    assert [row.session for row in rows] == ["1", "2", "1", "1", "8"]
    assert ideal_hit_tokens(rows) == 3 * 16


def test_a_block_that_recurs_after_another_prefix_is_not_shared(read: Read) -> None:
    """Bailian's ids are hashes of one block alone; a cache shares whole prefixes."""
    lines = [chat(1, -1, 0.0, [1, 2, 3]), chat(2, -1, 1.0, [1, 3, 2]), chat(3, -1, 2.0, [1, 2, 9])]
    rows = read(PUBLISHED["Qwen-Bailian's"].text(lines))
    assert ideal_hit_tokens(rows) == 16 + 32
    shared = set(rows[0].block_ids.tolist()) & set(rows[1].block_ids.tolist())
    assert len(shared) == 1


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"chat_id": None}, "chat_id is None"),
        ({"parent_chat_id": 1.5}, "parent_chat_id is 1.5"),
        ({"chat_id": True}, "chat_id is True"),
        ({"turn": 0}, "turn is 0"),
        ({"type": 3}, "type is 3, not text"),
        ({"timestamp": -1}, "timestamp is -1"),
        ({"hash_ids": [1, 2, 3]}, "hash_ids are 3, more than the prompt of 30 tokens has blocks"),
    ],
)
def test_a_wrong_value_of_a_bailian_line_is_named(
    read: Read, fields: dict[str, object], said: str
) -> None:
    line = changed("Qwen-Bailian's", **fields)
    error = refused(
        read, PUBLISHED["Qwen-Bailian's"].text([PUBLISHED["Qwen-Bailian's"].line, line])
    )
    assert str(error.value).endswith("trace:2") and error.problem.startswith(said)


@pytest.mark.parametrize("name", ["Mooncake's", "Qwen-Bailian's"])
@pytest.mark.parametrize(("part", "is_noticed"), [(1.0, False), (0.75, False), (0.5, True)])
def test_blocks_that_cover_a_part_of_the_prompts_are_noticed(
    read: Read, name: str, part: float, is_noticed: bool
) -> None:
    """They are larger than the format says."""
    each = PUBLISHED[name]
    ids = list(range(12))
    line = changed(name, hash_ids=ids, input_length=round(each.block_tokens * len(ids) / part))
    notices: list[str] = []
    read(each.text([line]), notice=notices.append)
    assert bool(notices) == is_noticed
    assert all("--block-tokens" in notice and "50%" in notice for notice in notices)


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_a_size_of_blocks_is_refused_where_there_are_none(read: Read, name: str) -> None:
    each = PUBLISHED[name]
    line = {field: value for field, value in each.line.items() if field != each.ids}
    if name == "Qwen-Bailian's":
        line["hash_ids"] = []
    error = refused(read, each.text([line]), block_tokens=16)
    assert error.field == "--block-tokens" and "no ids of blocks" in error.problem


def test_all_formats_of_lines_are_tested() -> None:
    assert [each.name for each in FORMATS] == OF_LINES
    for each in FORMATS:
        assert each.required == set(PUBLISHED[each.name].required())
        assert each.optional == PUBLISHED[each.name].optional
