"""Algorithm 1: the moves of sections that let all instances together make the most tokens.

::

    instances of a small batch that need memory ──► debtor    ┐
    its longest requests, longest first ──────────► sections  ├─► k sections, by equation 7
    instances that it reads in place, then those      │       │   until there is no gain
    that it asks, most memory first ──────────────► creditors ┘

The paper's pairs stop at the first creditor without a gain.  Memory is needed in lumps: nothing is
gained until the head of the line fits, which may need more than one creditor has.  So if the first
creditor alone gives no gain, as many as the head needs are tried together.

A plan looks further than what can be copied until the next one: gains are those of all sections
that are to move, of which the first ones move now.

Source: Infinite-LLM §5.3, Algorithm 1.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvell.cluster.steering.lending.market import Creditor, Debtor, Market, OfferedSections
from kvell.cluster.steering.lending.model import Numbers
from kvell.cluster.steering.placements import READINGS, Reading

LEAST_GAIN = 0.01
"""A loan must make both sides together faster by this part of the debtor's throughput: else noise
in reports would move pages."""
NONE: Numbers = np.zeros(1)


@dataclass(frozen=True, slots=True)
class Move:
    """A move of a request, or of a part of its pages, to another instance.

    :param num_blocks: 0: the whole request moves; else the target lends memory for this number of
        its sections, the paper's ``move_kvcache(req_id, num_blocks, dst_inst)`` (§6.2).
    """

    request_id: str
    source: str
    target: str
    num_blocks: int = 0


@dataclass(frozen=True, slots=True)
class LoanPart:
    """A number of sections for one creditor."""

    creditor: Creditor
    count: int


def plan_moves(debtors: Iterable[Debtor], creditors: Iterable[Creditor]) -> list[Move]:
    """Return the moves of a plan; no instance is on both sides of it.

    :param debtors: with other ids than the creditors.
    """
    market = Market(creditors)
    small = [
        debtor
        for debtor in debtors
        if debtor.load.needs_memory and debtor.load.batch <= debtor.model.small_batch
    ]
    moves: list[Move] = []
    for debtor in sorted(small, key=lambda debtor: (debtor.load.batch, debtor.instance_id)):
        left = {entry.req_id: entry.num_blocks for entry in debtor.longest}
        for reading in READINGS:
            supply = OfferedSections(debtor, reading, left)
            moved = _borrowed(debtor, supply, market, reading)
            debtor.reading = dict(debtor.reading) | {move.request_id: reading for move in moved}
            moves += moved
    return moves


def reactive_moves(debtors: Iterable[Debtor], creditors: Iterable[Creditor]) -> list[Move]:
    """Return moves that give debtors back the memory that they keep free, and no more.

    Sections go to the instance with the most memory, whatever they cost there: the placement of
    figure 5b, with which Infinite-LLM compares Algorithm 1.  Waiting requests move nothing.
    """
    market = Market(creditors)
    moves: list[Move] = []
    for debtor in sorted(debtors, key=lambda debtor: (debtor.load.spare_bytes, debtor.instance_id)):
        left = {entry.req_id: entry.num_blocks for entry in debtor.longest}
        for reading in READINGS:
            supply = OfferedSections(debtor, reading, left)
            while debtor.load.spare_bytes < 0 and len(supply) and debtor.blocks > 0:
                creditor = market.next_for(debtor, reading)
                if creditor is None:
                    break
                missing = -(debtor.load.spare_bytes // debtor.facts.section_bytes)
                part = LoanPart(creditor, min(missing, len(supply), creditor.room))
                moved = _moves(debtor, part, supply, reading)
                debtor.reading = dict(debtor.reading) | {move.request_id: reading for move in moved}
                moves += moved
                market.put_back([creditor], reading)
    return moves


def best_sections(
    debtor: Debtor, creditor: Creditor, most: int, reading: Reading = "in place"
) -> int:
    """Return how many sections, of 0 to ``most``, let both instances together make most tokens.

    Of equal numbers the smallest is returned.  The debtor must not read remote sections for longer
    than the rest of its step takes.
    """
    blocks = np.arange(most + 1, dtype=np.float64)
    tokens = blocks * debtor.facts.section_tokens
    size_bytes = blocks * debtor.facts.section_bytes
    lends = creditor.model.creditor(creditor.load, tokens, size_bytes)
    together = debtor.model.together(debtor.load, tokens, size_bytes, lends, reading)
    if together[0] < 0:  # existing loans already take longer to read than the rest of the step
        return 0
    best = int(together.argmax())
    return best if _is_gain(together[0], together[best], lends[0]) else 0


def gains_together(debtor: Debtor, parts: Sequence[LoanPart], reading: Reading) -> bool:
    """Return whether a debtor and several creditors make more tokens with all of these moves."""
    before = after = np.zeros(1)
    section_tokens, section_bytes = debtor.facts.section_tokens, debtor.facts.section_bytes
    for part in parts:
        count = np.array([part.count], np.float64)
        model, load = part.creditor.model, part.creditor.load
        before = before + model.creditor(load, NONE, NONE)
        after = after + model.creditor(load, count * section_tokens, count * section_bytes)
    count = np.array([sum(part.count for part in parts)], np.float64)
    size = count * section_tokens, count * section_bytes
    with_none = debtor.model.together(debtor.load, NONE, NONE, before, reading)[0]
    with_all = debtor.model.together(debtor.load, *size, after, reading)[0]
    return with_none >= 0 and _is_gain(with_none, with_all, before[0])


def _is_gain(before: float, after: float, creditors: float) -> bool:
    return after > before * (1 + 1e-9) and after - before >= LEAST_GAIN * (before - creditors)


def _borrowed(
    debtor: Debtor, supply: OfferedSections, market: Market, reading: Reading
) -> list[Move]:
    moves: list[Move] = []
    while len(supply) and debtor.blocks > 0:
        parts = _gaining(debtor, len(supply), market, reading)
        if not parts:
            break
        for part in parts:
            moves += _moves(debtor, part, supply, reading)
        market.put_back([part.creditor for part in parts], reading)
    return moves


def _gaining(debtor: Debtor, most: int, market: Market, reading: Reading) -> list[LoanPart]:
    """Take the creditors with which a debtor gains next; return none if there is no gain."""
    first = market.next_for(debtor, reading)
    if first is None:
        return []
    count = best_sections(debtor, first, min(most, first.room), reading)
    if count:
        return [LoanPart(first, count)]
    taken = [first]
    parts = [LoanPart(first, first.room)]
    missing_bytes = debtor.load.missing_bytes
    if math.isfinite(missing_bytes):
        wanted = math.ceil(missing_bytes / debtor.facts.section_bytes)
        left = wanted - first.room
        while left > 0 and wanted <= most:
            other = market.next_for(debtor, reading)
            if other is None:
                break
            taken.append(other)
            parts.append(LoanPart(other, min(left, other.room)))
            left -= other.room
        if left <= 0 and len(parts) > 1 and gains_together(debtor, parts, reading):
            return parts
    market.put_back(taken, reading)
    return []


def _moves(debtor: Debtor, part: LoanPart, supply: OfferedSections, reading: Reading) -> list[Move]:
    creditor = part.creditor
    tokens = part.count * debtor.facts.section_tokens
    size_bytes = part.count * debtor.facts.section_bytes
    debtor.load = debtor.load.borrowing(tokens, size_bytes, reading)
    creditor.load = creditor.load.lending(tokens, size_bytes)
    creditor.room -= part.count
    creditor.spared -= part.count
    moves: list[Move] = []
    for name, count in supply.take(part.count):
        now = min(count, debtor.blocks, creditor.blocks)
        debtor.blocks -= now
        creditor.blocks -= now
        if now:
            moves.append(Move(name, debtor.instance_id, creditor.instance_id, now))
    return moves
