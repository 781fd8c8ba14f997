"""Parts of a pool that tests look at."""

from typing import Any

from kvell.mempool.loans.creditor_ledger import CreditorLedger
from kvell.mempool.pool import MemPool
from kvell.mempool.transports.tcp.served_peers import ServedPeers


def num_receiving(pool: MemPool) -> int:
    return pool.node.ask(lambda: len(pool.agent.receiving))


def peer_of(pool: MemPool, name: str) -> Any:
    """Return a pool's connection to a peer."""
    return pool.node.connected[name]


def channels_of(server: ServedPeers) -> list[Any]:
    """Return the connections of a server's peers."""
    return list(server.threads)


def lent_of(ledger: CreditorLedger) -> dict[Any, Any]:
    """Return the loans of a creditor."""
    return ledger.open
