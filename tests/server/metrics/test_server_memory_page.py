"""/debug/memory: what was promised, who has it, and what the processes take."""

import httpx
import pytest

from kvell.engine.protocol.statistics import GroupStats, InstanceFacts, InstanceReport, Stats
from kvell.server.metrics.instance_metrics import InstanceFigures, contract_lines, memory_page
from kvell.vocabulary import MIB

pytestmark = pytest.mark.xdist_group("fake_server")

REPORT = InstanceReport(
    InstanceFacts(0, 8, "m", 64, 0, memory={"weights_bytes": 5, "contract_bytes": 90 * MIB})
)
STATS = Stats(
    *(0, 0, 2, 3, 7, 1, 0.5, 0, 0, 0, 0, 0),
    rungs={"inflate": 4},
    groups=(GroupStats("full", 1, 2, 3, 4, page_bytes=1024),),
    large_page_bytes=4096,
    memory={
        "chunk_bytes": 2 * MIB,
        "kv_chunks": 30,
        "activation_idle_chunks": 2,
        "activation_used_chunks": 1,
        "withheld_large_pages": 5,
        "largest_step_chunks": 3,
        "stale_positions": 9,
        "mapped": 11,
    },
    buffer={"holders": 3},
)


def test_the_promise_is_both_processes() -> None:
    page = memory_page({"mixed-0": InstanceFigures(STATS, REPORT)}, 10 * MIB)
    assert page["contract_bytes"] == 100 * MIB
    assert page["parts"]["weights_bytes"] == 5
    assert page["parts"]["front_floor_bytes"] == 10 * MIB


def test_every_chunk_has_an_owner_and_every_move_a_count() -> None:
    page = memory_page({"mixed-0": InstanceFigures(STATS, REPORT)}, 0)
    assert page["pool"]["chunks"] == {"kv": 30, "activation_idle": 2, "activation_used": 1}
    assert (page["pool"]["withheld_large_pages"], page["pool"]["largest_step_chunks"]) == (5, 3)
    assert page["moves"] == {"mapped": 11}
    assert page["cpu_buffer"] == {"holders": 3}
    assert page["rungs"] == {"inflate": 4}
    assert page["pool"]["groups"][0]["used_pages"] == 1
    assert page["requests"] == {"running": 2, "waiting": 3}


def test_processes_have_their_sizes() -> None:
    instances = {f"mixed-{n}": InstanceFigures(STATS, REPORT, 0, 10 + n) for n in range(2)}
    page = memory_page(instances, 0, front_now_bytes=7)
    assert page["now_bytes"] == {"front": 7, "instance": 21}
    assert page["instances"]["mixed-1"]["now_bytes"] == 11


def test_a_server_tells_it_over_http(server_url: str) -> None:
    page = httpx.get(f"{server_url}/debug/memory").json()
    assert page["pool"]["chunks"] == {}, "the fake engine shares no pool"
    assert page["now_bytes"]["front"] > MIB and page["now_bytes"]["instance"] > MIB
    assert page["contract_bytes"] >= page["parts"]["front_floor_bytes"] > MIB


def test_weights_of_several_instances_count_once() -> None:
    known = {f"mixed-{n}": InstanceFigures(STATS, REPORT) for n in range(3)}
    page = memory_page(known, 10 * MIB)
    assert page["contract_bytes"] == 280 * MIB - 2 * 5
    assert page["parts"]["contract_bytes"] == 270 * MIB
    assert set(page["instances"]) == set(known)
    assert page["instances"]["mixed-1"]["requests"] == {"running": 2, "waiting": 3}
    assert "pool" not in page, "there are three"


def test_the_contract_has_a_line_for_every_process_and_the_whole() -> None:
    parts = {"weights_bytes": 30 * MIB, "contract_bytes": 90 * MIB}
    lines = contract_lines({"mixed-0": parts, "mixed-1": parts}, 10 * MIB)
    assert [line.split()[0] for line in lines[1:]] == [
        *("front", "mixed-0", "mixed-1", "shared", "all"),
    ]
    assert lines[-1].split()[-2:] == ["160.0", "MiB"]
    assert lines[-2].split()[-3:] == ["-", "30.0", "MiB"]


def test_on_several_machines_each_instance_has_its_own_weights() -> None:
    parts = {"weights_bytes": 5 * MIB, "contract_bytes": 20 * MIB}
    names = ("mixed-0", "mixed-1")
    lines = contract_lines(dict.fromkeys(names, parts), 10 * MIB, shares_weights=False)
    assert not [line for line in lines if "shared weights" in line]
    assert lines[-1].split()[-2:] == ["50.0", "MiB"]
    told = {name: InstanceFigures(STATS, REPORT) for name in names}
    promised = [memory_page(told, 0, shares_weights=one)["contract_bytes"] for one in (True, False)]
    assert promised == [2 * 90 * MIB - 5, 2 * 90 * MIB]
