"""The engines whose journals are recorded: what each serves, and how a fresh one is made."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any, NamedTuple

import numpy as np

from kvell.elastic.arena import ActivationModel
from kvell.elastic.logical_buffer import CpuBuffer
from kvell.elastic.page_buffer import PageBuffer
from kvell.engine.core.core import EngineCore
from kvell.engine.core.journal import Entry, Journal
from kvell.engine.core.lateness import Lateness
from kvell.engine.cpu_buffer.parking import Parking
from kvell.engine.cpu_buffer.swapping import Swapping
from kvell.engine.planning.whole_prompts import without_chunks
from kvell.engine.protocol.messages import Cancel, Submit
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.limits import Limits
from kvell.engine.requests.plan import StepPlan, StepResult
from kvell.engine.setup.sharing import share_pool
from kvell.memory import GroupKind, Layout, create_core, longest_request
from kvell.mempool.transfers.actions import Action
from kvell.vocabulary import RequestId
from tests.engine.conftest import EOS, make_layout, make_submit
from tests.engine.cpu_buffer.machines import Losing
from tests.engine.lending.borrowing import asking, end, run
from tests.engine.lending.placing import placed
from tests.engine.moving.handing_over import Cluster
from tests.engine.planning.shared_traffic import longest
from tests.engine.setup.elastic_traffic import MORE_LARGE, TOKENS_A_CHUNK, Refusing
from tests.engine.setup.several_models import core_over, pool
from tests.engine.swapping import AtRandom, swapping_core
from tests.engine.virtual_model import VirtualModel
from tests.engine.works import with_spec
from tests.journaled import JournaledCore
from tests.pages.pools import group, images, pool_of
from tests.simulator.cluster.lending_schedules import LendingRun, LendingScenario, drawn, pressed
from tests.simulator.cluster.schedules import Fault, Run, Scenario, row


class Recorded(NamedTuple):
    """The inputs of one engine, its plans, and its actions for the pool."""

    entries: Sequence[Entry]
    plans: Sequence[StepPlan]
    actions: Sequence[Action] = ()


@dataclass(frozen=True)
class Case:
    """Engines of one kind.

    :param record: runs them; returns what each did, by its name.
    :param fresh: makes the core of an engine that has done nothing, by its name.
    """

    record: Callable[[], Mapping[str, Recorded]]
    fresh: Callable[[str], EngineCore]


def cluster_case(make: Callable[[], Run]) -> Case:
    def record() -> dict[str, Recorded]:
        cluster = make().go().cluster
        everyone = [*cluster.past, *cluster.instances.values()]
        named = {f"{one.name}#{one.incarnation}": one.record for one in everyone}
        return {
            name: Recorded(one.journal.entries, one.plans, one.actions)
            for name, one in named.items()
            if one is not None
        }

    def fresh(name: str) -> EngineCore:
        instance, _, incarnation = name.partition("#")
        return make().cluster.fresh_core(instance, int(incarnation))[0]

    return Case(record, fresh)


def scenario(seed: int, **changes: Any) -> Scenario:
    """Eighteen requests in two families, some of them turns of two sessions."""
    chance = Random(seed)
    rows = [
        row(
            round(chance.uniform(0, 0.3), 3),
            chance.randint(1, 40),
            chance.randint(1, 14),
            chance.choice([0, 8, 16, 30]),
            chance.randint(0, 1),
            chance.choice([None, None, "s", "t"]),
        )
        for _ in range(18)
    ]
    made = Scenario(
        *("all", {"mixed": 3}, 26, 3, 16, 3, "longest-prefix", 0.1, 0.2, 0.01, 0.01, [0.002]),
        rows,
        pulls=[-1, 0, 1, 2],
        seed=seed,
    )
    return replace(made, **changes)


FLEET_FAULTS = [
    Fault(0.05, "migrate", 1, 2),
    Fault(0.09, "cancel", 3, 0),
    Fault(0.12, "migrate", 0, 1),
    Fault(0.15, "crash", 1, 0),
    Fault(0.21, "evacuate", 2, 0),
]


def fleet() -> Run:
    return Run(scenario(1, faults=FLEET_FAULTS))


def disaggregated() -> Run:
    counts = {"prefill": 1, "decode": 2}
    return Run(scenario(2, counts=counts, streams=True, routing="least-load", mix="windows"))


def disaggregated_without_caching() -> Run:
    counts = {"prefill": 2, "decode": 1}
    faults = [Fault(0.1, "crash", 2, 0)]
    return Run(scenario(3, counts=counts, pd_caching=1, faults=faults, mix="state"))


def lends(make: Callable[[int], LendingScenario], seed: int) -> Run:
    return LendingRun(make(seed))


def moved_case(make: Callable[[], Cluster]) -> Case:
    def record() -> dict[str, Recorded]:
        everyone = make().instances.items()
        return {name: Recorded(one.journal.entries, one.plans) for name, one in everyone}

    return Case(record, lambda name: make().instances[name].fresh())


def ended(cluster: Cluster) -> Cluster:
    run(cluster, lambda: bool(cluster.entries["r"].emitted))
    end(cluster)
    return cluster


def prompts(seed: int, count: int, longest: int = 40) -> list[list[int]]:
    """Prompts in three families, which begin alike."""
    chance = Random(seed)
    return [
        [(chance.randint(0, 2) * 7 + i * i) % 50 for i in range(chance.randint(1, longest))]
        + [chance.randint(0, 49) for _ in range(chance.randint(0, 6))]
        for _ in range(count)
    ]


def drive(
    core: EngineCore, seed: int, *, words: int = 50, late: bool = False, warms: int = 0
) -> Recorded:
    """Submit, cancel and step at random; then run to the end.

    :param warms: number of reports of committed chunks.
    """
    chance, journal, plans = Random(seed), Journal(), list[StepPlan]()
    told, model = JournaledCore(core, journal), VirtualModel(core.memory.layout, words=words)
    waiting = [
        make_submit(
            f"q{index}",
            prompt,
            chance.randint(1, 25),
            salt=chance.choice(["", "", "s"]),
            ignore_eos=chance.random() < 0.7,
        )
        for index, prompt in enumerate(prompts(seed, 24))
    ]
    waiting = [_varied(command, chance) for command in waiting]
    in_flight: list[StepPlan] = []
    while waiting or core.has_work or in_flight:
        if waiting and chance.random() < 0.3:
            told.tell(waiting.pop(0))
        if chance.random() < 0.04:
            told.tell(Cancel(RequestId(f"q{chance.randint(0, 23)}")))
        while core.has_work and core.may_plan:
            in_flight.append(told.plan())
            plans.append(in_flight[-1])
        if in_flight:
            told.commit(model.run(in_flight.pop(0)))
        if warms and chance.random() < 0.2:
            warms -= 1
            told.warm(3)
        if late and chance.random() < 0.3:
            told.note(Lateness(chance.random() < 0.8, chance.random() < 0.1))
    return Recorded(journal.entries, plans)


def _varied(command: Submit, chance: Random) -> Submit:
    """Return a command with other fields that a plan depends on."""
    if chance.random() < 0.15:
        return make_submit(command.request_id, command.spec.token_ids.tolist(), pooling="last")
    sampling = command.spec.sampling
    if chance.random() < 0.3:
        sampling = replace(sampling, temperature=0.5, top_p=0.9)
    tenant = chance.choice(["", "a", "b"])
    priority = chance.choice([0, 0, 0, -1, 2])
    return with_spec(command, sampling=sampling, tenant=tenant, priority=priority)


PLAIN = make_layout((0, 9), 22)


def limits(layout: Layout, **changes: Any) -> Limits:
    made = Limits(
        max_num_batched_tokens=24,
        max_num_seqs=5,
        max_model_len=max(2, longest_request(layout, 60, 4)),
        vocab_size=50,
        min_chunk_tokens=4,
        max_prefix_wait_steps=5,
    )
    return replace(made, **changes)


def plain(name: str) -> EngineCore:
    changes: dict[str, dict[str, Any]] = {
        "alone": {},
        "ahead": {"depth": 1},
        "common pool": {
            "common_pool": True,
            "common_pool_chunk_tokens": 4,
            "common_pool_share": 0.6,
        },
        "lookup": {
            "num_speculative_tokens": 4,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        },
        "drafter": {"num_speculative_tokens": 3, "has_drafter": True},
        "whole": {"max_num_batched_tokens": 64},
    }
    chosen = limits(PLAIN, **changes[name])
    if name == "whole":
        chosen = without_chunks(chosen, PLAIN)
    return EngineCore(create_core(PLAIN), chosen, frozenset({EOS}))


def drive_all(names: Sequence[str]) -> dict[str, Recorded]:
    return {
        name: drive(plain(name), seed, words=3 if name == "lookup" else 50)
        for seed, name in enumerate(names)
    }


def buffered(name: str) -> EngineCore:
    some = int(name)
    return swapping_core(
        PLAIN,
        limits(PLAIN, max_num_batched_tokens=32),
        40 + some,
        AtRandom(some),
        make=Losing if some == 2 else Swapping,
        ahead=1 + 7 * some,
        keeps_prefixes=some > 0,
    )


def drive_buffered() -> dict[str, Recorded]:
    return {str(some): drive(buffered(str(some)), 40 + some, late=True) for some in range(3)}


def elastic(name: str) -> EngineCore:
    """One pool for KV and activations, over a device that refuses some mappings, and a buffer."""
    layout = replace(PLAIN, num_large_pages=PLAIN.num_large_pages + MORE_LARGE)
    core, chunk_bytes = create_core(layout), layout.large_page_bytes
    need = ActivationModel(0, chunk_bytes // TOKENS_A_CHUNK, 0)
    device = Refusing(-(-layout.pool_bytes // chunk_bytes), chunk_bytes)
    shared = share_pool(device, layout, core, need, None, device.num_chunks // 2)
    device.every = int(name)
    swapping = Swapping(core, PageBuffer(layout.groups, 20), AtRandom(7))
    chosen = limits(layout, max_model_len=longest(layout, need, chunk_bytes))
    parking = Parking(core, swapping, CpuBuffer(20, 6), chosen.min_chunk_tokens)
    return EngineCore(
        *(core, chosen, frozenset({EOS})),
        memory=shared.steps,
        swapping=swapping,
        parking=parking,
    )


def drive_elastic() -> dict[str, Recorded]:
    return {every: drive(elastic(every), 60, late=True, warms=3) for every in ("0", "4")}


PICTURES = {
    "in the text": pool_of(40, group(4, 2), images(GroupKind.VISION, 4, 2)),
    "beside it": pool_of(40, group(4, 2), images(GroupKind.CROSS, 4, 2)),
}


def seeing(name: str) -> EngineCore:
    layout = PICTURES[name]
    return EngineCore(create_core(layout), limits(layout, max_model_len=80), frozenset())


def drive_seeing(name: str) -> Recorded:
    """Twelve prompts with up to two of four pictures each."""
    chance, journal, plans = Random(len(name)), Journal(), list[StepPlan]()
    told = JournaledCore(seeing(name), journal)
    for index in range(12):
        told.tell(_pictured(index, chance))
        for _ in range(chance.randint(0, 3)):
            _step(told, plans, index)
    while told.core.has_work:
        _step(told, plans, 7)
    return Recorded(journal.entries, plans)


def _pictured(index: int, chance: Random) -> Submit:
    ids: list[int] = [chance.randint(0, 1) for _ in range(chance.randint(1, 9))]
    rows: list[tuple[int, int, int]] = []
    for _ in range(chance.randint(0, 2)):
        content, tokens = chance.randint(0, 3), chance.choice([4, 9, 10])
        rows.append((len(ids), tokens, tokens))
        ids += [-100 - content] * tokens
        ids += [chance.randint(0, 49) for _ in range(chance.randint(1, 5))]
    sampling = SamplingParams(temperature=0, max_tokens=chance.randint(1, 9))
    prompt = np.asarray(ids, "<i4").tobytes()
    return Submit(RequestSpec(RequestId(f"q{index}"), prompt, sampling, images=tuple(rows)))


def _step(told: JournaledCore, plans: list[StepPlan], token: int) -> None:
    if not told.core.has_work:
        return
    plans.append(told.plan())
    told.commit(StepResult(plans[-1].step, (token,) * plans[-1].num_logits))


def several(name: str) -> EngineCore:
    assert name == "two"
    return core_over(pool(600 * 1024))


def drive_several() -> dict[str, Recorded]:
    journal, plans = Journal(), list[StepPlan]()
    told = JournaledCore(several("two"), journal)
    for index in range(8):
        ids = np.arange(40 + index, dtype="<i4") % 40 + index
        sampling = SamplingParams(temperature=0, max_tokens=30)
        told.tell(
            Submit(
                RequestSpec(RequestId(f"q{index}"), ids.tobytes(), sampling, model="ab"[index % 2])
            )
        )
    while told.core.has_work:
        _step(told, plans, 9)
    return {"two": Recorded(journal.entries, plans)}


DRIVEN = ("alone", "ahead", "common pool", "whole")
DRAFTS = ("lookup", "drafter")
CASES: dict[str, Case] = {
    "fleet": cluster_case(fleet),
    "disaggregated": cluster_case(disaggregated),
    "disaggregated_without_caching": cluster_case(disaggregated_without_caching),
    **{
        f"lending_{make.__name__}_{seed}": cluster_case(partial(lends, make, seed))
        for make, seed in ((pressed, 24), (pressed, 27), (pressed, 37), (drawn, 35))
    },
    "placed": moved_case(lambda: ended(placed())),
    "asked": moved_case(lambda: ended(asking())),
    "engine": Case(partial(drive_all, DRIVEN), plain),
    "drafts": Case(partial(drive_all, DRAFTS), plain),
    "cpu_buffer": Case(drive_buffered, buffered),
    "elastic_memory": Case(drive_elastic, elastic),
    "images": Case(lambda: {name: drive_seeing(name) for name in PICTURES}, seeing),
    "several_models": Case(drive_several, several),
}
