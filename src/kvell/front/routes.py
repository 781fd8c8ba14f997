"""Which instance computes a request, which goes on with it, and whom it asks for its history.

::

    request ──router──► mixed                       computes it and answers
            └─router──► prefill ──goes_to──► decode  computes it; goes on with it
"""

from collections.abc import Iterable, Mapping

import numpy as np

from kvell.cluster.prefix_directory import PrefixDirectory
from kvell.cluster.routing.costs import ExecCosts, pull_or_recompute
from kvell.cluster.routing.policies import DEFAULT_ROUTING, Router, router_named
from kvell.cluster.routing.views import NO_HITS, RequestView
from kvell.cluster.trees.chains import PromptChain
from kvell.engine.requests.cache_roots import cache_root
from kvell.front.histories import Histories
from kvell.front.instance_load import InstanceLoad
from kvell.front.placements import PREFILL, Placements
from kvell.front.request_log import LogEntry

DECODE = "decode"

Known = tuple[PromptChain, Mapping[str, int]]
"""A request's blocks, and the tokens behind which each instance could resume it."""


class Routes:
    """Chooses among the lines of a front, and notes what was chosen in their requests.

    :param lines: of the front, by instance; looked at only.
    :param router: chooses who computes a request.
    :param pulls: whether a request asks an instance that has more of its history for that: one
        that ``locality`` knows, or else the one that had its session.
    :param locality: what instances cache, for a router that reads it.
    :param costs: of the instances' model, which say when reading history elsewhere pays.
    :ivar placements: of requests that are longer than one instance's memory.
    """

    def __init__(
        self,
        lines: Mapping[str, InstanceLoad],
        router: Router | None = None,
        *,
        pulls: bool = True,
        locality: PrefixDirectory | None = None,
        costs: ExecCosts | None = None,
    ) -> None:
        self._lines = lines
        self.placements = Placements(lines)
        self._router = router or router_named(DEFAULT_ROUTING)
        self._decode_router = router_named(DEFAULT_ROUTING)
        self._histories = Histories() if pulls and locality is None else None
        self._locality, self._pulls_more = locality, pulls
        self._costs = costs or ExecCosts()

    def line_for(
        self, entry: LogEntry, open_lines: Iterable[InstanceLoad], now_seconds: float
    ) -> InstanceLoad | None:
        """The line that a request goes to; None if it must wait for another's suspect.

        Or, if it is longer than one instance's memory, until others have some to lend.
        """
        if entry.attempts.on_probation:
            open_lines = [line for line in open_lines if not line.has_suspect]
        lines, is_long = list(open_lines), self.placements.is_long(entry)
        if is_long:  # it is decoded where it is computed, in any role but that for prompts alone
            lines = self.placements.homes(entry, lines)
        else:
            lines = self.placements.roomy(entry, self._beginning(lines))
        known = None if self._locality is None else self._known(entry, self._locality, now_seconds)
        line = self._chosen(entry, lines, self._router, known, entry.left_seconds(now_seconds))
        self.set_target(entry, "")
        if line is None:
            return None
        if line.role == PREFILL:
            decodes = [one for one in self._lines.values() if one.role == DECODE and one.has_room]
            self.set_target(entry, self.target(entry, decodes))
        if self._histories is not None:
            self._pulls(entry, line, self._histories)
        if known is not None:
            self._expect(entry, line, known, now_seconds)
        entry.placement = ()
        if is_long:
            self.placements.place(entry, line)
        return line

    def _beginning(self, lines: list[InstanceLoad]) -> list[InstanceLoad]:
        """Return the lines whose instances compute prompts; all, if none but decoders can."""
        begins = [line for line in lines if line.role != DECODE]
        others = (line.role != DECODE and line.is_open for line in self._lines.values())
        return begins if len(begins) < len(lines) and any(others) else lines

    def target(self, entry: LogEntry, lines: Iterable[InstanceLoad]) -> str:
        """The instance that goes on with a request; "" if there is none of them."""
        line = self._chosen(entry, list(lines), self._decode_router)
        return "" if line is None else line.instance_id

    def takers(self, instance_id: str) -> list[InstanceLoad]:
        """Lines to other instances that may go on with requests of this one."""
        found = (one for one in self._lines.values() if one.role != PREFILL and one.has_room)
        return [one for one in found if one.instance_id != instance_id]

    def set_target(self, entry: LogEntry, target: str) -> None:
        """Note where a request is to go on; "" if it stays."""
        old, new = self._lines.get(entry.goes_to), self._lines.get(target)
        if old is not None:
            old.coming.discard(entry.request_id)
        if new is not None:
            new.coming.add(entry.request_id)
            entry.goes_to_incarnation = new.incarnation
        entry.goes_to = target

    def taker(self, entry: LogEntry) -> InstanceLoad | None:
        """Return the line to the instance that a request has moved to; None if that has died since.

        One that is taken out of service meanwhile goes on with what has reached it.
        """
        line = self._lines.get(entry.goes_to)
        is_same = line is not None and line.incarnation == entry.goes_to_incarnation
        return line if is_same else None

    def moved(self, entry: LogEntry) -> None:
        """Note that a request is where it was to go on."""
        self.set_target(entry, "")
        if self._histories is not None:
            line = self._lines[entry.line]
            self._histories.note(entry.session, line.instance_id, line.incarnation)

    def _known(self, entry: LogEntry, locality: PrefixDirectory, now_seconds: float) -> Known:
        """What instances have of a request's text."""
        tokens = np.frombuffer(entry.prompt + entry.output.tobytes(), "<i4")
        root = cache_root(entry.cache_salt, "", is_scored=False)
        chain = locality.chain(tokens, entry.model, root)
        return chain, locality.hits(chain, now_seconds)

    def _expect(
        self, entry: LogEntry, line: InstanceLoad, known: Known, now_seconds: float
    ) -> None:
        """Note who will have the request's text, and who has more of it than its instance."""
        assert self._locality is not None
        chain, hits = known
        entry.hit_tokens = hits.get(line.instance_id, 0)
        entry.pulls_from = ""
        if self._pulls_more:
            paying = pull_or_recompute(chain.tokens, line.instance_id, hits, self._costs)
            entry.pulls_from = next((one for one in paying if self._lines[one].is_open), "")
        if entry.pulls_from:
            entry.hit_tokens = hits[entry.pulls_from]
        for name in filter(None, (line.instance_id, entry.goes_to)):
            incarnation = self._lines[name].incarnation
            self._locality.routed(name, incarnation, chain, now_seconds)

    def _pulls(self, entry: LogEntry, line: InstanceLoad, known: Histories) -> None:
        """Note where the request's text will be, and who has more of it now."""
        live = ((one.instance_id, one.incarnation) for one in self._lines.values() if one.is_open)
        tokens = entry.prompt_tokens + entry.emitted_tokens
        entry.pulls_from = known.source(entry.session, tokens, line.instance_id, live)
        known.note(entry.session, line.instance_id, line.incarnation)

    def _chosen(
        self,
        entry: LogEntry,
        lines: list[InstanceLoad],
        router: Router,
        known: Known | None = None,
        left_seconds: float | None = None,
    ) -> InstanceLoad | None:
        views = [line.view() for line in lines]
        if len(views) < 2:  # the common case of one instance asks no router
            return lines[0] if lines else None
        computed = entry.prompt_tokens + entry.emitted_tokens
        hits = NO_HITS if known is None else known[1]
        request = RequestView(
            computed, entry.expected_output_tokens, entry.session, hits, left_seconds
        )
        return self._lines[router.choose(request, views)]
