"""The use of memory at one moment, and means over the steps of a run.

``needed``      bytes of tokens that a later step may still read, by each layer's rule
``allocated``   used pages, and never-written pages of large pages that hold a used one
``stranded``    other pages of such large pages, cached or empty again, which no other
                group can get

Every page's bytes are its stride, padding included.  A shared page counts once.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvell.memory import Facts, GroupKind, GroupPolicy, GroupSpec, LayerSpec, Layout, policy_of
from kvell.pages.snapshot import PoolTotals
from kvell.prefix.groups.needs import dropped_tokens, end_position, kept_from, kept_to, live_units
from kvell.simulator.report.timeline import GroupMoment


@dataclass(frozen=True)
class Sample:
    """All groups at one moment."""

    running: int
    leaves_waiting: bool
    groups: tuple[GroupMoment, ...]


class RunningRequest(NamedTuple):
    """The progress of a running request.

    :param hit_tokens: those of them that came from the cache.
    """

    computed: int
    hit_tokens: int
    facts: Facts = Facts(0)
    model: str = ""


class MemoryMeter:
    """Sampler of the pool that uses token counts and pool totals alone, without a look at pages.

    The need depends on the model's layers, not on the groups a manager puts them into: a sliding
    layer that holds every token needs only its window.
    """

    def __init__(self, layout: Layout, layers: Sequence[LayerSpec]) -> None:
        self._groups = [(group, _parts(group, layers)) for group in layout.groups]

    def sample(
        self, running: Collection[RunningRequest], totals: PoolTotals, *, leaves_waiting: bool
    ) -> Sample:
        groups = tuple(
            GroupMoment(
                group.name,
                needed_bytes(group, parts, running, totals.used_pages[g]),
                totals.used_pages[g] * group.page_stride_bytes,
                totals.unwritten_pages[g] * group.page_stride_bytes,
                totals.stranded_pages[g] * group.page_stride_bytes,
                totals.cached_pages[g] * group.page_stride_bytes,
            )
            for g, (group, parts) in enumerate(self._groups)
        )
        return Sample(len(running), leaves_waiting, groups)


Parts = Mapping[tuple[GroupKind, GroupPolicy], int]
"""Bytes of one token (or state) over the layers of each kind inside a group."""


def needed_bytes(
    group: GroupSpec, parts: Parts, running: Collection[RunningRequest], used_pages: int
) -> int:
    """Return the bytes that a later step may still read, shared ones counted once.

    Only whole pages are shared, so every reference to a page beyond the first subtracts
    ``page_tokens``.  Where requests share the page in which their windows begin, the result
    is up to a page too small, never too large.
    """
    own = (group.kind, policy_of(group))
    mine = [r for r in running if r.model == group.model]
    references = sum(_held_pages(group, own[1], r) for r in mine)
    repeated = max(0, references - used_pages) * group.page_tokens
    needed = 0
    for (kind, policy), unit_bytes in parts.items():
        live = sum(live_units(kind, policy, r.facts, r.computed) for r in mine)
        shared = repeated
        if (kind, policy) != own:
            begins = ((r.hit_tokens, policy.active_start(r.computed)) for r in mine)
            shared = min(shared, sum(max(0, hit - begin) for hit, begin in begins))
        needed += max(0, live - shared) * unit_bytes
    return needed


def _held_pages(group: GroupSpec, policy: GroupPolicy, request: RunningRequest) -> int:
    facts, computed = request.facts, request.computed
    first = kept_from(group, policy, facts, computed)
    if dropped_tokens(group, facts) and computed >= facts.prompt_tokens:
        return kept_to(group, facts, computed)
    return end_position(group, facts, computed, computed) - first


def _parts(group: GroupSpec, layers: Sequence[LayerSpec]) -> Parts:
    parts: Counter[tuple[GroupKind, GroupPolicy]] = Counter()
    for layer in layers:
        if layer.index in group.layers and _may_hold(group, layer, layers):
            alone = replace(group, kind=layer.kind, window_tokens=layer.window_tokens)
            parts[layer.kind, policy_of(alone)] += layer.token_bytes
    return parts


def _may_hold(group: GroupSpec, layer: LayerSpec, layers: Sequence[LayerSpec]) -> bool:
    if layer.kv_of is not None:
        return False
    if (layer.model, layer.is_draft) != (group.model, group.is_draft):
        return False
    if layer.kind is group.kind:
        return True
    same = [other for other in layers if other.index == layer.index and other.kind is group.kind]
    in_one = (layer.kind is GroupKind.STATE) == (group.kind is GroupKind.STATE)
    return in_one and (not same or group.layers.count(layer.index) > 1)


@dataclass(frozen=True)
class Means:
    """Means over steps: running requests; waste and stranded as fractions."""

    batch: float
    waste: float
    stranded: float


class StepMeans:
    """Collector of samples; all arithmetic of the report is here."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.samples: list[Sample] = []

    def means(self, *, saturated: bool = False) -> Means:
        samples = [s for s in self.samples if s.leaves_waiting or not saturated]
        return Means(
            mean([s.running for s in samples]),
            mean([waste(s.groups) for s in samples]),
            mean([self._stranded(s.groups) for s in samples]),
        )

    def group_figures(self) -> list[dict[str, float | str]]:
        """Return each group's means over all steps, in bytes and as fractions."""
        return [
            self._figures(group, [s.groups[g] for s in self.samples])
            for g, group in enumerate(self._layout.groups)
        ]

    def _figures(self, group: GroupSpec, samples: Sequence[GroupMoment]) -> dict[str, float | str]:
        return {
            "name": group.name,
            "layers": len(group.layers),
            "page_tokens": group.page_tokens,
            "page_stride_bytes": group.page_stride_bytes,
            "needed_bytes_mean": mean([s.needed_bytes for s in samples]),
            "allocated_bytes_mean": mean([s.allocated_bytes for s in samples]),
            "cached_bytes_mean": mean([s.cached_bytes for s in samples]),
            "waste": mean([waste([s]) for s in samples]),
            "stranded": mean([self._stranded([s]) for s in samples]),
        }

    def _stranded(self, groups: Sequence[GroupMoment]) -> float:
        return sum(group.stranded_bytes for group in groups) / self._layout.pool_bytes


def waste(groups: Sequence[GroupMoment]) -> float:
    allocated = sum(group.allocated_bytes for group in groups)
    return 1 - sum(group.needed_bytes for group in groups) / allocated if allocated else 0.0


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
