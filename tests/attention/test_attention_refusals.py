"""Wrong tensors and wrong names are refused before any pointer is followed."""

import importlib.util
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvell.attention.choice import choose_kernels
from kvell.attention.interface import AttendParams, GroupBatch, LayerPages
from kvell.attention.portable import PortableKernels
from kvell.attention.sections import SectionKernels, SectionRecords
from kvell.errors import ChangeSomething
from tests.attention.cases import Shape, Stored, make_case, new_queries, store
from tests.attention.lent import Split, elsewhere_of, hold, local_part, queries_of

CPU = torch.device("cpu")

native = pytest.importorskip("kvell.attention.native", reason="these checks guard compiled code")


@pytest.fixture
def stored() -> Stored:
    return store(native.NativeKernels(), make_case(Shape(((40, 2), (20, 1)))))


@pytest.fixture
def query() -> torch.Tensor:
    return new_queries(make_case(Shape(((40, 2), (20, 1)))))


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


WRONG_BATCHES: dict[str, tuple[Callable[[Stored], Stored], str]] = {
    "page beyond the pool": (
        lambda s: replace(s, batch=replace(s.batch, page_ids=s.batch.page_ids + 1000)),
        "page_ids",
    ),
    "negative page": (
        lambda s: replace(s, batch=replace(s.batch, page_ids=s.batch.page_ids - 1000)),
        "page_ids",
    ),
    "starts that run backwards": (
        lambda s: replace(s, batch=replace(s.batch, table_starts=ints(0, 9, 5))),
        "table_starts",
    ),
    "starts that end early": (
        lambda s: replace(s, batch=replace(s.batch, query_starts=ints(0, 2, 2))),
        "query_starts",
    ),
    "context shorter than the step": (
        lambda s: replace(s, batch=replace(s.batch, context_lens=ints(1, 20))),
        "context_lens",
    ),
    "too few starts": (
        lambda s: replace(s, batch=replace(s.batch, query_starts=ints(0, 3))),
        "starts need 3",
    ),
    "negative first position": (
        lambda s: replace(s, batch=replace(s.batch, first_positions=ints(-1, 0))),
        "first_positions",
    ),
    "wide integers": (
        lambda s: replace(s, batch=replace(s.batch, page_ids=s.batch.page_ids.long())),
        "page_ids: must be contiguous int32",
    ),
    "a half-precision pool": (
        lambda s: replace(s, layer=replace(s.layer, dtype=torch.float16)),
        "float16",
    ),
    "an odd head size": (
        lambda s: replace(s, layer=replace(s.layer, head_size=60)),
        "head_size: 60",
    ),
    "a latent longer than its key": (
        lambda s: replace(s, layer=replace(s.layer, value_size=72)),
        "value_size: 72",
    ),
    "an odd latent": (
        lambda s: replace(s, layer=replace(s.layer, value_size=20)),
        "value_size: 20",
    ),
    "pages of nothing": (
        lambda s: replace(s, layer=replace(s.layer, page_tokens=0)),
        "must be positive",
    ),
    "a pool of floats": (
        lambda s: replace(s, layer=replace(s.layer, pool=torch.zeros(64))),
        "pool: must be a flat uint8",
    ),
}


@pytest.mark.parametrize(("spoil", "match"), WRONG_BATCHES.values(), ids=WRONG_BATCHES.keys())
def test_wrong_metadata_is_refused(
    stored: Stored, query: torch.Tensor, spoil: Callable[[Stored], Stored], match: str
) -> None:
    wrong = spoil(stored)
    with pytest.raises(ValueError, match=match):
        native.NativeKernels().attend(wrong.layer, wrong.batch, query, AttendParams(1.0))


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda q: q.double(), "must be torch.float32"),
        (lambda q: q[..., :32], "must be"),
        (lambda q: q[:, :8], "8 heads over 3"),
        (lambda q: q[0], "must be"),
        (lambda q: q.transpose(1, 2).contiguous().transpose(1, 2), "contiguous"),
    ],
)
def test_wrong_queries_are_refused(
    stored: Stored,
    query: torch.Tensor,
    spoil: Callable[[torch.Tensor], torch.Tensor],
    match: str,
) -> None:
    with pytest.raises(ValueError, match=match):
        native.NativeKernels().attend(stored.layer, stored.batch, spoil(query), AttendParams(1.0))


def test_sinks_of_another_length_are_refused(stored: Stored, query: torch.Tensor) -> None:
    params = AttendParams(1.0, sinks=torch.zeros(8))
    with pytest.raises(ValueError, match="sinks"):
        native.NativeKernels().attend(stored.layer, stored.batch, query, params)


@pytest.mark.parametrize(
    ("page", "row", "match"),
    [(10_000, 0, "write_page_ids"), (-1, 0, "write_page_ids"), (0, 16, "write_offsets")],
)
def test_writes_outside_the_pool_are_refused(
    stored: Stored, page: int, row: int, match: str
) -> None:
    batch = replace(stored.batch, write_page_ids=ints(page), write_offsets=ints(row))
    token = torch.zeros(1, 3, 64)
    with pytest.raises(ValueError, match=match):
        native.NativeKernels().write_kv(stored.layer, batch, token, token)


