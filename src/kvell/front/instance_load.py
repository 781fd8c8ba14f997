"""The front's view of one instance: its credits, its requests, and their load."""

from collections import Counter

from kvell.cluster.routing.costs import FIT_CONTEXT_TOKENS, pairs
from kvell.cluster.routing.ramp import Ramp
from kvell.cluster.routing.views import InstanceView
from kvell.cluster.steering.lending.views import LendingView
from kvell.cluster.steering.placements import NO_REACH, ContextLimits
from kvell.cluster.steering.relief import MemoryView, MovableView, is_short
from kvell.cluster.steering.roles import RoleView
from kvell.cluster.steering.steering import Steered
from kvell.engine.protocol.messages import Heartbeat, NotTaken
from kvell.engine.protocol.placements import RequestPlacementEntry
from kvell.front.request_log import LogEntry
from kvell.vocabulary import RequestId

CREDITS_PER_FREE = 3


class InstanceLoad:
    """The line to one instance; pure bookkeeping.

    :ivar in_flight: requests that the instance has and did not finish, oldest first.
    :ivar outstanding_prompt_tokens: prompt tokens that it still has to compute.
    :ivar outstanding_output_tokens: output tokens that it is still expected to make.
    :ivar uncached_prompt_tokens: of the prompt tokens, those that were not cached when their
        requests were routed, and ``outstanding_pairs`` of query and key that they make.
    :ivar held_tokens: prompts and emitted tokens of its requests.
    :ivar reach: maximum length of its requests, alone and with loans.
    :ivar placements: placements of its requests that borrow, by its last heartbeat.
    :ivar coming: requests that are moving to the instance.
    """

    def __init__(self, instance_id: str) -> None:
        self.instance_id = instance_id
        self._role = instance_id.rpartition("-")[0]
        self.in_flight: dict[RequestId, LogEntry] = {}
        self.incarnation = 0
        self.outstanding_prompt_tokens = 0
        self.outstanding_output_tokens = 0
        self.uncached_prompt_tokens = 0
        self.outstanding_pairs = 0
        self.held_tokens = 0
        self._num_prompts = 0
        self._credits, self._pauses = 0, False
        self._ramp: Ramp | None = None
        self._free_bytes = 0
        self._token_bytes = 0
        self.reach = NO_REACH
        self.placements: tuple[RequestPlacementEntry, ...] = ()
        self._beats = 0
        self._beat: Heartbeat | None = None
        self._pool_bytes = self._waiting = 0
        self._others_prompt_tokens = self._others_requests = 0
        self.coming: set[RequestId] = set()
        self._view: InstanceView | None = None
        self._tenants: Counter[str] = Counter()

    @property
    def role(self) -> str:
        """The current role.  The initial role is part of the id."""
        return self._role

    @role.setter
    def role(self, role: str) -> None:
        self._role, self._view = role, None

    @property
    def free_credits(self) -> int:
        """Number of further requests that the instance would take."""
        return max(0, self._credits - len(self.in_flight))

    @property
    def is_open(self) -> bool:
        """Whether the instance takes requests, though perhaps not now."""
        return self._credits > 0

    @property
    def has_room(self) -> bool:
        """Whether the instance may get a request now, by its credits and its slow start."""
        allowed = self._ramp is None or self._ramp.allows(len(self.in_flight))
        return allowed and self.free_credits > 0 and not self._pauses

    def has_room_for(self, tenant: str) -> bool:
        """Return whether a tenant may get a further request there: some credits stay for others.

        A tenant has at most three times the free credits (Choudhury and Hahne, 1998).
        """
        return not tenant or self._tenants[tenant] < CREDITS_PER_FREE * self.free_credits

    @property
    def has_suspect(self) -> bool:
        """Whether a request there is on probation, since it may have ended an instance."""
        return any(entry.attempts.on_probation for entry in self.in_flight.values())

    def open(
        self,
        credits: int,  # noqa: A002 - the protocol's word
        incarnation: int = 0,
        *,
        free_bytes: int = 0,
        token_bytes: int = 0,
        joins_others: bool = False,
        reach: ContextLimits = NO_REACH,
    ) -> None:
        """Open the line to a new incarnation.

        :param free_bytes: free KV memory.
        :param token_bytes: most KV memory of a token.
        :param joins_others: whether other instances serve already, so that the instance starts
            slowly (:class:`.Ramp`).
        """
        self._credits, self.incarnation, self._pauses = credits, incarnation, False
        self._free_bytes, self._token_bytes = free_bytes, token_bytes
        self.reach, self.placements, self._beat = reach, (), None
        self._pool_bytes = free_bytes
        self._others_prompt_tokens = self._others_requests = 0
        self._view = None
        self._ramp = Ramp(credits) if joins_others else None

    def spare_bytes(self, tokens: int, num_blocks: int) -> int:
        """Return the KV memory left with one more request, once all have their whole answers.

        :param num_blocks: sections that the instance is about to lend.
        """
        coming_tokens = tokens + self.outstanding_output_tokens
        coming_bytes = coming_tokens * self._token_bytes + num_blocks * self.reach.block_bytes
        return self._free_bytes - coming_bytes

    def give_back(self, size_bytes: int) -> None:
        """Count memory as free before the next heartbeat reports it."""
        self._free_bytes, self._view = min(self._pool_bytes, self._free_bytes + size_bytes), None

    def close(self) -> None:
        """Give the instance no further request; it continues those that it has."""
        self._credits = 0

    def took_none(self, why: NotTaken) -> None:
        """Stop giving it requests: for good if it drains, or until its next heartbeat."""
        if why == "draining":
            self.close()
        self._pauses = True

    def on_heartbeat(self, beat: Heartbeat) -> None:
        """Replace the estimates by the instance's heartbeat."""
        self._free_bytes, self._view, self._pauses = beat.free_bytes, None, False
        self._pool_bytes, self._waiting = beat.pool_bytes, beat.waiting
        self._others_prompt_tokens = beat.others_prompt_tokens
        self._others_requests = beat.others_requests
        self.placements, self._beat = beat.placements, beat
        self._beats += 1

    @property
    def pool_bytes(self) -> int:
        """Size of the instance's KV pool."""
        return self._pool_bytes

    @property
    def is_short(self) -> bool:
        """Whether the instance is short of memory, by its last heartbeat."""
        return is_short(self._waiting, self._free_bytes, self._pool_bytes)

    @property
    def borrows(self) -> bool:
        """Whether others hold sections of its requests, by its last heartbeat."""
        return any(not part.local for part in self.placements)

    def memory(self) -> MemoryView:
        """Return the instance's memory by its last heartbeat, and the moves from and to it."""
        # Counted only when short: an instance with free memory may have any number of requests.
        leaving = (
            sum(1 for entry in self.in_flight.values() if entry.goes_to) if self.is_short else 0
        )
        return MemoryView(
            self.instance_id,
            self._waiting,
            self._free_bytes,
            self._pool_bytes,
            leaving,
            len(self.coming),
        )

    def to_steered(self) -> Steered:
        """Return the instance as decisions need it, if no other front uses it."""
        takes = self.role != "prefill" and self.has_room
        return Steered(self.memory(), self.part(), takes, self._lends())

    def _lends(self) -> LendingView | None:
        if self._beat is None:
            return None
        return LendingView.of(self._beat, self._beats, self.reach, self._token_bytes)

    def movable(self) -> list[MovableView]:
        """Return the requests that decode, as far as is known, and do not move; oldest first."""
        return [
            MovableView(entry.request_id, self.size_bytes(entry))
            for entry in self.in_flight.values()
            if not (
                entry.goes_to or entry.is_dropped or entry.pending_prompt_tokens or entry.placement
            )
        ]

    def size_bytes(self, entry: LogEntry) -> int:
        """Return the largest size of a request's pages."""
        return (entry.prompt_tokens + entry.emitted_tokens) * self._token_bytes

    def part(self) -> RoleView | None:
        """Return the remaining work of the instance's role; None for a mixed instance.

        A decode instance's work is the number of its requests, since each lengthens all steps.  If
        their tokens make up more requests of the priced length, that number counts instead.
        """
        if self.role == "prefill":
            return RoleView(self.instance_id, "prefill", self.outstanding_prompt_tokens)
        if self.role == "decode":
            work = max(len(self.in_flight), self.held_tokens // FIT_CONTEXT_TOKENS)
            return RoleView(self.instance_id, "decode", work)
        return None

    def view(self) -> InstanceView:
        """Return a router's view of the instance, made again only after a change.

        Requests of other fronts count as the instance reports them: prompt tokens as uncached ones,
        and each request as one that decodes.
        """
        if self._view is None:
            self._view = InstanceView(
                self.instance_id,
                self.incarnation,
                self.outstanding_prompt_tokens + self._others_prompt_tokens,
                self.outstanding_output_tokens,
                self._free_bytes,
                self.uncached_prompt_tokens + self._others_prompt_tokens,
                self.outstanding_pairs,
                len(self.in_flight) - self._num_prompts + self._others_requests,
                0 if self.role == "prefill" else self.held_tokens,
            )
        return self._view

    def add(self, entry: LogEntry) -> None:
        """Count a request that is submitted now."""
        self._view = None
        self._tenants[entry.spec.tenant] += 1
        self.in_flight[entry.request_id] = entry
        entry.line = self.instance_id
        entry.pending_prompt_tokens = entry.prompt_tokens + entry.emitted_tokens
        entry.pending_output_tokens = entry.expected_output_tokens
        entry.held_tokens = entry.pending_prompt_tokens
        self.held_tokens += entry.held_tokens
        self._count_prompt(entry, 1)
        self.outstanding_output_tokens += entry.pending_output_tokens
        here = [part.num_blocks for part in entry.placement if part.local]
        self._free_bytes -= (
            sum(here) * self.reach.block_bytes
            if here
            else entry.pending_prompt_tokens * self._token_bytes
        )

    def on_tokens(self, entry: LogEntry, count: int) -> None:
        """Count tokens of a request of this line; the first ones show that its prompt is done."""
        self._view = None
        self.held_tokens += count
        entry.held_tokens += count
        if entry.pending_prompt_tokens:
            self._count_prompt(entry, -1)
            entry.pending_prompt_tokens = 0
            if self._ramp is not None:
                self._ramp.first_token()
                if self._ramp.limit is None:
                    self._ramp = None
        # One token stays outstanding to the end: how long an answer will be is only an estimate.
        made = min(count, entry.pending_output_tokens - 1)
        self.outstanding_output_tokens -= made
        entry.pending_output_tokens -= made

    def _count_prompt(self, entry: LogEntry, sign: int) -> None:
        """Add a request's prompt to the load, or remove it."""
        tokens = entry.pending_prompt_tokens
        self._num_prompts += sign
        self.outstanding_prompt_tokens += sign * tokens
        self.uncached_prompt_tokens += sign * max(1, tokens - entry.hit_tokens)
        self.outstanding_pairs += sign * pairs(tokens, entry.hit_tokens)

    def remove(self, entry: LogEntry) -> None:
        """Remove a request that has ended, or moves."""
        self._view = None
        del self.in_flight[entry.request_id]
        self._tenants[entry.spec.tenant] -= 1
        if not self._tenants[entry.spec.tenant]:
            del self._tenants[entry.spec.tenant]
        self.held_tokens -= entry.held_tokens
        if entry.pending_prompt_tokens:
            self._count_prompt(entry, -1)
        self.outstanding_output_tokens -= entry.pending_output_tokens
        entry.pending_prompt_tokens = entry.pending_output_tokens = 0

    def lost(self) -> list[LogEntry]:
        """Close the line, and remove and return all its requests, oldest first."""
        self.close()
        lost = list(self.in_flight.values())
        for entry in lost:
            self.remove(entry)
        return lost
