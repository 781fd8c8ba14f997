"""A table of the instances of a server."""

from collections.abc import Sequence

from kvell.byte_sizes import format_bytes
from kvell.cli.cluster.client import Cluster, Instance
from kvell.cli.terminal.figures import wide_console
from kvell.cli.terminal.tables import FittingTable, made_table

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
LEAST_FIRST = (
    "machine",
    "large pages (empty)",
    "output tokens left",
    "prompt tokens left",
    "lent, borrowed",
    "memory",
    "free KV",
    "restarts",
    "requests",
)
"""Columns that a narrow terminal lacks, the least important first."""


def print_cluster(cluster: Cluster) -> None:
    wide_console().print(cluster_table(cluster))


def cluster_table(cluster: Cluster) -> FittingTable:
    """Return the table of all instances, with their machines if there are several.

    The last line is the sum of the whole server.
    """
    rows = [*map(_row, cluster.instances), _total(cluster)]
    headers: tuple[str, ...] = HEADERS
    if any(instance.host for instance in cluster.instances):
        headers = (*HEADERS, "machine")
        machines = (*(instance.host for instance in cluster.instances), "")
        rows = [(*row, machine) for row, machine in zip(rows, machines, strict=True)]
    title = f"routing {cluster.routing}, {cluster.front.waiting:,} requests wait for an instance"
    return FittingTable(title, headers, rows, LEAST_FIRST)


def print_rows(title: str, headers: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    wide_console().print(made_table(title, headers, rows))


def _row(instance: Instance) -> tuple[str, ...]:
    pages = instance.pages
    has_changed = instance.serves_as not in ("", instance.role)
    return (
        f"{instance.id} as {instance.serves_as}" if has_changed else instance.id,
        instance.state,
        "–" if instance.pid is None else str(instance.pid),
        str(instance.restarts),
        f"{instance.in_flight:,}",
        f"{instance.outstanding_prompt_tokens:,}",
        f"{instance.outstanding_output_tokens:,}",
        f"{pages.large_pages:,} ({pages.empty_large_pages:,})",
        format_bytes(pages.free_bytes),
        f"{instance.sections.lent:,}, {instance.sections.borrowed:,}",
        format_bytes(instance.contract_bytes),
    )


def _total(cluster: Cluster) -> tuple[str, ...]:
    several = cluster.instances
    return (
        "front and all",
        "",
        str(cluster.front.pid),
        str(sum(instance.restarts for instance in several)),
        f"{sum(instance.in_flight for instance in several):,}",
        f"{sum(instance.outstanding_prompt_tokens for instance in several):,}",
        f"{sum(instance.outstanding_output_tokens for instance in several):,}",
        "",
        format_bytes(sum(instance.pages.free_bytes for instance in several)),
        "",
        format_bytes(cluster.contract_bytes),
    )