def test_writes_of_another_shape_are_refused(stored: Stored) -> None:
    batch = replace(stored.batch, write_page_ids=ints(0), write_offsets=ints(0))
    kernels = native.NativeKernels()
    with pytest.raises(ValueError, match="9 heads"):
        kernels.write_kv(stored.layer, batch, torch.zeros(1, 9, 64), torch.zeros(1, 3, 64))
    with pytest.raises(ValueError, match="tokens"):
        kernels.write_kv(stored.layer, batch, torch.zeros(2, 3, 64), torch.zeros(2, 3, 64))


def test_values_come_with_keys_or_inside_of_them(stored: Stored) -> None:
    batch = replace(stored.batch, write_page_ids=ints(0), write_offsets=ints(0))
    kernels, token = native.NativeKernels(), torch.zeros(1, 3, 64)
    latent = replace(stored.layer, value_size=32)
    for layer, value in ((stored.layer, None), (latent, token)):
        with pytest.raises(ValueError, match="unless it is a part of the key"):
            kernels.write_kv(layer, batch, token, value)


def test_keys_for_a_plain_pool_are_of_its_dtype(stored: Stored) -> None:
    batch = replace(stored.batch, write_page_ids=ints(0), write_offsets=ints(0))
    token = torch.zeros(1, 3, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"must be torch\.float32 on cpu"):
        native.NativeKernels().write_kv(stored.layer, batch, token, token)


def test_a_pool_too_small_for_one_page_holds_none(stored: Stored, query: torch.Tensor) -> None:
    tiny: LayerPages = replace(stored.layer, pool=stored.layer.pool[:64])
    with pytest.raises(ValueError, match="is not below 0"):
        native.NativeKernels().attend(tiny, stored.batch, query, AttendParams(1.0))


def test_a_write_touches_its_own_rows_only() -> None:
    case = make_case(Shape(((40, 1),)))
    stored = store(native.NativeKernels(), case)
    before = stored.layer.pool.clone()
    where = replace(stored.batch, write_page_ids=stored.batch.page_ids[:1], write_offsets=ints(5))
    new = torch.full((1, 3, 64), 7.0)
    native.NativeKernels().write_kv(stored.layer, where, new, new)
    changed = (before != stored.layer.pool).nonzero().flatten()
    assert 0 < len(changed) <= 2 * 3 * 64 * 4
    portable = replace(stored.layer, pool=before)
    PortableKernels().write_kv(portable, where, new, new)
    assert torch.equal(portable.pool, stored.layer.pool)


def test_choice_by_name_and_device() -> None:
    assert choose_kernels(CPU).name == "native"
    assert choose_kernels(CPU, "portable").name == "portable"
    pytest.importorskip("triton")
    assert choose_kernels(torch.device("cuda", 0)).name == "triton"
    assert choose_kernels(torch.device("cuda", 0), "portable").name == "portable"


def test_a_gpu_without_triton_runs_the_portable_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert choose_kernels(torch.device("cuda", 0)).name == "portable"
    with pytest.raises(ChangeSomething, match="is not installed; pip install triton"):
        choose_kernels(torch.device("cuda", 0), "triton")


@pytest.mark.parametrize(
    ("device", "name", "match"),
    [
        (CPU, "fast", "no such kernels"),
        (CPU, "triton", "does not run"),
        (torch.device("cuda", 0), "native", "does not run"),
    ],
)
def test_impossible_choices_say_what_to_change(device: torch.device, name: str, match: str) -> None:
    with pytest.raises(ChangeSomething, match=match) as caught:
        choose_kernels(device, name)
    assert caught.value.field == "attention"


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ChangeSomething, match=r"choose one of .*portable"):
        native.NativeKernels(instruction_set="avx1024")


CASE = make_case(Shape(((1100, 2), (1200, 3), (100, 1)), heads=4, kv_heads=2, head_size=16))
SPLITS = [Split((0, 1, 2), (0, 1)), Split((0, 2), (0,)), Split()]
QUERY = queries_of(CASE, local_part(CASE, SPLITS))
SCALE = AttendParams(1.0)


def moved(batch: GroupBatch, pages: int) -> GroupBatch:
    """With the first request's table that many pages later."""
    firsts = batch.first_positions + ints(pages, 0, 0)
    return replace(batch, first_positions=firsts)


Change = Callable[[SectionRecords], SectionRecords]

