"""Which metrics and labels an expression of PromQL uses."""

from collections.abc import Iterator
from dataclasses import dataclass

import promql_parser

ADDED = frozenset({"job", "server", "instance"})
"""Labels that Prometheus adds to what it scrapes, with ``dashboards/prometheus.yml``."""
OF_PROMETHEUS = frozenset({"up"})
"""Metrics that Prometheus makes itself."""


@dataclass(frozen=True)
class Use:
    """A metric in an expression.

    :param labels: that choose among its series.
    """

    metric: str
    labels: frozenset[str]


@dataclass(frozen=True)
class Expression:
    """An expression as far as tests ask.

    :param grouped: labels of ``by``, ``on`` and the like.
    """

    uses: tuple[Use, ...]
    grouped: frozenset[str]


def read(expression: str) -> Expression:
    """Parse an expression.

    :raises ValueError: if it is none.
    """
    uses: list[Use] = []
    grouped: set[str] = set()

    def visit(node: object) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            matchers = [node.matchers.matchers, *node.matchers.or_matchers]
            labels = frozenset(one.name for group in matchers for one in group)
            uses.append(Use(node.name or "", labels))
        elif isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            grouped.update(node.modifier.labels)
        elif isinstance(node, promql_parser.BinaryExpr) and node.modifier is not None:
            grouped.update(node.modifier.matching.labels if node.modifier.matching else ())
            grouped.update(node.modifier.group_labels or ())

    promql_parser.walk(promql_parser.parse(expression), visit)
    return Expression(tuple(uses), frozenset(grouped))


def problems(
    expression: str,
    labels_by_series: dict[str, frozenset[str]],
    shown: frozenset[str] = frozenset(),
) -> Iterator[str]:
    """What in an expression no server exports.

    :param labels_by_series: that a server exports.
    :param shown: further labels that a legend or a message takes from the result.
    """
    found = read(expression)
    if not found.uses:
        yield "it uses no metric"
    known = set(ADDED)
    for use in found.uses:
        if use.metric in OF_PROMETHEUS:
            continue
        if use.metric not in labels_by_series:
            yield f"{use.metric} is not exported"
            continue
        own = labels_by_series[use.metric]
        known |= own
        for label in sorted(use.labels - own - ADDED):
            yield f"{use.metric} has no label {label}"
    for label in sorted((found.grouped | shown) - known):
        yield f"no metric of it has the label {label}"
