"""Whether a creditor's loans fit what it holds, and the rights that it has granted."""

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
    """Every contradiction between loans, holds and rights, a sentence for each.

    :param pulls: by which loans are being filled.
    :param numbers: of rights that stand.
    """
    found = []
    known = {one.owner for one in lent.values()}
    holding = {one.owner for one in lent.values() if one.has_pages}
    for loan, one in lent.items():
        if (one.owner in holding) != (one.owner in holds):
            found.append(f"{loan} is {one.state}, and whether it is held does not fit that")
        elif one.has_pages:
            held = sorted((g, page) for g, _, page in holds.pages(one.owner).tolist())
            if held != sorted(map(tuple, one.rows.tolist())):
                found.append(f"{loan} lends {one.rows.tolist()} and holds {held}")
        if one.has_pages != (one.right.number in numbers):
            found.append(f"{loan} is {one.state}, and whether it has a number does not fit that")
        if (one.filling is not None) != (one.state in ("filling", "ending")):
            found.append(f"{loan} is {one.state}, and is filled by {one.filling}")
        if one.filling is not None and pulls.get(one.filling) != loan:
            found.append(f"{loan} is filled by {one.filling}, which fills another")
        if one.shares and one.state in ("filling", "ending"):
            found.append(f"{loan} shares its pages, and is {one.state}")
    found += [
        f"{hold.owner} holds pages for no loan"
        for hold in holds
        if hold.owner.kind == "loan" and hold.owner not in known
    ]
    return found