WRONG_RECORDS: dict[str, tuple[Change, str]] = {
    "doubles": (
        lambda r: replace(r, values=r.values.double()),
        "elsewhere.values: is torch.float64 .* pass contiguous float32 in host memory",
    ),
    "strided": (
        lambda r: replace(r, values=r.values.transpose(0, 1).contiguous().transpose(0, 1)),
        "elsewhere.values: .* with strides .* pass contiguous float32",
    ),
    "of another head": (
        lambda r: replace(r, values=r.values[..., :-1].contiguous()),
        r"elsewhere.values: is \[7, 4, 17\]; pass \[rows, 4, 18\]",
    ),
    "of fewer heads": (
        lambda r: replace(r, values=r.values[:, :2].contiguous()),
        r"elsewhere.values: is \[7, 2, 18\]; pass \[rows, 4, 18\]",
    ),
    "flat": (
        lambda r: replace(r, values=r.values.flatten()),
        r"elsewhere.values: is \[504\]; pass \[rows, 4, 18\]",
    ),
    "wide starts": (
        lambda r: replace(r, starts=r.starts.long()),
        r"elsewhere.starts: is torch.int64 \[4\]; pass int32 \[4\]",
    ),
    "starts of another batch": (
        lambda r: replace(r, starts=r.starts[:-1].clone()),
        r"elsewhere.starts: is torch.int32 \[3\]; pass int32 \[4\]",
    ),
    "strided starts": (
        lambda r: replace(r, starts=r.starts.repeat_interleave(2)[::2]),
        "elsewhere.starts: .* pass contiguous starts",
    ),
    "starts beyond the values": (
        lambda r: replace(r, starts=r.starts + ints(0, 0, 0, 3)),
        "elsewhere.starts: runs from 0 to 10; .* from 0 to the 7 rows of values",
    ),
    "starts that fall": (
        lambda r: replace(r, starts=ints(0, 10, 7, 7)),
        "elsewhere.starts: request 0 has 5 records of the 2 sections before its table",
    ),
    "negative lengths": (
        lambda r: replace(r, starts=ints(0, 2, -1, 7)),
        "elsewhere.starts: request 1 has -3 rows of records for 3 query rows",
    ),
    "not as many for each row": (
        lambda r: replace(r, starts=ints(0, 3, 7, 7)),
        "elsewhere.starts: request 0 has 3 rows of records for 2 query rows; pass as many",
    ),
    "none of a request": (
        lambda r: replace(r, starts=ints(0, 4, 4, 4), values=r.values[:4]),
        "elsewhere.starts: request 1 has 0 records of the 2 sections before its table; pass one",
    ),
    "of a request that is local": (
        lambda r: SectionRecords(ints(0, 4, 7, 8), torch.cat([r.values, r.values[:1]])),
        "elsewhere.starts: request 2 has 1 records of the 0 sections before its table",
    ),
}


def lent(kernels: SectionKernels) -> tuple[Stored, SectionRecords]:
    stored = hold(kernels, CASE, local_part(CASE, SPLITS), placement=0)
    return stored, elsewhere_of(kernels, CASE, SPLITS, placement=0)


@pytest.mark.parametrize(("change", "message"), WRONG_RECORDS.values(), ids=WRONG_RECORDS.keys())
def test_records_that_do_not_fit(kernels: SectionKernels, change: Change, message: str) -> None:
    stored, elsewhere = lent(kernels)
    with pytest.raises(ValueError, match=message):
        kernels.attend(stored.layer, stored.batch, QUERY, SCALE, change(elsewhere))


def test_a_table_that_begins_inside_a_section(kernels: SectionKernels) -> None:
    stored, elsewhere = lent(kernels)
    message = "first_positions: request 0's table begins at position 1008, .* a multiple of 512"
    with pytest.raises(ValueError, match=message):
        kernels.attend(stored.layer, moved(stored.batch, -1), QUERY, SCALE, elsewhere)


def test_a_query_row_among_what_is_elsewhere(kernels: SectionKernels) -> None:
    stored, elsewhere = lent(kernels)
    batch = replace(stored.batch, context_lens=ints(1025, 1200, 100))
    message = "context_lens: request 0 has a query row at position 1023, among the 1024 remote"
    with pytest.raises(ValueError, match=message):
        kernels.attend(stored.layer, batch, QUERY, SCALE, elsewhere)


def test_records_of_a_request_without_query_rows(kernels: SectionKernels) -> None:
    stored, elsewhere = lent(kernels)
    batch = replace(stored.batch, query_starts=ints(0, 2, 2, 3), context_lens=ints(1100, 1197, 100))
    message = "elsewhere.starts: request 1 has no query rows; leave its records out"
    with pytest.raises(ValueError, match=message):
        kernels.attend(stored.layer, batch, QUERY[:3], SCALE, elsewhere)


@pytest.mark.parametrize(
    "params",
    [replace(SCALE, window_tokens=700), replace(SCALE, chunk_tokens=900)],
    ids=["window", "chunk"],
)
def test_windows_and_chunks(kernels: SectionKernels, params: AttendParams) -> None:
    stored, elsewhere = lent(kernels)
    with pytest.raises(ValueError, match="elsewhere: this layer reads a window or chunk"):
        kernels.attend(stored.layer, stored.batch, QUERY, params, elsewhere)
