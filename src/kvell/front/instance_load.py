"""One instance as the front sees it: its credits, its requests, and the load they mean."""

from collections import Counter

from kvell.cluster.routing.costs import FIT_CONTEXT_TOKENS, pairs
from kvell.cluster.routing.ramp import Ramp
from kvell.cluster.routing.views import InstanceView
from kvell.cluster.steering.lending.views import LendingView
from kvell.cluster.steering.placements import NO_REACH, Reach
from kvell.cluster.steering.relief import MemoryView, MovableView, is_short
from kvell.cluster.steering.roles import RoleView
from kvell.cluster.steering.steering import Steered
from kvell.engine.protocol.messages import Heartbeat, NotTaken
from kvell.engine.protocol.placements import RequestPlacementEntry
from kvell.front.request_log import LogEntry
from kvell.vocabulary import RequestId

CREDITS_PER_FREE = 3


class InstanceLoad:
    """The way to one instance; pure bookkeeping.

    :ivar in_flight: requests that the instance has and did not finish, oldest first.
    :ivar outstanding_prompt_tokens: prompt tokens that it has still to compute.
    :ivar outstanding_output_tokens: output tokens that it is expected to make yet.
    :ivar uncached_prompt_tokens: of the prompt tokens, those that were not cached when their
        requests were routed, and ``outstanding_pairs`` of query and key that they make.
    :ivar held_tokens: of its requests, prompts and what they have emitted.
    :ivar reach: how long its requests can be, alone and if others lend it memory.
    :ivar placements: where it said last that the KV cache lies of requests that borrow.
    :ivar coming: requests that others have and that will go on there.
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
        """Current role.  The initial role is part of the id."""
        return self._role

    @role.setter
    def role(self, role: str) -> None:
        self._role, self._view = role, None

    @property
    def free_credits(self) -> int:
        """Further requests that the instance would take."""
        return max(0, self._credits - len(self.in_flight))

    @property
    def is_open(self) -> bool:
        """Whether the instance takes requests, if maybe not just now."""
        return self._credits > 0

    @property
    def has_room(self) -> bool:
        """Whether the instance may get a request now: credits are left, and its start is over."""
        allowed = self._ramp is None or self._ramp.allows(len(self.in_flight))
        return allowed and self.free_credits > 0 and not self._pauses

    def has_room_for(self, tenant: str) -> bool:
        """Whether a request of a tenant may be among those there: some credits stay for others.

        A tenant has at most three times as many as are free (Choudhury and Hahne, 1998).
        """
        return not tenant or self._tenants[tenant] < CREDITS_PER_FREE * self.free_credits

    @property
    def has_suspect(self) -> bool:
        """Whether one of its requests may have ended an instance before."""
        return any(entry.attempts.on_probation for entry in self.in_flight.values())

    def open(
        self,
        credits: int,  # noqa: A002 - the protocol's word
        incarnation: int = 0,
        *,
        free_bytes: int = 0,
        token_bytes: int = 0,
        joins_others: bool = False,
        reach: Reach = NO_REACH,
    ) -> None:
        """Take requests for a new incarnation.

        :param free_bytes: KV memory that nobody uses.
        :param token_bytes: of KV memory that a token takes, at most.
        :param joins_others: whether other instances serve already; then it gets its first
            requests slowly (:class:`.Ramp`).
        :param reach: how long its requests can be, alone and if others lend it memory.
        """
        self._credits, self.incarnation, self._pauses = credits, incarnation, False
        self._free_bytes, self._token_bytes = free_bytes, token_bytes
        self.reach, self.placements, self._beat = reach, (), None
        self._pool_bytes = free_bytes
        self._others_prompt_tokens = self._others_requests = 0
        self._view = None
        self._ramp = Ramp(credits) if joins_others else None

    def spare_bytes(self, tokens: int, num_blocks: int) -> int:
        """KV memory that is left with one more request, once all there have their whole answers.

        :param tokens: of the request.
        :param num_blocks: sections that the instance is about to lend.
        """
        coming_tokens = tokens + self.outstanding_output_tokens
        coming_bytes = coming_tokens * self._token_bytes + num_blocks * self.reach.block_bytes
        return self._free_bytes - coming_bytes

    def give_back(self, size_bytes: int) -> None:
        """Count memory as free that its next heartbeat will tell of."""
        self._free_bytes, self._view = min(self._pool_bytes, self._free_bytes + size_bytes), None

    def close(self) -> None:
        """Give it no further request; what it has goes on."""
        self._credits = 0

    def took_none(self, why: NotTaken) -> None:
        """Give it no further request: it drains.  Or none until its next heartbeat: it is full."""
        if why == "draining":
            self.close()
        self._pauses = True

    def heard(self, beat: Heartbeat) -> None:
        """Take what the instance says of its memory in place of the estimate, and of others."""
        self._free_bytes, self._view, self._pauses = beat.free_bytes, None, False
        self._pool_bytes, self._waiting = beat.pool_bytes, beat.waiting
        self._others_prompt_tokens = beat.others_prompt_tokens
        self._others_requests = beat.others_requests
        self.placements, self._beat = beat.placements, beat
        self._beats += 1

    @property
    def pool_bytes(self) -> int:
        """Size of its KV pool."""
        return self._pool_bytes

    @property
    def is_short(self) -> bool:
        """Whether it is short of memory, by what it said last."""
        return is_short(self._waiting, self._free_bytes, self._pool_bytes)

    @property
    def borrows(self) -> bool:
        """Whether others hold sections of its requests, by what it said last."""
        return any(not one.local for one in self.placements)

    def memory(self) -> MemoryView:
        """What it said of its memory, with what is on its way from it and to it."""
        # Counted where it is asked for: one that has memory may have any number of requests.
        leaving = sum(1 for one in self.in_flight.values() if one.goes_to) if self.is_short else 0
        return MemoryView(
            self.instance_id,
            self._waiting,
            self._free_bytes,
            self._pool_bytes,
            leaving,
            len(self.coming),
        )

    def steered(self) -> Steered:
        """What is decided from, where what this front knows of the instance is all there is."""
        takes = self.role != "prefill" and self.has_room
        return Steered(self.memory(), self.part(), takes, self._lends())

    def _lends(self) -> LendingView | None:
        if self._beat is None:
            return None
        return LendingView.of(self._beat, self._beats, self.reach, self._token_bytes)

    def movable(self) -> list[MovableView]:
        """Requests that decode, as far as is known, and stay; the oldest first."""
        return [
            MovableView(one.request_id, self.size_bytes(one))
            for one in self.in_flight.values()
            if not (one.goes_to or one.is_dropped or one.pending_prompt_tokens or one.placement)
        ]

    def size_bytes(self, entry: LogEntry) -> int:
        """Most bytes of a request's pages."""
        return (entry.prompt_tokens + entry.emitted_tokens) * self._token_bytes

    def part(self) -> RoleView | None:
        """How much it has to do of the part that it does; None if it does all of it.

        Of answers, that is their number: each adds to all steps.  Where they hold more tokens than
        the answers that are priced, these count instead.
        """
        if self.role == "prefill":
            return RoleView(self.instance_id, "prefill", self.outstanding_prompt_tokens)
        if self.role == "decode":
            work = max(len(self.in_flight), self.held_tokens // FIT_CONTEXT_TOKENS)
            return RoleView(self.instance_id, "decode", work)
        return None

    def view(self) -> InstanceView:
        """What a router sees of it; made again only when something has changed.

        What other fronts have there counts as far as the instance tells of it: prompt tokens as
        uncached ones, and each request as one that decodes.
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
        self._tenants[entry.tenant] += 1
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

    def emitted(self, entry: LogEntry, count: int) -> None:
        """Count tokens of a request of this line; the first says that its prompt is computed."""
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
        """Count a request's prompt, or count it no longer."""
        tokens = entry.pending_prompt_tokens
        self._num_prompts += sign
        self.outstanding_prompt_tokens += sign * tokens
        self.uncached_prompt_tokens += sign * max(1, tokens - entry.hit_tokens)
        self.outstanding_pairs += sign * pairs(tokens, entry.hit_tokens)

    def remove(self, entry: LogEntry) -> None:
        """A request is over, or goes elsewhere."""
        self._view = None
        del self.in_flight[entry.request_id]
        self._tenants[entry.tenant] -= 1
        if not self._tenants[entry.tenant]:
            del self._tenants[entry.tenant]
        self.held_tokens -= entry.held_tokens
        if entry.pending_prompt_tokens:
            self._count_prompt(entry, -1)
        self.outstanding_output_tokens -= entry.pending_output_tokens
        entry.pending_prompt_tokens = entry.pending_output_tokens = 0

    def lost(self) -> list[LogEntry]:
        """Close, and give up all requests, oldest first."""
        self.close()
        lost = list(self.in_flight.values())
        for entry in lost:
            self.remove(entry)
        return lost
