"""The rendezvous of instances: their addresses and their common secret, on one host or several."""

import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvell.mempool.transfers.methods import ALWAYS, COPIED, SENT, StreamCosts
from kvell.wire.endpoints import Endpoint, tcp_endpoint

PageTransport = Literal["memory", "tcp"]
"""The transport of pages between instances: mapped memory on the same host, or TCP."""
PoolRole = Literal["mixed", "prefill", "decode"]
"""The role of an instance: everything, only prefill, or only decode."""
PdCaching = Literal[0, 1, 2, 3]
"""The caching of prefill and decode instances (MemServe, PD-Caching-1 to -3): 0 no instance caches,
1 prefill instances do, 2 decode instances too, 3 prefill instances also receive the answers."""
PD_CACHINGS: tuple[PdCaching, ...] = (0, 1, 2, 3)
PD_CACHING_NAMES = ("none", "prefill", "both", "answers")
"""The names of ``PD_CACHINGS`` for users."""
DEFAULT_PD_CACHING: PdCaching = 3
TransferMethod = Literal["cheapest", "by_layer", "by_request"]
"""The time at which a request's pages are pulled when it is handed over: while its last chunk is
computed (``by_layer``), after it (``by_request``), or the quicker of both."""
SECRET = "secret"
"""The file in the folder that holds the pool's secret."""
SECRET_BYTES = 32
ADDRESS_BYTES = 256
"""The largest size of a file with an instance's address."""
FLAGS_FIELD, EXITING_FLAG = 6, 4
"""The flags in ``/proc/<pid>/stat``, counted from the state, and Linux's PF_EXITING."""


@dataclass(frozen=True)
class FolderRendezvous:
    """The rendezvous of instances on one host.

    :param instance: the name of the instance, unique in the folder.
    :param folder: contains a socket of each instance, or a file with its TCP address, accessible
        only to their user.
    :param role: prefill, decode or mixed.
    :param pd_caching: which instances cache pages.
    :param transport: how instances read each other's pages.
    :param method: when other instances pull the pages of requests handed over to them.
    """

    instance: str
    folder: Path
    role: PoolRole = "mixed"
    pd_caching: PdCaching = DEFAULT_PD_CACHING
    transport: PageTransport = "memory"
    method: TransferMethod = "cheapest"

    @property
    def pool(self) -> str:
        """The name of the pool."""
        return self.folder.name

    def secret(self) -> bytes:
        """Return the secret of the pool."""
        return (self.folder / SECRET).read_bytes()

    def address(self) -> Endpoint:
        """Return the address to listen at."""
        if self.transport == "tcp":
            return "tcp://127.0.0.1:0"
        return self.folder / self.instance

    def publish(self, address: Endpoint | None) -> None:
        """Publish the address of this instance's listener atomically."""
        if not isinstance(address, str):
            return  # the socket itself is in the folder
        with tempfile.NamedTemporaryFile(
            "w", dir=self.folder, prefix=".address-", delete=False
        ) as file:
            file.write(address)
        Path(file.name).replace(self.folder / self.instance)

    def address_of(self, instance: str) -> Endpoint:
        """Return the address of another instance.

        :raises OSError: when the published address cannot be read.
        """
        path = self.folder / instance
        if not path.is_file():
            return path
        with path.open("rb") as file:
            return file.read(ADDRESS_BYTES).decode("ascii", "replace")


@dataclass(eq=False)
class NetworkRendezvous:
    """The rendezvous of instances on several hosts, whose addresses the front sends.

    Pages are sent over TCP.

    :param instance: the name of the instance, unique in the pool.
    :param pool: the name of the pool; instances of different pools refuse each other.
    :param host: the address of this host for the other instances.
    :param key: the secret of the pool.
    :ivar listens: the address of the listener; "" before :meth:`publish`.
    """

    instance: str
    pool: str
    host: str
    key: bytes = field(repr=False)
    role: PoolRole = "mixed"
    pd_caching: PdCaching = DEFAULT_PD_CACHING
    listens: str = field(default="", init=False)
    _known: Mapping[str, str] = field(default_factory=dict, init=False)

    def secret(self) -> bytes:
        return self.key

    def address(self) -> Endpoint:
        """Return the address to listen at: a free port of this host's address."""
        return tcp_endpoint(self.host, 0)

    def publish(self, address: Endpoint | None) -> None:
        self.listens = address if isinstance(address, str) else ""

    def meet(self, addresses: Mapping[str, str]) -> None:
        self._known = dict(addresses)

    def address_of(self, instance: str) -> Endpoint:
        """Return the address of another instance.

        :raises OSError: when the front has not sent it.
        """
        if instance not in self._known:
            raise OSError(f"the address of {instance} is unknown")
        return self._known[instance]


Rendezvous = FolderRendezvous | NetworkRendezvous
"""How the instances of a pool find each other: on one host or on several."""


def stream_costs(place: Rendezvous | None) -> StreamCosts | None:
    """Return the costs of pulling pages while they are computed, or None if that is never done."""
    if place is None:
        return None
    if not isinstance(place, FolderRendezvous):
        return SENT
    if place.method == "by_request":
        return None
    if place.method == "by_layer":
        return ALWAYS
    return COPIED if place.transport == "memory" else SENT


def make_folder(folder: Path) -> None:
    path = folder / SECRET
    path.touch(0o600)
    path.write_bytes(secrets.token_bytes(SECRET_BYTES))


def remove_orphaned(folder: Path, maker_pid: int) -> None:
    """Remove a pool's folder if the parent process, which made it, was killed before it could.

    :param maker_pid: the process id of the parent, read while it lived.
    """
    if os.getppid() != maker_pid or _is_exiting(maker_pid):
        shutil.rmtree(folder, ignore_errors=True)


def _is_exiting(pid: int) -> bool:
    """Return whether a process has ended or is ending.

    Its sockets close before it leaves its children: one that sees that may still be its child.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return True
    return bool(int(fields[FLAGS_FIELD]) & EXITING_FLAG)
