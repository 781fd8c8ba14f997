"""Leases on prefixes that several requests share, as the common page pool decides.

A lease's pages count as used, so nothing evicts them.  They are still a reserve: the scheduler
gives up leases before it preempts or defers a request for lack of pages, and all of them before a
request waits while none runs.
"""

from collections.abc import Sequence

from kvell.engine.requests.limits import Limits
from kvell.engine.requests.request import Request, RequestState
from kvell.memory import MemoryCore
from kvell.prefix.eviction.common_pool import CommonPool, pool_cost
from kvell.prefix.eviction.shadow import Chain, PastRequest, chain_of

FOR_GOOD = (1 << 31) - 1
"""The last step of a lease: leases never expire, they are given up."""


class ProtectedPrefixes:
    """The leases of one scheduler; there are none unless ``limits.common_pool``."""

    def __init__(self, core: MemoryCore, limits: Limits) -> None:
        self._core = core
        self._limits = limits
        chunk_tokens = limits.common_pool_chunk_tokens
        self._policy = CommonPool(
            pool_cost(core.layout, chunk_tokens), chunk_tokens, limits.common_pool_share
        )
        self._leases: dict[int, int] = {}
        self._computing: list[tuple[Request, Chain]] = []

    @property
    def prefixes(self) -> int:
        return len(self._leases)

    @property
    def tokens(self) -> int:
        """Number of protected tokens; shared ones count once."""
        return self._policy.protected_tokens

    def on_admitted(self, request: Request, expected_output: int, unfinished: int) -> None:
        """Record a request that runs for the first time, except requests with images, whose pages
        are not shared."""
        if not self._limits.common_pool or request.images is not None:
            return
        chain = chain_of(request.prompt, request.cache_root, self._limits.common_pool_chunk_tokens)
        hits = request.cached_tokens or 0
        past = PastRequest(chain, len(request.prompt), expected_output, hits)
        shared = self._policy.note(past, min(self._limits.max_num_seqs, unfinished))
        if shared:
            self._computing.append((request, shared))

    def renew(self, running: Sequence[Request]) -> None:
        """Take leases and give some up, before the step takes its pages."""
        if not self._limits.common_pool:
            return
        computing, self._computing = self._computing, []
        if any(request.runs_alone for request in running):
            return
        reached = [c for c in computing if c[0].settled >= self._tokens_of(c[1])]
        self._computing = [
            (request, shared)
            for request, shared in computing
            if request.state is RequestState.RUNNING and request.settled < self._tokens_of(shared)
        ]
        plan = self._policy.plan([chain for _, chain in reached])
        for chain in plan.closes:
            self._core.close(self._leases.pop(chain[-1]))
        opens = {chain[-1] for chain in plan.opens}
        for request, chain in reached:
            self._keep(chain, request, lease=chain[-1] in opens)
            opens.discard(chain[-1])  # if several reach it in one step, the first decides

    def _keep(self, chain: Chain, request: Request, *, lease: bool) -> None:
        """Lease a prefix up to where requests diverge, or at least renew its pages there.

        Otherwise the pages of windowed layers there are evicted first, and no request could resume
        from the rest.  One more token is opened, since the core leaves the last one to compute.
        """
        length = self._tokens_of(chain)
        handle = self._core.open(request.tokens(0, length + 1), request.cache_root, FOR_GOOD)
        is_there = self._core.hit_tokens(handle) > length - self._limits.common_pool_chunk_tokens
        if lease and is_there and chain[-1] not in self._leases:
            self._leases[chain[-1]] = handle
            return
        self._core.close(handle, renew=is_there)
        if lease and not is_there:
            self._policy.remove(chain)

    def yield_least(self) -> bool:
        """Give up the lease with the least value; return False if nothing is protected."""
        if not self._leases:
            return False
        chain = self._policy.least()
        self._policy.remove(chain)
        self._core.close(self._leases.pop(chain[-1]), renew=False)
        return True

    def yield_all(self) -> bool:
        """Give up all leases; return False if nothing is protected."""
        count = len(self._leases)
        while self.yield_least():
            pass
        return count > 0

    def _tokens_of(self, chain: Chain) -> int:
        return len(chain) * self._limits.common_pool_chunk_tokens
