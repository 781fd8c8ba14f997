"""Turns of requests that wait: order, fairness, nobody starves, and a naive model that agrees."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from kvell.engine.requests.turns import FEWEST_KEPT, Turn, TurnQueue
from kvell.vocabulary import RequestId
from tests.depth import some


@dataclass(eq=False)
class One:
    request_id: RequestId
    turn: Turn = field(default_factory=Turn)
    cost: int = 10


def one(name: str, tenant: str = "", group: str = "", priority: int = 0, cost: int = 10) -> One:
    return One(RequestId(name), Turn(priority, tenant, group), cost)


def taken(queue: TurnQueue[One]) -> str:
    """Take the first, for all that it costs; it stays until the queue is left."""
    first = queue.first()
    assert first is not None
    queue.take(first)
    queue.charge(first.request_id, first.cost)
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
    queue.charge(RequestId("early"), 5)
    for n in range(20):
        queue.add(one(f"blue{n}", "blue", "z"))
    assert sum(taken(queue).startswith("blue") for _ in range(10)) <= 6


def test_groups_that_come_all_the_time_starve_nobody() -> None:
    queue: TurnQueue[One] = TurnQueue()
    known: dict[str, One] = {}
    for n in range(20):
        queue.add(known.setdefault(f"old{n}", one(f"old{n}", group="old")))
    seen = []
    for n in range(60):
        queue.add(known.setdefault(f"new{n}", one(f"new{n}", group=f"new{n}")))
        seen.append(taken(queue))
        queue.discard(known[seen[-1]])
    assert sum(name.startswith("old") for name in seen) >= 5, "each waits behind it too"


def test_what_is_put_back_is_first_of_its_tenant_and_not_of_others() -> None:
    queue: TurnQueue[One] = TurnQueue()
    known: dict[str, One] = {}
    for name, tenant in (("x", "red"), ("y", "red"), ("a", "blue"), ("b", "blue"), ("z", "red")):
        queue.add(known.setdefault(name, one(name, tenant, name)))
    queue.add(one("urgent", "red", "g", priority=-1))
    assert [taken(queue) for _ in range(4)] == ["urgent", "x", "a", "y"]
    queue.put_back([known["x"], known["y"]])
    assert drained(queue) == ["b", "x", "y", "z"], "red was charged for two"


def test_what_was_looked_at_and_not_charged_is_next_again() -> None:
    queue: TurnQueue[One] = TurnQueue()
    queue.add(first := one("a", "red"))
    queue.add(one("b", "blue"))
    queue.take(first)
    queue.put_back([first])
    assert sorted(drained(queue)) == ["a", "b"]


def test_output_is_charged_as_it_is_made() -> None:
    queue: TurnQueue[One] = TurnQueue()
    for name, tenant in (("r1", "red"), ("b1", "blue"), ("r2", "red"), ("b2", "blue")):
        queue.add(one(name, tenant))
    assert [taken(queue), taken(queue)] == ["r1", "b1"]
    for _ in range(30):
        queue.charge(RequestId("r1"), 1)
    queue.add(one("b3", "blue"))
    assert drained(queue) == ["b2", "b3", "r2"]


def test_a_tenant_that_is_served_saves_no_turns_up_while_none_of_it_waits() -> None:
    queue: TurnQueue[One] = TurnQueue()
    queue.add(one("r", "red"))
    queue.add(one("b", "blue"))
    drained(queue)
    queue.charge(RequestId("r"), 1000)
    for n in range(40):
        queue.add(one(f"g{n}", "green", cost=30))
        queue.add(one(f"b{n}", "blue", cost=30))
    first = [taken(queue)[0] for _ in range(10)]
    assert first.count("b") == first.count("g") == 5


def test_a_tenant_that_is_absent_for_a_moment_waits_for_one_prompt() -> None:
    """Blue has one request at a time; each of red's begins before blue's next comes."""
    queue: TurnQueue[One] = TurnQueue()
    reds = [one(f"red{n}", "red", cost=1000) for n in range(10)]
    for red in reds:
        queue.add(red)
    for n, red in enumerate(reds):
        assert taken(queue) == red.request_id
        queue.add(blue := one(f"blue{n}", "blue", cost=1000))
        queue.discard(red)
        assert taken(queue) == blue.request_id
        queue.discard(blue)


def test_passing_over_tenants() -> None:
    queue: TurnQueue[One] = TurnQueue()
    for name, tenant in (("r", "red"), ("b", "blue")):
        queue.add(one(name, tenant))
    assert queue.first(but={"red"}) is queue.waiting[RequestId("b")]
    assert queue.first(but={"red", "blue"}) is None


def test_a_later_attempt_takes_the_place_of_an_earlier_one() -> None:
    queue: TurnQueue[One] = TurnQueue()
    queue.add(old := one("r", "red"))
    queue.take(old)
    queue.add(new := one("r", "red"))
    assert not queue.discard(old), "it is known no longer"
    assert queue.first() is new and queue.discard(new)
    assert not queue.levels


def test_many_that_leave_the_line_leave_nothing_behind() -> None:
    queue: TurnQueue[One] = TurnQueue()
    queue.add(one("stays", "red", "g"))
    for n in range(5000):
        queue.add(each := one(f"r{n}", f"t{n}", f"g{n}"))
        assert queue.discard(each)
    [level] = queue.levels.values()
    assert len(level.places) + len(level.parties) <= 4 * FEWEST_KEPT
    assert not queue.discard(each)
    stays = queue.first()
    assert stays is not None and queue.discard(stays) and not queue.levels


Place = tuple[int, str]
Name = tuple[Place, str]


@dataclass
class Service:
    """Of a party: tokens, its last turn, the time it began to wait; who waits and who is served."""

    tokens: float = 0.0
    last_turn: int = 0
    came: int = 0
    waiting: set[str] = field(default_factory=set)
    served: set[str] = field(default_factory=set)

    @property
    def place(self) -> tuple[float, int, int]:
        return (self.tokens, self.last_turn, self.came)


class Naive:
    """The same rules, with every sum made anew."""

    def __init__(self) -> None:
        self.known: dict[str, One] = {}
        self.waiting: list[str] = []
        self.returned: list[str] = []
        self.parties: dict[Name, Service] = {}
        self.clock: dict[Place, float] = {}
        self.charged: dict[Place, int] = {}
        self.numbers = 0

    def _names(self, name: str) -> tuple[Name, Name]:
        turn = self.known[name].turn
        return (
            ((turn.priority, ""), turn.tenant),
            ((turn.priority, f" {turn.tenant}"), turn.group),
        )

    def _here(self, place: Place) -> list[Service]:
        found = [service for (where, _), service in self.parties.items() if where == place]
        return [one for one in found if one.waiting or one.served]

    def _waits(self, party: Service, name: str) -> None:
        self.numbers += 1
        if not party.waiting:
            party.came = self.numbers
        party.waiting.add(name)

    def add(self, each: One) -> None:
        name = each.request_id
        self.known[name] = each
        for place, party_name in self._names(name):
            party = self.parties.setdefault((place, party_name), Service())
            if not any(one.waiting for one in self._here(place)):
                self._advance(place)
            if not party.waiting:
                least = [one.tokens for one in self._here(place) if one.waiting]
                floor = max(self.clock.get(place, 0.0), min(least, default=0.0))
                party.tokens = max(party.tokens, floor)
            self._waits(party, name)
        self.waiting.append(name)

    def take(self) -> str:
        def order(name: str) -> tuple[object, ...]:
            tenant, group = (self.parties[one] for one in self._names(name))
            priority = self.known[name].turn.priority
            if name in self.returned:
                return (priority, *tenant.place, 0, self.returned.index(name))
            return (priority, *tenant.place, 1, *group.place, self.waiting.index(name))

        first = min([*self.returned, *self.waiting], key=order)
        names = self._names(first)
        for place, name in names[:1] if first in self.returned else names:
            party = self.parties[place, name]
            self._advance(place)
            self.clock[place] = max(self.clock.get(place, 0.0), party.tokens)
            self.numbers += 1
            party.last_turn = self.numbers
            party.waiting.remove(first)
            party.served.add(first)
        (self.returned if first in self.returned else self.waiting).remove(first)
        return first

    def charge(self, name: str, tokens: int) -> None:
        for place, party in self._names(name):
            self.parties[place, party].tokens += tokens
            self.charged[place] = self.charged.get(place, 0) + tokens

    def _advance(self, place: Place) -> None:
        if charged := self.charged.pop(place, 0):
            self.clock[place] = self.clock.get(place, 0.0) + charged / len(self._here(place))

    def put_back(self, name: str) -> None:
        tenant = self.parties[self._names(name)[0]]
        tenant.served.remove(name)
        self._waits(tenant, name)
        self.returned.insert(0, name)

    def drop(self, name: str) -> None:
        names = self._names(name)
        for each in names:
            party = self.parties[each]
            if not (party.waiting | party.served) - {name}:  # it leaves: what all had, until now
                self._advance(each[0])
            party.waiting.discard(name)
            party.served.discard(name)
        for line in (self.waiting, self.returned):
            if name in line:
                line.remove(name)
        del self.known[name]
        for place, _ in names:
            if not self._here(place):  # where nobody is any more, what was served is forgotten
                self.clock.pop(place, None)
                self.charged.pop(place, None)
                self.parties = {one: s for one, s in self.parties.items() if one[0] != place}


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"), st.sampled_from("rgb"), st.sampled_from("xyz"), st.integers(0, 1)
        ),
        st.tuples(st.just("take"), st.integers(0, 50)),
        st.tuples(st.just("charge"), st.integers(0, 1 << 20), st.integers(1, 50)),
        st.tuples(st.just("put back"), st.integers(0, 1 << 20)),
        st.tuples(st.just("drop"), st.integers(0, 1 << 20)),
    ),
    max_size=80,
)  # fmt: skip


def nth(names: Iterable[str], number: object) -> str:
    known = sorted(names)
    return known[int(str(number)) % len(known)] if known else ""


@some()
@given(STEPS)
def test_it_does_what_a_naive_model_does(steps: list[tuple[object, ...]]) -> None:
    queue: TurnQueue[One] = TurnQueue()
    naive = Naive()
    for number, (what, *given_) in enumerate(steps):
        waits = {*naive.waiting, *naive.returned}
        if what == "add":
            tenant, group, priority = given_
            each = one(f"r{number}", str(tenant), str(group), int(str(priority)))
            queue.add(each)
            naive.add(each)
        elif what == "take" and waits:
            name = taken_for(queue, int(str(given_[0])))
            assert name == naive.take()
            naive.charge(name, int(str(given_[0])))
        elif what == "charge" and (name := nth(naive.known, given_[0])):
            queue.charge(RequestId(name), int(str(given_[1])))
            naive.charge(name, int(str(given_[1])))
        elif what == "put back" and (name := nth(naive.known.keys() - waits, given_[0])):
            queue.put_back([naive.known[name]])
            naive.put_back(name)
        elif what == "drop" and (name := nth(naive.known, given_[0])):
            assert queue.discard(naive.known[name]) == (name in waits)
            naive.drop(name)
        assert len(queue) == len(naive.waiting) + len(naive.returned)
    assert [taken_for(queue, 0) for _ in range(len(queue))] == [
        naive.take() for _ in range(len(naive.waiting) + len(naive.returned))
    ]


def taken_for(queue: TurnQueue[One], tokens: int) -> str:
    first = queue.first()
    assert first is not None
    queue.take(first)
    queue.charge(first.request_id, tokens)
    return first.request_id


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
