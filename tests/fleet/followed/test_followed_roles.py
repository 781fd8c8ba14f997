"""Roles of instances are the manager's word; fronts tell it their load, and of roles it forgot."""

import asyncio

import numpy as np

from kvell.engine.protocol.messages import Migrate, Submit
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.fleet.manager.messages import FrontBeat
from kvell.front.front import Front
from tests.engine.works import spec_of
from tests.fleet.followed.scripted_cluster import (
    ScriptedInstance,
    ScriptedManager,
    cluster,
    finish_of,
)
from tests.front.scenarios import until


def roles(front: Front) -> dict[str, str]:
    return {one.instance_id: line.role for one, line in front.instances()}


def last_beat(manager: ScriptedManager) -> FrontBeat:
    beats = manager.beats()
    return beats[-1] if beats else FrontBeat()


def three() -> list[ScriptedInstance]:
    names = ("prefill-0", "decode-0", "decode-1")
    return [ScriptedInstance(name, 20 + n, step_seconds=0.01) for n, name in enumerate(names)]


async def test_the_load_of_each_part_is_told() -> None:
    prefill, *decodes = three()
    async with cluster(prefill, *decodes) as (manager, front):
        await until(lambda: len(last_beat(manager).roles) == 3)
        beat = last_beat(manager)
        assert beat.roles == {name: name.partition("-")[0] for name in beat.roles}
        assert beat.loads == {"prefill-0": 0, "decode-0": 0, "decode-1": 0}
        prompt = np.arange(50, 2050, dtype=np.int32)
        outputs = front.generate(spec_of(prompt, SamplingParams(max_tokens=1), pooling="last"))
        task = asyncio.ensure_future(anext(outputs))
        await until(lambda: last_beat(manager).loads["prefill-0"] == 2000)
        await task
        await until(lambda: set(last_beat(manager).loads.values()) == {0})


async def test_a_changed_role_is_taken_over_and_what_is_there_leaves() -> None:
    prefill, one, other = three()
    async with cluster(prefill, one, other) as (manager, front):
        manager.tell(prefill.entry(role="decode"), one.entry(), other.entry(), role_changes=1)
        await until(lambda: roles(front)["prefill-0"] == "decode")
        task = asyncio.create_task(finish_of(front, 200))
        await until(lambda: front.in_flight == 1)
        [entry] = front.entries().in_flight
        busy = {each.name: each for each in (prefill, one, other)}[entry.line]
        entries = [
            each.entry(role="prefill" if each is busy else "decode")
            for each in (prefill, one, other)
        ]
        manager.tell(*entries, role_changes=2)
        await until(lambda: roles(front)[busy.name] == "prefill")
        await until(lambda: any(isinstance(each, Migrate) for each in busy.engine.heard))
        await until(lambda: last_beat(manager).role_changes == 2)
        assert last_beat(manager).roles[busy.name] == "prefill"
        assert (await task).reason == "length"


async def test_a_manager_that_knows_of_fewer_changes_changes_none() -> None:
    """It has just started; it takes over what the front says."""
    prefill, one, other = three()
    async with cluster(prefill, one, other) as (manager, front):
        manager.tell(prefill.entry(), one.entry(role="prefill"), other.entry(), role_changes=4)
        await until(lambda: roles(front)["decode-0"] == "prefill")
        manager.heard.clear()
        manager.tell(prefill.entry(), one.entry(), other.entry(), role_changes=0)
        await until(lambda: len(manager.beats()) > 2)
        assert roles(front)["decode-0"] == "prefill"
        assert last_beat(manager).role_changes == 4
        assert last_beat(manager).roles["decode-0"] == "prefill"
        manager.tell(prefill.entry(), one.entry(), other.entry(), role_changes=5)
        await until(lambda: roles(front)["decode-0"] == "decode")


async def test_prompts_go_to_those_that_compute_prompts_now() -> None:
    prefill, one, other = three()
    async with cluster(prefill, one, other) as (manager, front):
        manager.tell(
            prefill.entry(role="decode"),
            one.entry(role="prefill"),
            other.entry(),
            role_changes=2,
        )
        await until(lambda: roles(front)["decode-0"] == "prefill")
        assert (await finish_of(front, 5)).reason == "length"
        [submitted] = [each for each in one.engine.heard if isinstance(each, Submit)]
        assert submitted.goes_to in ("prefill-0", "decode-1")
        assert not prefill.engine.asked() and not other.engine.asked()
