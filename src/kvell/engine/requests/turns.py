"""Turns of waiting requests: by priority first, then by tenant, then by group of the tenant.

::

    priority 0 ─┬─ tenant "red" ──┬─ returned: had their turn before, and wait again
                │                 ├─ group "cmpl-1": a b c d …
                │                 └─ group "cmpl-2": e
                └─ tenant "blue" ─── group "cmpl-3": f

Among tenants, and among the groups of a tenant, the party that was served the fewest tokens so far
is next, as in VTC (Sheng et al., 2024): prompts are charged when they begin, output as it is made.
A party without waiting requests resumes with at least the service of the next party, so no party
saves up turns, and with at least a clock of virtual tokens.  Every charge, divided by the number of
parties with requests, advances the clock, so no party starves while others keep arriving.  While
others wait, the clock advances when the next turn begins: a prompt is charged whole when it begins,
and a party that is absent for that moment alone would resume behind one that was served as much.
"""

import heapq
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Generic, Protocol, Self, TypeVar

from kvell.engine.protocol.request_spec import RequestSpec
from kvell.errors import Bound, TryLater
from kvell.vocabulary import RequestId

FEWEST_KEPT = 64
"""Number of parties from which on a round forgets idle ones."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The party that a request belongs to.

    :param priority: requests with a lower one come first, of any tenant.
    :param group: requests that were submitted together; the groups of a tenant take turns.
    """

    priority: int = 0
    tenant: str = ""
    group: str = ""

    @classmethod
    def of(cls, spec: RequestSpec) -> Self:
        return cls(spec.priority, spec.tenant, spec.group)


class Waits(Protocol):
    """A request that can wait for its turn."""

    @property
    def request_id(self) -> RequestId:
        """The request's id, unique among all requests that wait or are served."""
        ...

    @property
    def turn(self) -> Turn:
        """The request's party; read when the request arrives."""
        ...


@dataclass(eq=False)
class _Party:
    """A tenant or a group.

    :ivar service: in virtual tokens.
    :ivar last_turn: number of its last turn; 0 for none.
    :ivar came: sequence number of its latest beginning to wait.
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
        return (self.service, self.last_turn, self.came)


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
    :ivar num_here: number of parties with a request that waits or is served.
    :ivar charged: tokens that have not advanced the clock yet.
    """

    def __init__(self, make: Callable[[], Party]) -> None:
        self._make: Callable[[], Party] = make
        self.places: list[tuple[tuple[float, int, int], Party]] = []
        self._turns = self._arrivals = 0
        self._most_kept = FEWEST_KEPT
        self.clock = 0.0
        self.num_here = self.charged = 0
        self.parties: dict[str, Party] = {}

    def comes(self, name: str) -> Party:
        """Return the party of a request that arrives; the caller counts it as waiting or served."""
        party = self.parties.get(name)
        if party is None:
            if len(self.parties) >= self._most_kept:
                self._forget()
            party = self.parties[name] = self._make()
        if not party.num_waiting:
            first = self.next() if self.places else None
            if first is None and self.charged:
                self._advance()
            floor = self.clock if first is None else max(self.clock, first.service)
            party.service = max(party.service, floor)
        self.num_here += not (party.num_waiting or party.num_served)
        return party

    def waits(self, party: Party) -> None:
        """Count a request that waits now."""
        party.num_waiting += 1
        if party.num_waiting == 1:
            self._arrivals += 1
            party.came = self._arrivals
            if not party.is_listed:
                party.is_listed = True
                place = (party.service, party.last_turn, party.came)
                heapq.heappush(self.places, (place, party))

    def takes(self, party: Party) -> None:
        """Count a request of the party whose turn it is: it no longer waits, and is served."""
        self._turns += 1
        if self.charged:
            self._advance()
        self.clock = max(self.clock, party.service)
        party.last_turn = self._turns
        party.num_waiting -= 1
        party.num_served += 1

    def leaves(self, party: Party) -> None:
        """Count a request that has left; the party's numbers are without it already."""
        if party.num_waiting or party.num_served:
            return
        if self.charged:
            self._advance()
        self.num_here -= 1
        if not self.num_here:  # no request waits or is served
            self.parties.clear()
            self.places.clear()
            self.clock = 0.0
            self._most_kept = FEWEST_KEPT

    def next(self) -> Party | None:
        """Return the waiting party whose turn it is; None if no party waits."""
        while self.places:
            listed, party = self.places[0]
            if not party.num_waiting:
                party.is_listed = False
                heapq.heappop(self.places)
                continue
            place = (party.service, party.last_turn, party.came)
            if place == listed:
                return party
            heapq.heapreplace(self.places, (place, party))  # they only grow: none is too late
        return None

    def next_but(self, names: Collection[str]) -> Party | None:
        waits = [
            party for name, party in self.parties.items() if party.num_waiting and name not in names
        ]
        return min(waits, key=lambda party: party.place, default=None)

    def _advance(self) -> None:
        """Advance the clock by the charged tokens, divided by the number of parties here."""
        self.clock += self.charged / self.num_here
        self.charged = 0

    def _forget(self) -> None:
        for name, party in list(self.parties.items()):
            is_here = party.num_waiting or party.num_served
            if not is_here and party.service <= self.clock:
                del self.parties[name]
        self.places = [(kept.place, kept) for kept in self.parties.values() if kept.num_waiting]
        for kept in self.parties.values():
            kept.is_listed = bool(kept.num_waiting)
        heapq.heapify(self.places)
        self._most_kept = max(FEWEST_KEPT, 2 * len(self.parties))


