"""Microseconds and bytes that the front spends to route a request by what instances have cached.

Run from the repository's root: ``python -m bench.routing.front_cost``.  Real hashes, tree, policy
and messages; no instance computes anything.  See README.md beside this file.
"""

import argparse
import statistics
import time
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from bench import result_file
from kvell.cluster.instance_load import InstanceLoad
from kvell.cluster.routing.costs import RequestView, answer_seconds, pull_or_recompute
from kvell.cluster.routing.pace import PromptWork
from kvell.cluster.routing.policies import router_named
from kvell.cluster.trees.chains import HashMemo, PromptChain, TreeGroup
from kvell.cluster.trees.tree import PromptTree
from kvell.cost.prices import ExecCosts, pairs
from kvell.engine.protocol.codec import decode_event, encode_frame
from kvell.engine.protocol.notices import NO_BLOCK, BlocksRemoved, BlocksStored, IndexNotice
from kvell.engine.protocol.statistics import InstanceFacts, InstanceReport
from kvell.memory import GroupKind
from kvell.wire.frames import HEADER_BYTES

BLOCK_TOKENS = 16
LAYOUTS: Mapping[str, tuple[TreeGroup, ...]] = {
    "full": (TreeGroup(GroupKind.FULL, BLOCK_TOKENS),),
    "hybrid": (
        TreeGroup(GroupKind.FULL, BLOCK_TOKENS),
        TreeGroup(GroupKind.SLIDING, BLOCK_TOKENS, 1024),
        TreeGroup(GroupKind.STATE, BLOCK_TOKENS),
    ),
}
STATE_TOKENS = 512
"""Between two states that are kept."""
INSTANCES = (100, 1000)
PROMPT_TOKENS = {10_000: 1.0, 100_000: 0.03}
"""Lengths of prompts, and how many come each second for each instance: with hits, these keep a
third of the instances busy or fewer."""
SYSTEM_SHARE, SESSION_SHARE = 0.1, 0.7
"""Parts of a prompt that all have in common, and that requests of a session do."""
SESSIONS_PER_INSTANCE = 2
CACHED_PROMPTS = 20
"""Whole prompts that an instance has room for."""
COSTS = ExecCosts(
    request_seconds=5e-3, token_seconds=3e-5, pair_seconds=3e-10, output_token_seconds=1e-4
)
"""A third of a second for a prompt of 10,000 tokens: some 8 billion weights on a GPU."""
REQUESTS_PER_SECOND = 1000
"""Of the goal: at most half a core for prompts of 10,000 tokens."""

IDLE = InstanceReport(InstanceFacts(1, 1, "", 0, 0, prices=COSTS))

Ids = npt.NDArray[np.int32]
Result = TypeVar("Result")


