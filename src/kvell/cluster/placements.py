"""The placement of requests that are longer than the free memory of one instance."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from heapq import nlargest
from itertools import accumulate
from typing import TypeVar

from kvell.cluster.instance_load import NO_FACTS, InstanceLoad
from kvell.cluster.routed_request import RoutedRequest
from kvell.cluster.steering.lending.arrivals import ArrivingRequest, early_placement
from kvell.cluster.steering.lending.model import PerformanceModel
from kvell.cluster.steering.placements import (
    NO_SECTIONS,
    READINGS,
    Placement,
    local_sections,
    longest_with,
    placement,
    reading_of,
)
from kvell.engine.protocol.statistics import InstanceFacts, ModelLengths
from kvell.errors import ChangeSomething
from kvell.memory import common_prefix
from kvell.vocabulary import RequestId

R = TypeVar("R", bound=RoutedRequest)
MIXED = "mixed"
PREFILL = "prefill"
"""The role of instances that only compute prompts."""
MOST_HOMES = 4
"""Instances that are tried for a request that would wait for memory."""
MOST_MODELS = 64
"""Instances of different prices whose performance models are kept."""


class Placements:
    """Decisions about long requests: where one is computed, and who holds its other sections.

    :param lends_early: whether requests that would wait for memory get placements too.
    """

    def __init__(self, lines: Mapping[str, InstanceLoad], *, lends_early: bool = True) -> None:
        self._lines, self._lends_early = lines, lends_early
        self._placed: dict[RequestId, RoutedRequest] = {}
        self._model = lru_cache(MOST_MODELS)(PerformanceModel)

    def reach_tokens(self, model: str = "") -> int:
        """Return the most tokens of a request, if all other instances lend what they can.

        Instances that restart count, and those that leave or were given up do not.

        :param model: its name; "" is the first model.
        """
        lines = [line for line in self._lines.values() if line.will_serve]
        if len(lines) == 1:
            facts = lines[0].facts
            return facts.lengths(model).max_model_len if model else facts.max_model_len
        homes = (line for line in lines if line.role != PREFILL)
        reach = (
            _reach(line.facts, line.facts.lengths(model), self._lenders(line)) for line in homes
        )
        alone = (line.facts.lengths(model).max_model_len for line in lines)
        return max(reach, default=max(alone, default=0))

    def is_long(self, entry: RoutedRequest) -> bool:
        if len(self._lines) < 2 or not self._may_leave(entry):
            return False
        lengths = self._facts().lengths(entry.spec.model)
        return _tokens(entry, lengths) > lengths.max_model_len

    def _may_leave(self, entry: RoutedRequest) -> bool:
        if entry.spec.tensors or sum(line.will_serve for line in self._lines.values()) < 2:
            return False  # such requests stay within one instance
        facts = self._facts()
        lengths = facts.lengths(entry.spec.model)
        return lengths.reach_tokens > lengths.max_model_len and local_sections(facts, lengths) > 0

    def _facts(self) -> InstanceFacts:
        """Return the facts of an instance that was ready once; all are alike."""
        ready = (line.facts for line in self._lines.values() if line.facts.max_model_len)
        return next(ready, NO_FACTS)

    def check(self, entry: RoutedRequest) -> None:
        """Check that the instances can hold a request that is longer than one's memory.

        :raises ChangeSomething: if it is longer than what all instances hold together.
        """
        for _, problem in self.too_long([entry]):
            raise problem

    def too_long(self, entries: Iterable[R]) -> Iterator[tuple[R, ChangeSomething]]:
        """Yield the requests that the instances can never hold, each with what must change."""
        reach_tokens = cache(self.reach_tokens)
        for entry in entries:
            if self.is_long(entry):
                problem = _problem(entry, reach_tokens(entry.spec.model))
                if problem is not None:
                    yield entry, problem

    def outgrown(self, entries: Iterable[R]) -> Iterator[tuple[R, ChangeSomething]]:
        """Yield the placed requests that have more tokens than the instances can hold by now."""
        reach_tokens = cache(self.reach_tokens)
        for entry in entries:
            reach = reach_tokens(entry.spec.model)
            if entry.placement and entry.prompt_tokens + entry.emitted_tokens >= reach:
                problem = _problem(entry, reach)
                if problem is not None:
                    yield entry, problem

    def homes(self, entry: RoutedRequest, lines: Sequence[InstanceLoad]) -> list[InstanceLoad]:
        model = entry.spec.model
        return [line for line in self._borrowers(lines, model) if self._placement(entry, line)]

    def on_ended(self, entry: RoutedRequest) -> None:
        """Count the memory of an ended request as free before heartbeats report it."""
        home = self._lines.get(entry.line)
        if home is None:
            return
        for part in home.placements:
            line = self._lines.get(part.inst_id)
            if part.req_id == entry.request_id and line is not None:
                line.give_back(part.num_blocks * home.facts.section_bytes)
        left = (part for part in home.placements if part.req_id != entry.request_id)
        home.placements = tuple(left)

    def _borrowers(self, lines: Sequence[InstanceLoad], model: str) -> list[InstanceLoad]:
        """Return the lines whose instances may borrow for a model: those that borrow already, or
        else those that lend none.

        Loans that were planned for shorter requests are known from heartbeats.
        """
        debtors, creditors = self._parties()
        reported = [part for line in self._lines.values() for part in line.placements]
        creditors |= {part.inst_id for part in reported if not part.local}
        free = [
            line
            for line in lines
            if local_sections(line.facts, line.facts.lengths(model))
            and line.role != PREFILL
            and line.instance_id not in creditors
        ]
        return [line for line in free if line.instance_id in debtors or line.borrows] or free

    def roomy(self, entry: RoutedRequest, lines: list[InstanceLoad]) -> list[InstanceLoad]:
        """Return the lines to instances in whose memory a short request has room.

        Instances that borrow or lend have little memory for other requests, which would make them
        recall loans.  If no instance has room, return the one with the most memory.  Return all
        lines while nothing is lent.
        """
        debtors, creditors = self._parties()
        if not debtors:
            return lines
        parties = debtors | creditors
        coming = self._coming()
        tokens = entry.prompt_tokens + entry.emitted_tokens + entry.expected_output_tokens
        spare = {line: line.spare_bytes(tokens, coming[line.instance_id]) for line in lines}
        fitting = [line for line in lines if line.instance_id not in parties or spare[line] >= 0]
        return fitting or [max(lines, key=lambda line: spare[line])] if lines else lines

    def early(
        self, entry: RoutedRequest, lines: Sequence[InstanceLoad]
    ) -> tuple[InstanceLoad, Placement] | None:
        """Return where a short request runs now over several instances, if that pays.

        None if it has room at one of the lines, or waiting for room is better.
        """
        if not self._lends_early or len(self._lines) < 2 or not self._may_leave(entry):
            return None
        if not lines or any(line.role != MIXED for line in self._lines.values()):
            return None
        facts = lines[0].facts
        tokens = entry.prompt_tokens + entry.emitted_tokens
        size_bytes = tokens * facts.token_bytes
        if any(not line.waiting and line.free_bytes >= size_bytes for line in lines):
            return None
        blocks = -(-(tokens + entry.expected_output_tokens) // facts.section_tokens)
        request = ArrivingRequest(entry.request_id, tokens, blocks)
        coming = self._coming()
        borrowers = self._borrowers(lines, entry.spec.model)
        for home in nlargest(MOST_HOMES, borrowers, key=lambda line: line.free_bytes):
            for lenders in self._lenders(home):
                others = [line for line in lenders if line.is_open and not line.borrows]
                parts = early_placement(request, home, others, self._model, coming)
                if parts:
                    return home, parts
        return None

    def place(
        self, entry: RoutedRequest, home: InstanceLoad, early: Placement | None = None
    ) -> None:
        """Store the placement of a request that is about to go to one of its :meth:`homes`.

        :param early: its placement, if it is known (:meth:`early`).
        """
        entry.placement = self._placement(entry, home) if early is None else early
        entry.pulls_from = ""
        self._placed[entry.request_id] = entry

    def _placement(self, entry: RoutedRequest, home: InstanceLoad) -> Placement:
        facts = home.facts
        lenders_by_reading = self._lenders(home)
        alone = facts.lengths(entry.spec.model)
        lengths = ModelLengths(alone.max_model_len, _reach(facts, alone, lenders_by_reading))
        tokens = min(_tokens(entry, lengths), lengths.reach_tokens)
        (debtors, _) = self._parties()
        coming = self._coming()
        shared = self._shared_sections(entry, home)
        blocks = -(-tokens // facts.section_tokens)
        for lenders in lenders_by_reading:
            others = (
                line
                for line in lenders
                if line.is_open and not (line.instance_id in debtors or line.borrows)
            )
            parts = placement(
                entry.request_id,
                blocks,
                local_sections(facts, lengths),
                home,
                others,
                facts.section_bytes,
                shared if shared.keys() <= {line.instance_id for line in lenders} else NO_SECTIONS,
                coming,
            )
            if parts:
                return parts
        return ()

    def _shared_sections(self, entry: RoutedRequest, home: InstanceLoad) -> Counter[str]:
        """Return the remote sections of a request's text that another one at its instance has.

        The instance shares those loans with it, if they are still valid (``Borrow.shares``).
        """
        tokens = entry.spec.token_ids[:-1]
        best = Counter[str]()
        for name, other in self._placed.items():
            if other.line != home.instance_id or _prefix_space(other) != _prefix_space(entry):
                continue
            common = common_prefix(tokens, other.spec.token_ids)
            away = _away(name, home.placements)
            most = min(away.total(), common // home.facts.section_tokens)
            if most > best.total():
                best = _first(away, most)
        return best

    def _parties(self) -> tuple[set[str], set[str]]:
        """Return the instances that borrow for requests of this front, and those that lend."""
        for name, entry in list(self._placed.items()):
            line = self._lines.get(entry.line)
            if line is None or line.in_flight.get(name) is not entry:
                del self._placed[name]
        parts = [part for entry in self._placed.values() for part in entry.placement]
        debtors = {part.inst_id for part in parts if part.local}
        return debtors, {part.inst_id for part in parts if part.num_blocks and not part.local}

    def _coming(self) -> Counter[str]:
        """Return the sections of this front's requests that instances are still to lend."""
        coming: Counter[str] = Counter()
        for name, entry in self._placed.items():
            planned = _away(name, entry.placement)
            lent = Counter[str]()
            if (line := self._lines.get(entry.line)) is not None:
                lent = _away(name, line.placements)
            left = max(0, planned.total() - lent.total())  # a refused section may be elsewhere
            for instance_id, count in planned.items():
                coming[instance_id] += min(left, max(0, count - lent[instance_id]))
        return coming

    def _lenders(self, home: InstanceLoad) -> list[list[InstanceLoad]]:
        others = [line for line in self._lines.values() if line is not home and line.will_serve]
        readings = [reading_of(home.facts, line.facts) for line in others]
        return [
            [line for line, its in zip(others, readings, strict=True) if its == reading]
            for reading in READINGS
        ]


