"""Addresses of ``--cluster``: a running Ray cluster, or one that is started for a server."""

import logging
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from kvell.cli.terminal.environment import ray_environment, take_ray_token
from kvell.cli.terminal.progress import progress_bar
from kvell.errors import ChangeSomething

logger = logging.getLogger(__name__)

LOCAL_RAY = "local-ray"
AUTO = "auto"
LOCAL_HOST = "127.0.0.2"
"""The loopback address of a local Ray; Ray would replace 127.0.0.1 by the machine's address."""
TOKEN_BYTES = 32
NAME = re.compile(r"[A-Za-z0-9._-]{1,40}")


def check_cluster(cluster: str) -> None:
    """Check the value of ``--cluster``, and that Ray is installed.

    :raises ChangeSomething: if the address is invalid, or Ray is not installed.
    """
    from kvell.fleet.placing.opening import check_ray

    if cluster not in (LOCAL_RAY, AUTO):
        text = cluster if "://" in cluster else f"ray://{cluster}"
        try:
            parts = urlsplit(text)
            is_address = parts.scheme == "ray" and parts.hostname and parts.port
        except ValueError:
            is_address = False
        if not is_address:
            remedy = f"write it like ray://10.0.0.1:10001, 10.0.0.1:6379, {AUTO} or {LOCAL_RAY}"
            raise ChangeSomething("--cluster", cluster, "is not an address of a cluster", remedy)
    check_ray(cluster)


def check_name(name: str) -> None:
    """Check the name of a cluster.

    :raises ChangeSomething: if the name is invalid.
    """
    if not NAME.fullmatch(name):
        problem = "must be letters, digits, dots, dashes and underscores, at most 40"
        raise ChangeSomething("--cluster-name", name, problem, "use one like kvell")


@contextmanager
def running_cluster(cluster: str | None) -> Iterator[str | None]:
    """Yield the address of a running cluster; a Ray that is started for it ends with the block.

    :raises KvellError: when Ray does not start.
    """
    if cluster != LOCAL_RAY:
        yield cluster
        return
    from kvell.fleet.placing.ray.node import RayNode
    from kvell.fleet.placing.ray.node_settings import NodeSettings

    take_ray_token(secrets.token_hex(TOKEN_BYTES))
    settings = NodeSettings(host=LOCAL_HOST, clients_port=0, is_shared=True)
    node = RayNode(settings, ray_environment())
    logger.info("starting a Ray of this machine")
    with progress_bar("starting Ray"):
        node.start()
    try:
        yield node.address
    finally:
        node.end()
