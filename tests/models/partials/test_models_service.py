"""What a creditor's service reads and answers: only what its loans name, whatever it is asked."""

import queue
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.lending.native_records import native_records
from kvell.attention.interface import AttendParams, GroupBatch
from kvell.attention.native import NativeKernels
from tests.depth import many
from tests.models.fused_models import SETS
from tests.models.lent_pass import DEBTOR, NAMES, SECTION_PAGES, WORDS, Lender, prefix_of

FULL, MIXED = "LlamaForCausalLM", "Gemma2ForCausalLM"
FINE, WRONG = 0, 1
OTHER = DEBTOR + 1
HEADS, SCALE = 4, 0.25


@pytest.fixture(scope="module", autouse=True)
def _models() -> Iterator[None]:
    """Models last as long as this file's tests."""
    yield
    prefix_of.cache_clear()
    with_three.cache_clear()


@dataclass(frozen=True)
class Run:
    """A run of a query: first section, rights, and its rows [rows, heads, head_size]."""

    first: int
    rights: tuple[int, ...]
    rows: torch.Tensor


def lines(data: bytes) -> bytes:
    """Filled up to a multiple of 64 bytes."""
    return data + bytes(-len(data) % 64)


def query_of(
    number: int,
    layer: int,
    runs: list[Run],
    scale: float = SCALE,
    softcap: float = 0.0,
    heads: int = HEADS,
    element: int = 0,
) -> bytes:
    """As csrc/partials/message.h describes it, written a second time."""
    sections = sum(len(run.rights) for run in runs)
    rows = sum(len(run.rows) for run in runs)
    rule = (heads, element, scale, softcap)
    head = struct.pack("<Qiiiiiiff", number, layer, len(runs), sections, rows, *rule)
    for run in runs:
        head += struct.pack("<iiii", run.first, len(run.rights), len(run.rows), 0)
    head += b"".join(struct.pack("<Q", right) for run in runs for right in run.rights)
    return lines(head) + b"".join(run.rows.numpy().tobytes() for run in runs)


def answer_of(answer: bytes) -> tuple[int, int, list[int], torch.Tensor]:
    """Number, whether the query was wrong, states of runs, and all records."""
    number, answered, runs = struct.unpack_from("<Qii", answer)
    states = list(struct.unpack_from(f"<{runs}i", answer, 16))
    at = len(lines(answer[: 16 + 4 * runs]))
    records = torch.frombuffer(bytearray(answer[at:]) or bytearray(4), dtype=torch.float32)
    return number, answered, states, records


def rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, HEADS, 16, generator=torch.Generator().manual_seed(seed))


def lender(architecture: str = FULL) -> Lender:
    return Lender(prefix_of(architecture, torch.float32, 1), 0, starts=False)


def partials(
    lent: Lender,
    layer: int,
    pages: list[int],
    first: int,
    query: torch.Tensor,
    params: AttendParams,
) -> torch.Tensor:
    """Records by the attention room's own call."""
    served = lent.layers.layers[layer]
    end = first * 512 + len(pages) * served.pages.page_tokens

    def ints(*numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32)

    batch = GroupBatch(
        ints(0, len(query)),
        ints(end + len(query)),
        ints(0, len(pages)),
        ints(*pages),
        ints(first * SECTION_PAGES),
        ints(),
        ints(),
    )
    kernels = NativeKernels(1, SETS[0])
    return native_records(kernels, served.pages, batch, query, params).values.flatten()


@pytest.mark.parametrize(("layer", "softcap"), [(0, 0.0), (1, 0.0), (2, 5.0)])
def test_records_are_those_of_the_attention_room(layer: int, softcap: float) -> None:
    lent = lender()
    given_pages = []
    take = lent.pages
    lent.pages = lambda: given_pages.append(take()) or given_pages[-1]  # type: ignore[method-assign,func-returns-value]
    rights = [lent.lend(NAMES[0], section) for section in range(3)]
    whole, later = rows(2), rows(3, seed=1)
    runs = [Run(0, tuple(rights[:2]), whole), Run(2, (rights[2],), later)]
    number, answered, states, records = answer_of(
        lent.service.answer(DEBTOR, query_of(9, layer, runs, softcap=softcap))
    )
    assert (number, answered, states) == (9, FINE, [0, 0])
    params = AttendParams(SCALE, softcap=softcap)
    first = partials(lent, layer, given_pages[0][0] + given_pages[1][0], 0, whole, params)
    second = partials(lent, layer, given_pages[2][0], 2, later, params)
    assert torch.equal(records, torch.cat([first, second]))
    assert (lent.service.reading(), lent.service.wrong()) == (0, 0)


@pytest.mark.parametrize(
    "rule",
    [
        {"heads": 3},
        {"heads": 0},
        {"heads": -2},
        {"heads": 1 << 30},
        {"element": 2},
        {"element": -1},
        {"scale": float("nan")},
        {"softcap": float("inf")},
        {"softcap": -1.0},
    ],
)
def test_a_rule_that_no_layer_has_is_answered_as_wrong(rule: dict[str, Any]) -> None:
    lent = lender()
    runs = [Run(0, (lent.lend(NAMES[0], 0),), rows(1))]
    assert answer_of(lent.service.answer(DEBTOR, query_of(1, 0, runs)))[1] == FINE
    assert answer_of(lent.service.answer(DEBTOR, query_of(1, 0, runs, **rule)))[1] == WRONG