def _reach(
    facts: InstanceFacts,
    lengths: ModelLengths,
    lenders_by_reading: Sequence[Sequence[InstanceLoad]],
) -> int:
    return max(
        longest_with(facts, lengths, (lender.pool_bytes for lender in lenders))
        for lenders in lenders_by_reading
    )


def _problem(entry: RoutedRequest, reach: int) -> ChangeSomething | None:
    """Return what must change in a request that the instances cannot hold; None if they can."""
    prompt, answer = entry.prompt_tokens, entry.spec.sampling.max_tokens
    problem = f"exceeds the {reach} tokens that the instances can hold together"
    if prompt >= reach + bool(entry.spec.pooling):
        remedy = f"send at most {reach - 1} tokens, or start more instances"
        return ChangeSomething("prompt", f"{prompt} tokens", problem, remedy)
    if not entry.spec.pooling and answer is not None and prompt + answer > reach:
        remedy = f"ask for at most {reach - prompt}, or start more instances"
        return ChangeSomething("max_tokens", answer, f"with the prompt {problem}", remedy)
    return None


def _prefix_space(entry: RoutedRequest) -> tuple[str, str]:
    """Return what two requests with a common prefix must have in common to share its pages."""
    return entry.spec.model, entry.spec.cache_salt


def _away(name: RequestId, parts: Placement) -> Counter[str]:
    """Return the sections of one request, by the instance that lends them."""
    away = [part for part in parts if part.req_id == name and not part.local]
    return Counter({part.inst_id: part.num_blocks for part in away})


def _first(away: Counter[str], most: int) -> Counter[str]:
    """Return the first ``most`` of the sections, by instance."""
    ends = list(accumulate(away.values()))
    parts = zip(away, (min(end, most) for end in ends), (0, *ends), strict=False)
    return Counter({name: end - begin for name, end, begin in parts if end > begin})


def _tokens(entry: RoutedRequest, lengths: ModelLengths) -> int:
    """Return the most tokens that a request may have."""
    if entry.spec.pooling:
        return entry.prompt_tokens
    answer = entry.spec.sampling.max_tokens
    if answer is None:
        alone = lengths.max_model_len
        return alone if entry.prompt_tokens < alone else lengths.reach_tokens
    return entry.prompt_tokens + answer