@dataclass(eq=False)
class Instance(InstanceLoad):
    """What an instance caches, and the figures of its front that a router reads.

    :ivar cached: blocks of each group, least recently used first.
    """

    instance_id: str = ""
    room_blocks: int = 0
    report: InstanceReport = IDLE
    free_bytes: int = 0
    outstanding_prompt_tokens: int = 0
    outstanding_output_tokens: int = 0
    uncached_prompt_tokens: int = 0
    outstanding_pairs: int = 0
    running_requests: int = 0
    held_tokens: int = 0
    num_coming: int = 0
    coming_tokens: int = 0
    sequence: int = 0
    busy_until_seconds: float = 0.0
    cached: dict[int, OrderedDict[int, None]] = field(default_factory=dict)

    def prompt_seconds(self, work: PromptWork) -> float:
        """Return the price: no instance is slower."""
        return work.priced_seconds(COSTS)

    def stores(self, chain: PromptChain, groups: Sequence[TreeGroup]) -> IndexNotice:
        """Compute a prompt; what finds no room is evicted, the ends of old prompts first."""
        changes: list[BlocksStored | BlocksRemoved] = []
        hashes = chain.hashes[BLOCK_TOKENS]
        for index, group in enumerate(groups):
            cached = self.cached.setdefault(index, OrderedDict())
            every = STATE_TOKENS // BLOCK_TOKENS if group.kind is GroupKind.STATE else 1
            own = hashes[every - 1 :: every]
            new = tuple(one for one in own if one not in cached)
            if new:
                kind = group.kind.value
                changes.append(BlocksStored(index, kind, NO_BLOCK, new, b"", BLOCK_TOKENS))
            for one in reversed(own):
                cached[one] = None
                cached.move_to_end(one)
            excess = range(len(cached) - self.room_blocks // every)
            if old := tuple(cached.popitem(last=False)[0] for _ in excess):
                changes.append(BlocksRemoved(index, old))
        self.sequence += 1
        return IndexNotice(self.sequence - 1, tuple(changes))


class Clock:
    """Processor time of this thread, by part."""

    def __init__(self) -> None:
        self.parts: dict[str, list[float]] = {}

    def timed(self, part: str, call: Callable[[], Result]) -> Result:
        """Call, and count its microseconds."""
        begin = time.thread_time()
        result = call()
        self.parts.setdefault(part, []).append((time.thread_time() - begin) * 1e6)
        return result


def prompts_of(tokens: int, sessions: int, count: int) -> Iterator[Ids]:
    """Prompts that share a beginning with all others, more with those of their session."""
    rng = np.random.default_rng(7)

    def ids(share: float) -> Ids:
        return rng.integers(0, 100_000, int(tokens * share), dtype=np.int32)

    system = ids(SYSTEM_SHARE)
    known = [ids(SESSION_SHARE) for _ in range(sessions)]
    rest = 1 - SYSTEM_SHARE - SESSION_SHARE
    for _ in range(count):
        yield np.concatenate([system, known[rng.integers(sessions)], ids(rest)])


def measured(
    policy: str,
    groups: Sequence[TreeGroup],
    instances: int,
    tokens: int,
    requests: int,
    rate: float = 1.0,
) -> dict[str, float]:
    """Route as many requests as fill the caches, then time some more.

    :param rate: requests per second for each instance.
    """
    clock, tree, memo = Clock(), PromptTree(groups), HashMemo()
    router = router_named(policy)
    room = CACHED_PROMPTS * tokens // BLOCK_TOKENS
    cluster = [Instance(f"mixed-{number}", room) for number in range(instances)]
    by_id = {one.instance_id: one for one in cluster}
    sessions = max(2, instances * SESSIONS_PER_INSTANCE * 10_000 // tokens)
    warm = 2 * sessions
    hits_tokens, wire_bytes = list[int](), list[int]()
    running: list[tuple[float, int, Instance, int]] = []
    for number, ids in enumerate(prompts_of(tokens, sessions, warm + requests)):
        if number == warm:
            clock.parts.clear()
            hits_tokens.clear()
            wire_bytes.clear()
        now = number / rate / instances
        while running and running[0][0] <= now:
            _, _, one, had = heappop(running)
            _is_done(one, tokens, had)
        chain = clock.timed("hash", lambda ids=ids: PromptChain.of(ids, groups, memo=memo))  # type: ignore[misc]
        hits = clock.timed("match", lambda c=chain, t=now: tree.match(c, t))  # type: ignore[misc]
        asked = RequestView(tokens, 100, "", hits)
        name = clock.timed("choose", lambda a=asked: router.choose(a, cluster))  # type: ignore[misc]
        clock.timed(
            "pull",
            lambda a=asked, n=name, h=hits: pull_or_recompute(
                a.prompt_tokens, n, h, COSTS, lambda source: answer_seconds(by_id[source], 0.0)
            ),  # type: ignore[misc]
        )
        clock.timed("expect", lambda n=name, c=chain, t=now: tree.expect(n, 1, c, t))  # type: ignore[misc]
        chosen, hit = by_id[name], hits.get(name, 0)
        frame = encode_frame(chosen.stores(chain, groups))[HEADER_BYTES:]
        notice = clock.timed("decode", lambda f=frame: decode_event(f))  # type: ignore[misc]
        assert isinstance(notice, IndexNotice)
        complete = clock.timed(
            "notice",
            lambda n=name, one=notice, t=now: tree.on_notice(n, 1, one, t),  # type: ignore[misc]
        )
        assert complete, "a notice is missing"
        wire_bytes.append(len(frame) + HEADER_BYTES)
        hits_tokens.append(hit)
        begins = max(now, chosen.busy_until_seconds)
        chosen.busy_until_seconds = begins + _is_busy(chosen, tokens, hit)
        heappush(running, (chosen.busy_until_seconds, number, chosen, hit))
    assert tree.audit() == []
    whole = [sum(one) for one in zip(*clock.parts.values(), strict=True)]
    return {
        **{f"{part}_us": statistics.fmean(spent) for part, spent in clock.parts.items()},
        "total_us": statistics.fmean(whole),
        "median_us": statistics.median(whole),
        "p99_us": float(np.percentile(whole, 99)),
        "longest_us": max(whole),
        "core_share": statistics.fmean(whole) * 1e-6 * REQUESTS_PER_SECOND,
        "notice_bytes": statistics.fmean(wire_bytes),
        "hit_share": statistics.fmean(hits_tokens) / tokens,
        "blocks": len(tree),
    }


def _is_busy(instance: Instance, tokens: int, hit: int) -> float:
    """A prompt waits for those before it; returns the seconds of its own."""
    instance.uncached_prompt_tokens += tokens - hit
    instance.outstanding_pairs += pairs(tokens, hit)
    return COSTS.exec_seconds(tokens, hit)


def _is_done(instance: Instance, tokens: int, hit: int) -> None:
    instance.uncached_prompt_tokens -= tokens - hit
    instance.outstanding_pairs -= pairs(tokens, hit)


def block_bytes(groups: Sequence[TreeGroup], instances: int, prompts: int) -> float:
    """Bytes of memory for a block that the tree knows, its hash included."""
    tokens = 10_000
    texts = prompts_of(tokens, max(1, prompts // 2), prompts)
    cluster = [Instance(f"mixed-{number}", 1 << 40) for number in range(instances)]
    frames = [
        (one.instance_id, encode_frame(one.stores(PromptChain.of(ids, groups), groups)))
        for ids, one in ((ids, cluster[at % instances]) for at, ids in enumerate(texts))
    ]
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    tree = PromptTree(groups)
    for name, frame in frames:
        notice = decode_event(frame[HEADER_BYTES:])
        assert isinstance(notice, IndexNotice)
        assert tree.on_notice(name, 1, notice, 0.0)
    del notice
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) / len(tree)


def main() -> None:
    """Measure every layout, number of instances and length, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="prompt-tree")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layout", choices=tuple(LAYOUTS))
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures: dict[str, object] = {}
    for layout, groups in LAYOUTS.items():
        if options.layout not in (None, layout):
            continue
        for tokens, rate in PROMPT_TOKENS.items():
            if options.tokens not in (None, tokens):
                continue
            for instances in INSTANCES:
                rounds = [
                    measured(
                        options.policy,
                        groups,
                        instances,
                        tokens,
                        max(50, options.requests * 10_000 // tokens),
                        rate,
                    )
                    for _ in range(options.rounds)
                ]
                told = {
                    key: [
                        round(pick(one[key] for one in rounds), 4)
                        for pick in (min, statistics.median, max)
                    ]
                    for key in rounds[0]
                }
                figures[f"{layout}, {tokens} tokens, {instances} instances"] = told
                print(layout, tokens, instances)
                for key, (least, middle, most) in told.items():
                    print(f"    {key:14} {middle:10.4g}   {least:.4g} … {most:.4g}")
        figures[f"{layout}, block_bytes"] = {
            str(count): round(block_bytes(groups, count, 600), 1) for count in INSTANCES
        }
        print(layout, "bytes of a block", figures[f"{layout}, block_bytes"])
    if options.json:
        result_file.write(options.json, {"policy": options.policy, "figures": figures})


if __name__ == "__main__":
    main()
