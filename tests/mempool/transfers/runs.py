"""Two pools that transfer pages."""

from kvell.pages.layout import GroupSpec
from tests.mempool.transfers.network import Network
from tests.pages.pools import group, state

MIXES: dict[str, list[GroupSpec]] = {
    "full": [group(4, 2)],
    "window": [group(4, 2), group(2, 3, window=7)],
    "state": [group(4, 2), state(2, 3)],
    "all": [group(4, 2), group(4, 1, window=9), state(1, 2)],
}


def quiet(mix: str = "all", large: int = 40) -> Network:
    network = Network(MIXES[mix], large)
    for name in "abc":
        network.start(name)
    return network


def run(network: Network) -> None:
    while network.messages or any(one.copying for one in network.instances.values()):
        if network.messages:
            network.deliver(0)
        for name in network.instances:
            network.copy(name, 0, 99)
