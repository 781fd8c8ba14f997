"""The state of a server's instances: the body of ``GET /cluster``.

Further fields are left out of tables, and shown by ``--json``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Pages:
    """The KV memory of an instance."""

    large_pages: int
    empty_large_pages: int
    free_bytes: int


@dataclass(frozen=True)
class LentSections:
    """The numbers of sections of KV cache that an instance lends and borrows."""

    lent: int = 0
    borrowed: int = 0


@dataclass(frozen=True)
class Instance:
    """One instance.

    :param pid: None while there is no process.
    :param role: role at its start; ``serves_as`` is the current one.
    :param host: address of its machine; "" is the front's.
    """

    id: str
    pid: int | None
    role: str
    state: str
    restarts: int
    in_flight: int
    outstanding_prompt_tokens: int
    outstanding_output_tokens: int
    pages: Pages
    contract_bytes: int
    host: str = ""
    serves_as: str = ""
    sections: LentSections = LentSections()


@dataclass(frozen=True)
class FrontState:
    """The state of the front.

    :param waiting: requests that wait for an instance.
    """

    pid: int
    waiting: int


@dataclass(frozen=True)
class Cluster:
    """All instances of a server."""

    routing: str
    front: FrontState
    instances: tuple[Instance, ...]
    contract_bytes: int


@dataclass(frozen=True)
class ClusterAnswer:
    """A server's answer, decoded and raw."""

    cluster: Cluster
    raw: Mapping[str, Any]
