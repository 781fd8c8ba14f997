"""Which decodes a paged manager has nothing to do for.

Most decodes write into a page that their request has, and leave none behind.  vLLM's manager
finds that out each time; a run that does not ask for its time need not tell it.
"""

SETTLED_DECODES = 3
"""After a prefill the manager may have states to copy: so many decodes are always told to it …"""
EDGE_TOKENS = 2
"""… and those so close to the edge of a page, where pages are taken, named and left behind."""


class IdleDecodes:
    """Follows requests by their ids.

    :param unit_tokens: pages, windows and chunks are multiples of it.
    """

    def __init__(self, unit_tokens: int) -> None:
        self._unit = unit_tokens
        self._decodes: dict[str, int] = {}  # in a row

    def admitted(self, request: str) -> None:
        """It begins, or begins again."""
        self._decodes[request] = 0

    def gone(self, request: str) -> None:
        """It is over, or preempted."""
        self._decodes.pop(request, None)

    def is_idle(self, request: str, computed: int, tokens: int) -> bool:
        """Return whether it is a decode in the midst of a page, long enough after the prefill.

        :param computed: tokens of the request before this step; ``tokens`` in it.
        """
        decodes = self._decodes[request] + 1 if tokens == 1 else 0
        self._decodes[request] = decodes
        into = computed % self._unit
        return decodes > SETTLED_DECODES and EDGE_TOKENS < into < self._unit - EDGE_TOKENS
