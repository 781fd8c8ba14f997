"""Tables and bars of one snapshot of a server; pure functions."""

from collections import Counter
from collections.abc import Mapping

import msgspec
from msgspec import Struct
from rich.console import Group
from rich.text import Text

from kvell.byte_sizes import format_bytes
from kvell.cli.terminal.tables import FittingTable
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


BAR_CELLS = 30
USED, CACHED, WITHHELD, FREE = "█", "▒", "╱", "·"
MOST_REQUESTS = 20
LEAST_LOST = 0.01
INSTANCE_HEADERS = (
    "instance",
    "state",
    "pid",
    "KV memory",
    "of",
    "buffer",
    "sections",
    "threads",
    "running",
    "waiting",
    "preempted",
    "hits",
    "tokens/s",
)
INSTANCE_TEXTS = ("state", "KV memory", "of", "buffer", "sections", "threads")
INSTANCE_LEAST_FIRST = (
    "threads",
    "buffer",
    "preempted",
    "sections",
    "of",
    "hits",
    "waiting",
    "tokens/s",
    "running",
    "KV memory",
)
REQUEST_HEADERS = (
    "request",
    "instance",
    "state",
    "prompt",
    "output",
    "age",
    "first token",
    "per token",
)
REQUEST_TEXTS = ("instance", "state")
REQUEST_LEAST_FIRST = ("per token", "first token", "request", "age", "prompt", "output")
"""Columns that a narrow terminal lacks, the least important first."""


def screen(seen: ServerSnapshot, before: ServerSnapshot | None = None) -> Group:
    """Return the whole screen.

    :param before: previous snapshot, for rates; None for the first.
    """
    waits = [] if seen.requests.idle_wait is None else [_idle_wait(seen.requests.idle_wait)]
    return Group(*waits, _instances(seen, before), _requests(seen), _misses(seen))


def memory_bar(stats: InstanceStats, cells: int = BAR_CELLS) -> str:
    """Return the pool as a bar: used, cached, withheld for activations, free.

    A part that is not empty has at least one cell.
    """
    uses = stats.bytes
    parts = [(USED, uses.kv_used), (CACHED, uses.kv_cached), (WITHHELD, uses.withheld)]
    bar = "".join(
        sign * max(1, round(cells * size / uses.pool)) for sign, size in parts if size and uses.pool
    )
    return bar[:cells].ljust(cells, FREE)


def sections_text(sections: Mapping[str, int]) -> str:
    """Return the sections that an instance lends and borrows, and those recalled so far."""
    now = [f"{sections[name]:,} {name}" for name in ("lent", "borrowed") if sections.get(name)]
    recalled = sum(sections.get(name, 0) for name in ("returned", "replaced", "lost"))
    return ", ".join([*now, *([f"{recalled:,} recalled"] if recalled else [])]) or "–"


def threads_text(now: Mapping[str, float], before: Mapping[str, float]) -> str:
    """Return the threads of a step, and the share of their time that other programs took.

    :param before: counters of the previous snapshot; empty: the share is of the whole run.
    """
    if not now:
        return "–"
    had, lost = (now[name] - before.get(name, 0.0) for name in ("thread_seconds", "lost_seconds"))
    if had < 0 or lost < 0:  # the instance was restarted
        had, lost = now["thread_seconds"], now["lost_seconds"]
    share = lost / had if had else 0.0
    return f"{now['threads']:.0f}" + (f" −{share:.0%}" if share >= LEAST_LOST else "")


def tokens_per_second(
    seen: ServerSnapshot, before: ServerSnapshot | None, instance_id: str
) -> float | None:
    """Return output tokens per second between two snapshots; None if unknown."""
    now, then = _stats(seen, instance_id), _stats(before, instance_id)
    if before is None or now is None or then is None:
        return None
    seconds = seen.at_seconds - before.at_seconds
    tokens = now.output_tokens - then.output_tokens
    return tokens / seconds if seconds > 0 and tokens >= 0 else None  # fewer: it was restarted


def _instances(seen: ServerSnapshot, before: ServerSnapshot | None) -> FittingTable:
    legend = f"{USED} used  {CACHED} cached  {WITHHELD} withheld for activations  {FREE} free"
    title = f"{legend}   ({seen.requests.waiting:,} requests wait in front)"
    rows = []
    for instance in seen.instances:
        then = _stats(before, instance.id)
        rate = tokens_per_second(seen, before, instance.id)
        rows.append(_instance(instance, rate, {} if then is None else then.team))
    return FittingTable(title, INSTANCE_HEADERS, rows, INSTANCE_LEAST_FIRST, INSTANCE_TEXTS)


def _instance(
    instance: Instance, rate: float | None, team_before: Mapping[str, float]
) -> tuple[str, ...]:
    stats = instance.stats
    pid = "–" if instance.pid is None else str(instance.pid)
    if stats is None:
        return (instance.id, instance.state, pid, "no answer", *"–" * 9)
    buffer = stats.bytes.cpu_buffer
    hits = f"{stats.hit_tokens / stats.query_tokens:.0%}" if stats.query_tokens else "–"
    return (
        instance.id,
        instance.state + (f", {instance.restarts} restarts" if instance.restarts else ""),
        pid,
        memory_bar(stats),
        format_bytes(stats.bytes.pool),
        "–" if buffer is None else format_bytes(buffer),
        sections_text(stats.sections),
        threads_text(stats.team, team_before),
        f"{stats.running:,}",
        f"{stats.waiting:,}",
        f"{stats.preemptions:,}",
        hits,
        "–" if rate is None else f"{rate:,.0f}",
    )


def _requests(seen: ServerSnapshot) -> FittingTable:
    rows = seen.requests.rows[:MOST_REQUESTS]
    more = seen.requests.running + seen.requests.waiting - len(rows)
    title = "requests" + (f" (and {more:,} more)" if more else "")
    cells = [_request(row) for row in rows]
    return FittingTable(title, REQUEST_HEADERS, cells, REQUEST_LEAST_FIRST, REQUEST_TEXTS)


def _request(request: Request) -> tuple[str, ...]:
    ttft, tpot = request.ttft_seconds, request.tpot_seconds
    return (
        request.id,
        request.instance or "–",
        request.state,
        f"{request.prompt_tokens:,}",
        f"{request.output_tokens:,}",
        f"{request.age_seconds:.1f} s",
        "–" if ttft is None else f"{ttft * 1000:,.0f} ms",
        "–" if tpot is None else f"{tpot * 1000:,.1f} ms",
    )


def _idle_wait(wait: IdleSpell) -> Text:
    begin = f"{wait.requests:,} requests wait for {wait.seconds:.0f} s"
    return Text(f"{begin} although every instance is idle: {wait.why}", style="bold red")


def _misses(seen: ServerSnapshot) -> Text:
    counts = Counter(
        miss.reason
        for instance in seen.instances
        if instance.pages is not None
        for miss in instance.pages.misses
    )
    if not counts:
        return Text("no prompt missed its prefix lately")
    reasons = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in counts.most_common())
    return Text(f"why the last {counts.total()} misses missed: {reasons}")


def _stats(seen: ServerSnapshot | None, instance_id: str) -> InstanceStats | None:
    instances = () if seen is None else seen.instances
    return next((instance.stats for instance in instances if instance.id == instance_id), None)
