"""A limit of the work for one schema, counted in operations and not in time."""

MOST_OPERATIONS = 500_000
"""The most names copied, values compared and references followed for one schema.

All of them take about 0.2 s of processor time.  A schema of the greatest accepted length needs less
than a tenth unless its references repeat large parts.
"""


class Operations:
    """A counter of operations with a limit.

    :param most: the most operations.
    """

    def __init__(self, most: int = MOST_OPERATIONS) -> None:
        self._most = most
        self.done = 0

    def count(self, operations: int) -> None:
        """Count operations that follow.

        :raises ValueError: if there are too many.
        """
        self.done += operations
        if self.done > self._most:
            raise ValueError(
                f"the schema is too complex: its references take more than {self._most} operations"
            )
