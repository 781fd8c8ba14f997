"""Equal parts of a bounded quantity for tenants."""

from kvell.errors import Bound, TryLater


class EqualParts:
    """Counts by tenant; the tenants with a count share ``most`` in equal parts.

    A tenant without a count is refused only if the total would exceed twice ``most``.

    :param most: usual bound of the total; any count is accepted while the total is 0.
    :param bound: name of the bound, in errors.
    :param what: the counted things and a verb, in errors.
    """

    def __init__(self, most: int, bound: Bound, what: str) -> None:
        self._most, self._bound, self._what = most, bound, what
        self._parts: dict[str, int] = {}

    @property
    def total(self) -> int:
        """The sum over all tenants."""
        return sum(self._parts.values())

    def take(self, tenant: str, count: int) -> None:
        """Add to the count of a tenant.

        :raises TryLater: if the sum would be too large.
        """
        held = self._parts.get(tenant, 0)
        total = self.total
        part = self._most // (len(self._parts) + (tenant not in self._parts))
        is_above_part = held and held + count > part
        if is_above_part or (total and total + count > 2 * self._most):
            raise TryLater(f"{held or total} {self._what}; try again", bound=self._bound)
        self._parts[tenant] = held + count

    def give_back(self, tenant: str, count: int) -> None:
        """Subtract from the count of a tenant."""
        left = self._parts.get(tenant, 0) - count
        if left:
            self._parts[tenant] = left
        else:
            self._parts.pop(tenant, None)
