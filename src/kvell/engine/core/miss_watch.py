"""Reasons of prefix misses: a prompt's prefixes seen before, compared with its hit.

Pure and bounded.  Prefixes are remembered by digests, at lengths that are denser near the beginning
of a prompt (``MARKS``): a prompt of 8,192 tokens has 92 of them.  Each digest is remembered with
and without its cache root; the least recently seen ones are forgotten.  A prompt counts as seen
once it is admitted, even if it is cancelled before it is computed.
"""

import hashlib
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import get_args

import numpy as np
import numpy.typing as npt

from kvell.engine.protocol.pages import Miss, MissReason
from kvell.engine.requests.request import Request
from kvell.memory import VisibleCore, common_prefix, policy_of

MARKS = ((16, 256), (64, 4096), (256, None))
"""(tokens between marks, greatest length with this distance); None: without end."""
MOST_SEEN = 32_768
"""Largest number of remembered digests, which take 6 MB."""
MOST_MISSES = 64
"""Number of latest misses that are kept."""
DIGEST_BYTES = 8


def marks_within(length: int) -> list[int]:
    marks: list[int] = []
    for stride, end in MARKS:
        last = length if end is None else min(length, end)
        marks.extend(range((marks[-1] if marks else 0) + stride, last + 1, stride))
    return marks


def prefix_digests(tokens: npt.NDArray[np.int32], model: str, marks: Sequence[int]) -> list[bytes]:
    """Return digests of the prefixes of these lengths; equal ones mean equal tokens and model."""
    content = memoryview(tokens.astype("<i4", copy=False).tobytes())
    chain = hashlib.blake2b(f"{len(model)}:{model}".encode(), digest_size=DIGEST_BYTES)
    digests, start = [], 0
    for mark in marks:
        chain.update(content[4 * start : 4 * mark])
        digests.append(chain.digest())
        start = mark
    return digests


class MissLog:
    """The remembered prefixes, and the latest misses with their reasons."""

    def __init__(self, most_seen: int = MOST_SEEN, most_misses: int = MOST_MISSES) -> None:
        self._most_seen = most_seen
        self.seen: OrderedDict[bytes, int] = OrderedDict()
        self._misses: deque[Miss] = deque(maxlen=most_misses)
        self._counts: dict[str, int] = dict.fromkeys(get_args(MissReason), 0)

    @property
    def latest(self) -> tuple[Miss, ...]:
        return tuple(self._misses)

    @property
    def counts(self) -> dict[str, int]:
        return dict(self._counts)

    def on_admitted(
        self,
        request: Request,
        step: int,
        is_being_computed: Callable[[], bool],
        reaches: Callable[[], Mapping[str, int]],
    ) -> None:
        """Record a request at its first admission, and why a part of its prompt was not found.

        The last token of a prompt is always computed, so it is never missed.  Fewer tokens than
        are between two marks do not count as a miss.

        :param is_being_computed: returns whether another request is computing more of the prompt
            than the hit; called only if more was seen.
        :param reaches: returns, by group, the length in tokens of the hit that the group allows
            alone, of those that a hit needs; called only if more was seen and no request is
            computing it.
        """
        marks = marks_within(len(request.prompt))
        digests = prefix_digests(request.prompt, request.model, marks)
        rooted = _rooted(digests, request.cache_root)
        to_hit = bisect_left(marks, len(request.prompt))
        if to_hit and marks[to_hit - 1] > (request.cached_tokens or 0):
            prefixes = marks[:to_hit], digests[:to_hit], rooted[:to_hit]
            miss = self._explained(request, step, prefixes, is_being_computed, reaches)
            self._misses.append(miss)
            self._counts[miss.reason] += 1
        self._remember([*digests, *rooted], step)

    def on_ended(self, tokens: npt.NDArray[np.int32], root: str, model: str, step: int) -> None:
        """Record the tokens of an ended request; a conversation's next turn begins with them."""
        digests = prefix_digests(tokens, model, marks_within(len(tokens)))
        self._remember([*digests, *_rooted(digests, root)], step)

    def _explained(
        self,
        request: Request,
        step: int,
        prefixes: tuple[list[int], list[bytes], list[bytes]],
        is_being_computed: Callable[[], bool],
        reaches: Callable[[], Mapping[str, int]],
    ) -> Miss:
        marks, digests, rooted = prefixes
        hit_tokens = request.cached_tokens or 0
        seen_tokens, seen_step = self._longest(marks, rooted)
        groups: tuple[str, ...] = ()
        reason: MissReason
        if seen_tokens > hit_tokens:
            reason, groups = _lost(seen_tokens, is_being_computed, reaches)
        else:
            others_tokens, others_step = self._longest(marks, digests)
            if others_tokens > hit_tokens:
                reason = "other_salt"
                seen_tokens = others_tokens
                seen_step = others_step
            else:
                reason = "never_seen"
        return Miss(
            request.request_id,
            step,
            len(request.prompt),
            hit_tokens,
            seen_tokens,
            step - seen_step if seen_tokens else 0,
            reason,
            groups,
        )

    def _longest(self, marks: Sequence[int], keys: Sequence[bytes]) -> tuple[int, int]:
        """Return the longest remembered prefix and the step that last saw it; (0, 0) for none."""
        for mark, key in zip(reversed(marks), reversed(keys), strict=True):
            step = self.seen.get(key)
            if step is not None:
                return mark, step
        return 0, 0

    def _remember(self, keys: Sequence[bytes], step: int) -> None:
        for key in reversed(keys):  # the beginning of a prefix is forgotten after its end
            self.seen[key] = step
            self.seen.move_to_end(key)
        while len(self.seen) > self._most_seen:
            self.seen.popitem(last=False)


