"""Balloon, memory core and CPU buffer together, over a device that fails at every edge.

Requests write into their pages, steps into their slots, all into the same bytes of one fake
device: whatever moves, every request reads what it wrote.  Their pages go to the buffer and come
back, where mappings, copies and allocations fail midway.  The audits run after each rule, and at
the end the pool and the buffer are empty.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvell.elastic.logical_buffer import CpuBuffer
from kvell.elastic.memory import ElasticMemory, Slot
from kvell.elastic.page_buffer import PageBuffer
from kvell.elastic.tiling import Tiling
from kvell.errors import TryLater
from kvell.memory import create_core
from kvell.pages.audit import audit
from kvell.pages.layout import Layout
from kvell.prefix.interface import USED
from kvell.vocabulary import PageId
from tests.depth import machine
from tests.device.fake_chunks import EDGES, Edge, FakeChunks
from tests.elastic.balloon_audit import audit_elastic
from tests.elastic.buffer_audit import audit_buffer, audit_pages
from tests.pages.pools import group, pool_of, state

BUFFER_LARGE = 4
"""Large pages of the buffer: three requests do not fit."""


@dataclass(frozen=True)
class Text:
    """A request's tokens, where its prefix is looked for, and how many are computed."""

    tokens: tuple[int, ...]
    root: str
    computed: int


@dataclass(frozen=True)
class Out:
    """A request in the buffer.

    :param pages: (group, position) → page of the buffer.
    :param content: what each of them held on the device.
    """

    text: Text
    pages: dict[tuple[int, int], PageId]
    content: dict[tuple[int, int], bytes]


class CopyFailedError(Exception):
    """Injected."""


LAYOUTS: dict[str, Callable[[], Layout]] = {
    "one size": lambda: pool_of(12, group(2, 2)),
    "two sizes": lambda: pool_of(6, group(2, 2), group(1, 3, window=4)),
    "states": lambda: pool_of(10, group(2, 2), state(1, 1)),
}


