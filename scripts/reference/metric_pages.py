"""The page of metrics: what the collectors of a server give, asked for once each."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import PurePosixPath

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from kvell.engine.protocol.statistics import GroupStats, InstanceFacts, InstanceReport, Stats
from kvell.server.metrics.front_metrics import HISTOGRAMS, ServerMetrics
from kvell.server.metrics.instance_metrics import InstanceFigures
from scripts.reference.rst import code, heading, page, table

PATH = PurePosixPath("metrics.rst")
OWN = "kvell:"
SECTIONS = ("Of the front", "Of each instance", "The server's process")
TEXT = """
``GET /metrics`` of a server, in Prometheus's text format.  Names that vLLM has too mean what they
mean there; only the prefix ``kvell:`` is another.  Times are in seconds, sizes in bytes or pages.
Counters of an instance start again at 0 when it is started again.
"""
REPORT = InstanceReport(InstanceFacts(0, 1, "model", 1, 1))
STATS = Stats(
    *(1,) * 6,
    kv_cache_usage=0.0,
    prompt_tokens=0,
    output_tokens=0,
    prefix_cache_queries=0,
    prefix_cache_hits=0,
    preemptions=0,
    spec_decode_accepted_by_position=(0,),
    rungs={"own_page": 0},
    groups=(GroupStats("full", *(0,) * 10),),
    memory={"kv_chunks": 0, "inflated": 0},
    buffer=dict.fromkeys(
        (
            *("large_pages", "used_large_pages", "holders", "out_bytes", "in_bytes"),
            *("cached_pages", "cache_hit_tokens", "parked", "logical_large_pages"),
        ),
        0,
    ),
)
"""What an instance says of itself that has everything: a shared pool, a buffer, draft tokens."""


@dataclass(frozen=True)
class KnownMetric:
    """A metric that a server can have.

    :param name: as Prometheus knows it.
    :param labels: names of its labels, without those of a histogram's buckets.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str

    @property
    def section(self) -> str:
        """The title of its section."""
        if not self.name.startswith(OWN):
            return SECTIONS[2]
        return SECTIONS[1] if "instance" in self.labels else SECTIONS[0]


def known_metrics() -> list[KnownMetric]:
    """Return every metric of a server, by section."""
    metrics = ServerMetrics("model")
    metrics.instances.instances = {"mixed-0": InstanceFigures(STATS, REPORT)}
    families = metrics.registry.collect()
    known = [_known(one, metrics.registry) for one in families]
    return sorted(known, key=lambda one: SECTIONS.index(one.section))


def _known(family: Metric, registry: CollectorRegistry) -> KnownMetric:
    name = f"{family.name}_total" if family.type == "counter" else family.name
    return KnownMetric(name, family.type, _labels(family, registry), family.documentation)


def _labels(family: Metric, registry: CollectorRegistry) -> tuple[str, ...]:
    names = dict.fromkeys(name for sample in family.samples for name in sample.labels)
    if not names:  # nothing was counted yet, so only the collector knows
        collector = registry._names_to_collectors.get(family.name)
        names = dict.fromkeys(getattr(family, "_labelnames", getattr(collector, "_labelnames", ())))
    return tuple(name for name in names if name != "le")


def metric_pages() -> dict[PurePosixPath, str]:
    """Return the text of the page by its path."""
    sections = [
        part
        for title, members in groupby(known_metrics(), key=lambda one: one.section)
        for part in (heading(title, 1), _table(members))
    ]
    return {PATH: page(heading("Metrics"), TEXT, *sections, *_buckets())}


def _table(metrics: Iterable[KnownMetric]) -> str:
    rows = (
        (code(one.name), one.kind, ", ".join(map(code, one.labels)), one.text) for one in metrics
    )
    return table(("Name", "Type", "Labels", "Meaning"), (35, 12, 23, 30), rows)


def _buckets() -> Iterator[str]:
    yield heading("Bounds of the histograms", 1)
    rows = (
        (code(OWN + name), ", ".join(f"{bound:g}" for bound in bounds))
        for name, (bounds, _) in HISTOGRAMS.items()
    )
    yield table(("Name", "Upper bounds of its buckets"), (40, 60), rows)
