"""The parts of ``/debug/pages`` that ``kvell top`` shows."""

import msgspec
from msgspec import Struct

from kvell.errors import ChangeSomething
from kvell.wire.decoding import MalformedError, decode


class Uses(Struct, frozen=True):
    """The bytes of a pool by use; None if activations share no pool, or without a CPU buffer."""

    pool: int
    kv_used: int
    kv_cached: int
    withheld: int
    activation: int | None = None
    cpu_buffer: int | None = None


class InstanceStats(Struct, frozen=True):
    """The counters and gauges of an instance; ``sections`` counts loans of sections, ``team`` the
    processor time that the instance's threads had and lost."""

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
    """The reason why a part of a prompt was not in the cache."""

    reason: str


class InstancePages(Struct, frozen=True):
    """The pages of an instance, of which only the misses are shown."""

    misses: tuple[Miss, ...] = ()


class Instance(Struct, frozen=True):
    """One instance; without figures if it did not answer in time."""

    id: str
    state: str
    restarts: int
    pid: int | None = None
    stats: InstanceStats | None = None
    pages: InstancePages | None = None


class Request(Struct, frozen=True):
    """One request that has not ended."""

    id: str
    instance: str
    state: str
    prompt_tokens: int
    output_tokens: int
    age_seconds: float
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None


class IdleSpell(Struct, frozen=True):
    """The requests that wait while all instances are idle, their wait and its reason."""

    requests: int
    seconds: float
    why: str


class Requests(Struct, frozen=True):
    """The numbers of requests in flight and waiting, and rows of the first of them."""

    running: int
    waiting: int
    rows: tuple[Request, ...] = ()
    idle_wait: IdleSpell | None = None


class ServerSnapshot(Struct, frozen=True):
    """One snapshot of a server."""

    at_seconds: float
    instances: tuple[Instance, ...]
    requests: Requests


_SEEN = msgspec.json.Decoder(ServerSnapshot)


def read(body: bytes) -> ServerSnapshot:
    """Decode one snapshot.

    :raises ChangeSomething: if the body has another form.
    """
    try:
        return decode(_SEEN, body)
    except MalformedError as error:
        problem = f"sends its pages in another form ({error})"
        raise ChangeSomething("--url", "…", problem, "use the server's version") from error
