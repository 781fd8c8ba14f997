"""From a plan to arrays: checked by hand, and against a dictionary of positions."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvell.attention.host_batch import HostGroupBatch, HostRows, HostStateBatch
from kvell.attention.interface import GroupBatch, HostLengths, part_sizes
from kvell.attention.native import batch_args
from kvell.attention.states import StateBatch
from kvell.engine.requests.plan import NewPages
from kvell.engine.running.batching import FIELDS, GroupArrays, PageTables, WorkRows, token_positions
from kvell.engine.running.forward_batches import to_device
from kvell.memory import GroupKind, GroupSpec
from kvell.models.fused.decoder import states_args
from tests.engine.running.batches import FULL, SLIDING, Row, as_lists, plan, tables, work
from tests.oracle.tables import ReferenceTables
from tests.pages.pools import group


@pytest.fixture(params=[ReferenceTables, PageTables])
def kind(request: pytest.FixtureRequest) -> type[PageTables]:
    found: type[PageTables] = request.param
    return found


def test_a_prefill_and_a_decode_over_full_attention(kind: type[PageTables]) -> None:
    made = tables(kind, (5, 0, 0, 10), (5, 0, 1, 11), (6, 0, 0, 20), (6, 0, 1, 21), (6, 0, 2, 22))
    assert as_lists(made.arrays(0, [work(6, 8, 1), work(5, 0, 6)])) == {
        "query_starts": [0, 1, 7],
        "context_lens": [9, 6],
        "table_starts": [0, 3, 5],
        "page_ids": [20, 21, 22, 10, 11],
        "first_positions": [0, 0],
        "write_page_ids": [22, 10, 10, 10, 10, 11, 11],
        "write_offsets": [0, 0, 1, 2, 3, 0, 1],
    }


def test_a_window_starts_at_the_page_its_next_token_reads(kind: type[PageTables]) -> None:
    """Token 13 reads 8 … 13 in a window of 6: page 2 on."""
    rows: list[Row] = [(5, 1, position, 30 + position) for position in range(4)]
    arrays = tables(kind, *rows).arrays(1, [work(5, 13, 2)])
    assert as_lists(arrays) == {
        "query_starts": [0, 2],
        "context_lens": [15],
        "table_starts": [0, 2],
        "page_ids": [32, 33],
        "first_positions": [2],
        "write_page_ids": [33, 33],
        "write_offsets": [1, 2],
    }


def test_all_arrays_are_contiguous_int32(kind: type[PageTables]) -> None:
    arrays = tables(kind, (5, 0, 0, 10)).arrays(0, [work(5, 0, 3)])
    for values in arrays.fields.values():
        assert values.dtype == np.int32
        assert values.flags["C_CONTIGUOUS"]


def test_no_work_makes_empty_arrays(kind: type[PageTables]) -> None:
    arrays = as_lists(tables(kind, (5, 0, 0, 10)).arrays(0, []))
    assert arrays["query_starts"] == arrays["table_starts"] == [0]
    assert arrays["page_ids"] == arrays["write_page_ids"] == []


def test_tables_grow_over_steps_and_in_any_order_of_rows(kind: type[PageTables]) -> None:
    made = tables(kind, (5, 0, 1, 11), (6, 0, 0, 20), (5, 1, 0, 40), (5, 0, 0, 10))
    made.update(plan([(5, 0, position, 100 + position) for position in range(2, 40)]))
    page_ids = made.arrays(0, [work(5, 0, 160)]).page_ids.tolist()
    assert page_ids == [10, 11, *range(102, 140)]
    assert made.arrays(1, [work(5, 0, 2)]).page_ids.tolist() == [40]


def test_a_released_handle_is_forgotten(kind: type[PageTables]) -> None:
    made = tables(kind, (5, 0, 0, 10), (6, 0, 0, 20))
    made.update(plan([], released=(5, 99)))
    assert made.arrays(0, [work(6, 0, 1)]).page_ids.tolist() == [20]
    with pytest.raises(KeyError, match="5"):
        made.arrays(0, [work(5, 0, 1)])


STATE = GroupSpec(
    "state", GroupKind.STATE, (0, 2, 4, 6), 64, 1, page_stride_bytes=128, pages_per_large=3,
    layers_per_page=2,
)  # fmt: skip


def checkpoints(*rows: tuple[int, int, int, int, int]) -> NewPages:
    return np.asarray(rows, np.int32).reshape(-1, 5)


def test_a_states_table_has_its_slices_and_its_cuts_count_from_the_steps_first_token(
    kind: type[PageTables],
) -> None:
    """Two slices; another group's checkpoint, and rows in any order."""
    rows: list[Row] = [(5, 1, 1, 11), (5, 1, 0, 10), (6, 1, 0, 20), (6, 1, 1, 21)]
    made = tables(kind, *rows, groups=[FULL, STATE])
    kept = checkpoints(
        (6, 1, 72, 1, 41),
        (6, 0, 66, 0, 99),
        (6, 1, 64, 0, 30),
        (6, 1, 72, 0, 40),
        (6, 1, 64, 1, 31),
    )
    arrays = made.states(1, [work(5, 3, 1), work(6, 60, 12)], kept)
    assert arrays.end_page_ids is None
    written = {k: v for k, v in vars(arrays).items() if v is not None}
    assert {name: values.tolist() for name, values in written.items()} == {
        "query_starts": [0, 1, 13],
        "starts": [3, 60],
        "page_ids": [[10, 11], [20, 21]],
        "cut_requests": [1, 1],
        "cut_tokens": [4, 12],
        "cut_page_ids": [[30, 31], [40, 41]],
    }
    assert all(v.dtype == np.int32 and v.flags["C_CONTIGUOUS"] for v in written.values())


