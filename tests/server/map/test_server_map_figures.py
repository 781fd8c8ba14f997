"""What the memory map is told: right sums, bounded lists, loans and transfers of both sides."""

from typing import Any

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvell.cli.top.screen import IdleSpell, read
from kvell.engine.protocol.pages import LargePage, Miss, PageGroup, PageOwner, Pages
from kvell.engine.protocol.placements import RequestPlacementEntry
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.protocol.statistics import GroupStats, Stats
from kvell.fleet.fleet import MemberStatus
from kvell.front.request_log import LogEntry
from kvell.front.request_queue import Entries, IdleWait
from kvell.front.routes import RequestTransfer, TransferTotals
from kvell.server.map.figures import (
    MOST_REQUESTS,
    NO_LOANS,
    InstanceSnapshot,
    ServerLine,
    bytes_by_use,
    large_page_body,
    map_body,
    request_row,
)
from kvell.server.map.history import (
    MOST_PAIRS,
    InstanceLoans,
    PeerSections,
    TransferRow,
    ended_loans,
    loans_of,
    sections_lent,
    transfer_rows,
)
from kvell.vocabulary import RequestId

STATUS = MemberStatus("mixed-0", "mixed", "serving", 7, 1, None)
STATS = Stats(
    *(0, 9, 2, 3, 10, 1, 0.5, 0, 0, 400, 100, 0),
    rungs={"inflate": 4},
    groups=(
        GroupStats("full", 4, 2, 3, 100, page_bytes=1000),
        GroupStats("window", 1, 0, 3, 40, page_bytes=2000),
    ),
    large_page_bytes=4000,
    memory={"chunk_bytes": 500, "activation_used_chunks": 3, "withheld_large_pages": 2},
    buffer={"used_large_pages": 5},
)
PAGES = Pages(
    *(0, 9),
    (PageGroup("full", "full", 12, 16, 1000, 4),),
    np.array([0, -1, -2], "<i2").tobytes(),
    np.array([3, 0, 0], "<u4").tobytes(),
    np.array([1, 0, 0], "<u4").tobytes(),
    np.array([0, 0, 0], "<u4").tobytes(),
    (Miss(RequestId("r"), 4, 100, 16, 64, 3, "not_resumable", ("window",)),),
)


def entry(
    name: str = "r", arrived: float = 10.0, tokens: int = 0, line: str = "mixed-0"
) -> LogEntry:
    made = LogEntry(
        RequestSpec(
            RequestId(name),
            np.arange(5, dtype="<i4").tobytes(),
            SamplingParams(),
            cache_salt="a salt",
        ),
        arrived,
    )
    made.line = line
    made.output.extend(range(tokens))
    if tokens:
        made.first_token_seconds, made.last_token_seconds = arrived + 0.5, arrived + 0.5
        made.last_token_seconds += 0.25 * (tokens - 1)
    return made


def decoded(body: dict[str, Any]) -> Any:
    return msgspec.json.decode(msgspec.json.encode(body))


def test_bytes_are_divided_without_a_remainder() -> None:
    told = bytes_by_use(STATS)
    assert told == {
        "pool": 40_000,
        "kv_used": 6000,
        "kv_cached": 2000,
        "kv_free": 24_000,
        "withheld": 8000,
        "activation": 1500,
        "cpu_buffer": 20_000,
    }
    assert told["pool"] == sum(
        told[n] or 0 for n in ("kv_used", "kv_cached", "kv_free", "withheld")
    )


def test_what_there_is_not_is_told_from_nothing() -> None:
    told = bytes_by_use(Stats(*(0,) * 6, 0.0, *(0,) * 5))
    assert told["activation"] is None and told["cpu_buffer"] is None


def test_a_request_has_its_times() -> None:
    row = request_row(entry(tokens=5), 13.0)
    assert row == {
        "id": "r",
        "instance": "mixed-0",
        "state": "running",
        "prompt_tokens": 5,
        "output_tokens": 5,
        "age_seconds": 3.0,
        "ttft_seconds": 0.5,
        "tpot_seconds": 0.25,
    }


def test_a_request_without_tokens_has_no_times_yet() -> None:
    row = request_row(entry(), 13.0)
    assert (row["state"], row["ttft_seconds"], row["tpot_seconds"]) == ("prefilling", None, None)
    row = request_row(entry(tokens=1), 13.0)
    assert (row["state"], row["ttft_seconds"], row["tpot_seconds"]) == ("running", 0.5, None)


def test_states_follow_a_request() -> None:
    assert request_row(entry(line=""), 13.0)["state"] == "waiting"
    dropped = entry(tokens=2)
    dropped.is_dropped = True
    assert request_row(dropped, 13.0)["state"] == "ending"


def test_no_prompt_answer_or_salt_is_told() -> None:
    made = entry(tokens=3)
    made.spec = structs.replace(made.spec, prompt=b"secret prompt   ")
    body = msgspec.json.encode(
        map_body([InstanceSnapshot(STATUS, STATS, PAGES)], Entries([made], []), 13.0)
    )
    assert b"secret" not in body and b"a salt" not in body
    assert set(decoded(request_row(made, 13.0))) == {
        "id", "instance", "state", "prompt_tokens", "output_tokens", "age_seconds",
        "ttft_seconds", "tpot_seconds",
    }  # fmt: skip


