"""Mixed instances that cannot move requests say so at their start, with the setting."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvell.engine.protocol.statistics import InstanceFacts, InstanceReport
from kvell.front.front import Front
from kvell.mempool.rendezvous import FolderRendezvous, make_folder
from kvell.server.run import _contract
from kvell.vocabulary import MIB
from tests.models.serving.engines import engine_of

MEMORY = {"weights_bytes": 5 * MIB, "contract_bytes": 90 * MIB}
LINES = ("memory contract for tiny", "  weights 5 MiB")


def lines(staying: str, count: int = 2, reach: int = 64) -> str:
    """What is printed when so many instances serve."""
    facts = InstanceFacts(1, 8, "m", 64, 0, memory=MEMORY, staying=staying, contract_lines=LINES)
    report = InstanceReport(facts)
    members = [
        (SimpleNamespace(instance_id=f"mixed-{n}", report=report, host=""), None)
        for n in range(count)
    ]
    front: Any = SimpleNamespace(
        instances=lambda: members, facts=facts, reach_tokens=lambda _: reach
    )
    return "\n".join(_contract(cast(Front, front), 10 * MIB))


def test_the_setting_is_named_where_there_are_several() -> None:
    assert "lending             off with --device: requests stay" in lines("--device")
    assert "lending" not in lines("")
    assert "lending" not in lines("--device", count=1)


def test_a_single_instance_shows_its_contract_in_detail() -> None:
    assert lines("", count=1).startswith("memory contract for tiny\n  weights")
    assert "contract for" not in lines("", count=2)


def test_it_is_said_how_long_requests_may_be_while_others_lend() -> None:
    said = "longest request     64 tokens; 6,144 while others lend"
    assert said in lines("", reach=6144)
    assert "longest request" not in lines("")


@pytest.mark.parametrize(
    "more",
    [{}, {"cpu_buffer_bytes": 8 * MIB}, {"num_speculative_tokens": 2}, {"async_scheduling": True}],
    ids=["plain", "a CPU buffer", "lookup", "planned ahead"],
)
def test_no_setting_keeps_requests_on_a_cpu(more: dict[str, Any], tmp_path: Path) -> None:
    make_folder(tmp_path)
    place = FolderRendezvous("mixed-0", tmp_path)
    engine = engine_of("LlamaForCausalLM", True, pool_place=place, **more)
    facts = engine.ready().facts
    engine.close()
    assert facts.staying == ""
    assert facts.section_bytes > 0
