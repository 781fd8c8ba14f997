"""The instance that computes a request, the one that continues it, and the one with its history.

::

    request ──router──► mixed                       computes it and answers
            └─router──► prefill ──goes_to──► decode  computes it; continues it

The front remembers which instances have computed a session's texts.  A request without a session
has a digest of the beginning of its conversation or prompt instead.

A request whose session was elsewhere first fetches what is cached there, because reading pages of
another instance is faster than computing them again.  Source: MemServe §6.2, equation 2, of which
this is the case that always pays; the other instance itself reports what it still has.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvell.cluster.instance_load import InstanceLoad
from kvell.cluster.placements import PREFILL, Placements
from kvell.cluster.prefix_directory import PrefixDirectory
from kvell.cluster.routed_request import RoutedRequest
from kvell.cluster.routing.costs import (
    NO_HITS,
    RequestView,
    answer_seconds,
    first_token_seconds,
    prompt_work,
    pull_or_recompute,
)
from kvell.cluster.routing.instance_pace import FirstToken
from kvell.cluster.routing.policies import DEFAULT_ROUTING, EarliestEnd, Router, router_named
from kvell.cluster.steering.placements import Placement
from kvell.cluster.steering.relief import DEFAULT_RELIEF, Relief
from kvell.cluster.trees.chains import PromptChain
from kvell.engine.requests.cache_roots import cache_root
from kvell.front.request_log import LogEntry

MOST_SESSIONS = 65_536
"""Most sessions to remember; the least recently used ones are forgotten."""
FEWEST_TOKENS = 64
"""Shorter prompts are computed faster than fetched."""
FIRST_TOKENS = 256
"""The number of a plain prompt's first tokens that make its session key."""
KEY_BYTES = 16
FIRST_CHARS, LAST_CHARS = 1 << 16, 1 << 10
"""The characters at a long text's beginning and end that, with its length, make the session key.

A picture in a conversation is a text of megabytes, and hashing it all would block the event loop.
"""


def conversation_key(messages: Iterable[Mapping[str, Any]]) -> str:
    """Return a digest of a conversation up to its first user message.

    Later turns of a conversation have the same digest; other conversations with the same system
    prompt do not.
    """
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for message in messages:
        role = str(message.get("role", ""))
        content = message.get("content", "")
        shown = _told(content)
        digest.update(f"{len(role)}:{role}{len(shown)}:{shown}".encode())
        if role == "user":
            break
    return digest.hexdigest()


def prompt_key(token_ids: NDArray[np.int32]) -> str:
    """Return a digest of a prompt's first tokens (int32 ``[tokens]``)."""
    first = np.ascontiguousarray(token_ids[:FIRST_TOKENS], "<i4").tobytes()
    return hashlib.blake2b(first, digest_size=KEY_BYTES).hexdigest()


def _told(content: Any) -> str:
    if isinstance(content, str):
        if len(content) <= FIRST_CHARS + LAST_CHARS:
            return content
        return f"{content[:FIRST_CHARS]}{len(content)}{content[-LAST_CHARS:]}"
    if isinstance(content, Mapping):
        return _told("".join(f"{key}:{_told(part)}" for key, part in content.items()))
    if isinstance(content, Sequence):
        return _told("".join(f"{len(part)}:{part}" for part in map(_told, content)))
    return str(content)


class HeldSession(NamedTuple):
    """The texts of a session at one instance.

    :param tokens: of the latest one, as far as the front has seen it.
    """

    incarnation: int
    tokens: int


