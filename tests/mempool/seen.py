"""Parts of a pool that tests look at."""

from typing import Any

from kvell.mempool.agent import Agent
from kvell.mempool.connections import PeerConnections
from kvell.mempool.loans.creditor_ledger import CreditorLedger
from kvell.mempool.node import PageTransferThread
from kvell.mempool.pool import MemPool
from kvell.mempool.transports.tcp.partials import PartialsServer
from kvell.mempool.transports.tcp.served_peers import ServedPeers
from kvell.mempool.transports.tcp.tcp_pages import PageServer


def node_of(pool: MemPool) -> PageTransferThread:
    """Return the thread that transfers a pool's pages."""
    return pool._node


def agent_of(pool: MemPool) -> Agent:
    """Return the agent that decides for a pool; only its node's thread may call it."""
    return pool._agent


def num_receiving(pool: MemPool) -> int:
    """Return the number of texts on their way to a pool."""
    return node_of(pool).ask(lambda: len(agent_of(pool).receiving))


def peer_of(pool: MemPool, name: str) -> Any:
    """Return a pool's connection to a peer."""
    return node_of(pool)._peers[name]


def connections_of(pool: MemPool) -> PeerConnections:
    """Return the connections of a pool."""
    return node_of(pool)._connections


def page_server_of(pool: MemPool) -> PageServer:
    """Return the threads that send a pool's pages."""
    return connections_of(pool)._pages


def served_by(server: PageServer | PartialsServer) -> ServedPeers:
    """Return the peers of a server."""
    return server._peers


def channels_of(server: PageServer | PartialsServer) -> list[Any]:
    """Return the connections of a server's peers."""
    return list(served_by(server)._threads)


def lent_of(ledger: CreditorLedger) -> dict[Any, Any]:
    """Return the loans of a creditor."""
    return ledger._lent


def break_connections(node: PageTransferThread) -> None:
    """Hang up on all peers, as a fault of the thread does."""
    node._hang_up()
