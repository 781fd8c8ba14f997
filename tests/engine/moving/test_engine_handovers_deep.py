"""Two thousand schedules of instances with every mechanism: no answer changes, and each acts."""

from collections import Counter
from random import Random

import pytest

from kvell.engine.core.lateness import Lateness
from kvell.mempool.rendezvous import PD_CACHINGS
from kvell.mempool.transfers.methods import ALWAYS
from tests.depth import scaled
from tests.engine.moving.handing_over import Cluster, Entry, Extras, Instance
from tests.engine.moving.machine import ALL_MIXES, NAMES, cluster_of, prompt_of

MOMENTS = 100
MOST_REQUESTS = 14
RUNGS = {
    "inflate": "inflate",
    "deflate": "deflate",
    "swap": "swap_in",
    "cached prefix": "cache_in",
    "park": "offload",
    "prompt in the buffer": "offload_prompt",
}
"""Rungs of the ladder, by what they show."""
SIGNS = (*RUNGS, "move", "death", "plan ahead", "draft tokens", "read in place", "asked for")
"""What has to happen in all schedules together."""
TOGETHER = {"plan ahead", "prompt in the buffer", "deflate", "move"}
"""What has to happen in at least one of them at once."""


class Schedule:
    """What happens to three instances with every mechanism, drawn from a number."""

    def __init__(self, seed: int) -> None:
        self._chance = chance = Random(seed)
        extras = Extras(
            buffer=chance.choice([6, 20, 60]),
            ahead=chance.choice([4, 20, 60]),
            chunk_parts=chance.choice([0, 2, 4, 6]),
            seed=seed,
        )
        self.cluster: Cluster = cluster_of(
            chance.choice(list(ALL_MIXES)),
            chance.randint(9, 30),
            chance.randint(2, 5),
            chance.choice([8, 16]),
            chance.choice(PD_CACHINGS),
            chance.choice([None, ALWAYS]),
            by_queries=chance.random() < 0.5,
            depth=1,
            extras=extras,
        )
        self._acts = {
            self._submit: 14,
            self._lend: 12,
            self._migrate: 4,
            self._be_late: 4,
            self._pass_time: 4,
            self._cancel: 1,
            self._crash: 1,
            self._go_on: 60,
        }

    def run(self) -> set[str]:
        for _ in range(MOMENTS):
            [act] = self._chance.choices(list(self._acts), list(self._acts.values()))
            act()
        self.cluster.settle()
        self.cluster.check_ends()
        acts = Counter({"move": self.cluster.moved})
        acts["death"] = len(self.cluster.ever) - len(NAMES)
        for instance in self.cluster.ever.values():
            acts.update(acts_of(instance))
        return {name for name, count in acts.items() if count}

    def _submit(self) -> None:
        chance, number = self._chance, len(self.cluster.entries)
        if number == MOST_REQUESTS:
            return
        length = chance.randint(1, min(56, self.cluster.limits.max_model_len))
        entry = Entry(prompt_of(chance.randint(0, 2), length), chance.randint(1, 30), "")
        first, second, third = chance.sample(NAMES, 3)
        goes_to = second if chance.random() < 0.6 else ""
        pulls_from = third if chance.random() < 0.2 else ""
        self.cluster.submit(f"r{number}", entry, first, goes_to, pulls_from)

    def _some(self) -> str:
        names = [name for name, entry in self.cluster.entries.items() if entry.end is None]
        return self._chance.choice(names) if names else ""

    def _lend(self) -> None:
        if name := self._some():
            self.cluster.lend(name, self._chance.randint(1, 3), self._chance.choice(NAMES))

    def _migrate(self) -> None:
        if name := self._some():
            self.cluster.migrate(name, self._chance.choice(NAMES))

    def _cancel(self) -> None:
        if name := self._some():
            self.cluster.cancel(name)

    def _crash(self) -> None:
        self.cluster.crash(self._chance.choice(NAMES))

    def _be_late(self) -> None:
        lateness = Lateness(ttft_late=self._chance.random() < 0.8, tpot_late=False)
        self.cluster.be_late(self._chance.choice(NAMES), lateness)

    def _pass_time(self) -> None:
        self.cluster.pass_time(self._chance.choice([1, 1000, 400_000]))

    def _go_on(self) -> None:
        """Deliver some messages, copy some pages, and let each instance compute some steps."""
        chance = self._chance
        for _ in range(chance.randint(0, 6)):
            if self.cluster.messages:
                index = chance.choice([0, 0, 0, 0, 1, 3])
                self.cluster.deliver(index, loses=chance.random() < 0.01)
        for name in NAMES:
            self.cluster.copy(name, chance.randint(0, 2), chance.randint(0, 12))
            for _ in range(chance.randint(0, 3)):
                self.cluster.step(name, chance.choice([0, 0, 0, 3000]))


def acts_of(instance: Instance) -> Counter[str]:
    """Return how often an instance used each of its mechanisms."""
    stats = instance.core.stats()
    borrowed = [pages for plan in instance.plans for pages in plan.borrowed]
    asked = sum(pages.by_queries for pages in borrowed)
    return Counter(
        {
            "plan ahead": instance.planned_ahead,
            "draft tokens": stats.spec_decode_draft_tokens,
            "read in place": len(borrowed) - asked,
            "asked for": asked,
            **{name: stats.rungs.get(rung, 0) for name, rung in RUNGS.items()},
        }
    )


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_two_thousand_schedules_with_every_mechanism() -> None:
    seen = Counter[str]()
    for seed in range(scaled(2000)):
        try:
            acts = Schedule(seed).run()
        except Exception as error:
            error.add_note(f"schedule {seed}")
            raise
        seen.update(acts)
        seen["all at once"] += acts >= TOGETHER
    print(dict(seen))  # noqa: T201
    assert [sign for sign in (*SIGNS, "all at once") if not seen[sign]] == []
