"""Equal parts of a bounded quantity for tenants."""

from collections.abc import Mapping
from itertools import accumulate

from kvell.errors import Bound, TryLater


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
        total = self.total
        part = self._most // (len(self._parts) + (tenant not in self._parts))
        is_above_part = held and held + count > part
        has_room = not total or total - sum(self._reserved.values()) + count <= 2 * self._most
        is_reserved = not has_room and leaves_parts(self._reserved, tenant, count, self._most // 4)
        if is_above_part or not (has_room or is_reserved):
            raise TryLater(f"{held or total} {self._what}; try again", bound=self._bound)
        _add(self._parts, tenant, count)
        if is_reserved:
            _add(self._reserved, tenant, count)

    def give_back(self, tenant: str, count: int) -> None:
        _add(self._parts, tenant, -count)
        _add(self._reserved, tenant, -min(count, self._reserved.get(tenant, 0)))


def _add(counts: dict[str, int], tenant: str, count: int) -> None:
    """Add to a tenant's count; a count of 0 is forgotten."""
    counts[tenant] = counts.get(tenant, 0) + count
    if not counts[tenant]:
        del counts[tenant]
