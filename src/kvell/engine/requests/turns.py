"""Whose turn it is among requests that wait: priorities first, then tenants, then their groups.

::

    priority 0 ─┬─ tenant "red" ──┬─ returned: had their turn before, and wait again
                │                 ├─ group "cmpl-1": a b c d …
                │                 └─ group "cmpl-2": e
                └─ tenant "blue" ─── group "cmpl-3": f

Among tenants, and among the groups of a tenant, the party that was served the fewest tokens so far
is next, as in VTC (Sheng et al., 2024): prompts are charged when they are begun, output as it is
made.  A party of which nothing waited begins no lower than the next one stands, so nobody saves
turns up, and no lower than a clock of virtual tokens: what anybody is charged moves that on by its
part of the parties that are here, so nobody starves behind parties that come all the time.
"""

import heapq
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from kvell.vocabulary import RequestId

FEWEST_KEPT = 64
"""A round forgets parties that are idle only when it knows of more than so many."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The party that a request belongs to.

    :param priority: requests with lower ones come first, of any tenant.
    :param group: requests that were asked for together; the groups of a tenant take turns.
    """

    priority: int = 0
    tenant: str = ""
    group: str = ""


NO_PARTY = Turn()
"""Of requests that nobody told apart: they are served in the order in which they came."""


class Waits(Protocol):
    """A request that can wait for its turn."""

    @property
    def request_id(self) -> RequestId:
        """Its id, unlike those of all others that wait or are served."""
        ...

    @property
    def turn(self) -> Turn:
        """The party that it belongs to; read when it comes."""
        ...


@dataclass(eq=False)
class _Party:
    """A tenant or a group.

    :ivar service: in virtual tokens.
    :ivar last_turn: number of its last turn; 0 for none.
    :ivar came: number of the time that it last began to wait.
    :ivar is_listed: whether its round has a place for it, maybe an old one.
    """

    service: float = 0.0
    last_turn: int = 0
    came: int = 0
    num_waiting: int = 0
    num_served: int = 0
    is_listed: bool = False

    @property
    def place(self) -> tuple[float, int, int]:
        """The party with the least place is next; of equal service, the one that waited longest."""
        return (self.service, self.last_turn, self.came)

    @property
    def is_here(self) -> bool:
        """Whether any of its requests waits or is served."""
        return bool(self.num_waiting or self.num_served)


@dataclass(eq=False)
class _Group(_Party):
    ids: "OrderedDict[RequestId, None]" = field(default_factory=OrderedDict)


@dataclass(eq=False)
class _Tenant(_Party):
    returned: "OrderedDict[RequestId, None]" = field(default_factory=OrderedDict)
    groups: "_Round[_Group]" = field(default_factory=lambda: _Round(_Group))


Party = TypeVar("Party", _Group, _Tenant)
Item = TypeVar("Item", bound=Waits)