class Histories:
    """The instances of each session, the latest one last; pure."""

    def __init__(self, most_sessions: int = MOST_SESSIONS) -> None:
        self._most_sessions = most_sessions
        self._instances: OrderedDict[str, dict[str, HeldSession]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._instances)

    def note(self, session: str, instance_id: str, incarnation: int, tokens: int) -> None:
        """Note that an incarnation of an instance computes, or receives, a text of a session.

        :param tokens: of the text.
        """
        if not session:
            return
        instances = self._instances.setdefault(session, {})
        instances.pop(instance_id, None)
        instances[instance_id] = HeldSession(incarnation, tokens)
        self._instances.move_to_end(session)
        if len(self._instances) > self._most_sessions:
            self._instances.popitem(last=False)

    def source(self, session: str, prompt_tokens: int, chosen: str, live: Mapping[str, int]) -> str:
        """Return the instance to fetch a request's history from; "" for none.

        :param chosen: the instance that computes the request.
        :param live: instances that serve, with their incarnations.
        """
        still = self.tokens_at(session, live)
        if not still or prompt_tokens < FEWEST_TOKENS or chosen in still:
            return ""
        return list(still)[-1]

    def tokens_at(self, session: str, live: Mapping[str, int]) -> Mapping[str, int]:
        """Return the tokens of a session's texts by instance, the latest instance last.

        :param live: instances to look for, with their incarnations.
        """
        return {
            name: held.tokens
            for name, held in self._instances.get(session, {}).items()
            if live.get(name) == held.incarnation
        }


DECODE = "decode"
MOST_COUNTED = 4096
"""The most pairs of instances and kinds that are counted.  Beyond it, removed targets are dropped
and removed sources merged into the source ""."""
TransferKind = Literal["handover", "move", "pull"]
"""A ``handover`` of a request after its prompt, a ``move`` in the middle of its answer, or a
``pull`` of cached pages of its prompt."""

Known = tuple[PromptChain, Mapping[str, int]]
"""A request's blocks, and the number of its tokens that each instance could resume."""


class RequestTransfer(NamedTuple):
    """A kind of transfer from one instance to another."""

    kind: TransferKind
    source: str
    target: str


class TransferTotals(NamedTuple):
    """The transfers of one kind so far.

    :param size_bytes: the copied pages.
    """

    requests: int = 0
    size_bytes: int = 0

    def plus(self, other: "TransferTotals") -> "TransferTotals":
        return TransferTotals(self.requests + other.requests, self.size_bytes + other.size_bytes)


NO_TRANSFER = TransferTotals()


def totals_by_target(
    transfers: Mapping[RequestTransfer, TransferTotals],
) -> dict[str, dict[TransferKind, TransferTotals]]:
    sums: dict[str, dict[TransferKind, TransferTotals]] = {}
    for (kind, _, target), totals in transfers.items():
        of_target = sums.setdefault(target, {})
        of_target[kind] = of_target.get(kind, NO_TRANSFER).plus(totals)
    return sums