def test_states_without_checkpoints(kind: type[PageTables]) -> None:
    made = tables(kind, (5, 0, 0, 10), (5, 0, 1, 11), groups=[STATE])
    arrays = made.states(0, [work(5, 0, 7)], checkpoints())
    assert arrays.cut_page_ids.shape == (0, 2)
    assert arrays.cut_requests.tolist() == arrays.cut_tokens.tolist() == []


def test_a_running_state_goes_on_over_known_tokens_only(kind: type[PageTables]) -> None:
    """Two of five tokens are draft tokens: the state after the third is kept, not the last."""
    rows: list[Row] = [(5, 0, 0, 10), (5, 0, 1, 11), (6, 0, 0, 20), (6, 0, 1, 21)]
    made = tables(kind, *rows, groups=[STATE])
    drafting = structs.replace(work(5, 30, 5), proposed=2)
    arrays = made.states(
        0, [drafting, work(6, 60, 2)], checkpoints((6, 0, 61, 0, 8), (6, 0, 61, 1, 9))
    )
    assert arrays.end_page_ids is not None
    assert arrays.page_ids.tolist() == [[10, 11], [20, 21]]
    assert arrays.end_page_ids.tolist() == [[-1, -1], [20, 21]]
    cuts = zip(arrays.cut_requests, arrays.cut_tokens, arrays.cut_page_ids.tolist(), strict=True)
    assert list(cuts) == [(1, 1, [8, 9]), (0, 3, [10, 11])]


def test_draft_tokens_alone_leave_the_state_as_it_is(kind: type[PageTables]) -> None:
    made = tables(kind, (5, 0, 0, 10), (5, 0, 1, 11), groups=[STATE])
    arrays = made.states(0, [structs.replace(work(5, 33, 2), proposed=2)], checkpoints())
    assert arrays.end_page_ids is not None
    assert arrays.end_page_ids.tolist() == [[-1, -1]]
    assert len(arrays.cut_requests) == 0


@pytest.mark.parametrize("row", [(5, 0, 3, 0, 9), (5, 0, 12, 0, 9), (6, 0, 5, 0, 9)])
def test_a_checkpoint_of_no_token_of_the_step_is_refused(
    kind: type[PageTables], row: tuple[int, int, int, int, int]
) -> None:
    """Before its first token, after its last one, or of a request outside the step."""
    made = tables(kind, (5, 0, 0, 10), (5, 0, 1, 11), groups=[STATE])
    second = (*row[:3], 1, row[4])
    with pytest.raises(ValueError, match="checkpoint"):
        made.states(0, [work(5, 3, 8)], checkpoints(row, second))


works = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=5)