class _Round(Generic[Party]):
    """Parties that take turns.

    :ivar clock: in virtual tokens.
    :ivar num_here: parties of which a request waits or is served.
    """

    def __init__(self, make: Callable[[], Party]) -> None:
        self._make: Callable[[], Party] = make
        self._places: list[tuple[tuple[float, int, int], Party]] = []
        self._turns = self._arrivals = 0
        self._most_kept = FEWEST_KEPT
        self.clock = 0.0
        self.num_here = 0
        self.parties: dict[str, Party] = {}

    def comes(self, name: str) -> Party:
        """The party of a request that comes; :meth:`waits` or :meth:`serves` follows."""
        party = self.parties.get(name)
        if party is None:
            if len(self.parties) >= self._most_kept:
                self._forget()
            party = self.parties[name] = self._make()
        self.num_here += not party.is_here
        if not party.num_waiting:
            first = self.next()
            floor = self.clock if first is None else max(self.clock, first.service)
            party.service = max(party.service, floor)
        return party

    def waits(self, party: Party) -> None:
        """Count a request that waits now."""
        party.num_waiting += 1
        if party.num_waiting == 1:
            self._arrivals += 1
            party.came = self._arrivals
            if not party.is_listed:
                party.is_listed = True
                heapq.heappush(self._places, (party.place, party))

    def takes(self, party: Party) -> None:
        """Count a request of the party whose turn it is: it waits no longer, and is served."""
        self._turns += 1
        self.clock = max(self.clock, party.service)
        party.last_turn = self._turns
        party.num_waiting -= 1
        party.num_served += 1

    def leaves(self, party: Party) -> None:
        """Count a request that is here no longer; it was taken off the party's numbers."""
        self.num_here -= not party.is_here
        if not self.num_here:  # everybody got all that was asked for
            self.parties.clear()
            self._places.clear()
            self.clock, self._most_kept = 0.0, FEWEST_KEPT

    def next(self) -> Party | None:
        """The waiting party whose turn it is; None if nobody waits."""
        while self._places:
            place, party = self._places[0]
            if not party.num_waiting:
                party.is_listed = False
                heapq.heappop(self._places)
            elif place != party.place:  # places only grow, so an old one is never too late
                heapq.heapreplace(self._places, (party.place, party))
            else:
                return party
        return None

    def next_but(self, names: Collection[str]) -> Party | None:
        """The same among all but some; in the time of looking at each."""
        waits = [one for name, one in self.parties.items() if one.num_waiting and name not in names]
        return min(waits, key=lambda one: one.place, default=None)

    def charge(self, party: Party, tokens: int) -> None:
        """Count what a party was served."""
        party.service += tokens
        self.clock += tokens / self.num_here

    def _forget(self) -> None:
        """Drop idle parties whose service so far makes no difference any more."""
        for name, party in list(self.parties.items()):
            if not party.is_here and party.service <= self.clock:
                del self.parties[name]
        self._places = [(one.place, one) for one in self.parties.values() if one.num_waiting]
        for one in self.parties.values():
            one.is_listed = bool(one.num_waiting)
        heapq.heapify(self._places)
        self._most_kept = max(FEWEST_KEPT, 2 * len(self.parties))


@dataclass(frozen=True)
class _Membership(Generic[Item]):
    """Where a request belongs."""

    item: Item
    priority: int
    tenants: "_Round[_Tenant]"
    tenant: _Tenant
    group: _Group


