"""The global prompt tree of one role: which instances cache which prefixes (MemServe §6).

The paper's tree is a radix tree of tokens.  It is updated when answers pass by, and does not know
what instances evict.  Here instances report every change of their index, and a block's hash
identifies all tokens up to its end.  So the tree is a flat map, and a look-up is a walk along a
prompt's hashes.

Block hash → the instances that hold the block, as bits of an integer.

Entries age in two generations.  New entries are in the young one; when a generation ends, the young
one becomes old, and the entries of the old one are dropped.  So an entry needs no time of its own.

Most blocks have the same holders as the block before, so equal bits are mostly one object.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import itemgetter

import numpy as np

from kvell.cluster.trees.chains import WHOLE, PromptChain, TreeGroup
from kvell.cluster.trees.resuming import (
    FIRST_LOOK,
    Resumable,
    WholeRuns,
    longest,
    resumable,
    runs_of,
)
from kvell.engine.protocol.notices import BlocksRemoved, IndexNotice
from kvell.memory import GroupKind
from kvell.prefix.eviction.checkpoints import prompt_end

MOST_REMEMBERED = 1024
"""Sets of instances whose names are cached: some megabytes with 1,000 instances."""
FEW = 16
"""Largest set of instances that is resolved faster one by one than all together."""


@dataclass
class Member:
    """An instance.

    :ivar bit: represents the entries of the instance; replaced when these are forgotten.
    :ivar asks_again_seconds: when a whole notice is requested (again), since a notice was missed;
        None: none was missed.
    """

    incarnation: int
    bit: int
    next_sequence: int = 0
    asks_again_seconds: float | None = None


class Members:
    """Instances by their ids and by their bits.

    :ivar live: the bits of all instances.
    """

    def __init__(self) -> None:
        self.by_id: dict[str, Member] = {}
        self.live = 0
        self.dead = 0
        self._names: list[str] = []
        self._free: list[int] = []
        self._remembered: dict[int, Sequence[str]] = {}

    def join(self, instance_id: str, incarnation: int) -> Member:
        assert instance_id not in self.by_id, "it must leave first"
        member = Member(incarnation, self._taken(instance_id))
        self.by_id[instance_id] = member
        return member

    def leave(self, instance_id: str) -> None:
        """Forget an instance and its entries; ignore an unknown one."""
        member = self.by_id.pop(instance_id, None)
        if member is not None:
            self._dies(member.bit)

    def forget(self, instance_id: str) -> Member:
        member = self.by_id[instance_id]
        self._dies(member.bit)
        member.bit = self._taken(instance_id)
        return member

    def free(self, bits: int) -> None:
        assert bits & ~self.dead == 0, "bits in use cannot be freed"
        self.dead &= ~bits
        self._free += places(bits)

    def names(self, bits: int) -> Sequence[str]:
        names = self._remembered.get(bits)
        if names is None:
            if len(self._remembered) >= MOST_REMEMBERED:
                self._remembered.clear()
            names = self._remembered[bits] = self._named(bits)
        return names

    def audit(self) -> list[str]:
        bits = [member.bit for member in self.by_id.values()]
        free = sum(1 << place for place in self._free)
        every = (1 << len(self._names)) - 1
        return [
            problem
            for problem, is_wrong in (
                ("two instances have one bit", sum(bits) != self.live),
                ("a bit is live and dead", self.live & self.dead),
                ("a bit is free and in use", free & (self.live | self.dead)),
                ("a bit is lost", free | self.live | self.dead != every),
                (
                    "a bit has another's name",
                    any(self._named(member.bit) != (name,) for name, member in self.by_id.items()),
                ),
            )
            if is_wrong
        ]

    def _taken(self, instance_id: str) -> int:
        if self._free:
            place = self._free.pop()
            self._names[place] = instance_id
        else:
            place = len(self._names)
            self._names.append(instance_id)
        self.live |= 1 << place
        self._remembered.clear()
        return 1 << place

    def _dies(self, bit: int) -> None:
        self.live ^= bit
        self.dead |= bit

    def _named(self, bits: int) -> Sequence[str]:
        if bits.bit_count() <= FEW:
            return tuple(self._names[place] for place in places(bits))
        digits = np.frombuffer(bits.to_bytes(len(self._names) // 8 + 1, "little"), np.uint8)
        positions = np.flatnonzero(np.unpackbits(digits, bitorder="little"))
        return itemgetter(*positions.tolist())(self._names)  # type: ignore[no-any-return]


def places(bits: int) -> list[int]:
    """Return which bits are set, the lowest first."""
    positions = []
    while bits:
        lowest = bits & -bits
        positions.append(lowest.bit_length() - 1)
        bits ^= lowest
    return positions


_NOBODY = repeat(0)
Holders = dict[int, int]
"""Block hash → bits."""


class HolderMap:
    """The holders of the blocks of one layer group.

    A block that is added or looked up again becomes young again; without that it is kept for one
    generation at least, and two at most.
    """

    def __init__(self) -> None:
        self._young: Holders = {}
        self._old: Holders = {}
        self._live = -1
        self.turns = 0

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    @property
    def young_blocks(self) -> int:
        return len(self._young)

    def add(self, hashes: Sequence[int], bit: int) -> None:
        if self._old:
            self.find(hashes)
        _add(self._young, hashes, bit)

    def remove(self, hashes: Sequence[int], bit: int) -> None:
        """Remove a holder of the blocks; blocks that it does not hold stay as they are."""
        _remove(self._young, hashes, bit)
        _remove(self._old, hashes, bit)

    def find(self, hashes: Sequence[int]) -> list[int]:
        """Return the holders of each block, 0 without any, and renew the blocks."""
        held = list(map(self._young.get, hashes, _NOBODY))
        if self._old and not all(held):
            take, live = self._old.pop, self._live
            for index, bits in enumerate(held):
                if not bits and (bits := take(hashes[index], 0) & live):
                    held[index] = self._young[hashes[index]] = bits
        return held

    def turn(self, live: int) -> None:
        """End a generation.

        :param live: bits in use; the others are dropped from blocks that are renewed.  After two
            turns no block has a bit that was not in use at the first.
        """
        self._old, self._young = self._young, {}
        self._live = live
        self.turns += 1

    def clear_bits(self, live: int) -> None:
        self._young, self._old = _cleared(self._young, live), _cleared(self._old, live)

    def items(self) -> Iterator[tuple[int, int]]:
        return chain(self._young.items(), self._old.items())


class GuessMap:
    """The expected holders of the blocks of one layer group.

    Nothing renews a guess, which is kept for one generation at least, and two at most.
    """

    def __init__(self) -> None:
        self._young: Holders = {}
        self._old: Holders = {}
        self.turns = 0

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def add(self, hashes: Sequence[int], bit: int) -> None:
        _add(self._young, hashes, bit)

    def remove(self, hashes: Sequence[int], bit: int) -> None:
        _remove(self._young, hashes, bit)
        _remove(self._old, hashes, bit)

    def added_to(self, held: list[int], hashes: Sequence[int]) -> list[int]:
        """Return the holders of each block, with the expected ones."""
        for generation in (self._young, self._old):
            if generation and not generation.keys().isdisjoint(hashes):
                guessed = map(generation.get, hashes, _NOBODY)
                held = [a | b if b else a for a, b in zip(held, guessed, strict=True)]
        return held

    def turn(self) -> None:
        self._old, self._young = self._young, {}
        self.turns += 1

    def clear_bits(self, live: int) -> None:
        self._young, self._old = _cleared(self._young, live), _cleared(self._old, live)

    def items(self) -> Iterator[tuple[int, int]]:
        """Return every block with its bits; a block of both generations comes twice."""
        return chain(self._young.items(), self._old.items())


def _add(holders: Holders, hashes: Sequence[int], bit: int) -> None:
    """Add a bit to blocks, with one look-up for each where possible, since large maps are slow."""
    stored = list(map(holders.setdefault, hashes, repeat(bit)))
    if stored.count(bit) == len(stored):
        return
    before, after = bit, bit
    for block_hash, bits in zip(hashes, stored, strict=True):
        if bits != before:
            before = bits
            after = bits | bit
        if after is not bits:
            holders[block_hash] = after


def _remove(holders: Holders, hashes: Sequence[int], bit: int) -> None:
    if not holders:
        return
    popped = list(map(holders.pop, hashes, _NOBODY))
    if popped.count(bit) + popped.count(0) == len(popped):
        return
    before = bit
    after = 0
    for block_hash, bits in zip(hashes, popped, strict=True):
        if bits != before:
            before = bits
            after = bits & ~bit
        if after:
            holders[block_hash] = after


def _cleared(holders: Holders, live: int) -> Holders:
    return {block_hash: kept for block_hash, bits in holders.items() if (kept := bits & live)}


TTL_SECONDS = 600.0
GUESS_SECONDS = 30.0
ASK_AGAIN_SECONDS = 30.0
"""Time after which a whole notice that was requested counts as lost."""
MOST_BLOCKS = 4_000_000
"""Most blocks of all groups together: some 400 MB."""
MOST_DEAD_BITS = 64
"""Most dead bits beyond the number of instances; above, they are cleared from every block."""


class PromptTree:
    """The prefixes that the instances of one role can resume.

    :param groups: of the instances' layout, in order; all instances have the same.
    :param ttl_seconds: an entry that no notice or match has renewed for this long may be forgotten,
        and is after twice the time, which bounds the harm of a removal that was not reported.
    :param guess_seconds: longest life of a guess; its shortest life is half of it.
    :param most_blocks: above this number, those that were renewed least recently are forgotten.
    """

    def __init__(
        self,
        groups: Sequence[TreeGroup],
        ttl_seconds: float = TTL_SECONDS,
        *,
        guess_seconds: float = GUESS_SECONDS,
        most_blocks: int = MOST_BLOCKS,
    ) -> None:
        self._groups = tuple(groups)
        self._ttl_seconds, self._guess_seconds = ttl_seconds, guess_seconds
        self._most_young = max(1, most_blocks // 2)
        required = [index for index, group in enumerate(groups) if group.required]
        self._blocks = {index: HolderMap() for index in required}
        self._guesses = {index: GuessMap() for index in required}
        # Whole runs first: they bound how far the others must be looked at.
        self._order = sorted(required, key=lambda index: groups[index].kind not in WHOLE)
        self._members = Members()
        self._turned_seconds: float | None = None
        self._guesses_turned_seconds = 0.0
        self._asked_of: PromptChain | None = None
        self._asked: dict[int, list[int]] = {}
        """Holders of the blocks of the last prompt that was matched, as far as looked up."""
        self._dying: list[tuple[int, int, int]] = []
        """Bits, and the turns of blocks and of guesses after which no entry has them."""

    def __len__(self) -> int:
        return sum(map(len, self._blocks.values()))

    @property
    def guesses(self) -> int:
        return sum(map(len, self._guesses.values()))

    def on_notice(
        self, instance_id: str, incarnation: int, notice: IndexNotice, now_seconds: float
    ) -> bool:
        """Apply a notice of an instance about its index.

        A whole notice replaces all entries of the instance.  Notices of an older incarnation, and
        notices that arrived before, are ignored; the first one of a newer incarnation must have the
        number 0, or be whole.

        :param now_seconds: of a monotonic clock.
        :returns: False if a notice is missing and a whole one must be requested: immediately, and
            again after ``ASK_AGAIN_SECONDS``.  Until it arrives, entries are nearly right, which
            is better than nothing.
        """
        self._pass_time(now_seconds)
        member = self._members.by_id.get(instance_id)
        if member is None or incarnation > member.incarnation:
            member = self._joined(instance_id, incarnation)
        elif incarnation < member.incarnation:
            return True
        if notice.sequence < member.next_sequence:
            return True
        if notice.is_whole:
            member = self._forgotten(instance_id)
            member.asks_again_seconds = None
        elif notice.sequence > member.next_sequence and member.asks_again_seconds is None:
            member.asks_again_seconds = now_seconds
        member.next_sequence = notice.sequence + 1
        self._take(notice, member)
        if member.asks_again_seconds is None or now_seconds < member.asks_again_seconds:
            return True
        member.asks_again_seconds = now_seconds + ASK_AGAIN_SECONDS
        return False

    def lost(self, instance_id: str) -> None:
        member = self._members.by_id.get(instance_id)
        if member is not None:
            self._members.leave(instance_id)
            self._dies(member.bit)

    def expect(
        self, instance_id: str, incarnation: int, chain: PromptChain, now_seconds: float
    ) -> None:
        """Expect the blocks of a request that was just routed to an instance.

        Such guesses count in matches until a notice replaces them, or for ``guess_seconds``.
        """
        self._pass_time(now_seconds)
        member = self._members.by_id.get(instance_id)
        if member is None or incarnation > member.incarnation:
            member = self._joined(instance_id, incarnation)
        elif incarnation < member.incarnation:
            return
        for index, guesses in self._guesses.items():
            group = self._groups[index]
            if group.model == chain.model:
                hashes = self._expected(group, chain)
                held = self._held_now(index, hashes, chain)
                if len(held) < len(hashes):
                    held = [*held, 0]
                starts, holders = runs_of(held)
                ends = [*starts[1:], len(hashes)]
                for start, end, bits in zip(starts, ends, holders, strict=False):
                    if not bits & member.bit:
                        guesses.add(hashes[start:end], member.bit)

    def match(self, chain: PromptChain, now_seconds: float) -> Mapping[str, int]:
        """Return how many tokens of a prompt each instance can resume, without those with none.

        A prefix counts only where every group of the model has what it needs: all blocks of full
        attention, those of the window or chunk before the end, a state exactly at the end.  At
        least the last token is left to compute.  Prefixes that cut an image may count too.
        """
        self._pass_time(now_seconds)
        self._asked_of = chain
        self._asked = {}
        rules: list[Resumable] = []
        reach = chain.limit_tokens
        for index in self._order:
            group = self._groups[index]
            if group.model == chain.model:
                hashes = chain.hashes[group.block_tokens][: group.end_block(reach)]
                rule = resumable(group, self._found(index, hashes))
                if isinstance(rule, WholeRuns):
                    reach = min(reach, rule.most_tokens)
                rules.append(rule)
            if not reach:
                return {}
        lengths: dict[str, int] = {}
        live = self._members.live if rules else 0
        for length, bits in longest(rules, chain.limit_tokens, chain.alignment_tokens, live):
            lengths.update(dict.fromkeys(self._members.names(bits), length))
        return lengths

    def audit(self) -> list[str]:
        problems = self._members.audit()
        used = self._members.live | self._members.dead
        if sum(bits for bits, _, _ in self._dying) != self._members.dead:
            problems.append("a dead bit does not end")
        for index, blocks in self._blocks.items():
            held = [*blocks.items(), *self._guesses[index].items()]
            if any(bits & ~used or not bits for _, bits in held):
                problems.append(f"group {index} has a block without a holder")
            if len(dict(blocks.items())) != len(blocks):
                problems.append(f"group {index} has a block that is young and old")
        return problems

    def _take(self, notice: IndexNotice, member: Member) -> None:
        for change in notice.changes:
            blocks = self._blocks.get(change.group)
            if blocks is None:
                continue
            self._guesses[change.group].remove(change.hashes, member.bit)
            if isinstance(change, BlocksRemoved):
                blocks.remove(change.hashes, member.bit)
            else:
                blocks.add(change.hashes, member.bit)
        if sum(holders.young_blocks for holders in self._blocks.values()) > self._most_young:
            self._turn()

    def _found(self, index: int, hashes: Sequence[int]) -> list[int]:
        """Return the holders of the blocks, with guesses; of whole runs as far as there are any."""
        blocks, guesses = self._blocks[index], self._guesses[index]
        held = self._asked[index] = []
        if self._groups[index].kind not in WHOLE:
            held += blocks.find(hashes)
            return guesses.added_to(held, hashes)
        holders: list[int] = []
        while len(holders) < len(hashes):
            some = hashes[len(holders) : 2 * len(holders) + FIRST_LOOK]
            held += (bits := blocks.find(some))
            holders += (bits := guesses.added_to(bits, some))
            if not all(bits):
                break
        return holders

    def _held_now(self, index: int, hashes: Sequence[int], chain: PromptChain) -> list[int]:
        held = self._asked.get(index) if chain is self._asked_of else None
        if held is None or self._groups[index].kind is GroupKind.STATE:
            return self._blocks[index].find(hashes)
        return held

    @staticmethod
    def _expected(group: TreeGroup, chain: PromptChain) -> Sequence[int]:
        """Return the hashes that a prompt leaves in a group; of states, the one surely kept."""
        hashes = chain.hashes[group.block_tokens]
        if group.kind is not GroupKind.STATE:
            return hashes
        end = prompt_end(chain.tokens, chain.alignment_tokens) // group.block_tokens
        return hashes[max(0, end - 1) : end]

    def _joined(self, instance_id: str, incarnation: int) -> Member:
        self.lost(instance_id)
        return self._members.join(instance_id, incarnation)

    def _forgotten(self, instance_id: str) -> Member:
        before = self._members.by_id[instance_id].bit
        member = self._members.forget(instance_id)
        self._dies(before)
        return member

    def _dies(self, bit: int) -> None:
        """Retire a bit, which is free once no entry has it."""
        self._asked_of = None  # its holders may have the bit, which may become another instance's
        turns, guess_turns = self._turns()
        self._dying.append((bit, turns + 2, guess_turns + 2))
        if len(self._dying) > MOST_DEAD_BITS + len(self._members.by_id):
            for blocks, guesses in zip(self._blocks.values(), self._guesses.values(), strict=True):
                blocks.clear_bits(self._members.live)
                guesses.clear_bits(self._members.live)
            self._members.free(self._members.dead)
            self._dying.clear()

    def _pass_time(self, now_seconds: float) -> None:
        if self._turned_seconds is None:
            self._turned_seconds = self._guesses_turned_seconds = now_seconds
        for _ in range(_generations(now_seconds - self._turned_seconds, self._ttl_seconds)):
            self._turned_seconds = now_seconds
            self._turn()
        age = now_seconds - self._guesses_turned_seconds
        for _ in range(_generations(age, self._guess_seconds / 2)):
            self._guesses_turned_seconds = now_seconds
            for guesses in self._guesses.values():
                guesses.turn()
            self._bury()

    def _turn(self) -> None:
        for blocks in self._blocks.values():
            blocks.turn(self._members.live)
        self._bury()

    def _bury(self) -> None:
        turns, guess_turns = self._turns()
        over = [entry for entry in self._dying if entry[1] <= turns and entry[2] <= guess_turns]
        if over:
            self._dying = [entry for entry in self._dying if entry not in over]
            self._members.free(sum(bit for bit, _, _ in over))

    def _turns(self) -> tuple[int, int]:
        blocks = next((holders.turns for holders in self._blocks.values()), 0)
        return blocks, next((holders.turns for holders in self._guesses.values()), 0)


def _generations(age_seconds: float, length_seconds: float) -> int:
    """Return how many generations of this length have passed; after two nothing is left."""
    return min(2, int(age_seconds // length_seconds))