@dataclass(frozen=True)
class _Membership(Generic[Item]):
    """The parties that a request belongs to."""

    item: Item
    priority: int
    tenants: "_Round[_Tenant]"
    tenant: _Tenant
    group: _Group


class TurnQueue(Generic[Item]):
    """The requests that wait or are served, each until :meth:`discard`.

    An admitted request is taken and charged for its prompt; all are charged for their output.
    Adding and taking cost the logarithm of the number of waiting parties.  Charges are collected
    until something depends on them, since output is charged token by token.

    :ivar waiting: the requests that wait, by id; not to be changed.
    """

    def __init__(self) -> None:
        self.waiting: dict[RequestId, Item] = {}
        self._here: dict[RequestId, _Membership[Item]] = {}
        self.levels: dict[int, _Round[_Tenant]] = {}
        self._uncharged: defaultdict[RequestId, int] = defaultdict(int)

    def __len__(self) -> int:
        return len(self.waiting)

    def __contains__(self, item: Item) -> bool:
        return self.waiting.get(item.request_id) is item

    def __iter__(self) -> Iterator[Item]:
        tenants = [party for level in self.levels.values() for party in level.parties.values()]
        back = {name: None for tenant in tenants for name in tenant.returned}
        yield from [self.waiting[name] for name in (back | dict.fromkeys(self.waiting))]

    def add(self, item: Item) -> None:
        membership = self._comes(item)
        membership.tenants.waits(membership.tenant)
        membership.tenant.groups.waits(membership.group)
        membership.group.ids[item.request_id] = None
        self.waiting[item.request_id] = item

    def count_new(self) -> dict[str, int]:
        """Return the number of waiting requests by tenant, without those that were put back."""
        counts: dict[str, int] = {}
        for level in self.levels.values():
            for name, tenant in level.parties.items():
                if new := tenant.num_waiting - len(tenant.returned):
                    counts[name] = counts.get(name, 0) + new
        return counts

    def count_served(self, item: Item) -> None:
        membership = self._comes(item)
        membership.tenant.num_served += 1
        membership.group.num_served += 1

    def knows(self, item: Item) -> bool:
        membership = self._here.get(item.request_id)
        return membership is not None and membership.item is item

    def first(self, but: Collection[str] = ()) -> Item | None:
        """Return the request whose turn it is; None if none waits."""
        if not but and len(self.waiting) == 1:
            return next(iter(self.waiting.values()))
        if self._uncharged:
            self._settle()
        for priority in sorted(self.levels):
            level = self.levels[priority]
            tenant = level.next_but(but) if but else level.next()
            if tenant is None:
                continue
            if tenant.returned:
                return self.waiting[next(iter(tenant.returned))]
            group = tenant.groups.next()
            assert group is not None, "its tenant waits"
            return self.waiting[next(iter(group.ids))]
        return None

    def take(self, item: Item) -> None:
        """Serve a waiting request from now on; the caller charges it, or puts it back."""
        if self._uncharged:
            self._settle()
        del self.waiting[item.request_id]
        member = self._here[item.request_id]
        member.tenants.takes(member.tenant)
        if item.request_id in member.tenant.returned:
            del member.tenant.returned[item.request_id]  # its group has had this turn
            return
        del member.group.ids[item.request_id]
        member.tenant.groups.takes(member.group)

    def charge(self, request_id: RequestId, tokens: int) -> bool:
        """Charge tenant and group of a request for tokens; return whether the request is here."""
        if request_id not in self._here:
            return False
        self._uncharged[request_id] += tokens
        return True

    def put_back(self, items: Sequence[Item], *, behind_returned: bool = False) -> None:
        """Let served requests wait again, before all others of their tenants, in order.

        :param behind_returned: whether requests that were put back earlier stay before them.
        """
        if self._uncharged:
            self._settle()
        for item in items if behind_returned else reversed(items):
            if not self.knows(item):
                self.count_served(item)
            member = self._here[item.request_id]
            member.tenant.num_served -= 1
            member.tenants.waits(member.tenant)
            member.tenant.returned[item.request_id] = None
            member.tenant.returned.move_to_end(item.request_id, last=behind_returned)
            self.waiting[item.request_id] = item

    def discard(self, item: Item) -> bool | None:
        """Forget a request that waits or is served; return whether it waited, None if unknown."""
        member = self._here.get(item.request_id)
        if member is None or member.item is not item:
            return None  # another may have its id now
        if self._uncharged:
            self._settle()
        del self._here[item.request_id]
        waited = self.waiting.pop(item.request_id, None) is not None
        if item.request_id in member.tenant.returned:
            del member.tenant.returned[item.request_id]
            member.group.num_served -= 1
        elif waited:
            del member.group.ids[item.request_id]
            member.group.num_waiting -= 1
        else:
            member.group.num_served -= 1
        member.tenant.num_waiting -= waited
        member.tenant.num_served -= not waited
        member.tenant.groups.leaves(member.group)
        member.tenants.leaves(member.tenant)
        if not member.tenants.num_here:
            del self.levels[member.priority]
        return waited

    def clear(self) -> list[Item]:
        items = list(self)
        for item in items:
            self.discard(item)
        return items

    def _comes(self, item: Item) -> _Membership[Item]:
        turn = item.turn
        if item.request_id in self._here:  # an earlier attempt at the same, which has not ended yet
            self.discard(self._here[item.request_id].item)
        if self._uncharged:
            self._settle()
        if turn.priority not in self.levels:
            self.levels[turn.priority] = _Round(_Tenant)
        tenants = self.levels[turn.priority]
        tenant = tenants.comes(turn.tenant)
        group = tenant.groups.comes(turn.group)
        membership = _Membership(item, turn.priority, tenants, tenant, group)
        self._here[item.request_id] = membership
        return membership

    def _settle(self) -> None:
        """Charge the collected tokens, before the set of parties with requests changes."""
        for request_id, tokens in self._uncharged.items():
            member = self._here[request_id]
            member.tenant.service += tokens
            member.tenants.charged += tokens
            member.group.service += tokens
            member.tenant.groups.charged += tokens
        self._uncharged.clear()


