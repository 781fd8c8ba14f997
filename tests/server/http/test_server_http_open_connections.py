"""Which connection goes when another wants its place."""

from kvell.server.http.connection import OpenConnections, Phase


def connections(*phases: Phase) -> OpenConnections[int]:
    found: OpenConnections[int] = OpenConnections(8)
    for number, phase in enumerate(phases):
        found.enter(number, phase)
    return found


def test_the_one_goes_that_has_waited_longest_for_a_head() -> None:
    found = connections("answer", "body", "idle", "idle")
    assert found.longest_waiting() == 2
    found.enter(2, "idle")  # another byte of its head
    assert found.longest_waiting() == 2
    found.enter(2, "answer")
    found.enter(2, "idle")  # it has asked since, so the other waits for longer
    assert found.longest_waiting() == 3


def test_unfinished_bodies_go_next_and_answers_never() -> None:
    found = connections("arriving", "answer", "body")
    assert found.longest_waiting() == 2
    found.on_closed(2)
    found.on_closed(2)
    assert found.longest_waiting() is None
    assert (len(found), found.count("answer"), found.count("body")) == (2, 1, 0)
