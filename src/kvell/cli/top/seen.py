"""What ``/debug/pages`` tells, as far as ``kvell top`` shows it."""

import msgspec
from msgspec import Struct

from kvell.errors import ChangeSomething
from kvell.wire.decoding import MalformedError, decode


class Uses(Struct, frozen=True):
    """How a pool's bytes are divided; None where nothing is shared, and without a CPU buffer."""

    pool: int
    kv_used: int
    kv_cached: int
    lent: int
    activation: int | None = None
    cpu_buffer: int | None = None


class InstanceStats(Struct, frozen=True):
    """Counters and gauges of an instance; ``sections`` are those that instances lend each other,
    ``team`` is what its threads had and lost."""

    running: int
    waiting: int
    bytes: Uses
    query_tokens: int
    hit_tokens: int
    output_tokens: int
    prompt_tokens: int
    preemptions: int
    sections: dict[str, int] = {}
    team: dict[str, float] = {}


class Miss(Struct, frozen=True):
    """Why a part of a prompt was not in the cache."""

    reason: str


class InstancePages(Struct, frozen=True):
    """Of an instance's pages only the misses are shown here."""

    misses: tuple[Miss, ...] = ()


class Instance(Struct, frozen=True):
    """One instance; without figures if it did not answer in time."""

    id: str
    state: str
    restarts: int
    stats: InstanceStats | None = None
    pages: InstancePages | None = None


class Request(Struct, frozen=True):
    """One request that did not end yet."""

    id: str
    instance: str
    state: str
    prompt_tokens: int
    output_tokens: int
    age_seconds: float
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None


class IdleSpell(Struct, frozen=True):
    """Requests that wait though no instance has any, for so long, and why."""

    requests: int
    seconds: float
    why: str


class Requests(Struct, frozen=True):
    """Requests in flight and waiting; the first of them one by one."""

    running: int
    waiting: int
    rows: tuple[Request, ...] = ()
    idle_wait: IdleSpell | None = None


class Seen(Struct, frozen=True):
    """One look at a server."""

    at_seconds: float
    instances: tuple[Instance, ...]
    requests: Requests


_SEEN = msgspec.json.Decoder(Seen)


def read(body: bytes) -> Seen:
    """Read one look.

    :raises ChangeSomething: if it is not what ``kvell serve`` tells.
    """
    try:
        return decode(_SEEN, body)
    except MalformedError as error:
        problem = f"tells of its pages in another form ({error})"
        raise ChangeSomething("--url", "…", problem, "use the server's version") from error