@pytest.mark.parametrize("kind", [ReferenceTables, PageTables])
@given(works, st.integers(1, 6), st.sampled_from([0, 1, 2, 5, 9, 30]))
def test_every_token_is_written_where_its_table_says_and_can_read_its_window(
    kind: type[PageTables], spans: list[tuple[int, int]], page_tokens: int, window: int
) -> None:
    spec = group(page_tokens, 4, window)
    where = {(h, p): 100 * h + p for h in range(len(spans)) for p in range(60)}
    made = tables(kind, *[(h, 0, p, page) for (h, p), page in where.items()], groups=[spec])
    batch = [work(h, start, count) for h, (start, count) in enumerate(spans)]
    arrays = made.arrays(0, batch)
    row = 0
    for h, (start, count) in enumerate(spans):
        first = int(arrays.first_positions[h])
        table = arrays.page_ids[arrays.table_starts[h] : arrays.table_starts[h + 1]].tolist()
        for token in range(start, start + count):
            assert arrays.write_page_ids[row] == where[h, token // page_tokens]
            assert arrays.write_offsets[row] == token % page_tokens
            earliest = max(0, token - window + 1) if window else 0
            for read in range(earliest, token + 1):
                assert table[read // page_tokens - first] == where[h, read // page_tokens]
            row += 1
    assert arrays.query_starts[-1] == row
    assert first_is_needed(arrays, spans, page_tokens, window)


def first_is_needed(
    arrays: GroupArrays, spans: list[tuple[int, int]], page_tokens: int, window: int
) -> bool:
    """No table starts before the first page that its first token reads."""
    return all(
        first == (max(0, start - window + 1) if window else 0) // page_tokens
        for first, (start, _) in zip(arrays.first_positions.tolist(), spans, strict=True)
    )


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 20)), max_size=6))
def test_token_positions_count_up_from_every_start(spans: list[tuple[int, int]]) -> None:
    starts = np.asarray([s for s, _ in spans], np.int64)
    counts = np.asarray([c for _, c in spans], np.int64)
    positions = token_positions(starts, counts)
    assert positions.dtype == np.int64
    assert positions.tolist() == [p for s, c in spans for p in range(s, s + c)]


CHUNKED = GroupSpec(
    "chunked", GroupKind.CHUNKED, (3,), 4, 1, page_stride_bytes=64, pages_per_large=3,
    window_tokens=10,
)  # fmt: skip


