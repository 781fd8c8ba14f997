"""Requests whose placement the front names."""

from collections.abc import Sequence

from tests.engine.moving.handing_over import (
    Cluster,
    Entry,
)
from tests.engine.moving.machine import cluster_of, prompt_of

NAME = "r"

LARGE = 6


"""Large pages of each pool, with 48 tokens."""

PROMPT = prompt_of(1, 90)

TO_BOTH = (("p", 4), ("d", 5), ("e", 4))


def placed(
    placement: Sequence[tuple[str, int]] = TO_BOTH, max_tokens: int = 12, large: int = LARGE
) -> Cluster:
    """A cluster with a request of 102 tokens, in pools of 48 tokens."""
    cluster = cluster_of("full", large)
    assert cluster.limits.max_model_len < len(PROMPT) or large > LARGE
    cluster.submit(NAME, Entry(PROMPT, max_tokens, "", placement=placement), "p", "")
    return cluster


def answered(cluster: Cluster, name: str = NAME) -> bool:
    return bool(cluster.entries[name].emitted)


def starts(cluster: Cluster, at: str = "p", name: str = NAME) -> list[int]:
    plans = cluster.instances[at].plans
    return [work.start for plan in plans for work in plan.work if work.request_id == name]
