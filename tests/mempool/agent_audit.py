"""The audit of an agent's holds and loans: every contradiction, a sentence for each."""

from collections.abc import Iterator

from kvell.memory import MemoryCore
from kvell.mempool.agent import Agent
from kvell.mempool.holds import Holds
from kvell.mempool.loans.creditor_ledger import CreditorLedger


def audit_holds(holds: Holds, core: MemoryCore) -> list[str]:
    leases = {h.handle for h in core.snapshot().holders if h.is_lease}
    return [
        f"{hold.owner}: handle {hold.handle} is not a lease of the core"
        for hold in holds.values()
        if hold.handle not in leases
    ]


def audit_loans(agent: Agent) -> list[str]:
    return [*_debts(agent), *_lent(agent), *_pages(agent)]


def lent_pages(ledger: CreditorLedger) -> set[tuple[int, int]]:
    return {(group, page) for group, page in ledger.page_rows().tolist()}


def _pages(agent: Agent) -> Iterator[str]:
    loans = agent
    if len(loans.borrowing) and loans.lending.lends:
        yield "the instance borrows and lends at the same time"
    lent = lent_pages(loans.lending)
    snapshot = agent.core.snapshot()
    for entry in snapshot.index:
        if (entry.group, entry.page) in lent:
            yield f"page {entry.page} of group {entry.group} is lent, and the index names it"
    for group, page in sorted(lent):
        if (users := snapshot.refs[group].get(page, 0)) != 1:
            yield f"page {page} of group {group} is lent, and has {users} users"


def _lent(agent: Agent) -> Iterator[str]:
    ledger, holds = agent.lending, agent.holds
    records = ledger.open
    owners = {record.owner for record in records.values()}
    holding = {record.owner for record in records.values() if record.has_pages}
    for loan, record in records.items():
        if (record.owner in holding) != (record.owner in holds):
            yield f"{loan} is {record.state}, and whether it is held does not fit that"
        elif record.has_pages:
            held = sorted((g, page) for g, _, page in holds.pages(record.owner).tolist())
            if held != sorted(map(tuple, record.rows.tolist())):
                yield f"{loan} lends {record.rows.tolist()} and holds {held}"
        if record.has_pages != (record.right.number in agent.numbers):
            yield f"{loan} is {record.state}, and whether it has a number does not fit that"
        if (record.filling is not None) != (record.state in ("filling", "ending")):
            yield f"{loan} is {record.state}, and is filled by {record.filling}"
        if record.filling is not None and ledger.pulls.get(record.filling) != loan:
            yield f"{loan} is filled by {record.filling}, which fills another"
        if record.shares and record.state in ("filling", "ending"):
            yield f"{loan} shares its pages, and is {record.state}"
    for hold in holds.values():
        if hold.owner.kind == "loan" and hold.owner not in owners:
            yield f"{hold.owner} holds pages for no loan"
    lent = ledger.sum_of(records.values())
    if any(had > most for had, most in zip(lent, ledger.most_lent, strict=True)):
        yield f"{lent} pages are lent, more than {ledger.most_lent}"


def _debts(agent: Agent) -> Iterator[str]:
    ledger = agent.borrowing
    lent = {loan for loan, debt in ledger.open.items() if debt.state == "lent"}
    for loan in lent ^ ledger.readable.keys():
        yield f"{loan} is readable or lent, not both"
    for loan, debt in ledger.open.items():
        has_pages = tuple(len(some) for some in debt.pages) == debt.counts
        if has_pages == (debt.state == "asked"):
            yield f"{loan} is {debt.state} with pages {debt.pages}"
        if debt.filling is not None and debt.state != "filling":
            yield f"{loan} is {debt.state}, and its right to be filled {debt.filling}"
        if debt.filling is not None and debt.filling.number not in agent.numbers:
            yield f"{loan} is filled for {debt.filling}, whose number is free"
        if debt.state != "lent" and debt.deadline is None and debt.unanswered is None:
            yield f"{loan} is {debt.state} and waits for nothing"
