"""Parts of a pool that tests look at."""

from typing import Any

from kvell.mempool.agent import Agent
from kvell.mempool.connections import PeerConnections
from kvell.mempool.loans.creditor_ledger import CreditorLedger
from kvell.mempool.node import PageTransferThread
from kvell.mempool.pool import MemPool
from kvell.mempool.transports.tcp.served_peers import ServedPeers
from kvell.mempool.transports.tcp.tcp_pages import PageServer


def node_of(pool: MemPool) -> PageTransferThread:
    """Return the thread that transfers a pool's pages."""
    return pool.node


def agent_of(pool: MemPool) -> Agent:
    """Return the agent that decides for a pool; only its node's thread may call it."""
    return pool.agent


def num_receiving(pool: MemPool) -> int:
    return node_of(pool).ask(lambda: len(agent_of(pool).receiving))


def peer_of(pool: MemPool, name: str) -> Any:
    """Return a pool's connection to a peer."""
    return node_of(pool).connected[name]


def connections_of(pool: MemPool) -> PeerConnections:
    """Return the connections of a pool."""
    return node_of(pool).connections


def page_server_of(pool: MemPool) -> PageServer:
    """Return the threads that send a pool's pages."""
    return connections_of(pool).page_server


def channels_of(server: ServedPeers) -> list[Any]:
    """Return the connections of a server's peers."""
    return list(server.threads)


def lent_of(ledger: CreditorLedger) -> dict[Any, Any]:
    """Return the loans of a creditor."""
    return ledger.open


def break_connections(node: PageTransferThread) -> None:
    """Hang up on all peers, as a fault of the thread does."""
    node.hang_up()
