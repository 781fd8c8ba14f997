"""Whose turn it is among requests that wait: priorities first, then tenants, then their groups.

::

    priority 0 ─┬─ returned: had their turn before, and wait again
                ├─ tenant "red" ──┬─ group "cmpl-1": a b c d …
                │                 └─ group "cmpl-2": e
                └─ tenant "blue" ─── group "cmpl-3": f

Among tenants, and among the groups of a tenant, the party that was served the fewest tokens so far
is next, as in VTC (Sheng et al., 2024).  A party that comes back, or is new, begins where a clock
of virtual tokens stands, so nobody saves turns up; each turn moves that clock on by its cost
divided by the parties that wait, so nobody starves behind parties that come all the time.  Costs
are expected ones and are known when a request comes, so nothing is counted while it runs.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from kvell.vocabulary import RequestId

MOST_OUTPUT_TOKENS = 512
"""Output tokens that a turn costs at most: many clients ask for all there is room for, and few
answers are that long."""
FEWEST_KEPT = 64
"""A round forgets parties that are idle only when it knows of more than so many."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The party that a request belongs to, and what its turn costs that party.

    :param priority: requests with lower ones come first, of any tenant.
    :param group: requests that were asked for together; the groups of a tenant take turns.
    :param cost_tokens: of its prompt and its expected output.
    """

    priority: int = 0
    tenant: str = ""
    group: str = ""
    cost_tokens: int = 1


NO_PARTY = Turn()
"""Of requests that nobody told apart: they are served in the order in which they came."""


def turn_cost_tokens(prompt_tokens: int, output_tokens: int) -> int:
    """Cost of a turn for a prompt and at most so much output."""
    return prompt_tokens + max(1, min(output_tokens, MOST_OUTPUT_TOKENS))


class Waits(Protocol):
    """A request that can wait for its turn."""

    @property
    def request_id(self) -> RequestId:
        """Its id, unlike those of all others that wait."""
        ...

    @property
    def turn(self) -> Turn:
        """The party that it belongs to; read when it begins to wait."""
        ...


@dataclass(eq=False)
class _Party:
    """A tenant or a group.

    :ivar served_tokens: in virtual tokens; where it stood when it last began to wait, at least.
    :ivar last_turn: number of its last turn; 0 for none.
    :ivar came: number of the time that it last began to wait.
    """

    served_tokens: int = 0
    last_turn: int = 0
    came: int = 0
    num_waiting: int = 0

    @property
    def place(self) -> tuple[int, int, int]:
        """The party with the least place is next; of equal service, the one that waited longest."""
        return (self.served_tokens, self.last_turn, self.came)


@dataclass(eq=False)
class _Group(_Party):
    ids: "OrderedDict[RequestId, None]" = field(default_factory=OrderedDict)


@dataclass(eq=False)
class _Tenant(_Party):
    groups: "_Round[_Group]" = field(default_factory=lambda: _Round(_Group))


Party = TypeVar("Party", _Group, _Tenant)
Item = TypeVar("Item", bound=Waits)


class _Round(Generic[Party]):
    """Parties that take turns."""

    def __init__(self, make: Callable[[], Party]) -> None:
        self._make: Callable[[], Party] = make
        self._places: list[tuple[tuple[int, int, int], Party]] = []
        self._clock_tokens = self._turns = self._arrivals = self._num_active = 0
        self._most_kept = FEWEST_KEPT
        self.parties: dict[str, Party] = {}

    def came(self, name: str) -> Party:
        """Count a request that begins to wait."""
        party = self.parties.get(name)
        if party is None:
            party = self.parties[name] = self._make()
        party.num_waiting += 1
        if party.num_waiting == 1:
            self._num_active += 1
            self._arrivals += 1
            party.served_tokens = max(party.served_tokens, self._clock_tokens)
            party.came = self._arrivals
            self._list(party)
        return party

    def left(self, party: Party) -> None:
        """Count a request that waits no longer."""
        party.num_waiting -= 1
        self._num_active -= not party.num_waiting
        if not self._num_active:  # everybody got all that was asked for
            self.parties.clear()
            self._places.clear()
            self._clock_tokens, self._most_kept = 0, FEWEST_KEPT

    def next(self) -> Party:
        """The waiting party whose turn it is."""
        place, party = self._places[0]
        while not party.num_waiting or place != party.place:  # it left, or has another place now
            heapq.heappop(self._places)
            place, party = self._places[0]
        return party

    def served(self, party: Party, cost_tokens: int) -> None:
        """Let a waiting party have its turn."""
        share_tokens = max(1, cost_tokens // self._num_active)
        self._clock_tokens = max(self._clock_tokens, party.served_tokens) + share_tokens
        self._turns += 1
        party.served_tokens += cost_tokens
        party.last_turn = self._turns
        self._list(party)

    def _list(self, party: Party) -> None:
        if len(self._places) + len(self.parties) > self._most_kept:
            self._forget()
        heapq.heappush(self._places, (party.place, party))

    def _forget(self) -> None:
        """Drop old places, and idle parties whose service so far makes no difference any more."""
        for name, party in list(self.parties.items()):
            if not party.num_waiting and party.served_tokens <= self._clock_tokens:
                del self.parties[name]
        active = (one for one in self.parties.values() if one.num_waiting)
        self._places = [(one.place, one) for one in active]
        heapq.heapify(self._places)
        self._most_kept = max(FEWEST_KEPT, 2 * (len(self._places) + len(self.parties)))


class _Level:
    """Requests of one priority."""

    def __init__(self) -> None:
        self.returned: OrderedDict[RequestId, None] = OrderedDict()
        self._tenants = _Round(_Tenant)

    def add(self, request_id: RequestId, turn: Turn) -> None:
        self._tenants.came(turn.tenant).groups.came(turn.group).ids[request_id] = None

    def first(self) -> RequestId | None:
        """The next among those that had no turn yet."""
        if not self._tenants.parties:
            return None
        return next(iter(self._tenants.next().groups.next().ids))

    def remove(self, request_id: RequestId, turn: Turn, *, is_turn: bool) -> None:
        if request_id in self.returned:
            del self.returned[request_id]
            return
        tenant = self._tenants.parties[turn.tenant]
        group = tenant.groups.parties[turn.group]
        del group.ids[request_id]
        if is_turn:
            tenant.groups.served(group, turn.cost_tokens)
            self._tenants.served(tenant, turn.cost_tokens)
        tenant.groups.left(group)
        self._tenants.left(tenant)

    @property
    def is_empty(self) -> bool:
        return not self.returned and not self._tenants.parties


class TurnQueue(Generic[Item]):
    """Requests that wait, each until :meth:`take` or :meth:`discard`.

    Adding and taking cost the logarithm of the parties that wait.
    """

    def __init__(self) -> None:
        self._items: dict[RequestId, tuple[Item, Turn]] = {}
        self._levels: dict[int, _Level] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, item: Item) -> bool:
        return self.get(item.request_id) is item

    def __iter__(self) -> Iterator[Item]:
        """Those that were put back first, then the others as they came."""
        back = {one: None for level in self._levels.values() for one in level.returned}
        yield from [self._items[one][0] for one in (back | dict.fromkeys(self._items))]

    def get(self, request_id: RequestId) -> Item | None:
        """The request of an id; None if it does not wait."""
        found = self._items.get(request_id)
        return None if found is None else found[0]

    def add(self, item: Item) -> None:
        """Let a request wait for its turn."""
        turn = item.turn
        self._items[item.request_id] = (item, turn)
        self._level(turn.priority).add(item.request_id, turn)

    def put_back(self, items: Sequence[Item], *, behind_returned: bool = False) -> None:
        """Let requests that had their turn wait before all others of their priority, in order.

        :param behind_returned: whether those that were put back before stay in front of them.
        """
        for item in items if behind_returned else reversed(items):
            turn = item.turn
            self._items[item.request_id] = (item, turn)
            returned = self._level(turn.priority).returned
            returned[item.request_id] = None
            returned.move_to_end(item.request_id, last=behind_returned)

    def offers(self) -> Iterator[Item]:
        """Requests in the order of their turns; a caller that wants one takes it before asking on.

        A request that was put back and is not taken now holds up nobody.  Any other request that is
        not taken ends the offers.
        """
        for priority in sorted(self._levels):
            level = self._levels[priority]
            for request_id in list(level.returned):
                yield self._items[request_id][0]
            while (first := level.first()) is not None:
                yield self._items[first][0]
                if first in self._items:
                    return

    def first(self) -> Item | None:
        """The request whose turn it is; None if none waits."""
        return next(self.offers(), None)

    def take(self, item: Item) -> None:
        """Let a request have its turn, which its tenant and its group are charged for, once."""
        self._remove(item.request_id, is_turn=True)

    def discard(self, request_id: RequestId) -> Item | None:
        """Forget a request without a turn; None if it does not wait."""
        if request_id not in self._items:
            return None
        return self._remove(request_id, is_turn=False)

    def clear(self) -> list[Item]:
        """Forget all requests; those that were put back are first."""
        items = list(self)
        self._items.clear()
        self._levels.clear()
        return items

    def _level(self, priority: int) -> _Level:
        if priority not in self._levels:
            self._levels[priority] = _Level()
        return self._levels[priority]

    def _remove(self, request_id: RequestId, *, is_turn: bool) -> Item:
        item, turn = self._items.pop(request_id)
        level = self._levels[turn.priority]
        level.remove(request_id, turn, is_turn=is_turn)
        if level.is_empty:
            del self._levels[turn.priority]
        return item