def test_an_instance_that_is_silent_is_shown_without_figures() -> None:
    (told,) = map_body([InstanceSnapshot(STATUS, None, None)], Entries([], []), 1.0)["instances"]
    assert told == {
        "id": "mixed-0",
        "role": "mixed",
        "state": "serving",
        "restarts": 1,
        "pid": 7,
        "loans": NO_LOANS,
        "stats": None,
        "pages": None,
    }


def test_columns_are_base64_and_misses_are_told() -> None:
    (told,) = decoded(map_body([InstanceSnapshot(STATUS, STATS, PAGES)], Entries([], []), 1.0))[
        "instances"
    ]
    columns = told["pages"]["columns"]
    assert columns["group"] == "AAD///7/" and columns["used"] == "AwAAAAAAAAAAAAAA"
    (miss,) = told["pages"]["misses"]
    assert (miss["reason"], miss["groups"], miss["steps_ago"]) == ("not_resumable", ["window"], 3)
    assert told["pages"]["groups"][0]["pages_per_large"] == 4


def test_hit_rates_are_of_what_was_asked_for() -> None:
    (told,) = map_body([InstanceSnapshot(STATUS, STATS, None)], Entries([], []), 1.0)["instances"]
    assert [group["hit_rate"] for group in told["stats"]["groups"]] == [0.25, 0.1]
    nothing = Stats(*(0,) * 6, 0.0, *(0,) * 5, groups=STATS.groups)
    (told,) = map_body([InstanceSnapshot(STATUS, nothing, None)], Entries([], []), 1.0)["instances"]
    assert [group["hit_rate"] for group in told["stats"]["groups"]] == [None, None]


def test_a_large_page_names_its_owners() -> None:
    owner = PageOwner(RequestId("r"), 2, 32, 64)
    told = decoded(large_page_body(LargePage(3, 9, 0, 2, 1, 1, 0, (owner,), 5, 0, (16, 32))))
    assert told["owners"] == [{"id": "r", "pages": 2, "first_token": 32, "end_token": 64}]
    assert (told["large_page"], told["more_owners"], told["cached_ends"]) == (3, 5, [16, 32])


def test_a_wait_beside_idle_instances_is_told_to_who_looks() -> None:
    told = map_body([], Entries([], [entry(line="")], IdleWait(1, 12.5, "why")), 13.0)
    assert read(msgspec.json.encode(told)).requests.idle_wait == IdleSpell(1, 12.5, "why")


def test_the_line_of_the_server_is_told_and_loans_are_those_of_each_instance() -> None:
    lent = InstanceLoans(64, lends=(PeerSections("mixed-2", 4, 1),))
    snapshot = InstanceSnapshot(STATUS, STATS, PAGES, lent, {"inflate": 3})
    line = ServerLine(("m",), "bfloat16", 1.5, None, links=("metrics",))
    rows = [TransferRow("move", "mixed-0", "mixed-1", 1, 2)]
    told = decoded(map_body([snapshot], Entries([], []), 13.0, line, rows))
    assert told["server"]["dtype"] == "bfloat16"
    assert told["server"]["output_tokens_per_second"] is None
    assert told["transfers"][0]["kind"] == "move" and told["transfers"][0]["recent"] == 2
    (instance,) = told["instances"]
    assert instance["loans"]["lends"] == [{"peer": "mixed-2", "sections": 4, "requests": 1}]
    assert instance["stats"]["rungs_before"] == {"inflate": 3}
    assert instance["pages"]["columns"]["lent"] == "", "no page is lent"
    assert decoded(map_body([], Entries([], []), 13.0))["server"] is None


@given(st.integers(0, 2 * MOST_REQUESTS), st.integers(0, 2 * MOST_REQUESTS))
def test_all_requests_are_counted_and_only_so_many_listed(in_flight: int, waiting: int) -> None:
    told = map_body(
        [],
        Entries(
            [entry(f"f{i}") for i in range(in_flight)],
            [entry(f"w{i}", line="") for i in range(waiting)],
        ),
        13.0,
    )["requests"]
    assert (told["running"], told["waiting"]) == (in_flight, waiting)
    assert len(told["rows"]) == min(MOST_REQUESTS, in_flight + waiting)
    listed = [row["id"][0] for row in told["rows"]]
    assert listed == sorted(listed), "those at instances come first"


def part(request: str, instance: str, blocks: int, *, local: bool = False) -> RequestPlacementEntry:
    return RequestPlacementEntry(RequestId(request), instance, blocks, local)


def moving(name: str, **fields: object) -> LogEntry:
    prompt = np.arange(3, dtype="<i4").tobytes()
    made = LogEntry(RequestSpec(RequestId(name), prompt, SamplingParams()), 0.0)
    for field, value in fields.items():
        setattr(made, field, value)
    return made


