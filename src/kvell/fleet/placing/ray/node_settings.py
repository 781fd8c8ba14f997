"""The command line of a node of Ray."""

import json
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from kvell.fleet.placing.ray.room import SHARED, SHARED_UNITS

RAY = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats")
CLIENTS_PORT = 10001
STORE_BYTES = 80_000_000
"""Size of Ray's object store, about the least that Ray takes: Kvell puts nothing there."""


@dataclass(frozen=True)
class NodeSettings:
    """Settings of a node.

    :param joins: ``host:port`` of the cluster; "" starts a new one.
    :param host: address of this machine; "" lets Ray find it.
    :param port: port of a new cluster; 0 takes a free one.
    :param processors: number that the node offers; None for all.
    :param clients_port: port of ``ray://`` addresses of a new cluster, which Ray always serves; 0
        takes a free one.
    :param is_shared: whether any number of instances share its processors.
    """

    joins: str = ""
    host: str = ""
    port: int = 0
    processors: int | None = None
    clients_port: int = CLIENTS_PORT
    is_shared: bool = False

    def words(self, folder: Path) -> list[str]:
        words = [*RAY, f"--object-store-memory={STORE_BYTES}"]
        if self.joins:
            words += [f"--address={self.joins}"]
        else:
            words += ["--head", f"--port={self.port}", "--include-dashboard=false"]
            words += [f"--temp-dir={folder}"]
            words += [f"--ray-client-server-port={self.clients_port or _free_port()}"]
        if self.host:
            words += [f"--node-ip-address={self.host}"]
        if self.processors is not None:
            words += [f"--num-cpus={self.processors}"]
        if self.is_shared:
            words += [f"--resources={json.dumps({SHARED: SHARED_UNITS})}"]
        return words


def _free_port() -> int:
    """Return a port that is free now; Ray itself would not choose one."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
