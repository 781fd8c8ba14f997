"""The whole memory core under random use: every mix of groups, with the audit after each step.

What is checked is in :mod:`rehearsal`: the audit, hits and refusals beside a slow and
obvious reference, and that nothing is read but what must be read.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvell.pages.layout import Layout
from tests.depth import machine
from tests.pages.pools import confined, literal
from tests.prefix.mixes import MIXES, Prompt, late, prompt_of, with_images
from tests.prefix.reading import Request
from tests.prefix.rehearsal import Rehearsal

shapes = st.tuples(st.integers(0, 11), st.integers(0, 5), st.integers(0, 15))


def beginning(old: Request, length: int) -> Prompt:
    images = old.prompt.images
    for start, tokens, _ in images.tolist():
        if start < length < start + tokens:
            length = start
    whole = images[:, 0] + images[:, 1] <= length
    return Prompt(old.tokens[:length], images[whole])


class CoreMachine(RuleBasedStateMachine):
    """Requests come, grow, compute, and go; prefixes collide by design."""

    mixes = tuple(MIXES)

    @initialize(
        data=st.data(),
        num_large=st.integers(3, 40),
        sharing=st.sampled_from([replace, replace, literal, confined]),
    )
    def start(
        self, data: st.DataObject, num_large: int, sharing: Callable[[Layout], Layout]
    ) -> None:
        self.mix = MIXES[data.draw(st.sampled_from(self.mixes))]
        self.models = self.mix.models
        self.past: list[Request] = []
        self.rehearsal = Rehearsal(sharing(self.mix.layout(num_large)))

    def pick(self, index: int) -> Request:
        running = self.rehearsal.running
        return running[index % len(running)]

    @property
    def is_busy(self) -> bool:
        return bool(self.rehearsal.running)

    @rule()
    def next_step(self) -> None:
        self.rehearsal.next_step()

    def prompt(self, shape: tuple[int, int, int], images: list[int]) -> Prompt:
        tokens = prompt_of(*shape)
        if self.mix.long:
            tokens = [*tokens, *tokens, *tokens]
        places = images if self.mix.image_scale else []
        return with_images(tokens, places, self.mix.image_scale)

    @rule(
        shape=shapes,
        images=st.lists(st.integers(0, 30), max_size=3),
        model=st.integers(0, 3),
        root=st.sampled_from(["", "", "", "salt"]),
        lease=st.sampled_from([None, None, None, 0, 2]),
        reuse=st.integers(0, 15),
        extra=st.integers(0, 12),
    )
    def open(
        self,
        shape: tuple[int, int, int],
        images: list[int],
        model: int,
        root: str,
        lease: int | None,
        reuse: int,
        extra: int,
    ) -> None:
        request = self.rehearsal.open(
            self.prompt(shape, images),
            self.models[model % len(self.models)],
            root,
            lease_until=None if lease is None else self.rehearsal.step + lease,
            reuse=bool(reuse),
            extra=extra,
        )
        if lease is None:
            self.reach(request, len(request.tokens))

    @precondition(lambda self: self.past)
    @rule(index=st.integers(0, 99), cut=st.integers(0, 300), tail=st.integers(0, 15))
    def next_turn(self, index: int, cut: int, tail: int) -> None:
        """What somebody had, all of it or a part, and something else."""
        old = self.past[index % len(self.past)]
        prompt = beginning(old, cut % 2 * cut or len(old.tokens))
        tokens = [*prompt.tokens, *prompt_of(tail, 0, tail)]
        request = self.rehearsal.open(Prompt(tokens, prompt.images), old.model, old.root)
        self.reach(request, len(request.tokens))

    @precondition(lambda self: self.rehearsal.leases)
    @rule(extra=st.integers(0, 12))
    def claim(self, extra: int) -> None:
        self.rehearsal.claim(self.rehearsal.leases[0], extra)

    def reach(self, request: Request, wanted: int) -> None:
        """Compute as much of the request as memory allows, up to ``wanted`` tokens."""
        until = self.rehearsal.largest(request, wanted)
        if until == request.computed:
            return
        assert self.rehearsal.grow([request], [until]) == 1
        self.rehearsal.compute([request], [until])

    @precondition(lambda self: self.is_busy)
    @rule(index=st.integers(0, 99), count=st.integers(1, 40))
    def prefill(self, index: int, count: int) -> None:
        request = self.pick(index)
        self.reach(request, min(len(request.tokens), request.computed + count))

    @precondition(lambda self: self.is_busy)
    @rule(
        chosen=st.integers(1, 63),
        count=st.integers(1, 20),
        compute=st.booleans(),
        gather=st.integers(0, 3),
    )
    def together(self, chosen: int, count: int, compute: bool, gather: int) -> None:
        """Several in one call: either all that is needed of the first ones, or nothing."""
        some = [r for i, r in enumerate(self.rehearsal.running) if chosen >> i % 6 & 1]
        until = [self.within(r, count) for r in some]
        served = self.rehearsal.grow(some, until)
        if compute:
            self.rehearsal.compute(some[:served], until[:served], gather)

    def within(self, request: Request, count: int) -> int:
        """A prompt is computed to its end before anything follows: then tokens are dropped."""
        end = min(len(request.tokens), request.computed + count)
        if request.computed < request.facts.prompt_tokens:
            return min(end, request.facts.prompt_tokens)
        return end

    @precondition(lambda self: self.is_busy)
    @rule(token=st.integers(0, 1), gather=st.integers(0, 2))
    def decode_all(self, token: int, gather: int) -> None:
        ready = [r for r in self.rehearsal.running if r.computed == len(r.tokens)]
        self.rehearsal.append(ready, token)
        until = [len(r.tokens) for r in ready]
        served = self.rehearsal.grow(ready, until)
        self.rehearsal.compute(ready[:served], until[:served], gather)

    @precondition(lambda self: self.is_busy)
    @rule(index=st.integers(0, 99), whole=st.integers(0, 9))
    def send_away(self, index: int, whole: int) -> None:
        self.rehearsal.send_away(self.pick(index), whole)

    @precondition(lambda self: self.is_busy)
    @rule(index=st.integers(0, 99), renew=st.booleans())
    def close(self, index: int, renew: bool) -> None:
        request = self.pick(index)
        self.past.append(request)
        self.rehearsal.close(request, renew=renew)

    @precondition(lambda self: self.is_busy)
    @rule(index=st.integers(0, 99), reuse=st.booleans())
    def preempt(self, index: int, reuse: bool) -> None:
        """And begin again, with what was generated as known tokens."""
        old = self.pick(index)
        self.rehearsal.close(old, renew=False)
        generated = old.tokens[len(old.prompt.tokens) :]
        self.rehearsal.open(old.prompt, old.model, old.root, generated=generated, reuse=reuse)

    @precondition(lambda self: "late" not in self.models)
    @rule()
    def register(self) -> None:
        layout = self.rehearsal.core.layout
        groups = late(layout)
        if groups and layout.quota_large_pages is None:
            self.rehearsal.register(groups)
            self.models = [*self.models, "late"]

    def teardown(self) -> None:
        if not hasattr(self, "rehearsal"):
            return
        for request in self.rehearsal.running:
            self.rehearsal.close(request, renew=True)
        for _ in range(4):
            self.rehearsal.next_step()
        state = self.rehearsal.check()
        assert not any(state.used)
        assert not state.holders


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = machine()


@pytest.mark.long
@pytest.mark.parametrize("mix", MIXES)
def test_every_mix_for_long(mix: str) -> None:
    class OneMix(CoreMachine):
        mixes = (mix,)

    run_state_machine_as_test(OneMix, settings=machine(100))