class TurnQueue(Generic[Item]):
    """Requests that wait or are served, each until :meth:`discard`.

    Whoever is let in is taken, and charged for its prompt; all are charged for what they make.
    Adding and taking cost the logarithm of the parties that wait.  Charges are put together until
    something depends on them: output is charged token by token.
    """

    def __init__(self) -> None:
        self._waiting: dict[RequestId, Item] = {}
        self._here: dict[RequestId, _Membership[Item]] = {}
        self._levels: dict[int, _Round[_Tenant]] = {}
        self._uncharged: defaultdict[RequestId, int] = defaultdict(int)

    def __len__(self) -> int:
        """Those that wait."""
        return len(self._waiting)

    def __contains__(self, item: Item) -> bool:
        """Whether a request waits."""
        return self.get(item.request_id) is item

    def __iter__(self) -> Iterator[Item]:
        """Those that wait: those that were put back first, then the others as they came."""
        tenants = [one for level in self._levels.values() for one in level.parties.values()]
        back = {one: None for tenant in tenants for one in tenant.returned}
        yield from [self._waiting[one] for one in (back | dict.fromkeys(self._waiting))]

    def get(self, request_id: RequestId) -> Item | None:
        """The request of an id; None if it does not wait."""
        return self._waiting.get(request_id)

    def add(self, item: Item) -> None:
        """Let a request wait for its turn."""
        membership = self._comes(item)
        membership.tenants.waits(membership.tenant)
        membership.tenant.groups.waits(membership.group)
        membership.group.ids[item.request_id] = None
        self._waiting[item.request_id] = item

    def count_served(self, item: Item) -> None:
        """Count a request as served that has not waited here."""
        membership = self._comes(item)
        membership.tenant.num_served += 1
        membership.group.num_served += 1

    def knows(self, item: Item) -> bool:
        """Whether a request waits or is served."""
        one = self._here.get(item.request_id)
        return one is not None and one.item is item

    def first(self, but: Collection[str] = ()) -> Item | None:
        """The request whose turn it is; None if none waits.

        :param but: tenants that are passed over.
        """
        self._settle()
        for priority in sorted(self._levels):
            level = self._levels[priority]
            tenant = level.next_but(but) if but else level.next()
            if tenant is None:
                continue
            if tenant.returned:
                return self._waiting[next(iter(tenant.returned))]
            group = tenant.groups.next()
            assert group is not None, "its tenant waits"
            return self._waiting[next(iter(group.ids))]
        return None

    def take(self, item: Item) -> None:
        """Serve a request from now on; :meth:`charge` and :meth:`put_back` are for its taker."""
        self._settle()
        del self._waiting[item.request_id]
        one = self._here[item.request_id]
        one.tenants.takes(one.tenant)
        if item.request_id in one.tenant.returned:
            del one.tenant.returned[item.request_id]  # its group has had this turn
            return
        del one.group.ids[item.request_id]
        one.tenant.groups.takes(one.group)

    def charge(self, request_id: RequestId, tokens: int) -> bool:
        """Charge tenant and group of a request with tokens of any kind, if it is here."""
        if request_id not in self._here:
            return False
        self._uncharged[request_id] += tokens
        return True

    def put_back(self, items: Sequence[Item], *, behind_returned: bool = False) -> None:
        """Let requests wait again that are served, before all others of their tenants, in order.

        :param behind_returned: whether those that were put back before stay in front of them.
        """
        self._settle()
        for item in items if behind_returned else reversed(items):
            if not self.knows(item):
                self.count_served(item)
            one = self._here[item.request_id]
            one.tenant.num_served -= 1
            one.tenants.waits(one.tenant)
            one.tenant.returned[item.request_id] = None
            one.tenant.returned.move_to_end(item.request_id, last=behind_returned)
            self._waiting[item.request_id] = item

    def discard(self, item: Item) -> bool:
        """Forget a request, whether it waits or is served; whether it waited."""
        if not self.knows(item):
            return False  # another may have its id now
        self._settle()
        one = self._here.pop(item.request_id)
        waited = self._waiting.pop(item.request_id, None) is not None
        if item.request_id in one.tenant.returned:
            del one.tenant.returned[item.request_id]
            one.group.num_served -= 1
        elif waited:
            del one.group.ids[item.request_id]
            one.group.num_waiting -= 1
        else:
            one.group.num_served -= 1
        one.tenant.num_waiting -= waited
        one.tenant.num_served -= not waited
        one.tenant.groups.leaves(one.group)
        one.tenants.leaves(one.tenant)
        if not one.tenants.num_here:
            del self._levels[one.priority]
        return waited

    def clear(self) -> list[Item]:
        """Forget all that wait; those that were put back are first."""
        items = list(self)
        for item in items:
            self.discard(item)
        return items

    def _comes(self, item: Item) -> _Membership[Item]:
        turn = item.turn
        if item.request_id in self._here:  # an earlier attempt at the same, which has not ended yet
            self.discard(self._here[item.request_id].item)
        self._settle()
        if turn.priority not in self._levels:
            self._levels[turn.priority] = _Round(_Tenant)
        tenants = self._levels[turn.priority]
        tenant = tenants.comes(turn.tenant)
        group = tenant.groups.comes(turn.group)
        one = _Membership(item, turn.priority, tenants, tenant, group)
        self._here[item.request_id] = one
        return one

    def _settle(self) -> None:
        """Charge what was put together, while the parties are here that were when it was made."""
        for request_id, tokens in self._uncharged.items():
            one = self._here[request_id]
            one.tenants.charge(one.tenant, tokens)
            one.tenant.groups.charge(one.group, tokens)
        self._uncharged.clear()
