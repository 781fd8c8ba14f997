"""Statistics of an instance, and of each layer group of its pool, as the protocol carries them."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class GroupStats:
    """Page counts of one layer group, in small pages.

    :param name: of the group, like ``full``.
    :param used_pages: pages that requests use.
    :param cached_pages: pages kept for later prompts.
    :param evicted_pages: pages evicted so far.
    :param hit_tokens: tokens of cached pages that requests took so far.
    :param unwritten_pages: never used pages in large pages with a used page.
    :param stranded_pages: pages in these that are cached or empty again; see
        :class:`kvell.memory.PoolTotals`.
    :param checkpoint_pages: pages written so far for states on the way of a prompt.
    :param most_pages: pages that the group would have if the whole pool were its own.
    :param page_tokens: tokens of a page; 1 for states.
    :param page_bytes: bytes of a page.
    """

    name: str
    used_pages: int
    cached_pages: int
    evicted_pages: int
    hit_tokens: int
    unwritten_pages: int = 0
    stranded_pages: int = 0
    checkpoint_pages: int = 0
    most_pages: int = 0
    page_tokens: int = 0
    page_bytes: int = 0


@dataclass(frozen=True)
class Stats:
    """Counters and gauges of one instance; counters never fall within an incarnation.

    :param incarnation: tells this start of the instance from its other starts.
    :param step: steps so far.
    :param running: requests in the running batch now.
    :param waiting: requests that wait in the instance now.
    :param large_pages: large pages of the pool.
    :param empty_large_pages: large pages that nobody uses and that cache nothing.
    :param kv_cache_usage: used part of the pool's bytes, 0 to 1.
    :param prompt_tokens: prompt tokens of all requests so far, cached ones included.
    :param output_tokens: output tokens so far.
    :param prefix_cache_queries: prompt tokens that were looked up in the prefix cache.
    :param prefix_cache_hits: prompt tokens that were found there.
    :param preemptions: how often a request gave up its pages.
    :param finished: requests that ended, by their reason.
    :param rungs: how often a page was got, by the rung of the ladder that had one.
    :param groups: page counts of every layer group.
    :param protected_prefixes: shared prefixes that eviction spares.
    :param protected_tokens: tokens of these.
    :param spec_decode_drafts: steps of a request with draft tokens.
    :param spec_decode_draft_tokens: draft tokens.
    :param spec_decode_accepted_tokens: draft tokens that were accepted.
    :param spec_decode_accepted_by_position: the same by their position after the newest token.
    :param step_tokens: tokens that all steps computed.
    :param steps_by_size: steps by the tokens that they computed, up to 1, 8, 16, 32 and so on to
        16384, and above.
    :param large_page_bytes: size of a large page.
    :param memory: chunks of a shared pool by owner and state, and how many moved; empty where KV
        cache and activations share none.
    :param buffer: large pages and holders of the CPU buffer, and bytes copied out and in; empty
        without one.
    :param problems: contradictions that the audit found; None if it was not asked for.
    :param misses: prompts whose prefix was not found as far as it was asked for, by reason.
    :param sections: of 512 tokens: ``lent`` and ``borrowed`` now, ``returned`` from creditors,
        ``replaced`` by other creditors' and ``lost`` there so far.
    :param team: ``threads`` of the last step, and whether it went as ``shared`` with others; so
        far: ``thread_seconds`` that all had in steps, and of these ``lost_seconds``, when other
        programs ran on their processors; empty where no compiled pass computes.
    """

    incarnation: int
    step: int
    running: int
    waiting: int
    large_pages: int
    empty_large_pages: int
    kv_cache_usage: float
    prompt_tokens: int
    output_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    preemptions: int
    finished: dict[str, int] = field(default_factory=dict)
    rungs: dict[str, int] = field(default_factory=dict)
    groups: tuple[GroupStats, ...] = ()
    protected_prefixes: int = 0
    protected_tokens: int = 0
    spec_decode_drafts: int = 0
    spec_decode_draft_tokens: int = 0
    spec_decode_accepted_tokens: int = 0
    spec_decode_accepted_by_position: tuple[int, ...] = ()
    step_tokens: int = 0
    steps_by_size: tuple[int, ...] = ()
    large_page_bytes: int = 0
    memory: dict[str, int] = field(default_factory=dict)
    buffer: dict[str, int] = field(default_factory=dict)
    problems: tuple[str, ...] | None = None
    misses: dict[str, int] = field(default_factory=dict)
    sections: dict[str, int] = field(default_factory=dict)
    team: dict[str, float] = field(default_factory=dict)
