"""An instance's role changes in the front: it gets other requests, and what it has moves."""

import numpy as np

from kvell.cluster.steering.steering import RoleChanger, RoleRules
from kvell.engine.protocol.messages import Finished, Heartbeat, Migrate, Submit, Tokens
from kvell.engine.protocol.notices import WatchIndex
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.front.request_log import LogEntry
from kvell.front.request_queue import RequestQueue
from kvell.vocabulary import RequestId
from tests.reports import facts, load

EAGER = RoleRules(wait_seconds=0.01, patience_seconds=0.0, rest_seconds=5.0, memory_seconds=0.01)
NAMES = ("prefill-0", "decode-0", "decode-1")

FACTS = facts(8, 1, pool_bytes=1 << 20, token_bytes=1)


class Front:
    """A queue over three instances, whose roles may change."""

    def __init__(self) -> None:
        self.queue = RequestQueue(100, roles=RoleChanger(EAGER))
        self.now, self.count = 0.0, 0
        for name in NAMES:
            self.queue.open(name, FACTS, joins_others=False)

    def submit(self, tokens: int, answer: int = 4) -> tuple[str, Submit]:
        self.count += 1
        prompt = np.arange(tokens, dtype="<i4").tobytes()
        sampling = SamplingParams(max_tokens=answer)
        self.queue.add(
            LogEntry(RequestSpec(RequestId(f"r{self.count}"), prompt, sampling), self.now)
        )
        (submission,) = self.queue.due(self.now)
        return submission

    def beat(self, name: str = "prefill-0") -> list[tuple[str, object]]:
        """A second later an instance says that it lives; what instances are told."""
        self.now += 1.0
        beat = Heartbeat(load(1 << 20, 1 << 20))
        told = self.queue.on_event(name, beat, self.now)
        assert not any(isinstance(command, WatchIndex) for _, command in told)
        return [*told]

    def roles(self) -> dict[str, str]:
        return {name: line.role for name, line in self.queue.lines.items()}

    def hand_over(self, submission: Submit) -> None:
        """The first token of a request, which then goes on elsewhere."""
        request, attempt = submission.request_id, submission.attempt
        self.queue.tokens(Tokens(request, attempt, 0, (1,)), self.now)
        self.queue.on_finished(Finished(request, attempt, "moved"), self.now)


def test_an_instance_computes_prompts_once_they_outweigh_answers() -> None:
    front = Front()
    for _ in range(4):
        name, submission = front.submit(5_000)
        assert (name, submission.goes_to[:6]) == ("prefill-0", "decode")
    front.beat()
    front.beat()
    changed = [name for name, role in front.roles().items() if role == "prefill"]
    assert len(changed) == 2 and front.queue.role_changes == 1
    (other,) = (name for name, role in front.roles().items() if role == "decode")
    name, submission = front.submit(5_000)
    assert (name, submission.goes_to) == (changed[1], other)


def test_answers_that_it_gives_go_on_elsewhere() -> None:
    front = Front()
    homes: dict[str, list[str]] = {"decode-0": [], "decode-1": []}
    for _ in range(2):
        _, submission = front.submit(20, answer=40)
        homes[submission.goes_to].append(submission.request_id)
        front.hand_over(submission)
    assert all(homes.values()), "both give answers"
    for _ in range(5):
        front.submit(5_000)
    told = [*front.beat(), *front.beat()]
    (changed,) = (name for name, role in front.roles().items() if role != name[:-2])
    (other,) = (name for name in homes if name != changed)
    (moved,) = homes[changed]
    assert told == [(changed, Migrate(RequestId(moved), 0, other))]


def test_nothing_changes_where_nobody_may() -> None:
    front = Front()
    front.queue = RequestQueue(100)
    for name in NAMES:
        front.queue.open(name, facts(8, 1, pool_bytes=1, token_bytes=1), joins_others=False)
    for _ in range(6):
        front.submit(5_000)
    for _ in range(9):
        front.beat()
    assert front.roles() == {name: name[:-2] for name in NAMES}


def test_a_new_incarnation_keeps_the_role_that_the_front_gave() -> None:
    front = Front()
    for _ in range(4):
        front.submit(5_000)
    front.beat()
    front.beat()
    changed = next(name for name, role in front.roles().items() if role != name[:-2])
    front.queue.open(changed, facts(8, 2, pool_bytes=1, token_bytes=1), joins_others=True)
    assert front.roles()[changed] == "prefill"


def test_a_role_that_others_give_is_taken_once() -> None:
    front = Front()
    _, submission = front.submit(20, answer=40)
    front.hand_over(submission)
    home = submission.goes_to
    [other] = {"decode-0", "decode-1"} - {home}
    moved = [(home, Migrate(submission.request_id, 0, other))]
    assert front.queue.set_roles([(home, "prefill")]) == moved
    assert front.queue.set_roles([(home, "prefill")]) == []
    assert (front.roles()[home], front.queue.role_changes) == ("prefill", 1)
    assert front.queue.set_roles([(home, "decode")]) == []


def test_what_moves_goes_to_none_that_changes_too() -> None:
    front = Front()
    front.queue.open("decode-2", FACTS, joins_others=False)
    homes: dict[str, str] = {}
    for _ in range(3):
        _, submission = front.submit(20, answer=40)
        homes[submission.goes_to] = submission.request_id
        front.hand_over(submission)
    assert sorted(homes) == ["decode-0", "decode-1", "decode-2"], "each gives an answer"
    told = front.queue.set_roles([("decode-0", "prefill"), ("decode-1", "prefill")])
    assert told == [
        (name, Migrate(RequestId(homes[name]), 0, "decode-2")) for name in ("decode-0", "decode-1")
    ]
    assert front.queue.role_changes == 2
    assert front.queue.set_roles([]) == []


def test_the_load_asks_for_several_at_once() -> None:
    front = Front()
    for name in ("decode-2", "decode-3"):
        front.queue.open(name, FACTS, joins_others=False)
    for _ in range(8):
        front.submit(5_000)
    front.beat()
    assert front.queue.role_changes == 3
    assert sorted(front.roles().values()) == ["decode"] + ["prefill"] * 4