@given(works, st.data())
def test_compiled_tables_answer_as_the_others(
    spans: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Full, sliding and chunked groups, released and grown pages, in any places."""
    groups = (FULL, SLIDING, CHUNKED)
    both = ReferenceTables(groups), PageTables(groups)
    pages = [
        (h, g, p, data.draw(st.integers(0, 63)) * spec.pages_per_large)
        for h, (start, count) in enumerate(spans)
        for g, spec in enumerate(groups)
        for p in range(-(-(start + count) // spec.page_tokens))
    ]
    cut = data.draw(st.integers(0, len(pages)))
    steps = plan([(99, 0, 0, 1)]), plan(pages[:cut]), plan(pages[cut:], released=(99, 98))
    for step in steps:
        for one in both:
            one.update(step)
    batch = [work(h, start, count) for h, (start, count) in enumerate(spans)]
    rows, logits = WorkRows.of(batch), [h % 2 for h in range(len(spans))]
    for g in range(len(groups)):
        plain, compiled = (one.arrays(g, batch, rows) for one in both)
        assert as_lists(plain) == as_lists(compiled)
        assert (plain.sizes, plain.flat.dtype) == (compiled.sizes, compiled.flat.dtype)
        tables_of = ([one.table(h, g) for h in range(len(spans))] for one in both)
        for ours, theirs in zip(*tables_of, strict=True):
            held = min(len(ours), len(theirs))
            assert ours[:held].tolist() == theirs[:held].tolist()
    ids = [np.arange(count, dtype=np.int32) + 7 * h for h, (_, count) in enumerate(spans)]
    plain_rows, compiled_rows = (one.token_rows(rows, logits, ids) for one in both)
    assert_same(plain_rows, compiled_rows)
    assert len(plain_rows.flat) == 2 * sum(rows.counts) + sum(logits)


def assert_same(ours: HostRows, theirs: HostRows) -> None:
    assert (ours.sizes, ours.flat.dtype) == (theirs.sizes, theirs.flat.dtype)
    assert ours.flat.tolist() == theirs.flat.tolist()
    assert all(one.address == one.flat.ctypes.data for one in (ours, theirs))


def test_running_states_are_those_of_a_step_without_checkpoints(kind: type[PageTables]) -> None:
    made = kind([FULL, STATE])
    made.update(plan([(5, 1, 1, 11), (5, 1, 0, 10), (6, 1, 0, 20), (6, 1, 1, 21)]))
    batch = [work(6, 60, 12), work(5, 3, 1)]
    rows = made.running_states(1, WorkRows.of(batch))
    told, whole = HostStateBatch(rows), made.states(1, batch, checkpoints())
    for name, values in vars(whole).items():
        if values is None:
            assert getattr(told, name) is None
        else:
            assert (getattr(told, name).tolist(), values.dtype) == (values.tolist(), np.int32)
    plain = StateBatch(*(getattr(told, name) for name in HostStateBatch.MADE))
    (counts, ours), (theirs_counts, theirs) = told.args, states_args(plain)
    assert counts == theirs_counts == (2, 0, 2)
    assert ours[:3] == theirs[:3]
    assert ours[6] == theirs[6] == 0


def test_a_request_without_a_running_state_is_refused() -> None:
    made = tables(PageTables, (5, 0, 0, 10), groups=[STATE])
    with pytest.raises(ValueError, match="no running state"):
        made.running_states(0, WorkRows([5], [0], [1]))


def test_a_token_without_a_page_is_refused() -> None:
    made = tables(PageTables, (5, 0, 0, 10))
    with pytest.raises(ValueError, match="no page"):
        made.arrays(0, [work(5, 2, 3)])


@pytest.mark.parametrize("row", [(5, 2, 0, 1), (5, 0, -1, 1)])
def test_a_page_of_no_group_or_position_is_refused(row: Row) -> None:
    with pytest.raises(ValueError, match="new_pages"):
        tables(PageTables, row)


def test_rows_have_a_token_id_each() -> None:
    with pytest.raises(ValueError, match="token_ids"):
        tables(PageTables).token_rows(WorkRows([5], [0], [3]), [1], [np.zeros(2, np.int32)])


def test_the_fields_are_those_of_attentions_batch_in_its_order() -> None:
    names = [field.name for field in dataclasses.fields(GroupBatch) if field.init]
    assert names == [*FIELDS, "host"]


LENGTHS = [field.name for field in dataclasses.fields(HostLengths)]


def arrays() -> GroupArrays:
    """Two requests, three pages, five tokens; all numbers differ."""
    sizes, numbers = part_sizes(2, 3, 5), iter(range(100))
    parts = [np.asarray([next(numbers) for _ in range(n)], np.int32) for n in sizes]
    return GroupArrays.of(parts, np.int32)


def test_on_a_cpu_nothing_is_kept_twice() -> None:
    batch = to_device(arrays(), torch.device("cpu"))
    assert batch.host is None
    assert batch.page_ids.tolist() == arrays().page_ids.tolist()


def test_lengths_stay_on_the_host_beside_a_device() -> None:
    """``meta`` stands for a GPU: a device whose memory the host cannot read."""
    batch = to_device(arrays(), torch.device("meta"))
    tensors = {name: getattr(batch, name) for name in FIELDS}
    assert {tensor.device.type for tensor in tensors.values()} == {"meta"}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.int32}
    assert batch.host is not None
    for name in LENGTHS:
        assert getattr(batch.host, name).tolist() == getattr(arrays(), name).tolist()


def test_parts_of_one_tensor_are_where_compiled_kernels_look() -> None:
    """They lie as in a batch that was not split."""
    batch = to_device(arrays(), torch.device("cpu"))
    parts = [getattr(batch, name) for name in FIELDS]
    assert batch_args(batch, 5) == batch_args(GroupBatch(*parts), 5)
    assert isinstance(batch, HostGroupBatch)
    assert batch.writes == (batch.write_page_ids.data_ptr(), batch.write_offsets.data_ptr())


def test_lengths_are_named_as_in_the_batch() -> None:
    assert set(LENGTHS) <= {field.name for field in dataclasses.fields(GroupBatch)}
