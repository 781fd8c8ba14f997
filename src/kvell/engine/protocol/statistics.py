"""The reports of an instance: its facts, its load, and its counters on request."""

from dataclasses import dataclass, field

from msgspec import Struct

from kvell.cost.prices import USUAL_PRICES, ExecCosts
from kvell.engine.protocol.notices import IndexedGroup
from kvell.engine.protocol.placements import RequestPlacementEntry
from kvell.vocabulary import SECTION_TOKENS

MOST_LONGEST = 4
"""The most requests in ``LoadStats.longest``."""


class ModelLengths(Struct, frozen=True, forbid_unknown_fields=True):
    """The longest requests to one model, in tokens.

    :param max_model_len: limit in the memory of one instance.
    :param reach_tokens: limit if others lend enough; 0: none are made.
    """

    max_model_len: int
    reach_tokens: int = 0

    @property
    def longest_tokens(self) -> int:
        """The most tokens that a request can have, with loans."""
        return max(self.max_model_len, self.reach_tokens)


class ModelWeights(Struct, frozen=True, forbid_unknown_fields=True):
    """The weights of a model in an instance.

    :param size_bytes: bytes of its weights, and of its draft model's.
    :param form: form of most of its numbers: ``float32``, ``bfloat16``, ``int8`` or ``int4``.
    :param device: type of the device that has them and the KV cache, such as ``cpu``.
    """

    size_bytes: int
    form: str
    device: str


class InstanceFacts(Struct, frozen=True, forbid_unknown_fields=True):
    """The facts of an instance, which stay the same while its incarnation runs.

    :param incarnation: number that distinguishes this start of the instance from others.
    :param credits: most unfinished requests of a front.
    :param model: name of the first model.
    :param max_model_len: most tokens of a request to the first model.
    :param kv_pool_bytes: most bytes of KV cache.
    :param beside: lengths of every further model by its name, in order.
    :param memory: parts of the memory contract in bytes, and their sum, ``contract_bytes``.
    :param token_bytes: most KV memory that a token takes.
    :param indexed: description of each layer group's blocks in :class:`.IndexNotice`.
    :param pool_address: address of its pool for instances on other hosts; "" on one host.
    :param staying: the setting that keeps its requests from moving to others; "" if they can.
    :param section_bytes: KV memory of a section that it may borrow from another instance; 0: it
        does not borrow.
    :param reach_tokens: most tokens of a request to the first model, if others lend enough; 0:
        none are made.
    :param dtype: dtype of the first model's computation, such as ``bfloat16``; "" if it has none.
    :param contract_lines: its memory contract as text.
    :param section_tokens: tokens of a section.
    :param host: host whose instances read each other's memory in place; "" is the front's.
    :param is_asked: whether instances of other hosts may ask it for attention over what it lends.
    :param prices: prices of the first model, by which instances are compared.
    :param prices_origin: origin of the prices: ``defaults``, ``calibrated`` or ``from FILE``.
    :param weights: weights of every model by its name; "" is the first.
    """

    incarnation: int
    credits: int
    model: str
    max_model_len: int
    kv_pool_bytes: int
    beside: dict[str, ModelLengths] = {}
    memory: dict[str, int] = {}
    token_bytes: int = 0
    indexed: tuple[IndexedGroup, ...] = ()
    pool_address: str = ""
    staying: str = ""
    section_bytes: int = 0
    reach_tokens: int = 0
    dtype: str = ""
    contract_lines: tuple[str, ...] = ()
    section_tokens: int = SECTION_TOKENS
    host: str = ""
    prices: ExecCosts = USUAL_PRICES
    is_asked: bool = False
    prices_origin: str = "defaults"
    weights: dict[str, ModelWeights] = {}

    def lengths(self, model: str = "") -> ModelLengths:
        """Return the lengths of a model, zeros if it is not served; "" is the first."""
        if not model:
            return ModelLengths(self.max_model_len, self.reach_tokens)
        return self.beside.get(model, ModelLengths(0))


class LoadStats(Struct, frozen=True, forbid_unknown_fields=True):
    """The load of an instance at the end of its last step.

    :param step: steps so far.
    :param running: requests in the running batch.
    :param waiting: requests that wait in the instance.
    :param large_pages: large pages of the pool.
    :param empty_large_pages: large pages that are neither used nor cached.
    :param free_bytes: KV memory that no running request uses: empty, or cached and evictable.
    :param pool_bytes: size of the KV pool.
    :param placements: the placement of all requests that borrow memory: every report is complete,
        also for a new receiver.
    :param held_tokens: tokens that a step of the running requests reads.
    :param waiting_tokens: tokens of waiting requests: prompt and output.
    :param longest: the running requests with most local sections that could move, and the number
        of these; at most ``MOST_LONGEST`` requests.
    :param cached_bytes: KV memory that is cached for later prompts.
    :param memory_waiting: waiting requests that more memory would admit, at most one for each free
        seat; the others wait for a seat or for their turn in a step.
    :param head_tokens: tokens of the first waiting request, which is admitted before all others.
    :param head_bytes: KV memory that it needs to be admitted.
    :param answer_tokens: tokens that its answer will have, if it is of the usual length.
    :param growth_bytes: the most by which the running requests will grow before enough of them have
        ended, with answers of the usual length.
    :param copy_seconds: what the copy of a section to or from the instance adds to its steps; None:
        it has not measured that yet.
    """

    step: int
    running: int
    waiting: int
    large_pages: int
    empty_large_pages: int
    free_bytes: int
    pool_bytes: int
    placements: tuple[RequestPlacementEntry, ...] = ()
    held_tokens: int = 0
    waiting_tokens: int = 0
    longest: tuple[RequestPlacementEntry, ...] = ()
    cached_bytes: int = 0
    memory_waiting: int = 0
    head_tokens: int = 0
    head_bytes: int = 0
    answer_tokens: int = 0
    growth_bytes: int = 0
    copy_seconds: float | None = None


class InstanceReport(Struct, frozen=True):
    """The latest report of an instance about itself: from ``Ready``, and from its heartbeats.

    :param facts: facts of its present incarnation.
    :param load: load by its last heartbeat; None before the first.
    """

    facts: InstanceFacts
    load: LoadStats | None = None


@dataclass(frozen=True)
class GroupStats:
    """Page counts of one layer group, in small pages.

    :param name: the group's name, like ``full``.
    :param used_pages: pages that requests use.
    :param cached_pages: pages cached for later prompts.
    :param evicted_pages: pages evicted so far.
    :param hit_tokens: cached prompt tokens that requests took at their first admission, so far.
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
        from creditors, ``replaced`` by those of other creditors and ``lost`` there so far; its
        ``loans`` that were filled so far, and the ``loaned_bytes`` that were copied for them.
    :param team: ``threads`` of the last step, and whether its processors were ``shared``; so far:
        ``thread_seconds`` of all threads in steps, and the part ``lost_seconds`` in which other
        programs ran on their processors; empty without a compiled pass.
    :param device_steps: steps of models whose decode steps a device records: ``recorded``, or why
        they were computed operation by operation; empty without such a device.
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
    device_steps: dict[str, int] = field(default_factory=dict)
