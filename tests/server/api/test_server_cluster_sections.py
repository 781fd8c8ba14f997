"""What ``/cluster`` tells of memory that instances lend each other."""

from kvell.engine.protocol.placements import RequestPlacementEntry
from kvell.server.api.routes.cluster import sections_of
from kvell.vocabulary import RequestId


def part(inst_id: str, num_blocks: int, *, local: bool = False) -> RequestPlacementEntry:
    return RequestPlacementEntry(RequestId("r"), inst_id, num_blocks, local)


def test_debtors_say_what_creditors_lend() -> None:
    told = {
        "mixed-0": (part("mixed-0", 2, local=True), part("mixed-1", 2), part("mixed-2", 1)),
        "mixed-1": (),
        "mixed-2": (),
        "mixed-3": (part("mixed-1", 1), part("gone", 4)),
    }
    assert sections_of(told) == {
        "mixed-0": {"lent": 0, "borrowed": 3},
        "mixed-1": {"lent": 3, "borrowed": 0},
        "mixed-2": {"lent": 1, "borrowed": 0},
        "mixed-3": {"lent": 0, "borrowed": 5},
    }