def test_layers_with_windows_lend_nothing() -> None:
    lent = lender(MIXED)
    right = lent.lend(NAMES[0], 0)
    found = [
        answer_of(lent.service.answer(DEBTOR, query_of(1, layer, [Run(0, (right,), rows(1))])))[1]
        for layer in range(3)
    ]
    assert found == [WRONG, FINE, WRONG]
    assert lent.service.wrong() == 2


@pytest.mark.parametrize("debtor", [DEBTOR, OTHER])
@pytest.mark.parametrize("what", ["unknown", "another's", "revoked", "ended", "another's word"])
def test_what_is_not_lent_is_never_read(what: str, debtor: int) -> None:
    """The pages hold a canary: a record of it would show, in a run that is gone too."""
    lent = lender()
    right, good = lent.lend(NAMES[0], 0), lent.lend(NAMES[1], 0)
    lent.pool.fill_(0x40)  # 3.0039 in float32
    asks, asked = debtor, right
    if what == "unknown":
        asked = 40
    elif what == "another's":
        asks = OTHER
    elif what == "revoked":
        lent.revoke(right)
    elif what == "ended":
        assert lent.service.end(right, 0.0)
    else:
        lent.words[right] = right + WORDS  # who has the word now
    runs = [Run(0, (asked,), rows(1)), Run(0, (good, asked), rows(1))]
    _, answered, states, records = answer_of(lent.service.answer(asks, query_of(1, 0, runs)))
    assert (answered, states) == (FINE, [1, 1])
    assert not records.any()
    if debtor == DEBTOR:
        alone = [Run(0, (good,), rows(1))]
        _, _, states, records = answer_of(lent.service.answer(DEBTOR, query_of(2, 0, alone)))
        assert states == [0]
        assert records.any(), "the canary is what would have been seen"
    assert lent.service.reading() == 0


GOOD = [Run(0, (1, 2), rows(2)), Run(2, (3,), rows(1))]


@given(data=st.data())
@many()
def test_bad_bytes_are_answered_and_crash_nothing(data: st.DataObject) -> None:
    lent = with_three()
    query = bytearray(query_of(5, 1, GOOD))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, 16)) * 4
        value = data.draw(st.sampled_from([-1, 0, 1, 3, 7, 1 << 20, (1 << 31) - 1, -(1 << 31)]))
        struct.pack_into("<i", query, min(at, len(query) - 4), value)
    cut = data.draw(st.sampled_from([len(query), len(query), 0, 5, 20, 64, len(query) - 1]))
    answer = lent.service.answer(DEBTOR, bytes(query[:cut]))
    _, answered, states, records = answer_of(answer)
    assert answered in (FINE, WRONG)
    assert len(states) in (0, 2)
    assert not records.isnan().any(), "pages that no loan names hold NaN"
    assert lent.service.reading() == 0


@cache
def with_three() -> Lender:
    """A lender of three sections, by the rights 1, 2 and 3."""
    lent = lender()
    for section in range(3):
        lent.lend(NAMES[0], section)
    return lent


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids: ids[:-1], "not those of one section"),
        (lambda ids: [], "not those of one section"),
        (lambda ids: [*ids[:-1], 1 << 20], "pages: 1048576 is not below"),
        (lambda ids: [*ids[:-1], -1], "pages: -1 is not below"),
    ],
)
def test_loans_of_wrong_pages_are_refused(
    change: Callable[[list[int]], list[int]], message: str
) -> None:
    lent = lender()
    lent.words[5] = 5
    with pytest.raises(ValueError, match=message):
        lent.service.lend(5, DEBTOR, [change(lent.pages()[0])])


def test_rights_have_one_owner() -> None:
    lent = lender()
    right = lent.lend(NAMES[0], 0)
    for again, message in ((right, "lent already"), (0, "zero")):
        with pytest.raises(ValueError, match=message):
            lent.service.lend(again, DEBTOR, lent.pages())


def test_a_right_that_goes_while_it_is_read_makes_its_run_gone() -> None:
    lent = lender()
    right = lent.lend(NAMES[0], 0)
    query = query_of(1, 0, [Run(0, (right,), rows(4000))])
    answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    was_read = False
    while not was_read:  # a reading may end before this thread looks
        lent.words[right] = right
        thread = threading.Thread(target=lambda: answers.put(lent.service.answer(DEBTOR, query)))
        thread.start()
        while not lent.service.reading() and thread.is_alive():
            pass
        lent.revoke(right)
        was_read = bool(lent.service.reading())
        thread.join()
        _, answered, states, records = answer_of(answers.get())
    assert (answered, states) == (FINE, [1])
    assert not records.any()


def test_a_fence_waits_until_nobody_reads() -> None:
    """Other threads read all the while; once a right has ended nobody reads by it."""
    lent = lender()
    rights = [lent.lend(NAMES[0], section) for section in range(3)]
    query = query_of(1, 0, [Run(0, tuple(rights), rows(64))])
    stop = threading.Event()
    seen: queue.SimpleQueue[list[int]] = queue.SimpleQueue()

    def ask() -> None:
        while not stop.is_set():
            seen.put(answer_of(lent.service.answer(DEBTOR, query))[2])

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert [seen.get(timeout=60.0) for _ in range(4)] == [[0]] * 4
    lent.revoke(rights[1])
    assert lent.service.end(rights[1], 60.0)
    lent.pool.fill_(0xFF)  # the pages are others', and a record of NaN would show
    asked = lent.service.answer(DEBTOR, query)
    stop.set()
    for thread in threads:
        thread.join()
    assert not answer_of(asked)[3].isnan().any()
    assert lent.service.reading() == 0
    assert lent.service.end(rights[1], 0.0), "it is over already"
