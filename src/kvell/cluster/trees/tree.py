"""The global prompt tree of one role: who has which prefixes cached (MemServe §6).

The paper's tree is a radix tree of tokens, updated when answers pass by, and does not know what
instances evict.  Here instances tell every change of their index, and a block's hash names all
tokens up to its end.  So the tree is a flat map, and asking it is a walk along a prompt's hashes.
"""

from collections.abc import Mapping, Sequence

from kvell.cluster.trees.chains import PromptChain
from kvell.cluster.trees.groups import WHOLE, TreeGroup
from kvell.cluster.trees.holders import GuessMap, HolderMap
from kvell.cluster.trees.members import Member, Members
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

__all__ = ["PromptTree", "TreeGroup"]

TTL_SECONDS = 600.0
GUESS_SECONDS = 30.0
ASK_AGAIN_SECONDS = 30.0
"""How long a whole notice may take, after which it is taken for lost."""
MOST_BLOCKS = 4_000_000
"""Of all groups together: some 400 MB."""
MOST_DEAD_BITS = 64
"""Beyond the number of instances; then every block is gone through for them."""


class PromptTree:
    """Which instances of one role can resume a prompt where.

    :param groups: of the instances' layout, in order; all instances have the same.
    :param ttl_seconds: what no notice or match has renewed for so long may be forgotten, which
        bounds the harm of a removal that was never told.  It is forgotten within twice the time.
    :param guess_seconds: a guess ends after half of this at the earliest, and after this at the
        latest.
    :param most_blocks: known at once; above, those that were renewed least recently are forgotten.
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
        told = [index for index, group in enumerate(groups) if group.required]
        self._blocks = {index: HolderMap() for index in told}
        self._guesses = {index: GuessMap() for index in told}
        # Whole runs first: they bound how far the others must be looked at.
        self._order = sorted(told, key=lambda index: groups[index].kind not in WHOLE)
        self._members = Members()
        self._turned_seconds: float | None = None
        self._guesses_turned_seconds = 0.0
        self._asked_of: PromptChain | None = None
        self._asked: dict[int, list[int]] = {}
        """Who held the blocks of the last prompt that was asked for, as far as was looked."""
        self._dying: list[tuple[int, int, int]] = []
        """Bits, and the turns of blocks and of guesses from which on nothing has them."""

    def __len__(self) -> int:
        """Blocks that are known, of all groups."""
        return sum(map(len, self._blocks.values()))

    @property
    def guesses(self) -> int:
        """Blocks that are guessed, of all groups."""
        return sum(map(len, self._guesses.values()))

    def noticed(
        self, instance_id: str, incarnation: int, notice: IndexNotice, now_seconds: float
    ) -> bool:
        """Take in what an instance tells of its index.

        A whole notice replaces all that was known.  What an older incarnation says is ignored, and
        what was heard already; of a newer one the first notice must be number 0, or whole.

        :param now_seconds: of a clock that does not go back.
        :returns: False if one before this is missing and a whole notice is to be asked for: at once
            when that shows, and again after ``ASK_AGAIN_SECONDS``.  Until it comes, what is known
            is nearly right, which is better than nothing.
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
        """An instance is gone, and with it all that it had."""
        member = self._members.by_id.get(instance_id)
        if member is not None:
            self._members.leave(instance_id)
            self._dies(member.bit)

    def expect(
        self, instance_id: str, incarnation: int, chain: PromptChain, now_seconds: float
    ) -> None:
        """A request was routed there just now, so its blocks will be cached there soon.

        Such guesses count in matches until a notice says better, or for ``guess_seconds``.
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
                found = self._held_now(index, hashes, chain)
                if len(found) < len(hashes):
                    found = [*found, 0]
                starts, holders = runs_of(found)
                ends = [*starts[1:], len(hashes)]
                for start, end, bits in zip(starts, ends, holders, strict=False):
                    if not bits & member.bit:
                        guesses.add(hashes[start:end], member.bit)

    def match(self, chain: PromptChain, now_seconds: float) -> Mapping[str, int]:
        """Return how many tokens of a prompt each instance can resume, those with none left out.

        A prefix counts only where every group of the model has what it needs: all blocks of full
        attention, those of the window or chunk before the end, a state exactly at the end.  At
        least the last token is left to compute.  Prefixes that cut an image may count too.
        """
        self._pass_time(now_seconds)
        self._asked_of, self._asked = chain, {}
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
        told: dict[str, int] = {}
        live = self._members.live if rules else 0
        for length, bits in longest(rules, chain.limit_tokens, chain.alignment_tokens, live):
            told.update(dict.fromkeys(self._members.names(bits), length))
        return told

    def audit(self) -> list[str]:
        """Return contradictions, in words; there are none."""
        problems = self._members.audit()
        used = self._members.live | self._members.dead
        if sum(bits for bits, _, _ in self._dying) != self._members.dead:
            problems.append("a dead bit does not end")
        for index, blocks in self._blocks.items():
            held = [*blocks.items(), *self._guesses[index].items()]
            if any(bits & ~used or not bits for _, bits in held):
                problems.append(f"group {index} has a block of nobody")
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
        if sum(one.young_blocks for one in self._blocks.values()) > self._most_young:
            self._turn()

    def _found(self, index: int, hashes: Sequence[int]) -> list[int]:
        """Who holds the blocks, or will; of whole runs only about as far as anybody does."""
        blocks, guesses = self._blocks[index], self._guesses[index]
        held = self._asked[index] = []
        if self._groups[index].kind not in WHOLE:
            held += blocks.found(hashes)
            return guesses.added_to(held, hashes)
        found: list[int] = []
        while len(found) < len(hashes):
            some = hashes[len(found) : 2 * len(found) + FIRST_LOOK]
            held += (known := blocks.found(some))
            found += (known := guesses.added_to(known, some))
            if not all(known):
                break
        return found

    def _held_now(self, index: int, hashes: Sequence[int], chain: PromptChain) -> list[int]:
        """Who holds the first of the blocks at least; mostly that was asked just before."""
        asked = self._asked.get(index) if chain is self._asked_of else None
        if asked is None or self._groups[index].kind is GroupKind.STATE:
            return self._blocks[index].found(hashes)
        return asked

    @staticmethod
    def _expected(group: TreeGroup, chain: PromptChain) -> Sequence[int]:
        """What a prompt leaves in a group; of the states, the one that surely is kept."""
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
        """A bit is of no use any more; it is free once nothing has it."""
        self._asked_of = None  # it may still have the bit, which may become another's
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
        """End a generation of blocks."""
        for blocks in self._blocks.values():
            blocks.turn(self._members.live)
        self._bury()

    def _bury(self) -> None:
        """Free the bits that nothing has any more."""
        turns, guess_turns = self._turns()
        over = [one for one in self._dying if one[1] <= turns and one[2] <= guess_turns]
        if over:
            self._dying = [one for one in self._dying if one not in over]
            self._members.free(sum(bit for bit, _, _ in over))

    def _turns(self) -> tuple[int, int]:
        blocks = next((one.turns for one in self._blocks.values()), 0)
        return blocks, next((one.turns for one in self._guesses.values()), 0)


def _generations(age_seconds: float, length_seconds: float) -> int:
    """How many generations of this length are over; after two nothing is left."""
    return min(2, int(age_seconds // length_seconds))
