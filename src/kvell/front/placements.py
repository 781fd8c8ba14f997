"""Requests that are longer than the memory of one instance, as a front places them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from kvell.cluster.steering.placements import Placement, placement
from kvell.cluster.steering.relief import MemoryView
from kvell.errors import ChangeSomething
from kvell.front.instance_load import InstanceLoad
from kvell.front.request_log import LogEntry
from kvell.memory import common_prefix
from kvell.vocabulary import RequestId

PREFILL = "prefill"
"""The role of instances that compute prompts alone."""


class Placements:
    """Decides where such a request is computed, and who holds its other sections.

    :param lines: of the front, by instance; what they say of their memory is changed only by what
        they are about to lend.
    """

    def __init__(self, lines: Mapping[str, InstanceLoad]) -> None:
        self._lines = lines
        self._placed: dict[RequestId, LogEntry] = {}

    def reach_tokens(self) -> int:
        """Most tokens of a request, while all but its own instance lend what they can."""
        return max((self._reach(line) for line in self._lines.values()), default=0)

    def is_long(self, entry: LogEntry) -> bool:
        """Whether a request may become longer than what one instance can hold, and others lend."""
        if entry.model or entry.tensors or len(self._lines) < 2:
            return False  # such requests stay within one instance
        reach = next(iter(self._lines.values())).reach  # instances are alike
        lends = bool(reach.local_blocks) and reach.most_tokens > reach.alone_tokens
        return lends and _tokens(entry, reach.alone_tokens, reach.most_tokens) > reach.alone_tokens

    def check(self, entry: LogEntry) -> None:
        """Check that a request can be served that is longer than one instance's memory.

        :raises ChangeSomething: if it is longer than what all instances hold together.
        """
        if not self.is_long(entry):
            return
        reach = self.reach_tokens()
        if entry.prompt_tokens >= reach + bool(entry.pooling):
            problem = f"exceeds the {reach} tokens that the instances can hold together"
            remedy = f"send at most {reach - 1} tokens, or start more instances"
            raise ChangeSomething("prompt", f"{entry.prompt_tokens} tokens", problem, remedy)

    def homes(self, entry: LogEntry, lines: Sequence[InstanceLoad]) -> list[InstanceLoad]:
        """Return those of some lines at which a request that is longer can be placed now."""
        return [one for one in self._borrowers(lines) if self._planned(entry, one)]

    def ended(self, entry: LogEntry) -> None:
        """Count what a request held by what its instance told of it as free at once."""
        home = self._lines.get(entry.line)
        if not entry.placement or home is None:
            return
        for part in home.placements:
            line = self._lines.get(part.inst_id)
            if part.req_id == entry.request_id and line is not None:
                line.give_back(part.num_blocks * home.reach.block_bytes)
        left = (one for one in home.placements if one.req_id != entry.request_id)
        home.placements = tuple(left)

    def _borrowers(self, lines: Sequence[InstanceLoad]) -> list[InstanceLoad]:
        """Return those of some lines whose instances may borrow: that borrow, or else lend not.

        Loans that were planned for shorter requests are told by heartbeats.
        """
        debtors, creditors = self._parties()
        told = [part for line in self._lines.values() for part in line.placements]
        creditors |= {part.inst_id for part in told if not part.local}
        free = [
            one
            for one in lines
            if one.reach.local_blocks and one.role != PREFILL and one.instance_id not in creditors
        ]
        return [one for one in free if one.instance_id in debtors or one.borrows] or free

    def roomy(self, entry: LogEntry, lines: list[InstanceLoad]) -> list[InstanceLoad]:
        """Return the lines to instances in whose memory a short request has room.

        While some borrow or lend, these have little for others, who would make them recall what
        they have lent.  Where none has room, that with most; all lines while nothing is lent.
        """
        debtors, creditors = self._parties()
        if not debtors:
            return lines
        parties, coming = debtors | creditors, self._coming()
        tokens = entry.prompt_tokens + entry.emitted_tokens + entry.expected_output_tokens
        spare = {one: one.spare_bytes(tokens, coming[one.instance_id]) for one in lines}
        found = [one for one in lines if one.instance_id not in parties or spare[one] >= 0]
        return found or [max(lines, key=lambda one: spare[one])] if lines else lines

    def place(self, entry: LogEntry, home: InstanceLoad) -> None:
        """Say where a request lies that is about to go to one of its :meth:`homes`."""
        entry.placement, entry.pulls_from = self._planned(entry, home), ""
        self._placed[entry.request_id] = entry

    def _planned(self, entry: LogEntry, home: InstanceLoad) -> Placement:
        reach, most = home.reach, self._reach(home)
        tokens = min(_tokens(entry, reach.alone_tokens, most), most)
        (debtors, _), coming = self._parties(), self._coming()
        others = (
            _less(one.memory(), coming[one.instance_id] * reach.block_bytes)
            for one in self._others(home)
            if one.is_open and not (one.instance_id in debtors or one.borrows)
        )
        blocks = -(-tokens // reach.section_tokens)
        return placement(
            *(entry.request_id, blocks, reach.local_blocks, home.memory(), others),
            *(reach.block_bytes, self._shared(entry, home)),
        )

    def _shared(self, entry: LogEntry, home: InstanceLoad) -> Counter[str]:
        """Sections of a request's text that lie elsewhere already, for another one to its instance.

        The instance shares those loans with it, if they still stand (``Borrow.shares``).
        """
        tokens, best = np.frombuffer(entry.prompt, "<i4")[:-1], Counter[str]()
        for name, other in self._placed.items():
            if other.line != home.instance_id or other.cache_salt != entry.cache_salt:
                continue
            common = common_prefix(tokens, np.frombuffer(other.prompt, "<i4"))
            away = _away(name, home.placements)
            most = min(away.total(), common // home.reach.section_tokens)
            if most > best.total():
                best = _first(away, most)
        return best

    def _parties(self) -> tuple[set[str], set[str]]:
        """Instances that borrow for requests of this front, and those that lend to them."""
        for name, entry in list(self._placed.items()):
            line = self._lines.get(entry.line)
            if line is None or line.in_flight.get(name) is not entry:
                del self._placed[name]
        parts = [part for entry in self._placed.values() for part in entry.placement]
        debtors = {part.inst_id for part in parts if part.local}
        return debtors, {part.inst_id for part in parts if part.num_blocks and not part.local}

    def _coming(self) -> Counter[str]:
        """Sections of this front's requests that instances are to lend and do not yet."""
        coming: Counter[str] = Counter()
        for name, entry in self._placed.items():
            planned, lent = _away(name, entry.placement), Counter[str]()
            if (line := self._lines.get(entry.line)) is not None:
                lent = _away(name, line.placements)
            left = max(0, planned.total() - lent.total())  # a refused one may be elsewhere
            for instance_id, count in planned.items():
                coming[instance_id] += min(left, max(0, count - lent[instance_id]))
        return coming

    def _reach(self, line: InstanceLoad) -> int:
        """Most tokens of a request to an instance."""
        return line.reach.with_others(one.pool_bytes for one in self._others(line))

    def _others(self, home: InstanceLoad) -> list[InstanceLoad]:
        """Instances that could lend to one."""
        lines = self._lines.values()
        return [one for one in lines if one is not home and one.reach.meets(home.reach)]


def _away(name: RequestId, parts: Placement) -> Counter[str]:
    """Sections of one request by the instance that lends them."""
    away = [one for one in parts if one.req_id == name and not one.local]
    return Counter({one.inst_id: one.num_blocks for one in away})


def _first(away: Counter[str], most: int) -> Counter[str]:
    """So many of the sections, from the instance on that has the first ones."""
    ends = list(accumulate(away.values()))
    parts = zip(away, (min(end, most) for end in ends), (0, *ends), strict=False)
    return Counter({name: end - begin for name, end, begin in parts if end > begin})


def _less(view: MemoryView, size_bytes: int) -> MemoryView:
    """Return a view with less free memory."""
    return replace(view, free_bytes=max(0, view.free_bytes - size_bytes))


def _tokens(entry: LogEntry, alone: int, most: int) -> int:
    """Tokens that a request may have in the end.

    :param alone: most of a request to which nobody lends.
    :param most: that one may have which does not say how long its answer may be.
    """
    if entry.pooling:
        return entry.prompt_tokens
    answer = entry.sampling.max_tokens
    if answer is None:
        return alone if entry.prompt_tokens < alone else most
    return entry.prompt_tokens + answer
