"""Parts of a pool that tests look at."""

from typing import Any

from kvell.mempool.loans.creditor_ledger import CreditorLedger
from kvell.mempool.pool import MemPool
from kvell.mempool.transports.tcp.served_peers import ServedPeers


def num_receiving(pool: MemPool) -> int:
    return pool.node.ask(lambda: len(pool.agent.receiving))


def peer_of(pool: MemPool, name: str) -> Any:
    return pool.node.connected[name]


def channels_of(server: ServedPeers) -> list[Any]:
    return list(server.threads)


def lent_of(ledger: CreditorLedger) -> dict[Any, Any]:
    return ledger.open
