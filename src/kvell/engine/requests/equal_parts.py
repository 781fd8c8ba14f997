"""What tenants have in equal parts."""

from kvell.errors import Bound, TryLater


class EqualParts:
    """Counts by tenant; those who are here have it in equal parts.

    One that has nothing here is refused only when all of them together have twice as much.

    :param most: of all together, as a rule; what comes while nothing is here is always taken.
    :param bound: that is exceeded when there is too much.
    :param what: is counted, and what it does; in errors.
    """

    def __init__(self, most: int, bound: Bound, what: str) -> None:
        self._most, self._bound, self._what = most, bound, what
        self._parts: dict[str, int] = {}

    @property
    def total(self) -> int:
        """Of all."""
        return sum(self._parts.values())

    def take(self, tenant: str, count: int) -> None:
        """Count more of a tenant.

        :raises TryLater: if there is too much already.
        """
        own, total = self._parts.get(tenant, 0), self.total
        most_own = self._most // (len(self._parts) + (tenant not in self._parts))
        is_above_part = own and own + count > most_own
        if is_above_part or (total and total + count > 2 * self._most):
            raise TryLater(f"{own or total} {self._what}; try again", bound=self._bound)
        self._parts[tenant] = own + count

    def give_back(self, tenant: str, count: int) -> None:
        """Count less of a tenant."""
        left = self._parts.get(tenant, 0) - count
        if left:
            self._parts[tenant] = left
        else:
            self._parts.pop(tenant, None)
