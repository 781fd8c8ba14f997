"""Shows the instances of a server as a table."""

from collections.abc import Sequence

from kvell.cli.cluster.state import Cluster, Instance
from kvell.cli.terminal.figures import wide_console
from kvell.cli.terminal.sizes import format_bytes
from kvell.cli.terminal.tables import made_table

MACHINE_COLUMNS = 40
"""Of a machine's address, the longest of IPv6."""
HEADERS = (
    "instance",
    "state",
    "pid",
    "restarts",
    "requests",
    "prompt tokens left",
    "output tokens left",
    "large pages (empty)",
    "free KV",
    "lent, borrowed",
    "memory",
)


def print_cluster(cluster: Cluster) -> None:
    """Print all instances to stdout, with their machines if they are on several.

    The last line is the whole server.
    """
    rows = [*map(_row, cluster.instances), _total(cluster)]
    headers: tuple[str, ...] = HEADERS
    if any(one.host for one in cluster.instances):
        headers = (*HEADERS, "machine")
        machines = (*(one.host for one in cluster.instances), "")
        rows = [(*row, machine) for row, machine in zip(rows, machines, strict=True)]
    title = f"routing {cluster.routing}, {cluster.front.waiting:,} requests wait for an instance"
    print_rows(title, headers, rows)


def print_rows(title: str, headers: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Print another table to stdout, in the same form."""
    wide_console(MACHINE_COLUMNS).print(made_table(title, headers, rows))


def _row(one: Instance) -> tuple[str, ...]:
    pages = one.pages
    has_changed = one.serves_as not in ("", one.role)
    return (
        f"{one.id} as {one.serves_as}" if has_changed else one.id,
        one.state,
        "–" if one.pid is None else str(one.pid),
        str(one.restarts),
        f"{one.in_flight:,}",
        f"{one.outstanding_prompt_tokens:,}",
        f"{one.outstanding_output_tokens:,}",
        f"{pages.large_pages:,} ({pages.empty_large_pages:,})",
        format_bytes(pages.free_bytes),
        f"{one.sections.lent:,}, {one.sections.borrowed:,}",
        format_bytes(one.contract_bytes),
    )


def _total(cluster: Cluster) -> tuple[str, ...]:
    several = cluster.instances
    return (
        "front and all",
        "",
        str(cluster.front.pid),
        str(sum(one.restarts for one in several)),
        f"{sum(one.in_flight for one in several):,}",
        f"{sum(one.outstanding_prompt_tokens for one in several):,}",
        f"{sum(one.outstanding_output_tokens for one in several):,}",
        "",
        format_bytes(sum(one.pages.free_bytes for one in several)),
        "",
        format_bytes(cluster.contract_bytes),
    )
