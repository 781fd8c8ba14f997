"""A manager that is stopped and goes on: what others hold is theirs, however long it was away."""

import logging
from pathlib import Path

from tests.fleet.faults.cluster import cluster
from tests.front.scenarios import run, until

logger = logging.getLogger(__name__)


def test_a_manager_dials_again_what_was_cut_while_it_was_stopped(tmp_path: Path) -> None:
    """As a lease does that ends meanwhile: its instances serve, and are not started again."""

    async def scenario() -> None:
        async with cluster(tmp_path, 1) as one:
            started = list(one.machines.started)
            await one.managed.stop()
            cut = await one.wires.cut("manager-*", "*")
            assert len(cut) == 3 and all(wire.lost_bytes for wire in cut)
            await one.goes_on(100)
            one.managed.go_on()
            await until(lambda: len(one.wires.between("manager-*", "*")) == len(cut))
            await one.whole()
            await one.goes_on(300)
            assert one.machines.started == started, "it started again what served"
            assert not sum(front.load.again for front in one.fronts)
        logger.info(one.judge())

    run(scenario())
