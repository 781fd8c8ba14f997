"""The load of one instance: its report, its credits, and the requests that it has."""

from collections import Counter
from collections.abc import Iterable
from typing import Annotated

import msgspec

from kvell.cluster.routed_request import RoutedRequest
from kvell.cluster.routing.instance_pace import Crowd, InstancePace, Ramp
from kvell.cluster.routing.pace import Pace, PromptWork
from kvell.cost.prices import FIT_CONTEXT_TOKENS, pairs
from kvell.engine.protocol.messages import NO_OTHERS, Heartbeat, NotTaken, OtherFronts
from kvell.engine.protocol.statistics import InstanceFacts, InstanceReport, LoadStats
from kvell.vocabulary import RequestId

CREDITS_PER_FREE = 3
NO_FACTS = InstanceFacts(0, 0, "", 0, 0)
SHORT_PART = 8
"""An instance is short of memory if requests wait there, or less than one byte in 8 is free."""


class Movable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request that could leave: its prompt is computed, and it does not move already.

    :param size_bytes: upper bound of its pages.
    """

    request_id: str
    size_bytes: Annotated[int, msgspec.Meta(ge=0)]


class InstanceLoad:
    """The line to one instance; pure bookkeeping.

    Routers, placements and steering read the instance's report here, and what the front has counted
    since.  A cluster's manager has one too: it counts no requests, and adds what fronts report.
    Requests of other fronts count as the instance reports them: prompt tokens as uncached ones, and
    each request as one that decodes.

    :ivar report: the latest report of the instance about itself, with its ``facts``.
    :ivar role: the current role; the initial role, the default, is part of the id.
    :ivar is_open: whether the instance takes requests, though perhaps not now.
    :ivar will_serve: whether requests may wait for the instance: it does not leave for good, and
        was not given up.
    :ivar in_flight: requests that the instance has and did not finish, oldest first.
    :ivar outstanding_output_tokens: output tokens that it is still expected to make.
    :ivar uncached_prompt_tokens: of the prompt tokens, those that were not cached when their
        requests were routed, and ``outstanding_pairs`` of query and key that they make.
    :ivar placements: placements of its requests that borrow, by its last heartbeat; none once
        it died.
    :ivar coming: tokens of the requests that are moving to the instance.
    :ivar fronts_work: remaining work for fronts that report it, and ``fronts_leaving`` and
        ``fronts_coming`` of their requests that are moving away and there.
    """

    def __init__(self, instance_id: str, role: str = "") -> None:
        self.instance_id = instance_id
        self.role = role or instance_id.rpartition("-")[0]
        self.is_open, self.will_serve = False, True
        self.in_flight: dict[RequestId, RoutedRequest] = {}
        self.coming: dict[RequestId, int] = {}
        self.outstanding_prompt_tokens = self.outstanding_output_tokens = 0
        self.uncached_prompt_tokens = self.outstanding_pairs = self.running_requests = 0
        self.fronts_work = self.fronts_leaving = self.fronts_coming = 0
        self._held_tokens = 0
        self._others = NO_OTHERS
        self._ramp: Ramp | None = None
        self._tenants: Counter[str] = Counter()
        self.pace = InstancePace.alone(NO_FACTS.prices)
        self._begin(NO_FACTS)

    def _begin(self, facts: InstanceFacts) -> None:
        self.report = InstanceReport(facts)
        self.facts = facts
        size_bytes = facts.kv_pool_bytes
        self._use(LoadStats(0, 0, 0, 0, 0, free_bytes=size_bytes, pool_bytes=size_bytes))
        self._count_others(NO_OTHERS)

    def _use(self, load: LoadStats) -> None:
        self._load = load
        self.placements = load.placements
        self._taken_bytes = 0
        self._pauses = False

    def _count_others(self, others: OtherFronts) -> None:
        tokens = others.prompt_tokens - self._others.prompt_tokens
        self.outstanding_prompt_tokens += tokens
        self.uncached_prompt_tokens += tokens
        self.running_requests += others.requests - self._others.requests
        self._others = others

    @property
    def incarnation(self) -> int:
        return self.facts.incarnation

    @property
    def free_credits(self) -> int:
        return max(0, self.facts.credits - len(self.in_flight)) if self.is_open else 0

    @property
    def has_room(self) -> bool:
        count = len(self.in_flight)
        if not self.is_open or self._pauses or count >= self.facts.credits:
            return False
        return self._ramp is None or self._ramp.allows(count)

    def has_room_for(self, tenant: str) -> bool:
        """Return whether a tenant may get a further request there: some credits stay for others.

        A tenant has at most three times the free credits (Choudhury and Hahne, 1998).
        """
        return not tenant or self._tenants[tenant] < CREDITS_PER_FREE * self.free_credits

    @property
    def has_suspect(self) -> bool:
        return any(entry.attempts.on_probation for entry in self.in_flight.values())

    def open(
        self, facts: InstanceFacts, pace: InstancePace | None = None, *, joins_others: bool = False
    ) -> None:
        """Open the line to a new incarnation.

        :param pace: by its prices and host; None: one of its own.
        :param joins_others: whether other instances serve already, so that the instance starts
            slowly (:class:`.Ramp`).
        """
        self._begin(facts)
        self.pace.set_computing(False)
        self.pace = pace or InstancePace.alone(facts.prices)
        self.pace.set_computing(bool(self.in_flight))
        self.is_open = self.will_serve = True
        self._ramp = Ramp(facts.credits) if joins_others else None

    def prompt_seconds(self, work: PromptWork) -> float:
        return self.pace.seconds(work)

    def done_seconds(self, now: float) -> float:
        """Return how long it has computed its present prompts: since the last one was done, or
        since this call if it has none."""
        if not self.uncached_prompt_tokens:
            self.pace.begin_prompts(now)
        return self.pace.done_seconds(now)

    def spare_bytes(self, tokens: int, num_blocks: int) -> int:
        """Return the KV memory left with one more request, once all have their whole answers.

        :param num_blocks: sections that the instance is about to lend.
        """
        coming_tokens = tokens + self.outstanding_output_tokens
        coming_bytes = (
            coming_tokens * self.facts.token_bytes + num_blocks * self.facts.section_bytes
        )
        return self.free_bytes - coming_bytes

    def give_back(self, size_bytes: int) -> None:
        """Count memory as free before the next heartbeat reports it."""
        least_bytes = self._load.free_bytes - self._load.pool_bytes
        self._taken_bytes = max(least_bytes, self._taken_bytes - size_bytes)

    def close(self) -> None:
        """Give the instance no further request; it continues those that it has."""
        self.is_open = False

    def took_none(self, why: NotTaken) -> None:
        if why == "draining":
            self.close()
        self._pauses = True

    def on_report(self, report: InstanceReport) -> None:
        """Use the report of an instance that serves, whose requests others count."""
        if report.load is not None:
            self.open(report.facts)
            self._use(report.load)
        self.report = report

    def on_heartbeat(self, beat: Heartbeat) -> None:
        self.report = InstanceReport(self.facts, beat.load)
        self._use(beat.load)
        self._count_others(beat.others)

    @property
    def waiting(self) -> int:
        """Number of requests that hold no pages there, by its last heartbeat."""
        return self._load.waiting

    @property
    def memory_waiting(self) -> int:
        """Number of those that wait for memory, not for a seat or their turn."""
        return self._load.memory_waiting

    @property
    def pool_bytes(self) -> int:
        return self._load.pool_bytes

    @property
    def free_bytes(self) -> int:
        """Free KV memory: as reported, less what was submitted since."""
        return self._load.free_bytes - self._taken_bytes

    @property
    def is_short(self) -> bool:
        """Whether the instance is short of memory; asked for every heartbeat."""
        return self.waiting > 0 or self.free_bytes * SHORT_PART < self.pool_bytes

    @property
    def needs_steering(self) -> bool:
        return self.is_short or self._load.growth_bytes > self._load.free_bytes

    @property
    def borrows(self) -> bool:
        return any(not part.local for part in self.placements)

    @property
    def can_take(self) -> bool:
        """Whether the instance may continue requests of others, or hold memory for them."""
        return self.role != "prefill" and self.has_room

    @property
    def num_leaving(self) -> int:
        own = sum(1 for entry in self.in_flight.values() if entry.goes_to)
        return own + self.fronts_leaving

    @property
    def num_coming(self) -> int:
        return len(self.coming) + self.fronts_coming

    @property
    def coming_tokens(self) -> int:
        return sum(self.coming.values())

    def movable(self) -> list[Movable]:
        """Return the requests that decode, as far as is known, and do not move; oldest first."""
        return [
            Movable(entry.request_id, self.size_bytes(entry))
            for entry in self.in_flight.values()
            if not (
                entry.goes_to or entry.is_dropped or entry.pending_prompt_tokens or entry.placement
            )
        ]

    def size_bytes(self, entry: RoutedRequest) -> int:
        return (entry.prompt_tokens + len(entry.output)) * self.facts.token_bytes

    @property
    def own_prompt_tokens(self) -> int:
        return self.outstanding_prompt_tokens - self._others.prompt_tokens

    @property
    def work(self) -> int:
        """Remaining work of the instance's role; a front counts 0 for a mixed instance.

        A decode instance's work is the number of its requests, since each lengthens all steps.  If
        their tokens make up more requests of the priced length, that number counts instead.
        """
        own = 0
        if self.role == "prefill":
            own = self.own_prompt_tokens
        elif self.role == "decode":
            own = max(len(self.in_flight), self._held_tokens // FIT_CONTEXT_TOKENS)
        return own + self.fronts_work

    @property
    def held_tokens(self) -> int:
        """Prompts and emitted tokens of its requests; 0 for a prefill instance, whose requests
        decode elsewhere."""
        return 0 if self.role == "prefill" else self._held_tokens

    def add(self, entry: RoutedRequest) -> None:
        self._tenants[entry.spec.tenant] += 1
        self.in_flight[entry.request_id] = entry
        self.pace.set_computing(True)
        self.running_requests += 1
        entry.line = self.instance_id
        entry.pending_prompt_tokens = entry.prompt_tokens + len(entry.output)
        entry.pending_output_tokens = entry.expected_output_tokens
        entry.held_tokens = entry.pending_prompt_tokens
        self._held_tokens += entry.held_tokens
        self._count_prompt(entry, 1)
        self.outstanding_output_tokens += entry.pending_output_tokens
        here = [part.num_blocks for part in entry.placement if part.local]
        self._taken_bytes += (
            sum(here) * self.facts.section_bytes
            if here
            else entry.pending_prompt_tokens * self.facts.token_bytes
        )

    def on_tokens(self, entry: RoutedRequest, count: int, now: float | None = None) -> None:
        """Count tokens of a request of this line; the first ones show that its prompt is done.

        :param now: time of the tokens; None if the instance did not compute the prompt.
        """
        self._held_tokens += count
        entry.held_tokens += count
        if entry.pending_prompt_tokens:
            self._count_prompt(entry, -1)
            entry.pending_prompt_tokens = 0
            if now is not None and (predicted := entry.predicted) and not entry.attempt:
                self.pace.learn(predicted, now)
            if now is not None:
                self.pace.begin_prompts(now)
            if self._ramp is not None:
                self._ramp.first_token()
                if self._ramp.limit is None:
                    self._ramp = None
        # One token stays outstanding to the end: how long an answer will be is only an estimate.
        made = min(count, entry.pending_output_tokens - 1)
        self.outstanding_output_tokens -= made
        entry.pending_output_tokens -= made

    def _count_prompt(self, entry: RoutedRequest, sign: int) -> None:
        """Add a request's prompt to the load, or remove it; a request with one does not decode."""
        tokens = entry.pending_prompt_tokens
        self.running_requests -= sign
        self.outstanding_prompt_tokens += sign * tokens
        self.uncached_prompt_tokens += sign * max(1, tokens - entry.hit_tokens)
        self.outstanding_pairs += sign * pairs(tokens, entry.hit_tokens)

    def remove(self, entry: RoutedRequest) -> None:
        """Remove a request that has ended, or moves."""
        del self.in_flight[entry.request_id]
        self.pace.set_computing(bool(self.in_flight))
        self.running_requests -= 1
        self._tenants[entry.spec.tenant] -= 1
        if not self._tenants[entry.spec.tenant]:
            del self._tenants[entry.spec.tenant]
        self._held_tokens -= entry.held_tokens
        if entry.pending_prompt_tokens:
            self._count_prompt(entry, -1)
        self.outstanding_output_tokens -= entry.pending_output_tokens
        entry.pending_prompt_tokens = entry.pending_output_tokens = 0

    def lost(self) -> list[RoutedRequest]:
        """Close the line, and remove and return all its requests, oldest first.

        What they borrowed is no longer lent.
        """
        self.close()
        self.placements = ()
        lost = list(self.in_flight.values())
        for entry in lost:
            self.remove(entry)
        return lost


def pace_among(facts: InstanceFacts, lines: Iterable[InstanceLoad]) -> InstancePace:
    """Return the pace of an instance beside open lines: those of its host slow each other, and
    those of equal prices learn together."""
    neighbours = [line for line in lines if line.is_open and line.facts.host == facts.host]
    crowd = neighbours[0].pace.crowd if neighbours else Crowd()
    equals = (line.pace.shared for line in neighbours if line.facts.prices == facts.prices)
    return InstancePace(next(equals, None) or Pace(facts.prices), crowd)