class Routes:
    """The choice among the lines of a front, which is noted in the requests.

    :param router: chooses the instance that computes a request.
    :param pulls: whether a request fetches its history from an instance that has more of it: one
        that ``locality`` names, or else the one that had its session.
    :param locality: prefixes that instances cache, for a router that reads them.
    :param moves: the moves between instances while memory is short.
    :ivar placements: of requests that are longer than one instance's memory.
    :ivar transfers: the moved requests and the pulls of ended requests so far.
    """

    def __init__(
        self,
        lines: Mapping[str, InstanceLoad],
        router: Router | None = None,
        *,
        pulls: bool = True,
        locality: PrefixDirectory | None = None,
        moves: Relief = DEFAULT_RELIEF,
    ) -> None:
        self._lines = lines
        self.transfers: dict[RequestTransfer, TransferTotals] = {}
        self.placements = Placements(lines, lends_early=moves in ("all", "loans"))
        self._router = router or router_named(DEFAULT_ROUTING)
        self._decode_router: Router = EarliestEnd()
        self._histories = Histories() if pulls and locality is None else None
        self._locality, self._pulls_more = locality, pulls

    def line_for(
        self, entry: LogEntry, open_lines: Iterable[InstanceLoad], now_seconds: float
    ) -> InstanceLoad | None:
        """Return the line for a request; None if it must wait until another suspect is cleared.

        A request that is longer than one instance's memory also waits until others can lend.
        """
        if entry.attempts.on_probation:
            open_lines = [line for line in open_lines if not line.has_suspect]
        lines = list(open_lines)
        is_alone = len(self._lines) == 1
        is_long = not is_alone and self.placements.is_long(entry)
        early: Placement | None = None
        if is_long:  # it is decoded where it is computed, in any role but prefill
            lines = self.placements.homes(entry, lines)
        elif not is_alone:
            lines = self.placements.roomy(entry, self._beginning(lines))
            if (placed := self.placements.early(entry, lines)) is not None:
                home, early = placed
                lines = [home]
        match = None if self._locality is None else self._known(entry, self._locality, now_seconds)
        line = lines[0] if lines else None  # the common case of one instance asks no router
        if len(lines) > 1:
            hits = NO_HITS if match is None else match[1]
            left_seconds = entry.left_seconds(now_seconds)
            line = self._chosen(entry, lines, self._router, hits, left_seconds)
        if entry.goes_to:
            self.set_target(entry, "")
        if line is None:
            return None
        if line.role == PREFILL:
            decodes = [
                other for other in self._lines.values() if other.role == DECODE and other.has_room
            ]
            self.set_target(entry, self.target(entry, decodes, match))
        if self._histories is not None and entry.spec.session:
            self._pulls(entry, line, self._histories)
        if match is not None:
            self._expect(entry, line, match, now_seconds)
        entry.placement = ()
        if is_long or early is not None:
            self.placements.place(entry, line, early)
        entry.predicted = None
        if not is_alone:
            entry.predicted = self._predicted(entry, line, match, now_seconds)
        return line

    def _beginning(self, lines: list[InstanceLoad]) -> list[InstanceLoad]:
        """Return the lines whose instances compute prompts; all lines if only decoders are open."""
        begins = [line for line in lines if line.role != DECODE]
        others = (line.role != DECODE and line.is_open for line in self._lines.values())
        return begins if len(begins) < len(lines) and any(others) else lines

    def target(
        self, entry: RoutedRequest, lines: Iterable[InstanceLoad], match: Known | None = None
    ) -> str:
        """Return the instance that continues a request; "" if there are no lines.

        :param match: from a directory of prefixes; without one, sessions show who has their texts.
        """
        lines = list(lines)
        if len(lines) < 2:
            return lines[0].instance_id if lines else ""
        hits = NO_HITS if match is None else match[1]
        if self._histories is not None:
            hits = self._histories.tokens_at(entry.spec.session, _incarnations(lines))
        return self._chosen(entry, lines, self._decode_router, hits).instance_id

    def takers(self, instance_id: str) -> list[InstanceLoad]:
        takers = (line for line in self._lines.values() if line.role != PREFILL and line.has_room)
        return [line for line in takers if line.instance_id != instance_id]

    def set_target(self, entry: LogEntry, target: str, *, is_migration: bool = False) -> None:
        """Set the instance that is to continue a request; "" if it stays.

        :param is_migration: whether it continues there in the middle of its answer.
        """
        old, new = self._lines.get(entry.goes_to), self._lines.get(target)
        if old is not None:
            old.coming.pop(entry.request_id, None)
        if new is not None:
            new.coming[entry.request_id] = entry.prompt_tokens + entry.emitted_tokens
            entry.goes_to_incarnation = new.incarnation
        entry.goes_to = target
        entry.is_migrating = is_migration

    def taker(self, entry: LogEntry) -> InstanceLoad | None:
        """Return the line to the instance that a request has moved to; None if that has died since.

        An instance that is taken out of service meanwhile continues what has reached it.
        """
        line = self._lines.get(entry.goes_to)
        is_same = line is not None and line.incarnation == entry.goes_to_incarnation
        return line if is_same else None

    def count_pull(self, entry: LogEntry, size_bytes: int) -> None:
        """Count the pull of a request that ends at its line, and has copied pages."""
        if entry.pulls_from:
            self._count(RequestTransfer("pull", entry.pulls_from, entry.line), size_bytes)

    def on_moved(self, entry: LogEntry, taker: InstanceLoad, size_bytes: int) -> None:
        """Note that a request has moved from its line to its :meth:`taker`.

        :param size_bytes: the pages that were copied.
        """
        kind: TransferKind = "move" if entry.is_migrating else "handover"
        self._count(RequestTransfer(kind, entry.line, taker.instance_id), size_bytes)
        self.set_target(entry, "")
        if self._histories is not None:
            tokens = entry.prompt_tokens + len(entry.output)
            incarnation = taker.facts.incarnation
            self._histories.note(entry.spec.session, taker.instance_id, incarnation, tokens)

    def _count(self, transfer: RequestTransfer, size_bytes: int) -> None:
        self._add(transfer, TransferTotals(1, size_bytes))
        if len(self.transfers) > MOST_COUNTED:
            for old in list(self.transfers):
                if old.source in self._lines and old.target in self._lines:
                    continue
                totals = self.transfers.pop(old)
                if old.target in self._lines:  # the sums of each target never fall
                    self._add(old._replace(source=""), totals)

    def _add(self, transfer: RequestTransfer, totals: TransferTotals) -> None:
        self.transfers[transfer] = self.transfers.get(transfer, NO_TRANSFER).plus(totals)

    def _known(self, entry: LogEntry, locality: PrefixDirectory, now_seconds: float) -> Known:
        root = cache_root(entry.spec.cache_salt, "", is_scored=False)
        chain = locality.chain(entry.token_ids, entry.spec.model, root)
        return chain, locality.hits(chain, now_seconds)

    def _expect(
        self, entry: LogEntry, line: InstanceLoad, match: Known, now_seconds: float
    ) -> None:
        """Note the instances that will have the request's text, and one that has more of it now."""
        assert self._locality is not None
        chain, hits = match
        entry.hit_tokens = hits.get(line.instance_id, 0)
        entry.pulls_from = ""
        if self._pulls_more:
            entry.pulls_from = pull_or_recompute(
                chain.tokens,
                line.instance_id,
                hits,
                line.facts.prices,
                lambda name: self._answers(name, now_seconds),
            )
        if entry.pulls_from:
            entry.hit_tokens = hits[entry.pulls_from]
        for name in filter(None, (line.instance_id, entry.goes_to)):
            incarnation = self._lines[name].incarnation
            self._locality.on_routed(name, incarnation, chain, now_seconds)

    def _answers(self, instance_id: str, now_seconds: float) -> float:
        line = self._lines[instance_id]
        return answer_seconds(line, line.done_seconds(now_seconds)) if line.is_open else inf

    def _pulls(self, entry: LogEntry, line: InstanceLoad, histories: Histories) -> None:
        session = entry.spec.session
        tokens = entry.prompt_tokens + len(entry.output)
        entry.pulls_from = ""
        if len(self._lines) > 1:
            live = _incarnations(line for line in self._lines.values() if line.is_open)
            entry.pulls_from = histories.source(session, tokens, line.instance_id, live)
        histories.note(session, line.instance_id, line.facts.incarnation, tokens)

    def _predicted(
        self, entry: LogEntry, line: InstanceLoad, match: Known | None, now_seconds: float
    ) -> FirstToken:
        """Return when the first token comes on a line."""
        tokens = entry.prompt_tokens + entry.emitted_tokens
        hit = entry.hit_tokens
        fetch_seconds = 0.0
        if entry.pulls_from:
            own_hit = 0 if match is None else match[1].get(line.instance_id, 0)
            fetch_seconds = self._answers(entry.pulls_from, now_seconds)
            fetch_seconds += line.facts.prices.fetch_seconds(hit - own_hit)
        done_seconds = line.done_seconds(now_seconds)
        return FirstToken(
            first_token_seconds(line, tokens, hit, fetch_seconds, done_seconds),
            prompt_work(line, tokens, hit),
            line.pace.crowd.time(now_seconds),
            fetches=bool(entry.pulls_from),
        )

    def _chosen(
        self,
        entry: RoutedRequest,
        lines: list[InstanceLoad],
        router: Router,
        hits: Mapping[str, int] = NO_HITS,
        left_seconds: float | None = None,
    ) -> InstanceLoad:
        computed = entry.prompt_tokens + entry.emitted_tokens
        request = RequestView(
            computed, entry.expected_output_tokens, entry.spec.session, hits, left_seconds
        )
        return self._lines[router.choose(request, lines)]


def _incarnations(lines: Iterable[InstanceLoad]) -> dict[str, int]:
    return {line.instance_id: line.incarnation for line in lines}
