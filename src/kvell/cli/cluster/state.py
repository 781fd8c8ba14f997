"""What a server says of its instances: the body of ``GET /cluster``.

Fields that are not named here are left out of tables, and shown by ``--json``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Pages:
    """KV memory of an instance."""

    large_pages: int
    empty_large_pages: int
    free_bytes: int


@dataclass(frozen=True)
class LentSections:
    """Sections of KV cache that an instance lends to others, and that others lend to it."""

    lent: int = 0
    borrowed: int = 0


@dataclass(frozen=True)
class Instance:
    """One instance.

    :param pid: None while there is no process.
    :param role: that it started with, and ``serves_as`` the one that it has now.
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
    """The process that clients talk to.

    :param waiting: requests that no instance has yet.
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
class Answer:
    """A server's answer, read and as it came."""

    cluster: Cluster
    raw: Mapping[str, Any]
