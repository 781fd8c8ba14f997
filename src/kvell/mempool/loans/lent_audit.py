"""The audit of a creditor's loans against its holds and its granted rights."""

from collections.abc import Mapping

from kvell.mempool.holds import Holds
from kvell.mempool.loans.lent_pages import LentPages
from kvell.mempool.loans.messages import Loan
from kvell.mempool.transfers.messages import Transfer
from kvell.mempool.transfers.numbers import RightNumbers


def lent_problems(
    lent: Mapping[Loan, LentPages],
    pulls: Mapping[Transfer, Loan],
    holds: Holds,
    numbers: RightNumbers,
) -> list[str]:
    """Return all contradictions between loans, holds and rights, a sentence for each.

    :param pulls: the pulls that fill loans.
    :param numbers: the numbers of rights in use.
    """
    problems = []
    owners = {record.owner for record in lent.values()}
    holding = {record.owner for record in lent.values() if record.has_pages}
    for loan, record in lent.items():
        if (record.owner in holding) != (record.owner in holds):
            problems.append(f"{loan} is {record.state}, and whether it is held does not fit that")
        elif record.has_pages:
            held = sorted((g, page) for g, _, page in holds.pages(record.owner).tolist())
            if held != sorted(map(tuple, record.rows.tolist())):
                problems.append(f"{loan} lends {record.rows.tolist()} and holds {held}")
        if record.has_pages != (record.right.number in numbers):
            problems.append(
                f"{loan} is {record.state}, and whether it has a number does not fit that"
            )
        if (record.filling is not None) != (record.state in ("filling", "ending")):
            problems.append(f"{loan} is {record.state}, and is filled by {record.filling}")
        if record.filling is not None and pulls.get(record.filling) != loan:
            problems.append(f"{loan} is filled by {record.filling}, which fills another")
        if record.shares and record.state in ("filling", "ending"):
            problems.append(f"{loan} shares its pages, and is {record.state}")
    problems += [
        f"{hold.owner} holds pages for no loan"
        for hold in holds
        if hold.owner.kind == "loan" and hold.owner not in owners
    ]
    return problems
