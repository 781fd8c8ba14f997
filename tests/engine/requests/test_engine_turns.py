"""Turns of requests that wait: order, fairness, nobody starves, and a naive model that agrees."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from kvell.engine.requests.turns import FEWEST_KEPT, Turn, TurnQueue, turn_cost_tokens
from kvell.vocabulary import RequestId
from tests.depth import some


@dataclass(eq=False)
class One:
    request_id: RequestId
    turn: Turn = field(default_factory=Turn)


def one(name: str, tenant: str = "", group: str = "", priority: int = 0, cost: int = 10) -> One:
    return One(RequestId(name), Turn(priority, tenant, group, cost))


def taken(queue: TurnQueue[One]) -> str:
    first = queue.first()
    assert first is not None
    queue.take(first)
    return first.request_id


def drained(queue: TurnQueue[One]) -> list[str]:
    return [taken(queue) for _ in range(len(queue))]


def test_without_parties_it_is_first_come_first_served_within_a_priority() -> None:
    queue: TurnQueue[One] = TurnQueue()
    for name, priority in (("a", 0), ("late", 1), ("b", 0), ("urgent", -1), ("c", 0)):
        queue.add(one(name, priority=priority))
    assert drained(queue) == ["urgent", "a", "b", "c", "late"]
    assert queue.first() is None


def test_another_tenant_waits_for_no_backlog() -> None:
    queue: TurnQueue[One] = TurnQueue()
    for n in range(1000):
        queue.add(one(f"a{n}", "red", "big"))
    assert [taken(queue) for _ in range(3)] == ["a0", "a1", "a2"]
    queue.add(one("b", "blue", "small", cost=10_000))
    assert taken(queue) == "b"
    assert taken(queue) == "a3"


def test_tenants_come_first_and_then_their_groups() -> None:
    queue: TurnQueue[One] = TurnQueue()
    for group in ("one", "two"):
        for n in range(3):
            queue.add(one(f"red-{group}-{n}", "red", group))
    for n in range(3):
        queue.add(one(f"blue-{n}", "blue", "only"))
    assert drained(queue) == [
        *("red-one-0", "blue-0", "red-two-0", "blue-1", "red-one-1", "blue-2"),
        *("red-two-1", "red-one-2", "red-two-2"),
    ]


def test_who_asks_for_more_tokens_has_fewer_turns() -> None:
    queue: TurnQueue[One] = TurnQueue()
    for n in range(40):
        queue.add(one(f"long{n}", "long", "x", cost=300))
        queue.add(one(f"short{n}", "short", "y", cost=100))
    first = [taken(queue) for _ in range(40)]
    assert sum(name.startswith("short") for name in first) == 30


def test_an_idle_tenant_saves_no_turns_up() -> None:
    queue: TurnQueue[One] = TurnQueue()
    queue.add(one("early", "blue", "x"))
    for n in range(50):
        queue.add(one(f"red{n}", "red", "y"))
    for _ in range(30):
        taken(queue)
    for n in range(20):
        queue.add(one(f"blue{n}", "blue", "z"))
    assert sum(taken(queue).startswith("blue") for _ in range(10)) <= 6


def test_groups_that_come_all_the_time_starve_nobody() -> None:
    queue: TurnQueue[One] = TurnQueue()
    for n in range(20):
        queue.add(one(f"old{n}", group="old"))
    seen = []
    for n in range(60):
        queue.add(one(f"new{n}", group=f"new{n}"))
        seen.append(taken(queue))
    assert sum(name.startswith("old") for name in seen) >= 5, "each waits behind it too"


def test_what_is_put_back_is_first_of_its_priority_and_costs_no_second_turn() -> None:
    queue: TurnQueue[One] = TurnQueue()
    again = [one("x", "red", "g"), one("y", "red", "g")]
    queue.add(one("urgent", "red", "g", priority=-1))
    queue.add(one("a", "blue", "h"))
    queue.put_back(again)
    assert [each.request_id for each in queue] == ["x", "y", "urgent", "a"]
    offered = [each.request_id for each in queue.offers()]
    assert offered == ["urgent"], "one that had no turn yet holds up those behind it"
    assert drained(queue) == ["urgent", "x", "y", "a"]


def test_what_was_put_back_and_is_not_taken_holds_nobody_up() -> None:
    queue: TurnQueue[One] = TurnQueue()
    queue.put_back([one("suspect")])
    queue.add(one("a"))
    assert [each.request_id for each in queue.offers()] == ["suspect", "a"]


def test_many_that_leave_the_line_leave_nothing_behind() -> None:
    queue: TurnQueue[One] = TurnQueue()
    queue.add(one("stays", "red", "g"))
    for n in range(5000):
        queue.add(one(f"r{n}", f"t{n}", f"g{n}"))
        assert queue.discard(RequestId(f"r{n}")) is not None
    [level] = queue._levels.values()
    assert len(level._tenants._places) + len(level._tenants.parties) <= 2 * FEWEST_KEPT
    assert queue.discard(RequestId("r1")) is None
    assert drained(queue) == ["stays"] and not queue._levels


def test_a_turn_costs_at_least_a_token_and_no_more_output_than_is_usual() -> None:
    assert turn_cost_tokens(0, 0) == 1
    assert turn_cost_tokens(10, 1 << 20) == 10 + 512


Place = tuple[int, str]
Name = tuple[Place, str]


class Naive:
    """The same rules, with every sum made anew."""

    def __init__(self) -> None:
        self.waiting: list[One] = []
        self.service: dict[Name, list[int]] = {}
        self.clock: dict[Place, int] = {}
        self.numbers = 0

    def _start(self, place: Place, name: str) -> None:
        self.numbers += 1
        before = self.service.get((place, name), [0, 0, 0])
        start = max(before[0], self.clock.get(place, 0))
        self.service[place, name] = [start, before[1], self.numbers]

    def add(self, each: One) -> None:
        turn = each.turn
        tenants, groups = (turn.priority, ""), (turn.priority, f" {turn.tenant}")
        if not any(self._is_in(other, tenants, turn.tenant) for other in self.waiting):
            self._start(tenants, turn.tenant)
        if not any(self._is_in(other, groups, turn.group) for other in self.waiting):
            self._start(groups, turn.group)
        self.waiting.append(each)

    @staticmethod
    def _names(each: One) -> tuple[Name, Name]:
        turn = each.turn
        return (
            ((turn.priority, ""), turn.tenant),
            ((turn.priority, f" {turn.tenant}"), turn.group),
        )

    def _is_in(self, each: One, place: Place, name: str) -> bool:
        return (place, name) in self._names(each)

    def take(self) -> str:
        first = min(
            self.waiting,
            key=lambda each: (
                each.turn.priority,
                *(self.service[name] for name in self._names(each)),
                self.waiting.index(each),
            ),
        )
        for place, name in self._names(first):
            parties = {n for each in self.waiting for p, n in self._names(each) if p == place}
            served = self.service[place, name]
            share = max(1, first.turn.cost_tokens // len(parties))
            self.clock[place] = max(self.clock.get(place, 0), served[0]) + share
            self.numbers += 1
            served[0], served[1] = served[0] + first.turn.cost_tokens, self.numbers
        self.waiting.remove(first)
        self._forget()
        return first.request_id

    def drop(self, index: int) -> str:
        name = self.waiting.pop(index).request_id
        self._forget()
        return name

    def _forget(self) -> None:
        """Where nobody waits any more, what was served is forgotten."""
        places = {place for each in self.waiting for place, _ in self._names(each)}
        for place in list(self.clock):
            if place not in places:
                del self.clock[place]
        for place, name in list(self.service):
            if place not in places:
                del self.service[place, name]


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"), st.sampled_from("rgb"), st.sampled_from("xyz"),
            st.integers(0, 1), st.integers(1, 50),
        ),
        st.tuples(st.just("take")),
        st.tuples(st.just("drop"), st.integers(0, 1 << 20)),
    ),
    max_size=80,
)  # fmt: skip


@some()
@given(STEPS)
def test_it_does_what_a_naive_model_does(steps: list[tuple[object, ...]]) -> None:
    queue: TurnQueue[One] = TurnQueue()
    naive = Naive()
    for number, step in enumerate(steps):
        if step[0] == "add":
            _, tenant, group, priority, cost = step
            each = one(f"r{number}", str(tenant), str(group), int(str(priority)), int(str(cost)))
            queue.add(each)
            naive.add(each)
        elif naive.waiting and step[0] == "take":
            assert taken(queue) == naive.take()
        elif naive.waiting:
            name = naive.drop(int(str(step[1])) % len(naive.waiting))
            assert queue.discard(RequestId(name)) is not None
        assert len(queue) == len(naive.waiting)
    assert drained(queue) == [naive.take() for _ in list(naive.waiting)]


@some()
@given(st.lists(st.lists(st.integers(1, 600), min_size=30, max_size=30), min_size=2, max_size=5))
def test_tenants_that_wait_all_the_time_are_served_alike(costs: list[list[int]]) -> None:
    """Until the first has got all, no two differ by more than two of the costliest turns."""
    queue: TurnQueue[One] = TurnQueue()
    left = {str(tenant): list(each) for tenant, each in enumerate(costs)}
    for n in range(30):
        for tenant, each in left.items():
            queue.add(one(f"{tenant}-{n}", tenant, "g", cost=each[n]))
    served = dict.fromkeys(left, 0)
    while all(left.values()):
        tenant = taken(queue).partition("-")[0]
        served[tenant] += left[tenant].pop(0)
        assert max(served.values()) - min(served.values()) <= 2 * 600
