"""Bytes that tenants have in equal parts."""

from kvell.errors import Bound, TryLater


class TenantBytes:
    """Counts bytes by tenant; those who are here have them in equal parts.

    One that has nothing here is refused only when all of them together have twice as many.

    :param most_bytes: of all together, as a rule; what comes while nothing is here is always taken.
    :param bound: that is exceeded when there are too many.
    :param why: what the bytes wait for, in errors.
    """

    def __init__(self, most_bytes: int, bound: Bound, why: str) -> None:
        self._most_bytes, self._bound, self._why = most_bytes, bound, why
        self._bytes_of: dict[str, int] = {}

    @property
    def bytes_here(self) -> int:
        """Bytes of all."""
        return sum(self._bytes_of.values())

    def take(self, tenant: str, size_bytes: int) -> None:
        """Count bytes of a tenant.

        :raises TryLater: if there are too many already.
        """
        own_bytes, here_bytes = self._bytes_of.get(tenant, 0), self.bytes_here
        most_own_bytes = self._most_bytes // (len(self._bytes_of) + (tenant not in self._bytes_of))
        is_above_share = own_bytes and own_bytes + size_bytes > most_own_bytes
        if is_above_share or (here_bytes and here_bytes + size_bytes > 2 * self._most_bytes):
            told = f"{own_bytes or here_bytes} bytes {self._why}; try again"
            raise TryLater(told, bound=self._bound)
        self._bytes_of[tenant] = own_bytes + size_bytes

    def give_back(self, tenant: str, size_bytes: int) -> None:
        """Count bytes of a tenant no longer."""
        left_bytes = self._bytes_of.get(tenant, 0) - size_bytes
        if left_bytes:
            self._bytes_of[tenant] = left_bytes
        else:
            self._bytes_of.pop(tenant, None)
