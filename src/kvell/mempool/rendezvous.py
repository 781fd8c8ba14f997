"""Where instances of one host meet: a folder that says where each listens, and what all know."""

import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from kvell.mempool.transfers.methods import ALWAYS, COPIED, SENT, StreamCosts
from kvell.wire.endpoints import Endpoint

PageTransport = Literal["memory", "tcp"]
"""How pages get from one instance to another: read in its memory, which must be this host's, or
sent over TCP."""
PoolRole = Literal["mixed", "prefill", "decode"]
"""What an instance does: everything, compute prompts, or go on with requests behind them."""
PdCaching = Literal[0, 1, 2, 3]
"""Which of prefill and decode instances cache what (MemServe, PD-Caching-1 to -3): 0 none, 1
prefill instances, 2 decode ones too, 3 prefill instances get the answers too."""
PD_CACHINGS: tuple[PdCaching, ...] = (0, 1, 2, 3)
DEFAULT_PD_CACHING: PdCaching = 3
TransferMethod = Literal["cheapest", "by_layer", "by_request"]
"""When a request's pages are pulled by whom it is handed over to: while its last chunk is computed,
behind that, or what is quicker of both."""
SECRET = "secret"
"""File in the folder that holds what all instances of the pool know."""
SECRET_BYTES = 32
ADDRESS_BYTES = 256
"""Most bytes of a file that says where an instance listens."""


class Rendezvous(Protocol):
    """Where an instance meets others: a folder of its host, or a network (``network_place``)."""

    @property
    def instance(self) -> str:
        """Its name, unique in the pool."""
        ...

    @property
    def pool(self) -> str:
        """Name of the pool; instances of different ones refuse each other."""
        ...

    @property
    def role(self) -> PoolRole:
        """What it does."""
        ...

    @property
    def pd_caching(self) -> PdCaching:
        """Who caches what."""
        ...

    def secret(self) -> bytes:
        """What all instances of the pool know."""
        ...

    def address(self) -> Endpoint:
        """Where to listen."""
        ...

    def publish(self, address: Endpoint | None) -> None:
        """Let others find the address at which this instance listens."""
        ...

    def address_of(self, instance: str) -> Endpoint:
        """Where another instance listens.

        :raises OSError: when that is not known.
        """
        ...


@dataclass(frozen=True)
class FolderRendezvous:
    """Where an instance meets the others of its host.

    :param instance: its name, unique in the folder.
    :param folder: with a socket for each instance, or a file with the TCP address at which it
        listens, for their owner alone.
    :param role: what it does.
    :param pd_caching: who caches what.
    :param transport: how others read this instance's pages, and it theirs.
    :param method: when others read what is handed over to them.
    """

    instance: str
    folder: Path
    role: PoolRole = "mixed"
    pd_caching: PdCaching = DEFAULT_PD_CACHING
    transport: PageTransport = "memory"
    method: TransferMethod = "cheapest"

    @property
    def pool(self) -> str:
        """Name of the pool."""
        return self.folder.name

    def secret(self) -> bytes:
        """What all instances of the pool know."""
        return (self.folder / SECRET).read_bytes()

    def address(self) -> Endpoint:
        """Where to listen."""
        if self.transport == "tcp":
            return "tcp://127.0.0.1:0"
        return self.folder / self.instance

    def publish(self, address: Endpoint | None) -> None:
        """Let others find the address at which this instance listens, all of it or nothing."""
        if not isinstance(address, str):
            return  # the socket is there itself
        with tempfile.NamedTemporaryFile(
            "w", dir=self.folder, prefix=".address-", delete=False
        ) as file:
            file.write(address)
        Path(file.name).replace(self.folder / self.instance)

    def address_of(self, instance: str) -> Endpoint:
        """Where another instance listens.

        :raises OSError: when what it published cannot be read.
        """
        path = self.folder / instance
        if not path.is_file():
            return path
        with path.open("rb") as file:
            return file.read(ADDRESS_BYTES).decode("ascii", "replace")


def stream_costs(place: Rendezvous | None) -> StreamCosts | None:
    """What it costs when others read pages that are being computed; None: they never do."""
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
    """Write the secret of a new pool into an empty folder."""
    path = folder / SECRET
    path.touch(0o600)
    path.write_bytes(secrets.token_bytes(SECRET_BYTES))