class Elastic(RuleBasedStateMachine):
    @initialize(
        name=st.sampled_from(sorted(LAYOUTS)),
        chunk_bytes=st.sampled_from([96, 128, 320]),
        committed=st.floats(0, 1),
    )
    def begin(self, name: str, chunk_bytes: int, committed: float) -> None:
        self.layout = LAYOUTS[name]()
        num_chunks = -(-self.layout.pool_bytes // chunk_bytes)
        tiled = Tiling(
            num_chunks, chunk_bytes, self.layout.large_page_bytes, self.layout.num_large_pages
        )
        self.core = create_core(self.layout)
        self.device = FakeChunks(num_chunks, chunk_bytes)
        self.memory = ElasticMemory(self.device, self.core, tiled, round(committed * num_chunks))
        self.buffer = CpuBuffer(6)
        self.pages = PageBuffer(self.layout.groups, BUFFER_LARGE)
        self.host: dict[tuple[int, int], bytes] = {}
        self.out: dict[int, Out] = {}
        self.step, self.tag, self.holder = 0, 0, 0
        self.lengths: dict[int, int] = {}
        self.texts: dict[int, Text] = {}
        self.written: dict[tuple[int, int, int], bytes] = {}
        self.in_flight: tuple[Slot, bytes] | None = None

    def touch(self, start: int, data: bytes | None, size: int) -> bytes:
        """Read or write bytes of the KV region, through where chunks are at home."""
        found, at = b"", start
        while at < start + size:
            chunk, offset = divmod(at, self.device.chunk_bytes)
            count = min(self.device.chunk_bytes - offset, start + size - at)
            if data is None:
                found += self.device.load(self.device.home, chunk, count, offset)
            else:
                part = data[at - start : at - start + count]
                self.device.store(self.device.home, chunk, part, offset)
            at += count
        return found

    def write_pages(self, handle: int) -> None:
        """Into every page that the request holds and has not written yet."""
        for _, group_index, position, page in self.core.held_pages(handle).tolist():
            if (handle, group_index, position) not in self.written:
                self.tag += 1
                stride = self.layout.groups[group_index].page_stride_bytes
                content = self.tag.to_bytes(4, "little") * (stride // 4)
                self.touch(page * stride, content, stride)
                self.written[handle, group_index, position] = content

    def read_pages(self, handle: int) -> None:
        for _, group_index, position, page in self.core.held_pages(handle).tolist():
            stride = self.layout.groups[group_index].page_stride_bytes
            content = self.written[handle, group_index, position]
            assert self.touch(page * stride, None, stride) == content

    @rule(
        need=st.integers(1, 1500),
        edge=st.sampled_from([None, None, *EDGES]),
        after=st.integers(0, 3),
    )
    def begin_step(self, need: int, edge: Edge | None, after: int) -> None:
        """A step wants activations; the one before is completed."""
        self.end_step()
        self.pages.settle()
        self.step += 1
        self.core.begin_step(self.step)
        if edge is not None:
            self.device.fail(edge, after)
        slot = self.memory.grant(need, self.step)
        self.memory.tend(self.step - 1)
        self.device.heal()
        if slot is None:
            return
        assert slot.size_bytes >= need
        content = self.step.to_bytes(4, "little") * (self.device.chunk_bytes // 4)
        for position in range(slot.start, slot.start + slot.num_chunks):
            self.device.store(self.memory.area, position, content)
        self.in_flight = slot, content

    def end_step(self) -> None:
        """Its activations are what it wrote: nobody else had their bytes meanwhile."""
        if self.in_flight is not None:
            slot, content = self.in_flight
            for position in range(slot.start, slot.start + slot.num_chunks):
                found = self.device.load(self.memory.area, position, len(content))
                assert found == content
            self.memory.release(slot, self.step)
            self.in_flight = None

    @rule(large=st.integers(0, 12), keep=st.integers(0, 600))
    def inflate(self, large: int, keep: int) -> None:
        before = self.core.totals().empty_large
        got = self.memory.inflate(large, keep)
        assert self.core.totals().empty_large == before + got

    @rule(count=st.integers(1, 4), after=st.one_of(st.none(), st.integers(0, 2)))
    def warm(self, count: int, after: int | None) -> None:
        left = len(self.memory.balloon.uncommitted_chunks)
        if after is not None:
            self.device.fail("commit", after)
        try:
            done = self.memory.warm(count)
        except TryLater:
            done = cast(int, after)
        self.device.heal()
        assert len(self.memory.balloon.uncommitted_chunks) == left - min(done, count, left)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=16))
    def serve(self, tokens: list[int]) -> None:
        prompt = np.asarray(tokens, np.int32)
        handle = self.core.open(prompt, root=str(self.tag), reuse=True)
        self.core.claim(handle, len(tokens))
        until = self.core.largest(handle, len(tokens))
        if until <= self.core.hit_tokens(handle):
            self.core.close(handle, renew=False)
            return
        self.lengths[handle] = len(tokens)
        self.texts[handle] = Text(tuple(tokens), str(self.tag), until)
        self.compute(handle, until)

    def compute(self, handle: int, until: int) -> None:
        handles, ends = np.asarray([handle], np.int32), np.asarray([until], np.int32)
        served, _ = self.core.grow(handles, ends)
        self.core.copies()
        if served:
            self.write_pages(handle)
            self.read_pages(handle)
            self.core.advance(handles, ends)

    @precondition(lambda self: self.lengths)
    @rule(index=st.integers(0, 9), renew=st.booleans())
    def finish(self, index: int, renew: bool) -> None:
        handle = sorted(self.lengths)[index % len(self.lengths)]
        self.read_pages(handle)
        self.core.close(handle, renew=renew)
        self.forget(handle)

    def forget(self, handle: int) -> None:
        del self.lengths[handle], self.texts[handle]

    @precondition(lambda self: self.lengths)
    @rule(index=st.integers(0, 9), fails_after=st.one_of(st.none(), st.integers(0, 3)))
    def swap_out(self, index: int, fails_after: int | None) -> None:
        """A copy that fails, or a buffer that is full, leaves the request where it is."""
        handle = sorted(self.lengths)[index % len(self.lengths)]
        text = self.texts[handle]
        rows = [r for r in self.rows(handle) if self.is_computed(r[0], r[1], text.computed)]
        groups = range(len(self.layout.groups))
        need = [sum(group == g for group, _, _ in rows) for g in groups]
        self.holder += 1
        had_room = self.pages.has_room(need)
        taken = self.pages.hold(self.holder, need)
        assert (taken is not None) == had_room
        if taken is None:
            return
        left = [iter(some) for some in taken]
        pages = {(group, position): next(left[group]) for group, position, _ in rows}
        content: dict[tuple[int, int], bytes] = {}
        try:
            for count, (group, position, page) in enumerate(rows):
                self.may_fail(count, fails_after)
                data = self.touch(page * self.stride(group), None, self.stride(group))
                content[group, position] = data
                self.host[group, pages[group, position]] = data
        except CopyFailedError:
            self.pages.release(self.holder)
            return
        self.core.close(handle, returns=True)
        self.forget(handle)
        self.out[self.holder] = Out(text, pages, content)

    @precondition(lambda self: self.out)
    @rule(index=st.integers(0, 9), fails_after=st.one_of(st.none(), st.integers(0, 3)))
    def swap_in(self, index: int, fails_after: int | None) -> None:
        """It goes on where it was, or stays in the buffer; pages not read yet keep their bytes."""
        holder = sorted(self.out)[index % len(self.out)]
        out = self.out[holder]
        computed = out.text.computed
        tokens = np.asarray([*out.text.tokens[:computed], 1], np.int32)
        handle = self.core.open(tokens, root=out.text.root, reuse=True)
        before = {(group, position) for group, position, _ in self.rows(handle)}
        if self.core.hit_tokens(handle) < computed:
            self.core.receive(handle, computed)
        self.core.claim(handle, len(tokens))
        handles, ends = np.asarray([handle], np.int32), np.asarray([computed + 1], np.int32)
        served, _ = self.core.grow(handles, ends)
        self.carry_out_copies()
        try:
            if not served:
                raise CopyFailedError
            self.copy_in(handle, out, before, fails_after)
        except CopyFailedError:
            self.core.close(handle, renew=False)
            return
        self.pages.release(holder)
        del self.out[holder]
        self.lengths[handle] = len(tokens)
        self.texts[handle] = Text(tuple(tokens.tolist()), out.text.root, computed + 1)
        self.write_pages(handle)
        self.read_pages(handle)
        self.core.advance(handles, ends)

    def copy_in(
        self, handle: int, out: Out, before: set[tuple[int, int]], fails_after: int | None
    ) -> None:
        for count, (index, position, page) in enumerate(self.rows(handle)):
            if (index, position) not in out.pages:
                continue
            if (index, position) not in before:
                self.may_fail(count, fails_after)
                data = self.host[index, out.pages[index, position]]
                self.touch(page * self.stride(index), data, len(data))
            self.written[handle, index, position] = out.content[index, position]

    def carry_out_copies(self) -> None:
        for _, index, source, target in self.core.copies().tolist():
            stride = self.stride(index)
            self.touch(target * stride, self.touch(source * stride, None, stride), stride)

    def may_fail(self, count: int, fails_after: int | None) -> None:
        if count == fails_after:
            raise CopyFailedError

    def rows(self, handle: int) -> list[tuple[int, int, int]]:
        return [
            (g, position, page) for _, g, position, page in self.core.held_pages(handle).tolist()
        ]

    def stride(self, group: int) -> int:
        return self.layout.groups[group].page_stride_bytes

    def is_computed(self, group: int, position: int, computed: int) -> bool:
        spec = self.layout.groups[group]
        return not spec.kind.counts_tokens or position * spec.page_tokens < computed

    @precondition(lambda self: self.out)
    @rule(index=st.integers(0, 9))
    def cancel(self, index: int) -> None:
        """Of a request in the buffer: its pages are free one step later."""
        holder = sorted(self.out)[index % len(self.out)]
        self.pages.release(holder)
        del self.out[holder]

    @precondition(lambda self: self.lengths)
    @rule(index=st.integers(0, 9), kept=st.integers(1, 3))
    def offload(self, index: int, kept: int) -> None:
        """Somebody's KV goes to the CPU buffer, if it has room; at the end it is free again."""
        handle = sorted(self.lengths)[index % len(self.lengths)]
        free = self.buffer.free_chunks
        assert self.buffer.hold(handle, kept) == (kept <= free)

    @rule(holder=st.integers(1, 9), ttft=st.booleans(), tpot=st.booleans())
    def iterate(self, holder: int, ttft: bool, tpot: bool) -> None:
        self.buffer.release(holder)
        self.buffer.note_iteration(ttft_late=ttft, tpot_late=tpot)

    @invariant()
    def is_sound(self) -> None:
        if not hasattr(self, "memory"):
            return
        assert audit_elastic(self.memory) == []
        assert audit(self.layout, self.core.snapshot()) == []
        assert audit_buffer(self.buffer) == []
        assert audit_pages(self.pages) == []
        for handle in self.lengths:
            self.read_pages(handle)

    def teardown(self) -> None:
        if not hasattr(self, "memory"):
            return
        self.end_step()
        for handle in list(self.lengths):
            self.read_pages(handle)
            self.core.close(handle)
        for holder in list(self.buffer.held):
            self.buffer.release(holder)
        for holder in self.out:
            self.pages.release(holder)
        self.pages.settle()
        assert self.pages.used_large == 0
        self.memory.warm(self.device.num_chunks)
        self.memory.inflate(self.layout.num_large_pages)
        self.memory.tend(self.step)
        assert self.memory.balloon.activation_chunks == self.tail_chunks()
        assert not (self.core.reclaim_order() == USED).any()
        assert not self.core.snapshot().withheld
        assert self.buffer.held_chunks == 0
        assert audit_elastic(self.memory) == []

    def tail_chunks(self) -> int:
        """Activations may keep what lies under no large page."""
        balloon = self.memory.balloon
        return sum(
            not balloon.tiling.larges_over(chunk) and balloon.owner[chunk] == 1
            for chunk in range(self.device.num_chunks)
        )


Elastic.TestCase.settings = machine(30, weight=0.8)
TestElastic = Elastic.TestCase
