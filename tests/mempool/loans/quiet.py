from kvell.mempool.loans.messages import Loan
from tests.mempool.loans.lenders import LoanNetwork
from tests.mempool.transfers.network import Instance


def quiet(mix: str = "two", large: int = 20) -> LoanNetwork:
    network = LoanNetwork(mix, large)
    for name in "abc":
        network.start(name)
    return network


def lend_pages() -> tuple[LoanNetwork, Loan]:
    network = quiet()
    return network, network.lend("a", "b")


def begin_filling(ticks: int = 100) -> tuple[LoanNetwork, Loan]:
    """A loan of two pages, of which none has been copied yet."""
    network = quiet()
    loan = network.borrow("a", "b", 2, ticks)
    network.run()
    network.fill("a", loan)
    network.deliver(0)
    return network, loan


def used(instance: Instance) -> int:
    return sum(instance.core.snapshot().used)


def over(network: LoanNetwork) -> None:
    """Nothing is left of any loan."""
    network.run()
    for instance in network.instances.values():
        assert not len(instance.agent.borrowing) and not len(instance.agent.lending)
        assert not instance.granted and not used(instance) and not instance.copying
        assert instance.agent.next_deadline is None
