"""Figures of an engine in this process, by the names of the server's metrics."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from kvell.engine.protocol.statistics import Stats

PREFIX = "kvell:"


@dataclass(frozen=True)
class Metric:
    """A figure.

    :param name: as at the server's ``/metrics``, without ``_total``.
    :param labels: what distinguishes figures of one name.
    """

    name: str
    labels: Mapping[str, str] = field(default_factory=dict, kw_only=True)


@dataclass(frozen=True)
class Gauge(Metric):
    """A value that may fall.

    :param name: as in :class:`Metric`.
    :param value: the value now.
    :param labels: as in :class:`Metric`.
    """

    value: float


@dataclass(frozen=True)
class Counter(Metric):
    """A number that only grows.

    :param name: as in :class:`Metric`.
    :param value: the number so far.
    :param labels: as in :class:`Metric`.
    """

    value: int


@dataclass(frozen=True)
class Vector(Metric):
    """Counters of one name, by position.

    :param name: as in :class:`Metric`.
    :param values: the numbers so far.
    :param labels: as in :class:`Metric`.
    """

    values: list[int]


GAUGES: Mapping[str, str] = MappingProxyType(
    {
        "num_requests_running": "running",
        "num_requests_waiting": "waiting",
        "kv_cache_usage_perc": "kv_cache_usage",
        "large_pages": "large_pages",
        "empty_large_pages": "empty_large_pages",
    }
)
"""Names of gauges, and the fields of their values."""
COUNTERS: Mapping[str, str] = MappingProxyType(
    {
        "steps": "step",
        "prompt_tokens": "prompt_tokens",
        "generation_tokens": "output_tokens",
        "prefix_cache_queries": "prefix_cache_queries",
        "prefix_cache_hits": "prefix_cache_hits",
        "num_preemptions": "preemptions",
        "spec_decode_num_drafts": "spec_decode_drafts",
        "spec_decode_num_draft_tokens": "spec_decode_draft_tokens",
        "spec_decode_num_accepted_tokens": "spec_decode_accepted_tokens",
    }
)
"""Names of counters, and the fields of their values."""


def metrics_of(stats: Stats) -> list[Metric]:
    """Return the figures of statistics."""
    accepted = "spec_decode_num_accepted_tokens_per_pos"
    return [
        *(Gauge(PREFIX + name, getattr(stats, of)) for name, of in GAUGES.items()),
        *(Counter(PREFIX + name, getattr(stats, of)) for name, of in COUNTERS.items()),
        *(
            Counter(f"{PREFIX}request_success", count, labels={"finished_reason": reason})
            for reason, count in stats.finished.items()
        ),
        Vector(PREFIX + accepted, list(stats.spec_decode_accepted_by_position)),
    ]
