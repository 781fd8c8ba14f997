"""Loans and transfers between instances, as the memory map shows them; pure."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal

from msgspec import Struct

from kvell.cluster.steering.placements import Placement
from kvell.front.request_log import LogEntry
from kvell.front.routes import NO_TRANSFER, RequestTransfer, TransferKind, TransferTotals
from kvell.vocabulary import SECTION_TOKENS

LoanPair = tuple[str, str]
"""A creditor and its debtor."""
MOST_PAIRS = 64
"""The most kinds of transfers to list, the most frequent ones."""


class PeerSections(Struct, frozen=True):
    """The sections that an instance lends to a peer or borrows from it.

    :param peer: id of the other instance.
    :param requests: number of requests whose sections these are.
    """

    peer: str
    sections: int
    requests: int


class InstanceLoans(Struct, frozen=True):
    """The loans of one instance.

    :param section_bytes: memory of a section of ``section_tokens`` tokens; 0: it cannot borrow.
    :param lends: loans to debtors; ``borrows`` are from creditors.
    """

    section_bytes: int = 0
    section_tokens: int = SECTION_TOKENS
    lends: tuple[PeerSections, ...] = ()
    borrows: tuple[PeerSections, ...] = ()

    @property
    def lent(self) -> int:
        """Number of lent sections."""
        return sum(peer.sections for peer in self.lends)

    @property
    def borrowed(self) -> int:
        """Number of borrowed sections."""
        return sum(peer.sections for peer in self.borrows)


class TransferRow(Struct, frozen=True):
    """The transfers of one kind from one instance to another, or the ended loans of a creditor.

    :param running: transfers that run now.
    :param recent: transfers that ended within the history; of ended loans, the most sections that
        were lent at once.
    """

    kind: TransferKind | Literal["loan"]
    source: str
    target: str
    running: int
    recent: int


def loans_of(
    placements: Mapping[str, Placement], section_bytes: Mapping[str, int]
) -> dict[str, InstanceLoans]:
    """Return the loans of every instance.

    :param placements: reported places of the KV cache of requests that borrow, by debtor.
    :param section_bytes: memory of a section that an instance can borrow, by instance.
    """
    sections: Counter[tuple[str, str]] = Counter()
    requests: dict[tuple[str, str], set[str]] = {}
    for debtor, entries in placements.items():
        for entry in entries:
            if not entry.local:
                sections[debtor, entry.inst_id] += entry.num_blocks
                requests.setdefault((debtor, entry.inst_id), set()).add(entry.req_id)
    ids = section_bytes.keys() | placements.keys()
    return {
        instance_id: InstanceLoans(
            section_bytes.get(instance_id, 0),
            SECTION_TOKENS,
            tuple(
                PeerSections(debtor, count, len(requests[debtor, creditor]))
                for (debtor, creditor), count in sorted(sections.items())
                if creditor == instance_id
            ),
            tuple(
                PeerSections(creditor, count, len(requests[debtor, creditor]))
                for (debtor, creditor), count in sorted(sections.items())
                if debtor == instance_id
            ),
        )
        for instance_id in ids
    }


def sections_lent(loans: Mapping[str, InstanceLoans]) -> dict[LoanPair, int]:
    """Return the number of sections that each creditor lends to each debtor."""
    return {
        (creditor, peer.peer): peer.sections
        for creditor, lending in loans.items()
        for peer in lending.lends
    }


def ended_loans(
    now: Mapping[LoanPair, int], samples: Iterable[Mapping[LoanPair, int]]
) -> list[TransferRow]:
    """Return the loans of the history that have ended, by creditor and debtor.

    :param now: the number of sections that each creditor lends to each debtor now.
    :param samples: the same of each sample of the history.
    """
    most: dict[LoanPair, int] = {}
    for sample in samples:
        for pair, sections in sample.items():
            most[pair] = max(sections, most.get(pair, 0))
    ended = sorted(pair for pair in most.keys() - now.keys() if most[pair])
    return [TransferRow("loan", *pair, 0, most[pair]) for pair in ended[:MOST_PAIRS]]


def transfer_rows(
    in_flight: Iterable[LogEntry],
    now: Mapping[RequestTransfer, TransferTotals],
    before: Mapping[RequestTransfer, TransferTotals],
) -> list[TransferRow]:
    """Return the transfers that run or ran within the history, the most frequent first.

    :param in_flight: requests that instances have.
    :param now: the transfers so far.
    :param before: the same at the beginning of the history.
    """
    running: Counter[RequestTransfer] = Counter()
    for entry in in_flight:
        if entry.goes_to:
            kind: TransferKind = "move" if entry.is_migrating else "handover"
            running[RequestTransfer(kind, entry.line, entry.goes_to)] += 1
        if entry.pulls_from and entry.pending_prompt_tokens:
            running[RequestTransfer("pull", entry.pulls_from, entry.line)] += 1
    recent = {
        pair: totals.requests - before.get(pair, NO_TRANSFER).requests
        for pair, totals in now.items()
        if pair.source  # else those of removed instances, in one sum
    }
    pairs = [pair for pair in running.keys() | recent.keys() if running[pair] or recent.get(pair)]
    rows = [TransferRow(*pair, running[pair], recent.get(pair, 0)) for pair in pairs]
    rows.sort(key=lambda row: (-row.running, -row.recent, row.source, row.target, row.kind))
    return rows[:MOST_PAIRS]
