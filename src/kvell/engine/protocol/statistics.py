"""Statistics of an instance and of each layer group of its pool, as sent by the protocol."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class GroupStats:
    """Page counts of one layer group, in small pages.

    :param name: the group's name, like ``full``.
    :param used_pages: pages that requests use.
    :param cached_pages: pages cached for later prompts.
    :param evicted_pages: pages evicted so far.
    :param hit_tokens: tokens of cached pages that requests have reused so far.
    :param unwritten_pages: never used pages in large pages with a used page.
    :param stranded_pages: pages in such large pages that are cached or empty again; see
        :class:`kvell.memory.PoolTotals`.
    :param checkpoint_pages: pages written so far for states inside a prompt.
    :param most_pages: pages that the group would have if it owned the whole pool.
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

    :param incarnation: number that distinguishes this start of the instance from others.
    :param step: steps so far.
    :param running: requests in the running batch now.
    :param waiting: requests that wait in the instance now.
    :param large_pages: large pages of the pool.
    :param empty_large_pages: large pages that are neither used nor cached.
    :param kv_cache_usage: used part of the pool's bytes, 0 to 1.
    :param prompt_tokens: prompt tokens of all requests so far, cached ones included.
    :param output_tokens: output tokens so far.
    :param prefix_cache_queries: prompt tokens that were looked up in the prefix cache.
    :param prefix_cache_hits: prompt tokens that were found in it.
    :param preemptions: number of preemptions.
    :param finished: requests that ended, by reason.
    :param rungs: page allocations, by the rung of the ladder that provided the page.
    :param groups: page counts of every layer group.
    :param protected_prefixes: shared prefixes that eviction spares.
    :param protected_tokens: tokens of protected prefixes.
    :param spec_decode_drafts: steps of a request with draft tokens.
    :param spec_decode_draft_tokens: draft tokens.
    :param spec_decode_accepted_tokens: draft tokens that were accepted.
    :param spec_decode_accepted_by_position: accepted draft tokens, by position in the draft.
    :param step_tokens: tokens that all steps computed.
    :param steps_by_size: steps by the number of tokens that they computed: up to 1, 8, 16, 32 and
        so on to 16384, and above.
    :param large_page_bytes: size of a large page.
    :param memory: chunks of a pool that KV cache and activations share, by owner and state, and how
        many moved; empty without such a pool.
    :param buffer: large pages and holders of the CPU buffer, and bytes copied out and in; empty
        without a buffer.
    :param problems: contradictions that the audit found; None without an audit.
    :param misses: prompts whose prefix was not cached whole, by reason.
    :param sections: numbers of sections of 512 tokens: ``lent`` and ``borrowed`` now, ``returned``
        from creditors, ``replaced`` by those of other creditors and ``lost`` there so far.
    :param team: ``threads`` of the last step, and whether its processors were ``shared``; so far:
        ``thread_seconds`` of all threads in steps, and the part ``lost_seconds`` in which other
        programs ran on their processors; empty without a compiled pass.
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