def _rooted(digests: Sequence[bytes], root: str) -> list[bytes]:
    prefix = hashlib.blake2b(root.encode(), digest_size=DIGEST_BYTES).digest()
    return [prefix + digest for digest in digests]


def _lost(
    seen_tokens: int,
    is_being_computed: Callable[[], bool],
    reaches: Callable[[], Mapping[str, int]],
) -> tuple[MissReason, tuple[str, ...]]:
    if is_being_computed():
        return "being_computed", ()
    reached = reaches()
    short = tuple(group for group, tokens in reached.items() if tokens < seen_tokens)
    if short and len(short) == len(reached):
        return "evicted", ()
    return "not_resumable", short


class MissWatch:
    """A :class:`MissLog` over one memory core."""

    def __init__(self, core: VisibleCore) -> None:
        self._core = core
        self.log = MissLog()

    def on_admitted(self, request: Request, step: int, running: Sequence[Request]) -> None:
        """Record the first admission of a request whose prefix was looked up."""
        hit_tokens = request.cached_tokens or 0
        self.log.on_admitted(
            request,
            step,
            lambda: any(_computes(other, request, hit_tokens) for other in running),
            lambda: self._reaches(request),
        )

    def on_ended(self, request: Request, step: int) -> None:
        tokens = request.tokens(0, request.settled)
        self.log.on_ended(tokens, request.cache_root, request.model, step)

    def _reaches(self, request: Request) -> dict[str, int]:
        """Return how long a hit each group allows alone, of the groups that a hit requires."""
        lengths = self._core.reach(
            request.prompt,
            request.cache_root,
            images=request.images,
            prompt_tokens=len(request.prompt),
            model=request.model,
        ).tolist()
        return {
            group.name: length
            for group, length in zip(self._core.layout.groups, lengths, strict=True)
            if length >= 0 and policy_of(group).required_for_hit
        }


def _computes(other: Request, request: Request, hit_tokens: int) -> bool:
    if other is request or other.model != request.model or other.cache_root != request.cache_root:
        return False
    if other.settled >= len(other.prompt):
        return False
    return common_prefix(request.prompt, other.prompt) > max(hit_tokens, other.settled)