def test_both_sides_of_a_loan_name_each_other() -> None:
    placements = {
        "mixed-0": (),
        "mixed-1": (),
        "mixed-2": (
            *(part("r", "mixed-2", 2, local=True), part("r", "mixed-0", 4)),
            *(part("s", "mixed-2", 1, local=True), part("s", "mixed-0", 1)),
            part("s", "mixed-1", 3),
        ),
    }
    loans = loans_of(placements, {"mixed-0": 10, "mixed-1": 10, "mixed-2": 10})
    debtor = PeerSections("mixed-2", 5, 2)
    assert loans["mixed-0"].lends == (debtor,) and loans["mixed-0"].borrows == ()
    assert loans["mixed-1"].lends == (PeerSections("mixed-2", 3, 1),)
    assert loans["mixed-2"].borrows == (
        PeerSections("mixed-0", 5, 2),
        PeerSections("mixed-1", 3, 1),
    )
    assert (loans["mixed-2"].borrowed, loans["mixed-0"].lent) == (8, 5)
    assert loans["mixed-0"].section_bytes == 10


def test_an_instance_without_loans_has_none() -> None:
    assert loans_of({"a": ()}, {"a": 0})["a"].lends == ()
    assert loans_of({}, {"a": 7})["a"].section_bytes == 7


NAMES = st.sampled_from("abcd")


@given(st.dictionaries(NAMES, st.lists(st.tuples(NAMES, st.integers(1, 9)), max_size=6)))
def test_as_much_is_lent_as_is_borrowed(parts: dict[str, list[tuple[str, int]]]) -> None:
    placements = {
        debtor: tuple(part("r", creditor, blocks) for creditor, blocks in entries)
        for debtor, entries in parts.items()
    }
    loans = loans_of(placements, dict.fromkeys("abcd", 1))
    assert sum(each.lent for each in loans.values()) == sum(
        each.borrowed for each in loans.values()
    )
    assert sum(each.borrowed for each in loans.values()) == sum(
        blocks for entries in parts.values() for _, blocks in entries
    )


def test_transfers_are_counted_since_the_beginning_of_the_history() -> None:
    move, pull = RequestTransfer("move", "a", "b"), RequestTransfer("pull", "b", "a")
    merged = RequestTransfer("move", "", "b")
    now = {move: TransferTotals(9), pull: TransferTotals(4), merged: TransferTotals(30)}
    rows = transfer_rows([], now, {move: TransferTotals(2), pull: TransferTotals(4)})
    assert rows == [TransferRow("move", "a", "b", 0, 7)]


def test_transfers_that_run_are_shown_first() -> None:
    entries = [
        moving("m", line="a", goes_to="b", is_migrating=True),
        moving("h", line="a", goes_to="b"),
        moving("p", line="b", pulls_from="a", pending_prompt_tokens=3),
        moving("ended", line="b", pulls_from="a"),
        moving("stays", line="a"),
    ]
    rows = transfer_rows(entries, {RequestTransfer("move", "b", "a"): TransferTotals(5)}, {})
    assert rows == [
        TransferRow("handover", "a", "b", 1, 0),
        TransferRow("move", "a", "b", 1, 0),
        TransferRow("pull", "a", "b", 1, 0),
        TransferRow("move", "b", "a", 0, 5),
    ]


def test_the_most_frequent_transfers_are_listed() -> None:
    counts = {
        RequestTransfer("move", f"i{n}", "b"): TransferTotals(n + 1) for n in range(MOST_PAIRS + 9)
    }
    rows = transfer_rows([], counts, {})
    assert len(rows) == MOST_PAIRS and rows[0].recent == MOST_PAIRS + 9


def test_loans_that_have_ended_are_listed_with_the_most_sections_of_the_history() -> None:
    samples = [{}, {("a", "b"): 2}, {("a", "b"): 5, ("c", "b"): 1}, {("a", "b"): 1, ("c", "b"): 1}]
    assert ended_loans({("c", "b"): 1}, samples) == [TransferRow("loan", "a", "b", 0, 5)]
    assert ended_loans({("a", "b"): 3, ("c", "b"): 1}, samples) == [], "they are shown as loans now"
    assert ended_loans({}, []) == []


@given(st.dictionaries(NAMES, st.lists(st.tuples(NAMES, st.integers(1, 9)), max_size=6)))
def test_loans_of_a_sample_are_those_that_its_chart_adds_up(
    parts: dict[str, list[tuple[str, int]]],
) -> None:
    placements = {
        debtor: tuple(part("r", creditor, blocks) for creditor, blocks in entries)
        for debtor, entries in parts.items()
    }
    loans = loans_of(placements, dict.fromkeys("abcd", 1))
    pairs = sections_lent(loans)
    for name, each in loans.items():
        assert each.lent == sum(count for (creditor, _), count in pairs.items() if creditor == name)
        assert each.borrowed == sum(count for (_, debtor), count in pairs.items() if debtor == name)