def leaves_parts(held: Mapping[str, int], tenant: str, count: int, most: int) -> bool:
    """Return whether others find their parts if a tenant takes ``count`` more.

    With T = 2 · ``most``, the n largest counts may be together T · n / (n + 1), for each n.  So
    one tenant may hold ``most``, and while n others hold something, a newcomer can always take
    T / ((n + 1) · (n + 2)): ``most`` / 3, / 6, / 10, / 15 …  That remains true if some give their
    counts back.  The total stays below T.

    :param held: the counts of all tenants; one above ``most`` counts as ``most`` for others.
    """
    own = held.get(tenant, 0) + count
    others = sorted(
        (min(each, most) for name, each in held.items() if name != tenant), reverse=True
    )
    larger = [each for each in others if each >= own]
    totals = accumulate([own + sum(larger), *others[len(larger) :]])
    return all(
        total * (n + 1) <= 2 * most * n for n, total in enumerate(totals, start=len(larger) + 1)
    )


class EqualParts:
    """Counts by tenant; those that hold something grow to equal parts of ``most``.

    A newcomer is refused only if the total would exceed twice ``most``, and then it still finds a
    part in a reserve of ``most`` / 2 (:func:`leaves_parts`): while n tenants hold something, at
    least ``most`` / (2 · (n + 1) · (n + 2)).  So the total stays below 2.5 · ``most``, plus the
    excess of a single count over ``most``.

    :param most: bound of one tenant's count; any count is accepted while the total is 0.
    :param bound: name of the bound, in errors.
    :param what: the counted things and a verb, in errors.
    """

    def __init__(self, most: int, bound: Bound, what: str) -> None:
        self._most, self._bound, self._what = most, bound, what
        self._parts: dict[str, int] = {}
        self._reserved: dict[str, int] = {}

    @property
    def total(self) -> int:
        return sum(self._parts.values())

    def take(self, tenant: str, count: int) -> None:
        """Add to the count of a tenant.

        :raises TryLater: if the count would exceed the tenant's part.
        """
        held = self._parts.get(tenant, 0)
        total = sum(self._parts.values())
        part = self._most // (len(self._parts) + (tenant not in self._parts))
        is_above_part = held and held + count > part
        has_room = not total or total - sum(self._reserved.values()) + count <= 2 * self._most
        is_reserved = not has_room and leaves_parts(self._reserved, tenant, count, self._most // 4)
        if is_above_part or not (has_room or is_reserved):
            raise TryLater(f"{held or total} {self._what}; try again", bound=self._bound)
        if not count:
            return
        self._parts[tenant] = held + count
        if is_reserved:
            self._reserved[tenant] = self._reserved.get(tenant, 0) + count

    def give_back(self, tenant: str, count: int) -> None:
        for counts in (self._parts, self._reserved):
            left = max(0, counts.pop(tenant, 0) - count)
            if left:  # a count of 0 is forgotten
                counts[tenant] = left
