"""An engine's link to the pool: what other instances, copies and time bring, between its steps."""

import contextlib
import queue
import socket
from collections.abc import Sequence

from kvell.memory import GroupSpec
from kvell.mempool.agent import Agent
from kvell.mempool.entries import PeerEntry
from kvell.mempool.node import Node
from kvell.mempool.owners import Tick
from kvell.mempool.place import PoolPlace
from kvell.mempool.transfers.actions import Action, Grant, Revoke
from kvell.mempool.transports.page_copies import Bytes


class PoolLink:
    """Runs a :class:`.Node` whose agent is the engine core's.

    :param memory: the pool, uint8 [pool_bytes], and ``descriptor`` the memfd that it is.
    """

    def __init__(
        self,
        place: PoolPlace,
        agent: Agent,
        groups: Sequence[GroupSpec],
        memory: Bytes,
        descriptor: int,
    ) -> None:
        self._entries: queue.SimpleQueue[PeerEntry] = queue.SimpleQueue()
        self._reader, self._writer = socket.socketpair()
        for one in (self._reader, self._writer):
            one.setblocking(False)
        self._node = Node(
            agent.instance,
            agent.incarnation,
            agent.fingerprint,
            self._take,
            groups,
            memory,
            descriptor,
            address=place.folder / place.instance,
            folder=place.folder,
            secret=place.secret(),
        )
        self._node.start()

    @property
    def descriptor(self) -> int:
        """Becomes readable when :meth:`entries` has some."""
        return self._reader.fileno()

    def now(self) -> Tick:
        """Milliseconds of the node's clock."""
        return self._node.now()

    def entries(self) -> list[PeerEntry]:
        """What has happened since the last call, in order."""
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(4096)
        found: list[PeerEntry] = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._entries.get_nowait())
        return found

    def do(self, actions: Sequence[Action], deadline: Tick | None) -> None:
        """Do what the agent asks for.

        Rights are granted and revoked at once: the next plan may give their pages to others.

        :param deadline: when the agent must hear of the time.
        """
        others: list[Action] = []
        for action in actions:
            if isinstance(action, Grant):
                self._node.rights.grant(action.transfer.number)
            elif isinstance(action, Revoke):
                self._node.rights.revoke(action.transfer.number)
            else:
                others.append(action)
        self._node.wake_at(deadline)
        if others:
            self._node.post(others)

    def close(self) -> None:
        """Hang up."""
        self._node.close()
        self._reader.close()
        self._writer.close()

    def _take(self, entry: PeerEntry) -> list[Action]:
        """Keep an entry for the engine's loop; on the node's thread."""
        self._entries.put(entry)
        with contextlib.suppress(OSError):  # it is awake already, or it has ended
            self._writer.send(b"w")
        return []
